"""Steps with a cache equal the whole forward pass."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx

from headcount.attention import dot_product_attention
from headcount.attention.cached import cached_attention
from headcount.decoding.scheduling import keep_of_one
from headcount.decoding.search import check_options
from headcount.decoding.step import advance, empty_state, prefill, run_until, start
from tests.decoding_cases import (
    SETTINGS,
    batch,
    greedy_uncached,
    jitted,
    log_probs,
    make,
    sentences,
    trimmed,
)
from tests.marks import slow_but

# `test_search` compares the cached scores of these, or their merge rule treats each
# position by itself.
COVERED = {"post", "pre", "grouped", "elementwise, relative", "talking", "scaled"}
COVERED |= {"gated, learned", "mixture, rotary"}


@pytest.mark.parametrize("W, K", slow_but([(3, 2)], [(1, 4), (3, 2), (2, 4), (1, 1)]))
def test_cached_attention_equals_the_reference(W, K):
    random = np.random.default_rng(0)
    query = random.normal(size=(2, W, 4, 6)).astype(np.float32)
    key = random.normal(size=(2, 7, K, 6)).astype(np.float32)
    value = random.normal(size=(2, 7, K, 5)).astype(np.float32)
    sink = random.normal(size=4).astype(np.float32)
    plain = jax.jit(partial(dot_product_attention, implementation="reference"))
    keys, values = key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)
    whole = [(keys, values)]
    two = [
        (keys[..., :3], values[:, :, :3]),
        (keys[..., 3:], values[:, :, 3:]),
    ]
    for rows, given, parts in itertools.product(
        {1, W}, ({}, {"sink": sink}), (whole, two)
    ):
        mask = random.random((2, rows, 7)) < 0.6
        mask[..., 0] = True
        wanted = plain(query, key, value, None, mask[:, None], **given)
        found = jax.jit(cached_attention)(query, parts, mask, **given)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_cached_logits_of_bfloat16_are_float32():
    """100 and 100.25 are one number in bfloat16."""
    query = jnp.bfloat16([32.0, 2.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
    key = jnp.bfloat16([[6.25, 6.25], [0.0, 0.25], [0.0, 0.0], [0.0, 0.0]])
    value, mask = jnp.bfloat16([[0.0], [1.0]]), jnp.ones((1, 1, 2), bool)
    found = cached_attention(query, [(key[None, None], value[None, None])], mask)
    wanted = scipy.special.expit(0.25)
    assert found.dtype == jnp.bfloat16 and found.item() == pytest.approx(wanted, 4e-3)


@pytest.mark.parametrize(
    "shape",
    slow_but(
        ["gated values, knocking", "latent, rotary"],
        sorted(SETTINGS.keys() - COVERED),
    ),
)
def test_greedy_with_the_cache_equals_greedy_without(shape):
    graph, params = make(seed=3, **SETTINGS[shape])
    texts = sentences(5, 1, 9)
    out = jitted(graph, max_length=12)(params, *batch(texts))
    found = trimmed(out.tokens)
    assert found == [greedy_uncached(graph, params, text, 12) for text in texts]
    assert len({tuple(row) for row in found}) > 1  # the model is no constant
    for text, row, score in zip(texts, found, out.scores, strict=True):
        wanted = log_probs(graph, params, text, [row])[0]
        # log-probabilities near 0 carry the rounding of logits, which are larger
        np.testing.assert_allclose(score, wanted, rtol=1e-5, atol=2e-6)


@partial(jax.jit, static_argnames=("max_length", "beam_size"))
def begun(model, prompts, lengths, keys, limits, clock, **sizes):
    """Return the state of prompts that begin at the clock."""
    state = empty_state(model, prompts, keys, **sizes)
    rows = start(prefill(model, prompts, lengths), keys, limits, clock, **sizes)
    return state._replace(clock=jnp.asarray(clock), rows=rows)


@pytest.mark.slow
def test_a_narrower_state_continues_alike():
    """After the slots of both caches have been used again, at other times."""
    graph, params = make(**SETTINGS["elementwise, relative"])
    model = nnx.merge(graph, params)
    keys = jax.random.split(jax.random.key(0))
    sizes = {"max_length": 32, "beam_size": 3}
    limits, clock = jnp.array([30, 30]), 29
    state = begun(model, *batch(sentences(5, 9), S=16), keys, limits, clock, **sizes)
    options = check_options(beam_size=3, length_penalty=0.6)

    @jax.jit
    def steps(state):
        return jax.lax.fori_loop(0, 5, lambda _, x: advance(model, x, **options), state)

    state = steps(state)
    keep = jax.jit(partial(keep_of_one, shape=(12, 16)))
    narrow = keep(state, jnp.array([1, 0]), 2)
    assert narrow.cache[0][0].shape[-1] == 16 * 3
    assert narrow.rows.done.tolist() == [False, False]
    assert keep(state, jnp.array([1, 0]), 1).rows.done.tolist() == [False, True]
    for _ in range(2):
        state, narrow = steps(state), steps(narrow)
        np.testing.assert_allclose(
            narrow.rows.log_probs, state.rows.log_probs[::-1], rtol=1e-5
        )
    # the tokens of the clocks 29 to 43, of which each has its own slots
    clocks = np.arange(29, 44)
    np.testing.assert_array_equal(
        narrow.rows.tokens[..., clocks % 16], state.rows.tokens[::-1, :, clocks % 32]
    )


def test_steps_end_when_all_rows_are_done():
    graph, params = make()
    model = nnx.merge(graph, params)
    keys = jax.random.split(jax.random.key(0))
    source, limits = batch(sentences(4, 3)), jnp.array([4, 2])
    state = begun(model, *source, keys, limits, 0, max_length=16, beam_size=1)
    state = run_until(partial(advance, model, **check_options()), state, 2)
    assert int(state.clock) <= 4
    assert bool(state.rows.done.all())


@pytest.mark.slow
def test_padding_is_done_at_once():
    """Rows without a prompt take no step, and change no other row."""
    graph, params = make(layers=1)
    texts = sentences(5, 9)
    decode = jitted(graph, max_length=12)
    wanted = decode(params, *batch(texts))
    tokens, lengths = batch([*texts, [], []])
    found = decode(params, tokens, lengths)
    np.testing.assert_array_equal(found.tokens[:2], wanted.tokens)
    np.testing.assert_allclose(found.scores[:2], wanted.scores, rtol=1e-5)
    assert found.finished.tolist() == [True, True, False, False]
    assert not found.length[2:].any()
    alone = decode(params, tokens[2:], lengths[2:])
    assert not alone.length.any()
