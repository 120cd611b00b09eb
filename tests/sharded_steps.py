"""Prints the losses of a few steps on meshes of CPU devices, for test_sharding.py.

With an address, a number and an index: as one of several processes that share them.
"""

import json
import sys
from functools import partial

import jax
import numpy as np

from headcount.configs.base import get_config
from headcount.configs.validation import flat
from headcount.data.batches import batch_spec
from headcount.models.cost import abstract
from headcount.models.transformer import Transformer
from headcount.runtime import distributed as hosts
from headcount.runtime import sharding
from headcount.runtime.profiling import CompileClock
from headcount.tasks.translation import Translation
from headcount.training.step import (
    init,
    init_while_compiling,
    make_static,
    train_steps,
)
from headcount.training.trials import hyperparameters

STEPS = 4


def losses(config, num_trials, devices):
    """Of every step and trial, the shardings of the state's leaves, seconds to compile.

    Of compiling when the steps are done, after `init_while_compiling`.
    """
    arrays = hyperparameters(
        flat(config.to_dict()), [{"seed": seed} for seed in range(num_trials)]
    )
    rows = sharding.rows_of_part(8, config.train.accumulate_steps)
    mesh = sharding.make_mesh(config.mesh, num_trials, rows, devices)
    build = partial(Transformer, 64, **config.model.to_dict())
    static = make_static(abstract(build), config, Translation(config).loss)
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        make = partial(init, static=static, build=build)
        spec = batch_spec(("source", "target"), 8, {"source": 16, "target": 16})
        state = init_while_compiling(make, arrays, STEPS, spec, static)
        batch = {}
        for side in ("source", "target"):
            tokens = rng.integers(3, 64, (num_trials, STEPS, 8, 16), np.int32)
            batch[side] = tokens
            batch[f"{side}_segments"] = np.ones_like(tokens)
            batch[f"{side}_positions"] = np.zeros_like(tokens) + np.arange(16)
        part = sharding.part_here(mesh, num_trials, 8)
        cut = part.trials, slice(None), part.rows
        batch = {name: array[cut].astype(np.int32) for name, array in batch.items()}
        batch = sharding.place_batch(batch, part)
        clock = CompileClock()
        state, metrics = train_steps(state, arrays, batch, STEPS, static=static)
        compiling = clock.seconds
        loss = sharding.fetch(metrics["loss"])
    specs = {str(leaf.sharding.spec) for leaf in jax.tree.leaves(state)}
    return {"loss": loss.tolist(), "specs": sorted(specs), "compiling": compiling}


def main():
    address, *counts = sys.argv[2:] or (None, None, None)
    hosts.connect(address, *(count and int(count) for count in counts), seconds=60)
    config = get_config()
    config.model.width, config.model.mlp_dim = 32, 512
    config.model.num_encoder_layers = config.model.num_decoder_layers = 1
    config.model.cross_attention.sink = True
    config.model.attention.dropout = 0.2
    found = []
    for trials, shape in json.loads(sys.argv[1]):
        config.mesh.update({"trial": None, "data": -1, "model": 1, "shard": "none"})
        config.train.accumulate_steps = shape.pop("accumulate_steps", 1)
        config.mesh.update(shape)
        devices = jax.devices() if shape else jax.devices()[:1]
        found.append(losses(config, trials, devices))
    print(json.dumps(found))
    hosts.leave()


if __name__ == "__main__":
    main()
