"""One update of every trial, and the loss of a held-out batch.

Everything has a leading trial axis R, also when there is one trial.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from headcount.attention.platform import platform
from headcount.models import precision
from headcount.models.cross_entropy import TRIALS, cross_entropy
from headcount.runtime import sharding
from headcount.training.optimizer import learning_rate_at, make_optimizer
from headcount.training.zero import gathered, scattered


class TrainState(NamedTuple):
    """What an exact resume needs; every leaf has the trial axis R in front."""

    step: jax.Array  # updates done
    params: nnx.State
    opt_state: optax.OptState
    diverged_at: jax.Array  # the update whose loss or gradient was not finite; 0: none
    stopped_at: jax.Array  # the updates after which it was stopped early; 0: it wasn't

    @property
    def frozen(self) -> jax.Array:
        """Whether the trial keeps its parameters from now on."""
        return (self.diverged_at > 0) | (self.stopped_at > 0)


def items_of(state: TrainState, best: dict) -> dict:
    """What a checkpoint holds; the parameters apart, for who wants only them."""
    return {
        "params": state.params,
        "optimizer": state.opt_state,
        "trials": {
            "step": state.step,
            "diverged_at": state.diverged_at,
            "stopped_at": state.stopped_at,
        },
        "best": best,
    }


def state_of(items: dict) -> TrainState:
    """The state of which `items_of` gives these."""
    params, opt_state = items["params"], items["optimizer"]
    return TrainState(params=params, opt_state=opt_state, **items["trials"])


class Static(NamedTuple):
    """What is fixed in the program: trials of one group have it in common."""

    graph: nnx.GraphDef
    schedule: str
    width: int
    remat: str = "none"  # see models.precision.apply
    accumulate_steps: int = 1  # parts of a batch that are computed one by one
    shard: str = "none"  # see training.sharding.specs


def optimizer_of(static: Static, trial: dict) -> optax.GradientTransformation:
    """The optimizer of one trial from its numbers."""
    return make_optimizer(
        schedule=static.schedule, width=static.width, **trial["optimizer"]
    )


def static_of(model, config) -> Static:
    """What a config fixes; the model may be abstract."""
    return Static(
        nnx.split(model)[0],
        config.optimizer.schedule,
        config.model.width,
        config.train.remat,
        config.train.accumulate_steps,
        config.mesh.shard,
    )


@partial(jax.jit, static_argnames=("static", "build"))
def init(trials: dict, *, static: Static, build) -> TrainState:
    """Initial values of every trial from its own seed; `build(rngs)` is a model."""

    def one(trial):
        params = nnx.split(build(rngs=nnx.Rngs(jax.random.key(trial["seed"]))))[1]
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer_of(static, trial).init(params),
            diverged_at=jnp.zeros((), jnp.int32),
            stopped_at=jnp.zeros((), jnp.int32),
        )

    return jax.vmap(one)(trials)


def over_trials(function):
    """The function of one trial, for all of them; the trial axis R is in front.

    Accelerators do all trials at once. On CPU they take turns: there a batch of
    products is slower than one after another, which fill its cores and caches already.
    """

    def mapped(*arguments):
        if in_turn():
            return jax.lax.map(lambda one: function(*one), arguments)
        return jax.vmap(function, axis_name=TRIALS)(*arguments)

    return mapped


def in_turn() -> bool:
    """Whether trials take turns: not those that different devices hold."""
    mesh = jax.sharding.get_abstract_mesh()
    return platform() == "cpu" and dict(mesh.shape).get("trial", 1) == 1


def batch_loss(graph, params, batch, label_smoothing, **options):
    """Label-smoothed cross-entropy (nats) summed over the tokens, and their number.

    `options` are of `models.Transformer.hidden`: dropout, head gates, remat.
    """
    model = precision.merge(graph, params)
    hidden = model.hidden(batch, **options)
    features, table = model.output(hidden)
    weights = (batch["target_segments"] > 0).astype(jnp.float32)
    loss = cross_entropy(
        features.reshape(-1, features.shape[-1]),
        table,
        batch["target"].reshape(-1),
        weights.reshape(-1),
        label_smoothing,
    )
    return loss, weights.sum()


@partial(jax.jit, static_argnames="static", donate_argnames="state")
def train_steps(
    state: TrainState, trials: dict, batches: dict, num_steps, *, static: Static
):
    """Update every trial on one batch after another.

    How many are done is data, so one program serves up to k.

    Args:
        state: of R trials; donated.
        trials: numbers of the trials, each of shape R: `seed`, `dropout`,
            `label_smoothing`, and `optimizer`, the arguments of `make_optimizer`;
            `head_gates`, see `models.Transformer.__call__`, of shape R L N.
        batches: int arrays R k B S and R k B T, see `models.Transformer.__call__`.
        num_steps: at most k; the batches from there on are not looked at.

    Returns:
        The new state and metrics of shape R k. A trial whose loss or gradient is not
        finite keeps its old state, and is frozen: `updated` says which were updated,
        `diverged` which stopped being finite in this step.
    """

    def one(state, trial, batches):
        def step(index, carry):
            state, metrics = carry
            batch = jax.tree.map(lambda x: x[index], batches)
            state, now = update(state, trial, batch, static)
            write = jax.tree.map(lambda x, new: x.at[index].set(new), metrics, now)
            return state, write

        first = jax.tree.map(lambda x: x[0], batches)
        like = jax.eval_shape(lambda: update(state, trial, first, static)[1])
        k = len(batches["source"])
        metrics = jax.tree.map(lambda x: jnp.zeros((k, *x.shape), x.dtype), like)
        # All at once, a frozen trial saves nothing, and to ask it is communication.
        steps = jnp.where(state.frozen, 0, num_steps) if in_turn() else num_steps
        return jax.lax.fori_loop(0, steps, step, (state, metrics))

    state, metrics = over_trials(one)(state, trials, batches)
    return sharding.keep(state, static.shard), metrics


def begin(
    make, trials: dict, k: int, shape: tuple[int, int, int], static: Static
) -> TrainState:
    """The state `make(trials)`, and `train_steps` compiled meanwhile for what follows.

    Args:
        make: initial values, see `init`.
        trials: see `train_steps`.
        k: most steps of a call.
        shape: B, S and T of its batches.
        static: see `train_steps`.
    """
    mesh = jax.sharding.get_mesh()
    state = jax.eval_shape(make, trials)
    where = sharding.state_shardings(state, mesh, static.shard)
    like = sharding.abstract(state, where)
    batches = sharding.abstract_batches(mesh, len(trials["seed"]), k, shape)
    with ThreadPoolExecutor(1) as other:
        made = other.submit(sharding.initial, make, trials, mesh, static.shard)
        train_steps.lower(like, trials, batches, k, static=static).compile()
        return made.result()


def loss_and_gradient(params, trial: dict, batch: dict, key, static: Static):
    """The loss (nats a token, the mean over the batch) of a trial, and its gradient.

    Parts of a batch weigh by their tokens, so it is the same into however many it is
    cut, but for dropout, which drops other elements.
    """
    tokens = jnp.maximum((batch["target_segments"] > 0).sum(), 1)

    @jax.value_and_grad
    def differentiated(params, part, key):
        loss, _ = batch_loss(
            static.graph,
            gathered(params, static.shard),
            part,
            trial["label_smoothing"],
            rate=trial["dropout"],
            key=key,
            head_gates=trial["head_gates"],
            remat=static.remat,
        )
        return loss / tokens

    def of_part(*arguments):
        loss, gradient = differentiated(*arguments)
        return loss, scattered(gradient, static.shard)

    count = static.accumulate_steps
    if count == 1:
        return of_part(params, batch, key)

    def add(total, numbered):
        index, part = numbered
        here = of_part(params, part, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, total, here), None

    def parts_of(x):  # strided, so that every device has rows of each part
        return x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)

    parts = jax.tree.map(parts_of, batch)
    zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, zero, (jnp.arange(count), parts))[0]


@partial(jax.jit, static_argnames="static", inline=True)  # traced only once
def update(state: TrainState, trial: dict, batch: dict, static: Static):
    """Update one trial on one batch, see `train_steps`."""
    key = jax.random.fold_in(jax.random.key(trial["seed"]), state.step)

    tokens = (batch["target_segments"] > 0).sum()
    loss, gradient = loss_and_gradient(state.params, trial, batch, key, static)
    change, opt_state = optimizer_of(static, trial).update(
        gradient, state.opt_state, state.params
    )
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    updated, diverged = finite & ~state.frozen, ~finite & ~state.frozen
    new = state._replace(
        step=state.step + 1,
        params=optax.apply_updates(state.params, change),
        opt_state=opt_state,
    )
    new = jax.tree.map(lambda new, old: jnp.where(updated, new, old), new, state)
    diverged_at = jnp.where(diverged, state.step + 1, state.diverged_at)
    optimizer = trial["optimizer"]
    metrics = {
        "loss": loss,
        "gradient_norm": norm,
        "learning_rate": learning_rate_at(
            static.schedule,
            state.step,
            optimizer["learning_rate"],
            optimizer["warmup_steps"],
            static.width,
        ),
        "target_tokens": tokens,
        "source_tokens": (batch["source_segments"] > 0).sum(),
        "updated": updated,
        "diverged": diverged,
    }
    return new._replace(diverged_at=diverged_at), metrics


@partial(jax.jit, static_argnames="graph")
def eval_step(graph: nnx.GraphDef, params: nnx.State, head_gates: dict, batch: dict):
    """Summed cross-entropy (nats, no smoothing) and tokens of a batch, both R.

    The gates are R L N. The batch (B S and B T) has no trial axis: every trial sees
    the same.
    """

    def one(params, head_gates):
        return batch_loss(graph, params, batch, 0.0, head_gates=head_gates)

    return over_trials(one)(params, head_gates)


def stop_late(
    state: TrainState, best: dict, before: int, step: int
) -> tuple[TrainState, np.ndarray]:
    """Freeze the trials whose best evaluation is of a step `before` or earlier.

    Returns:
        The state, and which trials are frozen by this.
    """
    late = ~sharding.fetch(state.frozen) & (best["step"] <= before)
    stopped_at = jnp.where(late, step, state.stopped_at)
    return state._replace(stopped_at=stopped_at), np.flatnonzero(late)


def keep_best(best: dict, params: nnx.State, step: int, scores: np.ndarray) -> dict:
    """Replace the best parameters of the trials that score higher than ever before.

    Args:
        best: `params` (leaves with the trial axis R; donated), `score` and `step` (R).
        params: of now.
        step: of now.
        scores: R, higher is better.
    """
    better = scores > best["score"]
    return {
        "params": replaced(best["params"], params, better),
        "score": np.where(better, scores, best["score"]),
        "step": np.where(better, step, best["step"]).astype(np.int32),
    }


@partial(jax.jit, donate_argnames="old")
def replaced(old: nnx.State, new: nnx.State, which: jax.Array) -> nnx.State:
    """The new parameters of some trials, the old ones of the others."""

    def choose(old, new):
        return jnp.where(which.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, old, new)
