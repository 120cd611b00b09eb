"""Decoding: the cache, the search, samples, and batches of any make."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from flax import nnx

from headcount.attention import dot_product_attention
from headcount.attention.cached import cached_attention
from headcount.decoding import generate as decoding
from headcount.decoding import scheduling as decoding_stream
from headcount.decoding import search as decoding_search
from headcount.decoding import step as decoding_step
from headcount.models.transformer import Transformer

SHAPES = {
    "post": {},
    "pre": {"norm": "pre"},
    "grouped": {"num_kv_heads": 2, "head_dim": 6, "value_dim": 5},
}
# Every merge rule, kind of positions and option of the heads at least once.
SETTINGS = SHAPES | {
    "scaled": {"merge": "scaled"},
    "mean, rotary": {"merge": "mean", "positions": "rotary", "qk_norm": True},
    "weighted, relative": {
        "merge": "weighted",
        "positions": "relative",
        "scale": 0.7,
    },
    "dynamic, none": {"merge": "dynamic", "positions": "none", "num_kv_heads": 1},
    "gated, learned": {"merge": "gated", "positions": "learned"},
    "elementwise, relative": {
        "merge": "gated_elementwise",
        "positions": "relative",
        "num_kv_heads": 2,
        "sink": True,
    },
    "mixture, rotary": {"merge": "mixture", "mixture_heads": 2, "positions": "rotary"},
    "talking": {"talking_heads": True, "num_kv_heads": 2, "positions": "relative"},
}


def make(
    vocab_size=30, norm="post", seed=2, positions="sinusoidal", layers=2, **attention
):
    """A small model whose predictions vary: random ones repeat a token for ever.

    Its queries tell keys apart, its embeddings count beside the layers' biases, and its
    last norm keeps a token's own embedding from being what it predicts.
    """
    model = Transformer(
        vocab_size,
        width=16,
        num_encoder_layers=1,
        num_decoder_layers=layers,
        mlp_dim=24,
        dropout=0.0,
        positions=positions,
        norm=norm,
        attention={"num_heads": 4, "implementation": "reference"} | attention,
        rngs=nnx.Rngs(seed),
    )
    random = np.random.default_rng(seed)
    for layer in model.decoder:
        for part in (layer.self_attention, layer.cross_attention):
            part.query[...] *= 8.0
            for mix in part.talking_heads or ():  # at first the identity
                part.talking_heads[mix][...] += random.normal(size=(4, 4)) / 4
            if part.sink is not None:  # at first 0
                part.sink[...] += 2 * random.normal(size=4)
    model.embedding[...] *= 4.0
    last = model.decoder_norm or model.decoder[-1].mlp_norm
    last.scale[...] = 3.0 * random.normal(size=16)
    if positions == "relative":  # at first 0
        for table in (model.encoder_positions, model.decoder_positions):
            table[...] += random.normal(size=table.shape)
    return nnx.split(model)


# Limits of translations that their first cache has room for.
SHORT = {"max_length_factor": 1.0, "max_length_extra": 7}


def sentences(*lengths, vocab_size=30, seed=0):
    random = np.random.default_rng(seed)
    return [[*random.integers(3, vocab_size, n - 1).tolist(), 2] for n in lengths]


def batch(texts, S=None):
    S = S or max(map(len, texts))
    source = np.array([text + [0] * (S - len(text)) for text in texts], np.int32)
    positions = np.broadcast_to(np.arange(S, dtype=np.int32), source.shape)
    return tuple(map(jnp.asarray, (source, (source > 0).astype(np.int32), positions)))


def padded(lengths):
    """Tokens that the uncached model is given, so that it is compiled seldom."""
    return decoding_stream.power_of_two(max(lengths))


@partial(jax.jit, static_argnums=0)
def uncached(graph, params, inputs):
    """Log-probabilities of every piece at every place."""
    return jax.nn.log_softmax(nnx.merge(graph, params)(inputs))


def inputs_of(text, targets):
    """A batch of one source and each of the targets."""
    rows = {"source": [text] * len(targets), "target": targets}
    return {
        f"{side}{name}": array
        for side, texts in rows.items()
        for name, array in zip(
            ("", "_segments", "_positions"),
            batch(texts, padded(map(len, texts))),
            strict=True,
        )
    }


def log_probs(graph, params, text, targets):
    """Of each whole target (with EOS), by the uncached model."""
    inputs = inputs_of(text, targets)
    each = np.take_along_axis(
        np.asarray(uncached(graph, params, inputs)),
        np.asarray(inputs["target"])[..., None],
        axis=-1,
    )[..., 0]
    return (each * inputs["target_segments"]).sum(1)


def greedy_uncached(graph, params, text, limit):
    """Repeat the whole forward pass for every token."""
    out = []
    while len(out) < limit - 1:
        # after what is there, any token: it is not looked at
        scores = uncached(graph, params, inputs_of(text, [[*out, 2]]))
        piece = 2 + int(scores[0, len(out), 2:].argmax())
        if piece == 2:
            break
        out.append(piece)
    return [*out, 2]


def jitted(graph, **options):
    return jax.jit(
        lambda params, *arrays: decoding.decode(
            nnx.merge(graph, params), *arrays, **options
        )
    )


def trimmed(tokens):
    return [row[row > 0].tolist() for row in np.asarray(tokens)]


@pytest.mark.parametrize("W, K", [(1, 4), (3, 2), (2, 4), (1, 1)])
def test_cached_attention_is_attention(W, K):
    random = np.random.default_rng(0)
    query = random.normal(size=(2, W, 4, 6)).astype(np.float32)
    key = random.normal(size=(2, 7, K, 6)).astype(np.float32)
    value = random.normal(size=(2, 7, K, 5)).astype(np.float32)
    sink = random.normal(size=4).astype(np.float32)
    for rows, given in itertools.product({1, W}, ({}, {"sink": sink})):
        mask = random.random((2, rows, 7)) < 0.6
        mask[..., 0] = True
        plain = jax.jit(partial(dot_product_attention, implementation="reference"))
        wanted = plain(query, key, value, None, mask[:, None], **given)
        found = jax.jit(cached_attention)(
            query, key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3), mask, **given
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_logits_of_bfloat16_are_float32():
    """100 and 100.25 are one number in bfloat16."""
    query = jnp.bfloat16([32.0, 2.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
    key = jnp.bfloat16([[6.25, 6.25], [0.0, 0.25], [0.0, 0.0], [0.0, 0.0]])
    value, mask = jnp.bfloat16([[0.0], [1.0]]), jnp.ones((1, 1, 2), bool)
    found = cached_attention(query, key[None, None], value[None, None], mask)
    wanted = scipy.special.expit(0.25)
    assert found.dtype == jnp.bfloat16 and found.item() == pytest.approx(wanted, 4e-3)


@pytest.mark.parametrize("shape", SETTINGS)
def test_greedy_equals_uncached(shape):
    graph, params = make(**SETTINGS[shape])
    texts = sentences(5, 1, 9)
    out = jitted(graph, max_length=12)(params, *batch(texts))
    found = trimmed(out.tokens)
    assert found == [greedy_uncached(graph, params, text, 12) for text in texts]
    assert len({tuple(row) for row in found}) == 3  # the model is no constant
    for text, row, score in zip(texts, found, out.scores, strict=True):
        wanted = log_probs(graph, params, text, [row])[0]
        np.testing.assert_allclose(score, wanted, rtol=1e-4)


def exhaustive(graph, params, text, limit, length_penalty):
    """All translations in three pieces, and their scores by the uncached model."""
    every = [
        [*middle, 2]
        for length in range(limit)
        for middle in itertools.product((3, 4, 5), repeat=length)
    ]
    scores = np.array(log_probs(graph, params, text, every))
    lengths = np.array([len(target) for target in every])
    return every, scores / ((5 + lengths) / 6) ** length_penalty


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.5])
def test_beam_finds_the_best_of_all(shape, length_penalty):
    graph, params = make(vocab_size=6, **SHAPES[shape])
    text, limit = sentences(4, vocab_size=6)[0], 4
    every, scores = exhaustive(graph, params, text, limit, length_penalty)
    out = jitted(graph, max_length=limit, beam_size=27, length_penalty=length_penalty)(
        params, *batch([text])
    )
    assert trimmed(out.tokens)[0] == every[scores.argmax()]
    np.testing.assert_allclose(out.scores[0], scores.max(), rtol=1e-4)


@pytest.mark.parametrize("n_best, length_penalty", [(5, 0.0), (13, 0.6), (40, 1.5)])
def test_the_n_best_are_those_of_all(n_best, length_penalty):
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


def test_lists_of_the_n_best_of_many():
    """In rows that are used again, each as it is scored by the uncached model."""
    graph, params = make(layers=1)
    texts = sentences(*(1 + i % 9 for i in range(17)))
    options = {"beam_size": 4, "length_penalty": 0.6, "batch_size": 16} | SHORT
    lists = decoding.translate(graph, params, texts, n_best=3, **options)
    assert len({len(ids) for some in lists for ids, _ in some}) > 4
    for text, some in zip(texts, lists, strict=True):
        every = [[*ids, 2] for ids, _ in some]
        assert len(set(map(tuple, every))) == 3
        lengths = np.array([len(ids) for ids in every])
        wanted = log_probs(graph, params, text, every) / ((5 + lengths) / 6) ** 0.6
        found = [score for _, score in some]
        np.testing.assert_allclose(found, wanted, rtol=1e-4)
        assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("shape", [*SHAPES, "elementwise, relative", "talking"])
def test_beam_scores_are_the_uncached_models(shape):
    # A wrong `sees` would show: the score would be of another hypothesis.
    graph, params = make(**SETTINGS[shape])
    texts = sentences(6, 3)
    out = jitted(graph, max_length=10, beam_size=3, length_penalty=0.6)(
        params, *batch(texts)
    )
    for text, row, score in zip(texts, trimmed(out.tokens), out.scores, strict=True):
        wanted = log_probs(graph, params, text, [row])[0]
        wanted /= ((5 + len(row)) / 6) ** 0.6
        np.testing.assert_allclose(score, wanted, rtol=1e-4)


def beam_by_hand(graph, params, text, limit, beam_size, length_penalty, n_best=1):
    """The search as `decode` tells it, by whole passes of the uncached model.

    Returns the scores and the tokens that it ends with; and those of two searches that
    end too soon, with as many hypotheses as beam_size, or where the best live one is
    worth no more as it is, however much longer it may get.
    """

    def worth(log_prob, length):
        return log_prob / ((5 + length) / 6) ** length_penalty

    live, ended, count, present = [(0.0, [])], [], None, None
    for length in range(1, limit + 1):
        targets = [[*tokens, 2] for _, tokens in live]
        targets += [[2]] * (beam_size - len(live))  # of one shape
        scores = np.asarray(uncached(graph, params, inputs_of(text, targets)))
        pieces = range(2, 3 if length == limit else scores.shape[-1])
        every = [
            (log_prob + scores[row, length - 1, piece], [*tokens, piece])
            for row, (log_prob, tokens) in enumerate(live)
            for piece in pieces
        ]
        every.sort(reverse=True)
        ended += [(worth(p, length), t) for p, t in every[:beam_size] if t[-1] == 2]
        live = [(p, t) for p, t in every if t[-1] != 2][:beam_size]
        if not live:
            break
        best, hope = max(ended, default=(-np.inf, None)), live[0][0]
        last = (
            sorted(ended, reverse=True)[n_best - 1][0]
            if ended[n_best - 1 :]
            else -np.inf
        )
        if len(ended) >= beam_size:
            count = count or best
        if worth(hope, length) <= best[0]:
            present = present or best
        if count and worth(hope, length) <= best[0] or worth(hope, limit) <= last:
            break
    return sorted(ended, reverse=True)[:n_best], [
        count or max(ended),
        present or max(ended),
    ]


@pytest.mark.parametrize("length_penalty, beam_size", [(0.0, 4), (0.6, 2), (3.0, 4)])
def test_a_narrow_beam_keeps_and_ends_what_it_says(length_penalty, beam_size):
    graph, params = make()
    params["embedding"][...] = params["embedding"][...].at[2].multiply(1.7)
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


@pytest.mark.parametrize("length_penalty, n_best", [(0.0, 2), (0.6, 4)])
def test_the_n_best_of_a_narrow_beam_are_those_that_it_says(length_penalty, n_best):
    graph, params = make()
    params["embedding"][...] = params["embedding"][...].at[2].multiply(1.7)
    texts, limit = sentences(*range(2, 10), seed=2), 14
    options = {"beam_size": 4, "length_penalty": length_penalty, "n_best": n_best}
    out = jitted(graph, max_length=limit, **options)(params, *batch(texts))
    for text, rows, scores in zip(texts, out.tokens, out.scores, strict=True):
        wanted, _ = beam_by_hand(graph, params, text, limit, **options)
        best, _ = beam_by_hand(graph, params, text, limit, **options | {"n_best": 1})
        assert trimmed(rows) == [tokens for _, tokens in wanted] and wanted[:1] == best
        np.testing.assert_allclose(scores, [score for score, _ in wanted], rtol=1e-4)


def test_length_penalty_by_hand():
    # (5 + 7) / 6 = 2, squared 4; and one token has the penalty 1.
    assert decoding_search.penalty(7, 2.0) == 4.0
    assert decoding_search.penalty(1, 0.6) == 1.0


@pytest.mark.parametrize("first", [0, 3])
def test_top_pieces_is_top_k(first):
    random = np.random.default_rng(0)
    logits = random.permutation(6 * 1000).reshape(2, 3, 1000).astype(np.float32)
    logits[0, 0, [1, 997]] = 9999, 9998  # left out, and in no whole block
    logits[0, 1, first : first + 3] = 9999, 9998, 9997
    top_pieces = jax.jit(decoding_search.top_pieces, static_argnums=(1, 2))
    for count in (1, 5, 30):
        wanted, pieces = jax.lax.top_k(logits[..., first:], count)
        found = top_pieces(logits, count, first)
        np.testing.assert_array_equal(found[0], wanted)
        np.testing.assert_array_equal(found[1], pieces + first)


def test_top_pieces_of_two_blocks():
    """Of 150 pieces EOS would stand in the second row of blocks, and stay."""
    logits = jnp.zeros((1, 150)).at[0, 2].set(9.0).at[0, 7].set(1.0)
    found = decoding_search.top_pieces(logits, 1, 3)
    assert [x.item() for x in found] == [1.0, 7]


def test_samples_follow_the_distribution():
    logits = jnp.array([2.0, 0.5, -1.0, 1.0, 0.0, -jnp.inf])
    draws = 4000
    keys = jax.random.split(jax.random.key(0), draws)

    @partial(jax.jit, static_argnums=(0, 1))
    def draw(top_k, top_p, temperature):
        rows = jnp.broadcast_to(logits / temperature, (draws, 6))
        return decoding_search.sample(rows, keys, top_k, top_p)

    for temperature in (0.5, 2.0):
        wanted = scipy.special.softmax(np.float64(logits[:5]) / temperature)
        counts = np.bincount(draw(0, 1.0, temperature), minlength=6)
        assert counts[5] == 0
        assert scipy.stats.chisquare(counts[:5], draws * wanted).pvalue > 0.001
    assert set(draw(2, 1.0, 1.0).tolist()) == {0, 3}
    # The two best have 0.78 of the probability, the three best 0.91.
    assert set(draw(0, 0.8, 1.0).tolist()) == {0, 1, 3}
    assert set(draw(0, 0.7, 1.0).tolist()) == {0, 3}


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_next_piece_is_drawn_at_the_temperature(temperature):
    """Neither padding nor BOS, however likely."""
    logits, draws = jnp.array([9.0, 9.0, 2.0, 0.5, -1.0, 1.0]), 4000
    rows, nothing = jnp.broadcast_to(logits, (draws, 1, 6)), jnp.zeros(draws, int)
    keys = jax.random.split(jax.random.key(0), draws)
    options = decoding_search.complete(temperature=temperature)
    del options["length_penalty"]
    found = decoding_search.next_pieces(
        rows, jnp.zeros((draws, 1)), nothing, nothing > 0, keys, **options
    )
    counts = np.bincount(found.pieces[:, 0], minlength=6)
    wanted = scipy.special.softmax(np.float64(logits[2:]) / temperature)
    assert not counts[:2].any()
    assert scipy.stats.chisquare(counts[2:], draws * wanted).pvalue > 0.001


def test_sampling_is_seeded_and_narrows_to_greedy():
    graph, params = make(layers=1)
    texts = sentences(*(1 + i % 9 for i in range(17)))  # of as many rows at any time

    def sampled(**options):
        return decoding.translate(
            graph, params, texts, batch_size=16, **SHORT, **options
        )[0]

    greedy = sampled()
    assert sampled(temperature=1.0, top_k=1) == greedy
    assert sampled(temperature=1.0, top_p=1e-6) == greedy
    assert sampled(temperature=1e-30) == greedy
    # what is 0 in float32
    assert sampled(temperature=1e-50) == sampled(temperature=1.0, top_p=1e-50) == greedy
    free = sampled(temperature=4.0, seed=1)
    assert free == sampled(temperature=4.0, seed=1)
    assert free != sampled(temperature=4.0, seed=2)
    rest = decoding.translate(
        graph,
        params,
        texts[9:],
        batch_size=16,
        temperature=4.0,
        seed=1,
        sample_numbers=range(9, 17),
        **SHORT,
    )[0]
    assert rest == free[9:]


@pytest.mark.parametrize(
    "options",
    [
        {"length_penalty": 0.6},
        {"temperature": 2.0, "top_k": 5},
        {"beam_size": 3, "length_penalty": 0.6},
    ],
    ids=["greedy", "sampled", "beam"],
)
def test_without_scores_the_translations_are_the_same(options):
    graph, params = make(layers=1)
    texts = sentences(*(1 + i % 9 for i in range(17)))
    options |= {"batch_size": 16} | SHORT
    rows, scores = decoding.translate(graph, params, texts, **options)
    found, others = decoding.translate(
        graph, params, texts, return_scores=False, **options
    )
    assert found == rows and len(set(map(len, rows))) > 2  # some end, some are cut
    if "beam_size" in options:
        assert others == scores
    else:
        assert np.isfinite(scores).all() and np.all(np.array(scores) < others)


def test_every_token_of_every_sample_is_drawn_anew():
    """By a model that finds all pieces alike, of one sentence again and again."""
    graph, params = make(layers=1)
    params["embedding"][...] = jnp.zeros_like(params["embedding"][...])
    texts = sentences(9) * 32
    options = {"temperature": 4.0, "batch_size": 16} | SHORT
    rows, scores = decoding.translate(graph, params, texts, **options)
    drawn = np.bincount(sum(rows, []), minlength=30)
    assert drawn.sum() > 200 and not drawn[:3].any()
    assert scipy.stats.chisquare(drawn[3:]).pvalue > 0.001
    firsts = [row[0] for row in rows if row]
    assert len(set(firsts)) > len(firsts) / 4  # no sentence's number is another's
    again = [row[i] == row[i + 1] for row in rows for i in range(len(row) - 1)]
    assert np.mean(again) < 0.2  # nor any place's
    lengths = np.array([len(row) + 1 for row in rows])
    np.testing.assert_allclose(scores, -lengths * np.log(30), rtol=1e-5)


def test_decoding_where_python_numbers_are_int64():
    graph, params = make(layers=1)
    texts, options = sentences(5, 3, 9), {"temperature": 1.0, "batch_size": 4} | SHORT
    wanted, scores = decoding.translate(graph, params, texts, **options)
    with jax.enable_x64(True):
        found, others = decoding.translate(graph, params, texts, **options)
    assert found == wanted
    np.testing.assert_allclose(others, scores, rtol=1e-4)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_sentence_alone_or_among_others(beam_size):
    # More sentences than rows, so that rows are used again and the cache wraps.
    graph, params = make(layers=1)
    texts = sentences(5, 12, 1, 20, 3, 8, 9, 14, 24, 2, 6, 16, 17)
    options = {"beam_size": beam_size, "length_penalty": 0.6}
    options |= SHORT if beam_size > 1 else {}
    together, scores = decoding.translate(
        graph, params, texts, batch_size=9 * beam_size, **options
    )
    for i in (1, 2, 8, 12):
        alone, score = decoding.translate(graph, params, [texts[i]], **options)
        assert alone == [together[i]]
        np.testing.assert_allclose(score, [scores[i]], rtol=1e-4)


def test_rows_are_filled_again_on_the_device(monkeypatch):
    graph, params = make(layers=1)
    calls = {"encode": 0, "go_on": 0}
    original = decoding.programs

    def spy(*arguments):
        found = original(*arguments)

        def counted(name):
            def call(*arrays):
                calls[name] += 1
                return getattr(found, name)(*arrays)

            return call

        return found._replace(**{name: counted(name) for name in calls})

    monkeypatch.setattr(decoding, "programs", spy)
    monkeypatch.setattr(decoding_stream, "num_lanes", lambda _: 1)
    texts = sentences(*range(1, 31))
    options = {"beam_size": 4, "max_length_factor": 1.0, "max_length_extra": 0}
    many, scores = decoding.translate(graph, params, texts, batch_size=32, **options)
    assert calls == {"encode": 1, "go_on": 1}
    for i in (0, 7, 29):
        alone, score = decoding.translate(graph, params, [texts[i]], **options)
        assert alone == [many[i]]
        np.testing.assert_allclose(score, [scores[i]], rtol=1e-4)


def test_lanes_translate_as_one_stream(monkeypatch):
    graph, params = make(layers=1)
    texts = sentences(*np.random.default_rng(0).integers(1, 20, 41))
    lanes = []
    original = decoding_stream.stream

    def spy(programs, sentences, limits, waiting, **sizes):
        lanes.append(len(waiting[0]))
        return original(programs, sentences, limits, waiting, **sizes)

    monkeypatch.setattr(decoding_stream, "stream", spy)
    options = {"batch_size": 6, "beam_size": 2, "length_penalty": 0.6}
    monkeypatch.setattr(decoding_stream, "num_lanes", lambda _: 3)
    apart, scores = decoding.translate(graph, params, texts, **options)
    assert sorted(lanes[:3]) == [13, 14, 14]
    lanes.clear()
    monkeypatch.setattr(decoding_stream, "num_lanes", lambda _: 1)
    together, expected = decoding.translate(graph, params, texts, **options)
    assert lanes[0] == 41
    assert apart == together
    np.testing.assert_allclose(scores, expected, rtol=1e-4)


@partial(jax.jit, static_argnames=("max_length", "beam_size"))
def begun(model, source, keys, limits, clock, **sizes):
    """The state of sentences that begin at the clock."""
    state = decoding_step.empty(model, source[0], keys, **sizes)
    encoded = decoding_step.encode(model, *source)
    rows = decoding_step.start(encoded, keys, limits, clock, **sizes)
    return state._replace(clock=jnp.asarray(clock), rows=rows)


def test_a_narrower_state_goes_on_alike():
    graph, params = make(**SETTINGS["elementwise, relative"])
    model = nnx.merge(graph, params)
    source = batch(sentences(5, 9), S=16)
    keys = jax.random.split(jax.random.key(0))
    sizes = {"max_length": 32, "beam_size": 3}
    limits, clock = jnp.array([30, 30]), 29  # both caches wrap, at other times
    state = begun(model, source, keys, limits, clock, **sizes)
    options = decoding_search.complete(beam_size=3, length_penalty=0.6)

    @jax.jit
    def steps(state):
        return jax.lax.fori_loop(
            0, 5, lambda _, x: decoding_step.advance(model, x, **options), state
        )

    state = steps(state)
    keep = jax.jit(partial(decoding_stream.keep_of_one, shape=(12, 16)))
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


def test_a_search_that_the_cache_cuts_short_is_begun_again(monkeypatch):
    # Poor hypotheses have ended when the cache is full, and better ones are longer.
    graph, params = make(seed=9)
    params["embedding"][...] = params["embedding"][...].at[2].multiply(1.5)
    texts = sentences(*(9 + i % 8 for i in range(40)), seed=9)
    options = {"beam_size": 5, "length_penalty": 0.6, "batch_size": 80}
    unfinished = []  # after each start
    original = decoding.lanes

    def spy(programs, sentences, limits, waiting, *sizes):
        found = original(programs, sentences, limits, waiting, *sizes)
        unfinished.append(set(range(40)) - found[0].keys())
        return found

    monkeypatch.setattr(decoding, "lanes", spy)
    tokens, scores = decoding.translate(graph, params, texts, **options)
    monkeypatch.setattr(decoding, "lanes", original)
    assert any(len(tokens[i]) < 24 for i in unfinished[0])  # what the first cache holds
    long = sentences(40)  # for which all have a larger cache
    among, expected = decoding.translate(graph, params, texts + long, **options)
    assert tokens == among[:40]
    np.testing.assert_allclose(scores, expected[:40], rtol=1e-4)


def test_a_translation_too_long_for_its_source_holds_up_none(monkeypatch):
    # It is left out when the others go on in a smaller cache, and is begun again.
    graph, params = make(seed=8)
    params["embedding"][...] = params["embedding"][...].at[2].multiply(1.5)
    texts = sentences(20, 18, *(3 + i % 12 for i in range(24)), seed=8)
    left_out = []
    original = decoding_stream.keep

    def spy(state, rows, count, **shape):
        left_out.append(int((~state.rows.done).sum() - count.sum()))
        return original(state, rows, count, **shape)

    monkeypatch.setattr(decoding_stream, "keep", spy)
    monkeypatch.setattr(decoding_stream, "num_lanes", lambda _: 1)
    options = {"max_length_extra": 40}
    together, scores = decoding.translate(graph, params, texts, batch_size=4, **options)
    assert max(left_out) > 0
    left_out.clear()
    apart, expected = decoding.translate(graph, params, texts, **options)
    assert not any(left_out)
    assert together == apart
    np.testing.assert_allclose(scores, expected, rtol=1e-4)


def test_no_sentence_and_an_empty_one():
    graph, params = make()
    assert decoding.translate(graph, params, []) == ([], [])
    (tokens,), _ = decoding.translate(graph, params, [[2]])
    assert tokens == greedy_uncached(graph, params, [2], 18)[:-1]


def test_a_long_translation_outgrows_the_cache():
    # Limits of 50 tokens a source token; the cache for short sources has 24 slots.
    graph, params = make(layers=1)
    params["embedding"][...] = params["embedding"][...].at[2].set(0.0)  # no EOS
    (tokens,), _ = decoding.translate(
        graph, params, sentences(2), max_length_factor=30.0, max_length_extra=10
    )
    assert tokens == greedy_uncached(graph, params, sentences(2)[0], 70)[:-1]
    assert len(tokens) == 69


def test_where_most_translations_are_long_all_begin_again(monkeypatch):
    graph, params = make(layers=1)
    params["embedding"][...] = params["embedding"][...].at[2].set(0.0)  # no EOS
    sent = []
    original = decoding_stream.arrays_of

    def spy(numbers, *others):
        sent.extend(numbers[0])
        return original(numbers, *others)

    monkeypatch.setattr(decoding_stream, "arrays_of", spy)
    monkeypatch.setattr(decoding_stream, "num_lanes", lambda _: 1)
    texts = sentences(*[5] * 60)
    tokens, _ = decoding.translate(graph, params, texts, batch_size=4)
    assert {len(each) for each in tokens} == {25}  # the cache has 24 slots, then 32
    assert sorted(sent[-60:]) == list(range(60))
    assert len(sent) < 80


def test_trials_under_vmap():
    graphs, params = zip(make(seed=0), make(seed=1), strict=True)
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    arrays = batch(sentences(5, 3, 8))
    one = jitted(graphs[0], max_length=9, beam_size=2, length_penalty=0.6)
    found = jax.jit(jax.vmap(lambda params: one(params, *arrays)))(both)
    for trial in range(2):
        wanted = one(params[trial], *arrays)
        np.testing.assert_array_equal(found.tokens[trial], wanted.tokens)
        np.testing.assert_allclose(found.scores[trial], wanted.scores, rtol=1e-5)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_all_trials_at_once_are_each_alone(beam_size):
    graphs, params = zip(*(make(seed=seed, layers=1) for seed in range(3)), strict=True)
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    # More than the rows, not the same ones for each, and none for the last.
    texts = sentences(5, 12, 1, 20, 3, 8, 9, 14, 24, 2, 6, 16, 17)
    chosen = [list(range(13)), [12, 3, 8, 5, 0], []]
    gates = {"decoder": jnp.ones((3, 1, 4)).at[1, 0, 1].set(0.0)}
    found = decoding.translate_trials(
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


def test_sentences_are_encoded_no_wider_than_the_rows():
    for length in range(1, 300):
        width = decoding_stream.columns(length)
        assert length <= width <= decoding_stream.bucket(length)


def test_a_bucket_compiles_once(monkeypatch):
    graph, params = make(seed=3, layers=1)
    found = []

    def spy(*arguments):
        found.append(original(*arguments))
        return found[-1]

    original = decoding.programs
    monkeypatch.setattr(decoding, "programs", spy)

    def sizes():
        return [program._cache_size() for program in found[0]]

    # The model never ends, so the caches of 24 and then of 32 or 64 slots are met.
    for lengths in ((5,), (16,)):
        decoding.translate(graph, params, sentences(*lengths))
    compiled = sizes()
    assert min(compiled) >= 1
    for lengths in ((4,), (12,), (16,)):
        decoding.translate(graph, params, sentences(*lengths, seed=1))
    assert all(each is found[0] for each in found)
    assert sizes() == compiled


def test_finished_sentences_stop_the_loop():
    graph, params = make()
    model = nnx.merge(graph, params)
    source = batch(sentences(4, 3))
    keys = jax.random.split(jax.random.key(0))
    limits = jnp.array([4, 2])
    state = begun(model, source, keys, limits, 0, max_length=16, beam_size=1)
    step = partial(decoding_step.advance, model, **decoding_search.complete())
    state = decoding_step.run(step, state, 2)
    assert int(state.clock) <= 4
    assert bool(state.rows.done.all())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"beam_size": 0}, "beam_size must be at least 1, got 0."),
        ({"length_penalty": -1.0}, "length_penalty must be at least 0, got -1.0."),
        ({"temperature": -1.0}, "temperature must be at least 0, got -1.0."),
        ({"top_k": -1}, "top_k must be at least 0, got -1."),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0."),
        ({"temperature": 1.0, "beam_size": 2}, "Sampling needs beam_size 1, got 2."),
        ({"n_best": 2}, "n_best must be from 1 to beam_size=1, got 2."),
        ({"beam_size": 2, "n_best": 0}, "n_best must be .* beam_size=2, got 0."),
    ],
)
def test_options_out_of_range(options, message):
    graph, params = make()
    with pytest.raises(ValueError, match=f"^{message}$"):
        decoding.translate(graph, params, sentences(3), **options)


@pytest.mark.parametrize("layers", [slice(None), slice(-1, None)])
def test_a_gate_of_zero_removes_a_head_from_every_step(layers):
    """Of every layer, or of the last one alone."""
    graph, params = make()
    model = nnx.merge(graph, params)
    gates = {site: x.at[layers, 1].set(0.0) for site, x in model.head_gates().items()}
    texts = sentences(5, 9)
    options = {"beam_size": 2, "batch_size": 2} | SHORT
    whole = decoding.translate(graph, params, texts, **options)[1]
    gated, scores = decoding.translate(
        graph, params, texts, head_gates=gates, **options
    )
    for part in (
        *(layer.self_attention for layer in model.encoder[layers]),
        *(layer.self_attention for layer in model.decoder[layers]),
        *(layer.cross_attention for layer in model.decoder[layers]),
    ):
        part.merge["kernel"][...] = part.merge["kernel"][...].at[1].set(0.0)
    wanted, wanted_scores = decoding.translate(*nnx.split(model), texts, **options)
    assert gated == wanted
    np.testing.assert_allclose(scores, wanted_scores, rtol=1e-4)
    assert scores != whole
