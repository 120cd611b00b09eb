"""Small tasks on files, and runs whose models have their initial values."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from headcount.configs.base import get_config
from headcount.models.cost import abstract
from headcount.runtime import sharding
from headcount.tasks import Run, make_task

SMALL = {
    "data.vocab_size": 60,
    "data.batch_tokens": 256,
    "data.max_length": 64,
    "model.width": 16,
    "model.mlp_dim": 16,
    "model.num_encoder_layers": 1,
    "model.num_decoder_layers": 1,
    "model.attention.num_heads": 2,
}
DECODER_ONLY = {"task.name": "language_model", "model.num_encoder_layers": 0}
ENCODER_ONLY = {"model.num_decoder_layers": 0}


def small_task(folder, **changes):
    """Return a task whose vocabulary is in a folder."""
    config = get_config()
    config.update_from_flattened_dict(SMALL | changes)
    return make_task(config, folder)


def untrained_run(task, num_trials=2, scale=1.0, head_gates=None) -> Run:
    """Return a run of models with other initial values per trial, times `scale`."""

    def params(seed):
        params = nnx.split(task.build(rngs=nnx.Rngs(jax.random.key(seed))))[1]
        return jax.tree.map(lambda x: x * scale, params)

    graph = nnx.split(abstract(task.build))[0]
    every = jax.jit(jax.vmap(params))(jnp.arange(num_trials))
    return run_of(task, graph, every, head_gates)


def run_of(task, graph, params, head_gates=None) -> Run:
    """Return a run of parameters, whose leaves have a leading trial axis."""
    num_trials = len(jax.tree.leaves(params)[0])
    axes = {"trial": None, "data": -1, "model": 1}
    return Run(
        config=task.config,
        graph=graph,
        params=params,
        trials=[{"seed": seed} for seed in range(num_trials)],
        head_gates=head_gates or {},
        step=[0] * num_trials,
        diverged_at=[None] * num_trials,
        task=task,
        mesh=sharding.make_mesh(axes, num_trials, jax.device_count()),
    )


def model_of(run, trial=0):
    """Return the model of one trial."""
    return nnx.merge(run.graph, run.of(trial)[0])


@partial(jax.jit, static_argnames=("graph", "method"))
def _call(graph, params, method, batch):
    return getattr(nnx.merge(graph, params), method)(batch)


def output_of(run, method, trial=0, **fields) -> np.ndarray:
    """Return what a method of a trial's model gives for one example, in float64.

    Args:
        method: "__call__" (logits), "hidden" or "class_logits".
        fields: token ids by side. They are padded to a multiple of 32, so that few
            shapes are compiled; the result is of the tokens of the last side.
    """
    batch = {}
    for side, ids in fields.items():
        row = np.zeros((1, -(-len(ids) // 32) * 32), np.int32)
        batch[side], batch[f"{side}_segments"] = row.copy(), row.copy()
        batch[side][0, : len(ids)] = ids
        batch[f"{side}_segments"][0, : len(ids)] = 1
        batch[f"{side}_positions"] = np.arange(row.size, dtype=np.int32)[None]
    return np.float64(_call(run.graph, run.of(trial)[0], method, batch)[0])[: len(ids)]


def evaluate(run, examples, **options) -> list[dict]:
    """Score a run on its mesh."""
    with jax.set_mesh(run.mesh):
        return run.task.evaluate(run, examples, **options)
