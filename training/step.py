"""One update of every trial: the train state, the loss's gradient, the optimizer.

Every array has a leading trial axis R, even with a single trial.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from headcount.data.examples import segments_of
from headcount.models import precision
from headcount.models.trial_axis import in_turn, over_trials
from headcount.runtime import sharding
from headcount.training.optimizer import (
    SCHEDULE_KEYS,
    learning_rate_at,
    make_optimizer,
)
from headcount.training.trials import OPTIMIZER_PROGRAM_KEYS


class TrainState(NamedTuple):
    """Everything needed to resume exactly; every leaf has a leading trial axis R."""

    step: jax.Array  # updates done
    params: nnx.State
    opt_state: optax.OptState
    diverged_at: jax.Array  # step with a non-finite loss or gradient; 0: none
    stopped_at: jax.Array  # step at which patience ran out; 0: it has not

    @property
    def frozen(self) -> jax.Array:
        """Whether each trial is no longer updated, of shape R."""
        return (self.diverged_at > 0) | (self.stopped_at > 0)


class Static(NamedTuple):
    """Settings compiled into the program, and so shared by all trials of a group."""

    graph: nnx.GraphDef
    loss: Callable  # `Task.loss`
    optimizer: tuple  # (name, value) pairs of the settings that are not numbers
    width: int
    remat: str = "none"  # see models.precision.rematerialize
    accumulate_steps: int = 1  # microbatches per update
    shard: str = "none"  # see runtime.sharding.specs


def make_static(model, config, loss: Callable) -> Static:
    """Return the static settings of a config; the model may be abstract."""
    return Static(
        nnx.split(model)[0],
        loss,
        tuple((key, config.optimizer[key]) for key in OPTIMIZER_PROGRAM_KEYS),
        config.model.width,
        config.train.remat,
        config.train.accumulate_steps,
        config.mesh.shard,
    )


def trial_optimizer(static: Static, trial: dict) -> optax.GradientTransformation:
    """Return the optimizer of one trial with its own hyperparameters."""
    return make_optimizer(
        width=static.width, **dict(static.optimizer), **trial["optimizer"]
    )


@partial(jax.jit, static_argnames=("static", "build"))
def init(trials: dict, *, static: Static, build) -> TrainState:
    """Initialize every trial from its own seed; `build(rngs=...)` makes a model."""

    def one(trial):
        params = nnx.split(build(rngs=nnx.Rngs(jax.random.key(trial["seed"]))))[1]
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=trial_optimizer(static, trial).init(params),
            diverged_at=jnp.zeros((), jnp.int32),
            stopped_at=jnp.zeros((), jnp.int32),
        )

    return jax.vmap(one)(trials)


def init_while_compiling(
    make, trials: dict, k: int, spec: dict, static: Static
) -> TrainState:
    """Return `make(trials)`, compiling `train_steps` at the same time.

    Args:
        make: function that returns the initial state; see `init`.
        trials: see `train_steps`.
        k: maximum number of steps per call of `train_steps`.
        spec: shapes of one trial's batch; see `tasks.base.Batches`.
        static: see `train_steps`.
    """
    mesh = jax.sharding.get_mesh()
    state = jax.eval_shape(make, trials)
    shardings = sharding.state_shardings(state, mesh, static.shard)
    abstract = sharding.abstract(state, shardings)
    batches = sharding.abstract_batches(mesh, len(trials["seed"]), k, spec)
    with ThreadPoolExecutor(1) as thread:
        state_future = thread.submit(sharding.initial, make, trials, mesh, static.shard)
        train_steps.lower(abstract, trials, batches, k, static=static).compile()
        return state_future.result()


@partial(jax.jit, static_argnames="static", donate_argnames="state")
def train_steps(
    state: TrainState, trials: dict, batches: dict, num_steps, *, static: Static
):
    """Update every trial on one batch after another.

    Args:
        state: donated.
        trials: hyperparameters, each of shape R: `seed`, `dropout`, `label_smoothing`,
            `optimizer` (arguments of `make_optimizer`); and `head_gates`, a dict from
            site to an array of shape R L N.
        batches: arrays of shape R k B ...
        num_steps: number of batches to use, at most k.
        static: settings compiled into the program.

    Returns:
        The new state, and metrics of shape R k; only the first num_steps are valid.
    """

    def one(state, trial, batches):
        def step(index, carry):
            state, metrics = carry
            batch = jax.tree.map(lambda x: x[index], batches)
            state, step_metrics = update(state, trial, batch, static)
            write = jax.tree.map(
                lambda x, new: x.at[index].set(new), metrics, step_metrics
            )
            return state, write

        first = jax.tree.map(lambda x: x[0], batches)
        metric_shapes = jax.eval_shape(lambda: update(state, trial, first, static)[1])
        k = len(jax.tree.leaves(batches)[0])
        metrics = jax.tree.map(
            lambda x: jnp.zeros((k, *x.shape), x.dtype), metric_shapes
        )
        # Vectorized trials can't skip steps, and checking would cost communication.
        steps = jnp.where(state.frozen, 0, num_steps) if in_turn() else num_steps
        return jax.lax.fori_loop(0, steps, step, (state, metrics))

    state, metrics = over_trials(one)(state, trials, batches)
    return sharding.keep(state, static.shard), metrics


def loss_and_gradient(params, trial: dict, batch: dict, key, static: Static):
    """Compute a trial's loss on a batch, and the gradient of its parameters.

    The batch is computed in `accumulate_steps` microbatches. Their number only affects
    what is random (dropped elements, masked tokens, noise of gates) and the balance
    loss of routed heads, which is of each microbatch.

    Returns:
        The mean loss; its weight, a sum over the batch; the gradient; and the largest
        logit of each head where `qk_clip` needs it (see `penalty_and_largest`).
    """

    def weighted_loss(params, part, key):
        model = precision.model_of(
            static.graph, sharding.gathered(params, static.shard)
        )
        options = {"auxiliary": {}} if model.has_auxiliary else {}
        loss, weight = static.loss(
            model,
            part,
            label_smoothing=trial["label_smoothing"],
            rate=trial["dropout"],
            key=key,
            head_gates=trial["head_gates"],
            remat=static.remat,
            **options,
        )
        penalty, largest = penalty_and_largest(options.get("auxiliary", {}))
        # penalties affect the gradient, but not the reported loss
        return loss + weight * penalty, (loss, weight, largest)

    def part_gradient(part, key, scale):
        total, pullback, (loss, weight, largest) = jax.vjp(
            partial(weighted_loss, part=part, key=key), params, has_aux=True
        )
        (gradient,) = pullback(jnp.ones_like(total) * scale(weight))
        return loss, weight, sharding.scattered(gradient, static.shard), largest

    # The sums run over the rows of all devices: B is sharded over the mesh axis "data",
    # and the compiler inserts the all-reduce.
    def divisor(weight):
        return jnp.where(weight > 0, weight, 1.0)

    count = static.accumulate_steps
    if count == 1:
        loss, weight, *rest = part_gradient(batch, key, lambda w: 1 / divisor(w))
        return loss / divisor(weight), weight, *rest

    def accumulate(total, indexed_part):
        index, part = indexed_part
        part_key = jax.random.fold_in(key, index)
        *part_sums, largest = part_gradient(part, part_key, lambda _: 1.0)
        sums = jax.tree.map(jnp.add, total, tuple(part_sums))
        return sums, largest

    def split(x):  # strided, so that every device has rows of each microbatch
        return x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)

    parts = jax.tree.map(split, batch)
    zero = jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    sums, largest = jax.lax.scan(accumulate, zero, (jnp.arange(count), parts))
    loss, weight, gradient = sums
    gradient = jax.tree.map(lambda x: x / divisor(weight), gradient)
    largest = jax.tree.map(lambda x: x.max(0), largest)
    return loss / divisor(weight), weight, gradient, largest


def penalty_and_largest(auxiliary: dict) -> tuple[jax.Array | float, dict]:
    """Return the summed penalties, and each head's largest logit by site.

    Args:
        auxiliary: see `Transformer.hidden`.
    """
    layers = [layer for site in auxiliary.values() for layer in site]
    penalty = sum(layer["penalty"] for layer in layers if "penalty" in layer)
    largest = {
        site: [layer["largest"] for layer in site_layers]
        for site, site_layers in auxiliary.items()
        if "largest" in site_layers[0]
    }
    return penalty, largest


@partial(jax.jit, static_argnames="static", inline=True)  # jit: traced only once
def update(state: TrainState, trial: dict, batch: dict, static: Static):
    """Update one trial on one batch; see `train_steps`."""
    key = jax.random.fold_in(jax.random.key(trial["seed"]), state.step)
    loss, weight, gradient, largest = loss_and_gradient(
        state.params, trial, batch, key, static
    )
    change, opt_state = trial_optimizer(static, trial).update(
        gradient, state.opt_state, state.params
    )
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    updated, diverged = finite & ~state.frozen, ~finite & ~state.frozen
    new_state = state._replace(
        step=state.step + 1,
        params=clipped(
            optax.apply_updates(state.params, change), largest, static.graph
        ),
        opt_state=opt_state,
    )
    new_state = jax.tree.map(
        lambda new, old: jnp.where(updated, new, old), new_state, state
    )
    diverged_at = jnp.where(diverged, state.step + 1, state.diverged_at)
    metrics = {
        "loss": loss,
        "weight": weight,
        "gradient_norm": norm,
        "learning_rate": learning_rate_at(
            dict(static.optimizer)["schedule"],
            state.step,
            width=static.width,
            **{key: trial["optimizer"][key] for key in SCHEDULE_KEYS},
        ),
        "tokens": tokens_per_field(batch),
        "updated": updated,
        "diverged": diverged,
    }
    return new_state._replace(diverged_at=diverged_at), metrics


def clipped(params, largest: dict, graph):
    """Apply QK clip to the parameters at the sites that use it.

    Args:
        largest: largest logits of each layer, by site; see `penalty_and_largest`.
    """
    if not largest:
        return params
    model = nnx.merge(graph, params)
    for site, logits in largest.items():
        for layer, layer_logits in zip(
            model.sites()[site].attentions, logits, strict=True
        ):
            layer.clip(layer_logits)
    return nnx.split(model)[1]


def tokens_per_field(batch: dict) -> dict[str, jax.Array]:
    """Count the non-padding tokens of each field that has segment ids."""
    return {field: (array > 0).sum() for field, array in segments_of(batch).items()}


def checkpoint_items(state: TrainState, best: dict) -> dict:
    """Return the items of a checkpoint.

    Parameters are an item of their own, so that they can be read alone.
    """
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


def state_from_items(items: dict) -> TrainState:
    """Rebuild the train state from the items that `checkpoint_items` returns."""
    params, opt_state = items["params"], items["optimizer"]
    return TrainState(params=params, opt_state=opt_state, **items["trials"])
