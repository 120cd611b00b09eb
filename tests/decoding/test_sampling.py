"""Samples follow the model's distribution, and depend on their seed and number only."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from headcount.decoding.generate import generate
from headcount.decoding.sampling import sample
from tests.decoding_cases import make, sentences, short

DRAWS = 4000


@partial(jax.jit, static_argnums=(1, 2, 3))
def draw(logits, temperature, top_k=0, top_p=1.0):
    """Draw many times from one row of logits."""
    keys = jax.random.split(jax.random.key(0), DRAWS)
    rows = jnp.broadcast_to(logits, (DRAWS, *logits.shape))
    return sample(rows, keys, temperature, top_k, top_p)


LOGITS = jnp.array([2.0, 0.5, -1.0, 1.0, 0.0, -jnp.inf])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_softmax_at_the_temperature(temperature):
    """By a chi-square test; what has no probability is never drawn."""
    wanted = scipy.special.softmax(np.float64(LOGITS[:5]) / temperature)
    counts = np.bincount(draw(LOGITS, temperature), minlength=6)
    assert counts[5] == 0
    assert scipy.stats.chisquare(counts[:5], DRAWS * wanted).pvalue > 0.001


@pytest.mark.parametrize(
    "options, kept",
    [
        # probabilities 0.567, 0.209, 0.126, 0.077, 0.021 of tokens 0, 3, 1, 4, 2
        ({"top_k": 2}, [0, 3]),
        ({"top_k": 100}, [0, 3, 1, 4, 2]),
        ({"top_p": 0.7}, [0, 3]),
        ({"top_p": 0.8}, [0, 3, 1]),
        ({"top_k": 2, "top_p": 0.8}, [0, 3]),
    ],
)
def test_top_k_and_top_p_renormalize_the_most_probable_tokens(options, kept):
    counts = np.bincount(draw(LOGITS, 1.0, **options), minlength=6)
    assert set(np.flatnonzero(counts)) == set(kept)
    wanted = scipy.special.softmax(np.float64(LOGITS)[kept])
    assert scipy.stats.chisquare(counts[kept], DRAWS * wanted).pvalue > 0.001


def test_top_p_is_of_the_distribution_at_the_temperature():
    """At temperature 3 the best token has 0.31 of the probability, the next 0.22."""
    assert set(draw(LOGITS, 3.0, 0, 0.5).tolist()) == {0, 3}
    assert set(draw(LOGITS, 1.0, 0, 0.5).tolist()) == {0}


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [
        (4.0, 1, 1.0),
        (4.0, 0, 1e-6),
        (1e-30, 0, 1.0),
        # what is 0 in float32
        (1e-50, 0, 1.0),
        (4.0, 0, 1e-50),
    ],
)
def test_sampling_narrows_to_greedy(temperature, top_k, top_p):
    logits = jax.random.normal(jax.random.key(1), (500, 40))
    keys = jax.random.split(jax.random.key(0), 500)
    found = jax.jit(partial(sample, temperature=temperature, top_k=top_k, top_p=top_p))
    np.testing.assert_array_equal(found(logits, keys), logits.argmax(1))


@pytest.mark.slow
def test_samples_depend_on_their_seed_and_number():
    graph, params = make(layers=1)
    texts = sentences(*(1 + i % 9 for i in range(17)))  # of as many rows at any time
    limits = short(texts)

    def sampled(seed, texts=texts, limits=limits, **options):
        options |= {"seed": seed, "temperature": 4.0, "batch_size": 16}
        return generate(graph, params, texts, limits=limits, **options)[0]

    free = sampled(1)
    assert free == sampled(1)
    assert free != sampled(2)
    assert sampled(1, texts[9:], limits[9:], sample_numbers=range(9, 17)) == free[9:]
    assert sampled(1, texts[9:], limits[9:]) != free[9:]


@pytest.mark.slow
def test_every_token_of_every_sample_is_drawn_anew():
    """By a model that finds all tokens alike, of one sentence again and again."""
    graph, params = make(layers=1)
    params["embedding"][...] = jnp.zeros_like(params["embedding"][...])
    texts = sentences(9) * 32
    rows, scores = generate(
        graph, params, texts, limits=short(texts), temperature=4.0, batch_size=16
    )
    drawn = np.bincount(sum(rows, []), minlength=30)
    assert drawn.sum() > 200 and not drawn[:3].any()
    assert scipy.stats.chisquare(drawn[3:]).pvalue > 0.001
    firsts = [row[0] for row in rows if row]
    assert len(set(firsts)) > len(firsts) / 4  # no two samples have one key
    again = [row[i] == row[i + 1] for row in rows for i in range(len(row) - 1)]
    assert np.mean(again) < 0.2  # nor two tokens of a sample
    lengths = np.array([len(row) + 1 for row in rows])
    np.testing.assert_allclose(scores, -lengths * np.log(30), rtol=1e-5)
