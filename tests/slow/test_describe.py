"""Counts: the parts sum to the whole, and the whole is what XLA computes."""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from headcount.configs.presets import get_config as preset
from headcount.models.cost import (
    abstract,
    multiply_adds,
    parameters,
    plain,
    products,
)
from headcount.models.describe import parts, spec_of
from headcount.models.transformer import Transformer
from tests.model_cases import SETTINGS, VOCAB, build_of, config_of

# Every setting of the model that has parameters or products of its own.
OTHERS = {
    "gated feed-forward": {"mlp": "gated", "use_bias": False, "norm_type": "rms_norm"},
    "untied, output transform": {
        "tie_embeddings": False,
        "output_transform": True,
        "output_bias": True,
        "embedding_norm": True,
    },
    "classes of every token": {"num_decoder_layers": 0, "num_classes": 5},
    "classes of the first token": {
        "num_decoder_layers": 0,
        "num_classes": 5,
        "pooling": "first",
        "pooler": True,
    },
    "exclusive": {
        "encoder_attention": {"exclusive": True},
        "decoder_attention": {"exclusive": True},
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_parts_sum_to_the_whole(name):
    model = abstract(build_of(*SETTINGS[name]))
    check_parts(model)


@pytest.mark.parametrize("name", OTHERS)
def test_parts_of_other_settings_sum_to_the_whole(name):
    check_parts(abstract(partial(Transformer, VOCAB, **config_of() | OTHERS[name])))


def check_parts(model):
    rows = parts(model, 9, 7)
    assert sum(row.parameters for row in rows) == parameters(model)
    assert sum(row.multiply_adds for row in rows) == multiply_adds(
        model, spec_of(model, 9, 7)
    )
    assert len({row.name for row in rows}) == len(rows)


@pytest.mark.parametrize("name, length", [("bert_base", 128), ("gpt2_small", 64)])
def test_parameters_and_multiply_adds_of_presets_by_hand(name, length):
    config = preset(name)
    D, F, V = 768, 3072, config.data.vocab_size
    build = partial(Transformer, V, **config.model.to_dict())
    model = abstract(build)
    layer = 4 * D * D + 2 * D * F + 2 * length * D  # a token: kernels, logits, sums
    spec = spec_of(model, length, length)
    assert multiply_adds(model, spec) == length * (12 * layer + V * D)
    rows = parts(model, length, length)
    assert sum(row.parameters for row in rows) == parameters(model)
    assert sum(row.multiply_adds for row in rows) == multiply_adds(model, spec)


def test_a_tagger_has_no_products_with_the_vocabulary():
    settings = config_of() | {"num_decoder_layers": 0}
    D, V, C, S = settings["width"], 1000, 5, 9
    tagger = abstract(partial(Transformer, V, num_classes=C, **settings))
    masked = abstract(partial(Transformer, V, **settings))
    counts = [multiply_adds(model, spec_of(model, S, 0)) for model in (masked, tagger)]
    assert counts[0] - counts[1] == S * D * (V - C)


@pytest.mark.parametrize("name", ["mean", "gated_elementwise"])
def test_multiply_adds_equal_those_that_xla_counts(name):
    """Two operations each; XLA counts norms, softmax and sums too: 10% at this size.

    The whole is computed with plain einsums, in a program without loops.
    """
    positions, norm, heads = SETTINGS[name]
    config = config_of("none", norm, heads | {"num_heads": 4})
    config |= {"width": 64, "mlp_dim": 256}
    model = plain(abstract(partial(Transformer, 500, **config)))
    graph, params = nnx.split(model)
    batch = {
        key: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for key, x in spec_of(model, 24, 16).items()
    }
    compiled = jax.jit(lambda params, batch: nnx.merge(graph, params)(batch)).lower(
        params, batch
    )
    flops = compiled.compile().cost_analysis()["flops"]
    ours = 2 * multiply_adds(model, batch)
    assert ours < flops < 1.1 * ours


def test_products_in_a_loop_raise_an_error():
    def looped(x):
        return jax.lax.scan(lambda carry, _: (carry @ carry, None), x, length=3)[0]

    with pytest.raises(ValueError, match="in a loop can't be counted"):
        products(jax.make_jaxpr(looped)(jnp.ones((2, 2))).jaxpr)


def test_products_of_every_branch_are_counted():
    def branched(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x @ x @ x, x)

    assert products(jax.make_jaxpr(branched)(jnp.ones((2, 2))).jaxpr) == 3 * 2**3


def test_describe_prints_parts_and_heads():
    command = [sys.executable, "-m", "headcount.models.describe"]
    command += ["--config=configs/presets.py:bert_base"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    for text in ("encoder.self_attention.merge", "109,482,240", "768×12×64", "147,648"):
        assert text in result.stdout
    for flag, sentence in {
        "attention.num_heads=7": "model.attention.num_heads must divide model.width",
        "width=0": "model.width must be at least 1, got 0",
    }.items():
        bad = [*command, f"--config.model.{flag}"]
        result = subprocess.run(bad, capture_output=True, text=True)
        assert result.returncode == 2 and result.stderr.count("\n") == 1
        assert sentence in result.stderr
