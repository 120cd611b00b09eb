"""Decoding of many trials at once through the compilers for TPUs and an H200."""

from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from headcount.decoding.generate import programs
from headcount.decoding.scheduling import Queue
from headcount.decoding.search import check_options
from headcount.models.cost import abstract
from headcount.models.transformer import Transformer
from headcount.runtime import sharding
from headcount.runtime import topology as targets
from headcount.training.hlo_cost import Program

R, B, S, L = 8, 16, 16, 32
SIZES = {"width": 64, "mlp_dim": 128, "num_encoder_layers": 1, "num_decoder_layers": 1}


@pytest.mark.parametrize("beam_size", [1, 5])
@pytest.mark.parametrize("target", ["v5e:2x2", "h200:4"])
def test_chips_decode_their_trials_without_communication(target, beam_size):
    mesh = sharding.trial_mesh(targets.devices(target).ravel().tolist())
    on_trial = sharding.named(mesh, "trial")

    def of_trials(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((R, *x.shape), x.dtype, sharding=on_trial),
            tree,
        )

    def integers(*shape):
        return of_trials(jax.ShapeDtypeStruct(shape, np.int32))

    model = partial(Transformer, 1000, **SIZES, dropout=0.0, norm="post")
    model = partial(model, positions="sinusoidal", attention={"num_heads": 4})
    platform = "tpu" if target[0] == "v" else "cuda"
    with jax.set_mesh(mesh):
        graph, params = nnx.split(abstract(model))
        leaves, structure = jax.tree.flatten(params)
        leaves = of_trials(leaves)
        options = tuple(check_options(beam_size=beam_size).items())
        make_idle, prefill, serve = programs(graph, structure, options)

        def placed(function, *arguments, **sizes):
            """What it gives, without running it."""
            out = jax.eval_shape(partial(function, **sizes), *arguments)
            return sharding.abstract(out, jax.tree.map(lambda _: on_trial, out))

        state = placed(make_idle, leaves, shape=(B, S), max_length=L)
        reading = leaves, None, integers(B, S), integers(B)
        prompts = placed(prefill, *reading)
        queue = Queue(prompts, integers(B), integers(B), integers())
        traced = [
            prefill.trace(*reading),
            serve.trace(state, leaves, None, queue, integers(), integers()),
        ]
        compiled = [x.lower(lowering_platforms=(platform,)).compile() for x in traced]
    for program in compiled:
        assert Program(program.as_text()).collectives() == {}
