"""Decoding of decoder-only models: with the cache as without it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headcount.configs.base import get_config
from headcount.decoding import generate as decoding
from headcount.decoding.generate import generate, generate_trials, stream
from headcount.decoding.search import Vocabulary
from headcount.models.transformer import Transformer

VOCAB, BOS = 24, 1
VOCABULARY = Vocabulary(eos=BOS, banned=(0, 2, 3))
KINDS = {
    "learned": {"model.positions": "learned", "model.max_positions": 64},
    "sinusoidal": {"model.positions": "sinusoidal"},
    "rotary, grouped": {
        "model.positions": "rotary",
        "model.attention.num_kv_heads": 2,
    },
    "relative, one key head": {
        "model.positions": "relative",
        "model.attention.num_kv_heads": 1,
    },
    "none, pre-norm": {"model.positions": "none", "model.norm": "pre"},
    "talking heads": {"model.attention.talking_heads": True},
    "sink, QK norm": {"model.attention.sink": True, "model.attention.qk_norm": True},
    "differential, exclusive, ALiBi": {
        "model.attention.differential": True,
        "model.attention.exclusive": True,
        "model.attention.gate": "double_sigmoid",
        "model.positions": "alibi",
    },
    "latent, rotary": {
        "model.attention.latent_dim": 12,
        "model.attention.exclusive": True,
        "model.positions": "rotary",
    },
    "value residual, knocking, shared mixture": {
        "model.attention.value_residual": True,
        "model.attention.knocking": "mlp",
        "model.attention.merge": "shared_mixture",
        "model.attention.gate": "sigmoid",
        "model.attention.gate_on": "values",
    },
    "gated, other sizes": {
        "model.attention.merge": "gated",
        "model.attention.head_dim": 6,
        "model.attention.value_dim": 10,
    },
}


# The others have their steps tested by test_step.py and test_search.py.
WITH_OWN_CACHES = (
    *("rotary, grouped", "talking heads", "sink, QK norm", "latent, rotary"),
    *("differential, exclusive, ALiBi", "value residual, knocking, shared mixture"),
)


def make_model(changes: dict, seed: int = 0):
    config = get_config()
    config.model.num_encoder_layers, config.model.width = 0, 32
    config.model.mlp_dim = 48
    config.update_from_flattened_dict(changes)
    model = Transformer(
        VOCAB, **config.model.to_dict(), rngs=nnx.Rngs(jax.random.key(seed))
    )
    # parameters that start at 0 or as the identity would hide mistakes
    graph, params = nnx.split(model)
    keys = iter(jax.random.split(jax.random.key(seed + 1), 1000))
    params = jax.tree.map(
        lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), params
    )
    return graph, params


LENGTH = 32  # of every text that is computed from scratch: one program for all


@partial(jax.jit, static_argnums=0)
def all_logits(graph, params, inputs, length):
    """Logits at every place of a padded text, computed from scratch."""
    place = jnp.arange(LENGTH)[None]
    batch = {
        "target": jnp.zeros_like(inputs),
        "target_inputs": inputs,
        "target_segments": (place < length).astype(jnp.int32),
        "target_positions": place,
    }
    return nnx.merge(graph, params)(batch)[0]


def next_logits(graph, params, tokens: list[int]):
    """Logits after a text, computed from scratch."""
    inputs = jnp.array([tokens + [0] * (LENGTH - len(tokens))])
    return all_logits(graph, params, inputs, len(tokens))[len(tokens) - 1]


def greedy(graph, params, prompt: list[int], limit: int) -> list[int]:
    """Continue a prompt without a cache."""
    found = []
    while len(found) < limit - 1:
        logits = next_logits(graph, params, prompt + found)
        token = int(logits.at[jnp.array(VOCABULARY.banned)].set(-jnp.inf).argmax())
        if token == BOS:
            return found
        found.append(token)
    return found


PROMPTS = [[BOS], [BOS, 5], [BOS, 4, 9, 17, 23], [BOS, *range(4, 21)]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_OWN_CACHES)
def test_greedy_with_the_cache_equals_greedy_without(kind):
    seed = 9 if kind == "talking heads" else 0  # one that does not end at once
    graph, params = make_model(KINDS[kind], seed)
    limits = [12, 7, 9, 1]
    found, _ = generate(graph, params, PROMPTS, limits=limits, vocabulary=VOCABULARY)
    assert found == [
        greedy(graph, params, prompt, limit)
        for prompt, limit in zip(PROMPTS, limits, strict=True)
    ]
    assert any(len(ids) > 5 for ids in found)


@pytest.mark.slow
def test_scores_are_log_probabilities_of_the_uncached_model():
    graph, params = make_model(KINDS["rotary, grouped"])
    options = {"limits": [8] * 4, "vocabulary": VOCABULARY, "beam_size": 3}
    for prompt, hypotheses in zip(
        PROMPTS, generate(graph, params, PROMPTS, n_best=3, **options), strict=True
    ):
        assert len(hypotheses) == 3
        for ids, score in hypotheses:
            total, text = 0.0, list(prompt)
            for token in [*ids, BOS]:
                total += jax.nn.log_softmax(next_logits(graph, params, text))[token]
                text.append(token)
            np.testing.assert_allclose(score, total, rtol=1e-4)


@pytest.mark.slow
def test_stream_gives_what_generate_does():
    graph, params = make_model(KINDS["learned"])
    for number, options in enumerate(
        [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_k": 5}]
    ):
        options |= {"vocabulary": VOCABULARY}
        (whole,), _ = generate(
            graph,
            params,
            [PROMPTS[2]],
            limits=[20],
            sample_numbers=[number],
            **options,
        )
        pieces = stream(graph, params, PROMPTS[2], limit=20, number=number, **options)
        assert list(pieces) == whole


@pytest.mark.slow
def test_texts_have_no_more_rows_than_prompts(monkeypatch):
    """20 prompts in two lanes have 16 rows each, not the batch_size of 128."""
    graph, params = make_model(KINDS["relative, one key head"])
    seen = []

    def spy(parts, prompts, limits, waiting, sizes, room, most):
        seen.append(sizes)
        return [dict.fromkeys(waiting[0], ([], 0.0))]

    monkeypatch.setattr(decoding, "num_lanes", lambda _: 2)
    monkeypatch.setattr(decoding, "decode_in_lanes", spy)
    for count in (1, 20, 400):
        prompts, limits = [[BOS]] * count, [9] * count
        generate(graph, params, prompts, limits=limits, vocabulary=VOCABULARY)
    assert seen == [[1], [16], [16, 128]]


@pytest.mark.slow
def test_rows_are_refilled_with_waiting_prompts():
    """40 prompts in 4 rows: each continuation is that of its prompt alone."""
    graph, params = make_model(KINDS["rotary, grouped"])
    keys = np.random.default_rng(0)
    prompts = [
        [BOS, *keys.integers(4, VOCAB, keys.integers(0, 9)).tolist()] for _ in range(40)
    ]
    limits = keys.integers(1, 12, 40).tolist()
    options = {"limits": limits, "vocabulary": VOCABULARY, "batch_size": 4}
    found, _ = generate(graph, params, prompts, **options)
    assert found == [
        greedy(graph, params, prompt, limit)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    assert len({len(ids) for ids in found}) > 4, "rows end at different times"


@pytest.mark.slow
def test_trials_are_each_as_alone():
    models = [make_model(KINDS["learned"], seed) for seed in (0, 1)]
    graph = models[0][0]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(params for _, params in models))
    options = {"limits": [10] * 4, "vocabulary": VOCABULARY}
    both = generate_trials(graph, stacked, PROMPTS, **options)
    for (graph, params), (tokens, _) in zip(models, both, strict=True):
        assert generate(graph, params, PROMPTS, **options)[0] == tokens


@pytest.mark.slow
def test_a_gate_of_zero_removes_a_head_in_prefill_and_steps():
    graph, params = make_model(KINDS["learned"])
    ones = nnx.merge(graph, params).head_gates()
    gates = {site: gate.at[0, 1].set(0) for site, gate in ones.items()}
    options = {"limits": [10] * 4, "vocabulary": VOCABULARY}
    gated, _ = generate(graph, params, PROMPTS, head_gates=gates, **options)
    plain, _ = generate(graph, params, PROMPTS, **options)
    assert gated != plain

    model = nnx.merge(graph, params)
    model.decoder[0].self_attention.merge["kernel"][...] = (
        model.decoder[0].self_attention.merge["kernel"][...].at[1].set(0)
    )
    removed, _ = generate(graph, nnx.split(model)[1], PROMPTS, **options)
    assert gated == removed
