"""Less memory and fewer bits: what must be equal is, what must be float32 is."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headcount.configs.base import get_config
from headcount.data.batches import PackedBatches
from headcount.data.examples import Ragged
from headcount.models.precision import compute_dtype
from headcount.models.transformer import Transformer
from headcount.training.step import Static, loss_and_gradient
from tests.model_cases import LOSS
from tests.programs import equations

VOCAB, EOS = 40, 2


@pytest.fixture(scope="module")
def batch():
    """Eight rows of one trial, the last two of padding but for a few tokens."""
    rng = np.random.default_rng(0)
    sentences = [[*rng.integers(3, VOCAB, n), EOS] for n in rng.integers(2, 10, 300)]
    fields = {"source": Ragged.of(sentences), "target": Ragged.of(sentences[::-1])}
    batches = PackedBatches(fields, batch_tokens=512, max_length=64, seeds=[0])
    batch = {name: array[0].copy() for name, array in batches[0].items()}
    assert len(batch["target"]) == 8
    for name, array in batch.items():
        if "segments" in name:
            array[6:, 5:] = 0
    return batch


class Program(NamedTuple):
    """The loss and the gradient of a small model."""

    params: nnx.State
    traced: Any  # jax.stages.Traced

    @property
    def jaxpr(self):
        return self.traced.jaxpr.jaxpr

    def results(self, batch, *dropouts):
        run = self.traced.lower().compile()
        return [
            run(self.params, trial(rate), batch, jax.random.key(0)) for rate in dropouts
        ]


def trial(dropout):
    return {"label_smoothing": 0.1, "dropout": dropout, "head_gates": {}}


def program(batch, settings=None, **static):
    model = get_config().model
    model.width, model.mlp_dim, model.attention.num_heads = 16, 24, 2
    model.num_encoder_layers = model.num_decoder_layers = 1
    model.update(settings or {})
    build = partial(Transformer, VOCAB, **model.to_dict())
    graph, params = nnx.split(build(rngs=nnx.Rngs(0)))
    function = partial(loss_and_gradient, static=Static(graph, LOSS, (), 16, **static))
    arguments = params, trial(0.0), batch, jax.random.key(0)
    return Program(params, jax.jit(function).trace(*arguments))


@pytest.fixture(scope="module")
def plain(batch):
    return program(batch)


@pytest.fixture(scope="module")
def expected(batch, plain):
    """Without and with dropout."""
    return plain.results(batch, 0.0, 0.3)


def assert_same(ours, theirs):
    for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_accumulated_gradient_equals_that_of_the_whole_batch(batch, expected):
    (parts,) = program(batch, accumulate_steps=4).results(batch, 0.0)
    assert_same(parts, expected[0])


def test_accumulated_parts_have_dropout_masks_of_their_own(batch):
    """The same rows as the first or as the second part; the other is padding."""
    early = {name: array.copy() for name, array in batch.items()}
    for side in ("source", "target"):
        early[f"{side}_segments"][4:] = 0
    late = {name: np.roll(array, 4, axis=0) for name, array in early.items()}
    parts = program(batch, accumulate_steps=2)
    (whole, first), (also, second) = (
        parts.results(rows, 0.0, 0.3) for rows in (early, late)
    )
    np.testing.assert_allclose(whole[0], also[0], rtol=1e-5)
    assert abs(first[0] - second[0]) > 1e-3


def products(program):
    """The types of each product of two matrices, such as tokens by a kernel."""
    return [
        [str(x.aval.dtype) for x in equation.invars]
        for equation in equations(program.jaxpr)
        if equation.primitive.name == "dot_general"
        and all(x.aval.ndim == 2 for x in equation.invars)
    ]


def test_rematerialization_changes_no_loss_and_no_gradient(batch, plain, expected):
    block, dots = (program(batch, remat=remat) for remat in ("block", "dots"))
    assert_same(block.results(batch, 0.3), expected[1:])
    counts = [len(products(one)) for one in (plain, block, dots)]
    assert counts[0] == counts[2] < counts[1]
    assert "policy" in str(dots.traced.jaxpr)  # but something is computed again


def test_bfloat16_computes_products_in_it_and_the_rest_in_float32(batch, expected):
    rounded = program(batch, {"dtype": "bfloat16"})
    ((loss, _, gradient, _),) = rounded.results(batch, 0.3)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected[1][0], rtol=0.01)
    ours, theirs = (
        np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (gradient, expected[1][2])
    )
    assert ours.dtype == np.float32
    cosine = ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs)
    assert cosine > 0.999


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"positions": "rotary", "norm": "pre", "attention": {"qk_norm": True}},
        {"positions": "relative", "attention": {"merge": "gated"}},
    ],
)
def test_every_model_computes_in_bfloat16(batch, settings):
    rounded = program(batch, settings | {"dtype": "bfloat16"})
    found = products(rounded)
    assert found.count(["bfloat16"] * 2) > 20
    for equation in equations(rounded.jaxpr):
        if equation.primitive.name in ("exp", "rsqrt", "log"):
            assert all(x.aval.dtype == jnp.float32 for x in equation.invars)


def test_the_cpu_computes_in_float32_by_default():
    assert compute_dtype(None) == "float32" and compute_dtype("bfloat16") == "bfloat16"
