"""Prints translations on meshes of 8 CPU devices, for test_sharding.py.

Each mesh decodes as CPUs do, a trial after the other, and as accelerators do.
"""

import json
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from headcount.configs.base import get_config
from headcount.data.examples import Ragged
from headcount.decoding.generate import generate, programs
from headcount.decoding.scheduling import Queue
from headcount.decoding.search import check_options
from headcount.models.transformer import Transformer
from headcount.runtime import sharding
from headcount.tasks import Run
from headcount.tasks.translation import translations
from headcount.training.hlo_cost import Program


def main():
    settings = {"width": 16, "mlp_dim": 24, "dropout": 0.0}
    settings |= {"positions": "sinusoidal", "norm": "pre"}
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    build = partial(Transformer, 40, **settings, **layers, attention={"num_heads": 2})
    graph = nnx.split(build(rngs=nnx.Rngs(0)))[0]
    every = [nnx.split(build(rngs=nnx.Rngs(seed)))[1] for seed in range(4)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *every)
    params["embedding"][...] *= 4.0  # or every token is followed by the same
    gates = {"cross": np.ones((4, 1, 2), np.float32)}
    gates["cross"][2, 0, 1] = 0.0
    rng = np.random.default_rng(0)
    sources = [[*rng.integers(3, 40, n).tolist(), 2] for n in (3, 8, 5, 2, 7)]
    config = get_config()
    own_platform, found = sharding.platform_of, []
    for shape in json.loads(sys.argv[1]):
        devices = jax.devices()[: int(np.prod(list(shape.values())))]
        mesh = sharding.make_mesh(shape, 4, 8, devices)
        placed = jax.device_put(params, sharding.named(mesh, "trial"))
        for platform in (own_platform, lambda mesh: "gpu"):
            sharding.platform_of = platform
            rest = [{}] * 4, gates, [0] * 4, [None] * 4, None, mesh
            run = Run(config, graph, placed, *rest)
            with jax.set_mesh(mesh):
                chosen = Ragged.of(sources), [0, 2, 3]
                of_trials = translations(run, *chosen, beam_size=2)
                one = jax.tree.map(lambda leaf: leaf[2], (placed, gates))
                options = {"head_gates": one[1], "beam_size": 2}
                alone, _ = generate(graph, one[0], sources, **options)
            found.append([*(of_trials[trial] for trial in (0, 2, 3)), alone])
    print(json.dumps({"translations": found, "moved": moved(graph, params)}))


def moved(graph, params):
    """The collectives of each program that decodes four trials on four devices."""
    mesh = sharding.trial_mesh(jax.devices()[:4])
    params = jax.device_put(params, sharding.named(mesh, "trial"))
    leaves, structure = jax.tree.flatten(params)
    options = tuple(check_options(beam_size=2).items())
    with jax.set_mesh(mesh):
        make_idle, prefill, serve = programs(graph, structure, options)
        state = make_idle(leaves, shape=(4, 16), max_length=32)
        prompts = np.zeros((4, 4, 16), np.int32)
        of_trials, of_rows = np.zeros(4, np.int32), np.zeros((4, 4), np.int32)
        reading = leaves, None, prompts, of_rows
        queue = Queue(prefill(*reading), of_rows, of_rows, of_trials)
        lowered = [
            prefill.lower(*reading),
            serve.lower(state, leaves, None, queue, of_trials, of_trials),
        ]
        return [Program(p.compile().as_text()).collectives() for p in lowered]


if __name__ == "__main__":
    main()
