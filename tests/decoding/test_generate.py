"""Generation of many prompts and trials: what a result does not depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headcount.decoding.generate import generate, generate_trials, stream
from tests.decoding_cases import (
    batch,
    greedy_uncached,
    jitted,
    make,
    scale_eos,
    sentences,
    short,
    trimmed,
)
from tests.marks import slow_but


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"length_penalty": 0.6},
        {"temperature": 2.0, "top_k": 5},
        {"beam_size": 3, "length_penalty": 0.6},
    ],
    ids=["greedy", "sampled", "beam"],
)
def test_tokens_are_the_same_without_scores(options):
    graph, params = make(layers=1)
    texts = sentences(*(1 + i % 9 for i in range(17)))
    options = options | {"batch_size": 16, "limits": short(texts)}
    rows, scores = generate(graph, params, texts, **options)
    found, others = generate(graph, params, texts, return_scores=False, **options)
    assert found == rows and len(set(map(len, rows))) > 2  # some end, some are cut
    if "beam_size" in options:
        assert others == scores
    else:
        assert np.isfinite(scores).all() and np.all(np.array(scores) < others)


@pytest.mark.slow
def test_results_are_the_same_where_python_numbers_are_int64():
    graph, params = make(layers=1)
    texts = sentences(5, 3, 9)
    options = {"temperature": 1.0, "batch_size": 4, "limits": short(texts)}
    wanted, scores = generate(graph, params, texts, **options)
    with jax.enable_x64(True):
        found, others = generate(graph, params, texts, **options)
    assert found == wanted
    np.testing.assert_allclose(others, scores, rtol=1e-4)


@pytest.mark.slow
def test_no_prompt_and_an_empty_one():
    graph, params = make()
    assert generate(graph, params, []) == ([], [])
    (tokens,), _ = generate(graph, params, [[2]])
    assert tokens == greedy_uncached(graph, params, [2], 18)[:-1]


@pytest.mark.parametrize("limits", slow_but([None], [[1, 2, 7, 40], None]))
def test_results_have_at_most_their_limit(limits):
    """EOS included; by default twice the prompt and 16. The model never ends."""
    graph, params = make(layers=1)
    scale_eos(params, 0.0)
    texts = sentences(5, 5, 1, 3)
    rows, scores = generate(graph, params, texts, limits=limits)
    wanted = limits or [26, 26, 18, 22]
    assert [len(row) + 1 for row in rows] == wanted
    assert np.isfinite(scores).all()
    assert rows[0] == greedy_uncached(graph, params, texts[0], wanted[0])[:-1]


@pytest.mark.slow
def test_a_result_longer_than_the_first_cache_equals_the_uncached_one():
    """The first cache for 16 source tokens has 24 slots."""
    graph, params = make(layers=1)
    scale_eos(params, 0.0)
    texts = sentences(16)
    (tokens,), _ = generate(graph, params, texts)
    assert tokens == greedy_uncached(graph, params, texts[0], 48)[:-1]
    assert len(tokens) == 47


@pytest.mark.slow
def test_trials_under_vmap_equal_each_alone():
    graphs, params = zip(make(seed=0), make(seed=1), strict=True)
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    arrays = batch(sentences(5, 3, 8))
    one = jitted(graphs[0], max_length=9, beam_size=2, length_penalty=0.6)
    found = jax.jit(jax.vmap(lambda params: one(params, *arrays)))(both)
    for trial in range(2):
        wanted = one(params[trial], *arrays)
        np.testing.assert_array_equal(found.tokens[trial], wanted.tokens)
        np.testing.assert_allclose(found.scores[trial], wanted.scores, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("beam_size", [1, 3])
def test_trials_together_equal_each_alone(beam_size):
    graphs, params = zip(*(make(seed=seed, layers=1) for seed in range(3)), strict=True)
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    # more than the rows, not the same ones for each, and none for the first
    texts = sentences(5, 12, 1, 20, 3, 8, 9, 14, 24, 2, 6, 16, 17)
    chosen = [[], list(range(13)), [12, 3, 8, 5, 0]]
    gates = {"decoder": jnp.ones((3, 1, 4)).at[1, 0, 1].set(0.0)}
    found = generate_trials(
        graphs[0],
        both,
        texts,
        chosen,
        head_gates=gates,
        beam_size=beam_size,
        batch_size=4 * beam_size,
    )
    limits = jnp.array([2 * len(text) + 16 for text in texts])
    alone = jitted(graphs[0], max_length=64, beam_size=beam_size)
    for trial, numbers in enumerate(chosen):
        own = jax.tree.map(lambda x, trial=trial: x[trial], gates)
        out = alone(params[trial], *batch(texts), None, limits, own)
        tokens = trimmed(out.tokens)
        assert found[trial][0] == [tokens[i][:-1] for i in numbers]
        scores = out.scores[jnp.array(numbers, int)]
        np.testing.assert_allclose(found[trial][1], scores, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [slice(None), slice(-1, None)])
def test_a_gate_of_zero_removes_a_head_from_every_step(layers):
    """Of every layer, or of the last one alone."""
    graph, params = make()
    model = nnx.merge(graph, params)
    gates = {site: x.at[layers, 1].set(0.0) for site, x in model.head_gates().items()}
    texts = sentences(5, 9)
    options = {"beam_size": 2, "batch_size": 2, "limits": short(texts)}
    whole = generate(graph, params, texts, **options)[1]
    gated, scores = generate(graph, params, texts, head_gates=gates, **options)
    for part in (
        *(layer.self_attention for layer in model.encoder[layers]),
        *(layer.self_attention for layer in model.decoder[layers]),
        *(layer.cross_attention for layer in model.decoder[layers]),
    ):
        part.merge["kernel"][...] = part.merge["kernel"][...].at[1].set(0.0)
    wanted, wanted_scores = generate(*nnx.split(model), texts, **options)
    assert gated == wanted
    np.testing.assert_allclose(scores, wanted_scores, rtol=1e-4)
    assert scores != whole


def test_gates_of_an_unknown_site_raise_an_error_that_names_it():
    graph, params = make(layers=1)
    gates = {"decodr": jnp.ones((1, 4))}
    with pytest.raises(ValueError, match="decodr"):
        generate(graph, params, sentences(3), head_gates=gates)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "seed": 3}])
def test_stream_of_an_encoder_decoder_equals_generate(options):
    graph, params = make(layers=1)
    (text,) = sentences(6)
    (wanted,), _ = generate(
        graph, params, [text], limits=[11], sample_numbers=[4], **options
    )
    found = stream(graph, params, text, limit=11, number=4, **options)
    assert list(found) == wanted and len(wanted) > 2


def test_stream_of_a_beam_raises_an_error():
    graph, params = make(layers=1)
    with pytest.raises(ValueError, match="beam"):
        next(stream(graph, params, sentences(3)[0], limit=5, beam_size=2))
