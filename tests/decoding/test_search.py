"""Beam search: against all translations, and against the search written as a loop."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from headcount.decoding.generate import generate
from headcount.decoding.search import (
    Vocabulary,
    check_n_best,
    check_options,
    continue_hypotheses,
    length_penalty_at,
    top_tokens,
)
from tests.decoding_cases import (
    SETTINGS,
    SHAPES,
    batch,
    beam_by_hand,
    exhaustive,
    jitted,
    log_probs,
    make,
    scale_eos,
    sentences,
    short,
    trimmed,
)
from tests.marks import slow_but


@pytest.mark.parametrize(
    "shape, length_penalty",
    slow_but(
        [("pre", 0.6)],
        itertools.product(SHAPES, [0.0, 0.6, 1.5]),
    ),
)
def test_wide_beam_equals_exhaustive_search(shape, length_penalty):
    graph, params = make(vocab_size=6, **SHAPES[shape])
    text, limit = sentences(4, vocab_size=6)[0], 4
    every, scores = exhaustive(graph, params, text, limit, length_penalty)
    out = jitted(graph, max_length=limit, beam_size=27, length_penalty=length_penalty)(
        params, *batch([text])
    )
    assert trimmed(out.tokens)[0] == every[scores.argmax()]
    np.testing.assert_allclose(out.scores[0], scores.max(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("n_best, length_penalty", [(5, 0.0), (13, 0.6), (40, 1.5)])
def test_n_best_of_a_wide_beam_equals_exhaustive_search(n_best, length_penalty):
    """In order; and where there are fewer, all of them."""
    graph, params = make(vocab_size=6)
    (text,) = sentences(4, vocab_size=6)
    options = {"beam_size": 40, "length_penalty": length_penalty, "n_best": n_best}
    decode = jitted(graph, max_length=4, **options)
    for limit in (4, 3, 1):
        every, scores = exhaustive(graph, params, text, limit, length_penalty)
        best = np.argsort(-scores)[:n_best]
        out = decode(params, *batch([text]), None, jnp.array([limit]))
        count = min(n_best, len(every))
        assert trimmed(out.tokens[0, :count]) == [every[i] for i in best]
        np.testing.assert_allclose(out.scores[0, :count], scores[best], rtol=1e-4)
        assert out.finished[0] and not out.tokens[0, count:].any()
        assert (out.scores[0, count:] == -np.inf).all()


@pytest.mark.slow
def test_n_best_lists_of_many_prompts_have_the_uncached_scores():
    """In rows that are used again."""
    graph, params = make(layers=1)
    texts = sentences(*(1 + i % 9 for i in range(17)))
    options = {"beam_size": 4, "length_penalty": 0.6, "batch_size": 16}
    lists = generate(graph, params, texts, n_best=3, limits=short(texts), **options)
    assert len({len(ids) for some in lists for ids, _ in some}) > 4
    for text, some in zip(texts, lists, strict=True):
        every = [[*ids, 2] for ids, _ in some]
        assert len(set(map(tuple, every))) == 3
        lengths = np.array([len(ids) for ids in every])
        wanted = log_probs(graph, params, text, every) / ((5 + lengths) / 6) ** 0.6
        found = [score for _, score in some]
        np.testing.assert_allclose(found, wanted, rtol=1e-4)
        assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    "shape",
    slow_but(["talking"], [*SHAPES, "elementwise, relative", "talking"]),
)
def test_beam_scores_equal_the_uncached_models(shape):
    # a wrong `visible` would show: the score would be of another hypothesis
    graph, params = make(**SETTINGS[shape])
    texts = sentences(6, 3)
    out = jitted(graph, max_length=10, beam_size=3, length_penalty=0.6)(
        params, *batch(texts)
    )
    for text, row, score in zip(texts, trimmed(out.tokens), out.scores, strict=True):
        wanted = log_probs(graph, params, text, [row])[0]
        wanted /= ((5 + len(row)) / 6) ** 0.6
        np.testing.assert_allclose(score, wanted, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "length_penalty, beam_size",
    [(0.0, 4), (0.6, 2), (3.0, 4)],
)
def test_narrow_beam_equals_the_search_by_hand(length_penalty, beam_size):
    graph, params = make()
    scale_eos(params, 1.7)
    texts, limit = sentences(*range(2, 14), seed=2), 14
    options = {"beam_size": beam_size, "length_penalty": length_penalty}
    out = jitted(graph, max_length=limit, **options)(params, *batch(texts))
    found, too_soon = trimmed(out.tokens), np.zeros(2, int)
    for text, row, score in zip(texts, found, out.scores, strict=True):
        ((wanted, tokens),), sooner = beam_by_hand(
            graph, params, text, limit, **options
        )
        assert row == tokens
        np.testing.assert_allclose(score, wanted, rtol=1e-4)
        too_soon += [early != tokens for _, early in sooner]
    # else the end would not be tested; at a low penalty the second finds the same
    assert too_soon[0] > 0 and (too_soon[1] > 0 or length_penalty < 1)
    assert len({len(row) for row in found}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("length_penalty, n_best", [(0.0, 2), (0.6, 4)])
def test_n_best_of_a_narrow_beam_equal_the_search_by_hand(length_penalty, n_best):
    graph, params = make()
    scale_eos(params, 1.7)
    texts, limit = sentences(*range(2, 10), seed=2), 14
    options = {"beam_size": 4, "length_penalty": length_penalty, "n_best": n_best}
    out = jitted(graph, max_length=limit, **options)(params, *batch(texts))
    for text, rows, scores in zip(texts, out.tokens, out.scores, strict=True):
        wanted, _ = beam_by_hand(graph, params, text, limit, **options)
        best, _ = beam_by_hand(graph, params, text, limit, **options | {"n_best": 1})
        assert trimmed(rows) == [tokens for _, tokens in wanted] and wanted[:1] == best
        np.testing.assert_allclose(scores, [score for score, _ in wanted], rtol=1e-4)


def test_length_penalty_by_hand():
    # (5 + 7) / 6 = 2, squared 4; and one token has the penalty 1
    assert length_penalty_at(7, 2.0) == 4.0
    assert length_penalty_at(1, 0.6) == 1.0


@pytest.mark.parametrize("first", [0, 3])
def test_top_tokens_equals_top_k(first):
    random = np.random.default_rng(0)
    logits = random.permutation(6 * 1000).reshape(2, 3, 1000).astype(np.float32)
    logits[0, 0, [1, 997]] = 9999, 9998  # left out, and in no whole block
    logits[0, 1, first : first + 3] = 9999, 9998, 9997
    found = jax.jit(top_tokens, static_argnums=(1, 2))
    for count in (1, 5, 30):
        wanted, tokens = jax.lax.top_k(logits[..., first:], count)
        values, places = found(logits, count, first)
        np.testing.assert_array_equal(values, wanted)
        np.testing.assert_array_equal(places, tokens + first)


def test_top_tokens_leaves_out_the_first_of_two_blocks():
    """Of 150 tokens EOS would stand in the second row of blocks, and stay."""
    logits = jnp.zeros((1, 150)).at[0, 2].set(9.0).at[0, 7].set(1.0)
    assert [x.item() for x in top_tokens(logits, 1, 3)] == [1.0, 7]


@pytest.mark.parametrize("vocab", [40, 700])  # ranked at once, and by blocks
@pytest.mark.parametrize("eos, banned", [(2, (0, 1)), (1, (0, 2, 3)), (5, ())])
def test_continuations_of_any_vocabulary_equal_a_sort(vocab, eos, banned):
    """Hypotheses continue with the best W of what is neither EOS nor banned.

    The probabilities are over the whole vocabulary, and a hypothesis ends if fewer than
    W continuations, of which EOS is one, are better.
    """
    random, W = np.random.default_rng(0), 3
    logits = 3 * random.normal(size=(4, W, vocab)).astype(np.float32)
    logits[:, :, [*banned]] += 9.0
    logits[:2, :, eos] += 9.0
    before = -np.float32(random.random((4, W)))
    options = check_options(beam_size=W, vocabulary=Vocabulary(eos, banned))
    del options["length_penalty"]
    found = jax.jit(partial(continue_hypotheses, **options))(
        jnp.array(logits),
        jnp.array(before),
        jnp.ones(4, int),
        jnp.arange(4) == 3,
        jax.random.split(jax.random.key(0), 4),
    )
    sums = before[..., None] + scipy.special.log_softmax(np.float64(logits), axis=-1)
    np.testing.assert_allclose(found.eos_log_probs, sums[..., eos], rtol=1e-5)
    for row in range(4):
        every = [
            (sums[row, beam, token], beam, token)
            for beam, token in itertools.product(range(W), range(vocab))
            if token not in banned and (row < 3 or token == eos)
        ]
        every.sort(reverse=True)
        ends = {beam for _, beam, token in every[:W] if token == eos}
        assert set(np.flatnonzero(found.ends[row])) == ends
        live = [each for each in every if each[2] != eos][:W]
        if row == 3:  # its last step: all end, none goes on
            assert not live and (found.log_probs[row] < -1e8).all()
            continue
        wanted, parents, tokens = zip(*live, strict=True)
        np.testing.assert_allclose(found.log_probs[row], wanted, rtol=1e-5)
        assert found.parents[row].tolist() == [*parents]
        assert found.tokens[row].tolist() == [*tokens]
    assert found.ends[:2].any() and found.ends[3].all()


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("eos, banned", [(2, (0, 1)), (1, (0, 3))])
def test_the_next_token_is_sampled_at_the_temperature(temperature, eos, banned):
    """Never a banned one, however likely."""
    logits, draws = np.float64([1.0, 0.0, 2.0, 0.5, -1.0, 1.5]), 4000
    logits[[*banned]] = 9.0
    rows = jnp.broadcast_to(jnp.float32(logits), (draws, 1, 6))
    nothing = jnp.zeros(draws, int)
    vocabulary = Vocabulary(eos, banned)
    options = check_options(temperature=temperature, vocabulary=vocabulary)
    del options["length_penalty"]
    keys = jax.random.split(jax.random.key(0), draws)
    found = jax.jit(partial(continue_hypotheses, **options))(
        rows, jnp.zeros((draws, 1)), nothing, nothing > 0, keys
    )
    counts = np.bincount(found.tokens[:, 0], minlength=6)
    allowed = [token for token in range(6) if token not in banned]
    assert counts[allowed].sum() == draws
    wanted = draws * scipy.special.softmax(logits[allowed] / temperature)
    assert scipy.stats.chisquare(counts[allowed], wanted).pvalue > 0.001
    np.testing.assert_array_equal(found.ends[:, 0], found.tokens[:, 0] == eos)


@pytest.mark.parametrize(
    "options, key",
    [
        ({"beam_size": 0}, "beam_size"),
        ({"length_penalty": -1.0}, "length_penalty"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"temperature": 1.0, "beam_size": 2}, "beam_size"),
    ],
)
def test_options_out_of_range_raise_an_error_that_names_them(options, key):
    with pytest.raises(ValueError, match=rf"\b{key}\b.* got {options[key]}\.$"):
        check_options(**options)
    graph, params = make()
    with pytest.raises(ValueError, match=rf"\b{key}\b"):
        generate(graph, params, sentences(3), **options)


@pytest.mark.parametrize("n_best, beam_size", [(2, 1), (0, 2), (6, 5)])
def test_n_best_beyond_the_beam_raises_an_error(n_best, beam_size):
    with pytest.raises(ValueError, match=f"n_best.*{beam_size}, got {n_best}"):
        check_n_best(n_best, beam_size)
    graph, params = make()
    with pytest.raises(ValueError, match="n_best"):
        generate(graph, params, sentences(3), beam_size=beam_size, n_best=n_best)
