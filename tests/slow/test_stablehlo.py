"""Exported programs give the tokens that `generate` gives and the model's scores."""

import jax
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from jax import export

from headcount.configs.base import get_config
from headcount.decoding import stablehlo
from headcount.decoding.generate import generate
from headcount.models.huggingface import named
from headcount.models.transformer import Transformer

VOCAB, LENGTH = 30, 6
SETTINGS = {"pairs": {}, "texts": {"num_encoder_layers": 0, "positions": "rotary"}}


@pytest.fixture
def unchecked():
    """Without checks of annotations, which say int where a size is symbolic."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("name", SETTINGS)
def test_programs_of_symbolic_shapes_decode_and_score(name, unchecked):
    config = get_config()
    config.model.width = config.model.mlp_dim = 16
    config.model.num_encoder_layers = config.model.num_decoder_layers = 1
    config.model.attention.merge = "gated"  # which no other format has
    config.model.update(SETTINGS[name])
    config.model.tie_embeddings = False  # else it repeats the token that it reads
    model = Transformer(VOCAB, **config.model.to_dict(), rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(KEY, x.shape), params)
    arrays = {key: np.asarray(leaf) for key, leaf in named(params).items()}
    programs, arrays = stablehlo.programs(config, arrays, {})
    call = {key: export.deserialize(x).call for key, x in programs.items()}

    rng = np.random.default_rng(0)
    prompts = rng.integers(4, VOCAB, (3, 7)).astype(np.int32)
    lengths = np.array([7, 4, 2], np.int32)
    sentences = [row[:n].tolist() for row, n in zip(prompts, lengths, strict=True)]
    wanted, scores = generate(
        graph, params, sentences, limits=[LENGTH] * 3, return_scores=True
    )
    prompt = call["prefill"](arrays, prompts, lengths)
    N, H = config.model.attention.num_heads, 4
    cache = [[np.zeros((3, N, H, LENGTH), np.float32)]]
    cache[0] += [np.zeros((3, N, LENGTH, H), np.float32)]
    token, tokens = prompt["first"], []
    for number in range(LENGTH):
        logits, cache = call["step"](arrays, prompt, cache, token, np.int32(number))
        logits = np.array(logits)
        logits[:, :2] = -np.inf  # padding and BOS
        token = logits.argmax(-1).astype(np.int32)
        tokens.append(token)
    tokens = np.stack(tokens, 1)
    for mine, theirs in zip(wanted, tokens, strict=True):
        assert theirs[: len(mine)].tolist() == [int(i) for i in mine]
    assert len({int(i) for ids in wanted for i in ids}) > 3

    if name == "pairs":  # with EOS, which the last step was forced to
        target = np.array([[*map(int, ids)] + [2] for ids in wanted if len(ids) == 5])
        rows = [i for i, ids in enumerate(wanted) if len(ids) == 5]
        size = np.full(len(rows), 6, np.int32)
        source = prompts[rows], lengths[rows]
        found = call["score"](arrays, *source, target.astype(np.int32), size)
        np.testing.assert_allclose(
            np.asarray(found).sum(1), np.array(scores)[rows], rtol=1e-4
        )


KEY = jax.random.key(1)
