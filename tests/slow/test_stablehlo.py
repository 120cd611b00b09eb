"""Exported programs give the tokens that `generate` gives and the model's scores."""

import re

import jax
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from jax import export

from headcount.configs.base import get_config
from headcount.decoding.generate import generate
from headcount.exchange import stablehlo, usage_examples
from headcount.exchange.exporting import facts_of, to_stablehlo
from headcount.exchange.huggingface import named
from headcount.models.transformer import Transformer
from tests.tasks import test_classification, test_language_model, test_tagging
from tests.tasks.untrained import untrained_run

VOCAB, LENGTH = 30, 6
SEED = 18  # its models write more than three tokens, and outputs of five tokens
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
    model = Transformer(VOCAB, **config.model.to_dict(), rngs=nnx.Rngs(SEED))
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


def card_run(run, folder, monkeypatch, capsys) -> tuple[dict, str]:
    """Export a run and execute its card's code: what that defines, and prints."""
    out = folder / "out"
    out.mkdir()
    usage = to_stablehlo(run, 0, out)
    card = usage_examples.section(usage, facts_of(run))
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(out)
    names = {}
    exec(code, names)
    return names, capsys.readouterr().out


@pytest.mark.parametrize("changes", [{}, {"model.attention.latent_dim": 6}])
def test_the_card_of_a_language_model_scores_and_continues(
    changes, tmp_path, unchecked, monkeypatch, capsys
):
    for split, texts in (
        ("train", test_language_model.TRAIN),
        ("val", test_language_model.VAL),
    ):
        (tmp_path / f"{split}.txt").write_text("\n\n".join(texts))
    task = test_language_model.make_task(tmp_path, **changes)
    run = untrained_run(task, num_trials=1, scale=3.0)
    names, printed = card_run(run, tmp_path, monkeypatch, capsys)
    text = task.read("val")["text"][0]
    (score,) = task.score_lines(run, [text])
    np.testing.assert_allclose(
        np.asarray(names["log_probs"]).sum(), float(score.split()[0]), atol=1e-3
    )
    (wanted,) = task.predict(run, [text], temperature=0.0, max_new_tokens=50)
    assert text + printed.removesuffix("\n") == wanted


def test_the_card_of_a_classifier_of_pairs_has_the_types_of_their_tokens(
    tmp_path, unchecked, monkeypatch, capsys
):
    changes = {"pairs": True, "model.token_types": 2}
    task = test_classification.make_task(tmp_path, **changes)
    run = untrained_run(task, num_trials=1, scale=3.0)
    names, printed = card_run(run, tmp_path, monkeypatch, capsys)
    text = task.read("val")["source"][0]
    assert "\t" in text
    (line,) = task.predict(run, [text])
    assert f'"label": "{printed.strip()}"' in line
    tokens = task.encode_parts("val", [text.split("\t")])[0]["source"][0]
    given = names["padded"]([tokens.tolist()])
    alone = names["program"]("classify")(names["params"], *given, 0 * given[0])
    assert not np.allclose(alone, names["logits"])


@pytest.mark.parametrize("tokenizer", ["sentencepiece", "affixes"])
@pytest.mark.parametrize("tests", [test_classification, test_tagging])
def test_the_card_of_classes_prints_what_predict_says(
    tests, tokenizer, tmp_path, unchecked, monkeypatch, capsys
):
    task = tests.make_task(tmp_path, **{"data.tokenizer": tokenizer})
    run = untrained_run(task, num_trials=1, scale=3.0)
    if tokenizer == "affixes":
        with pytest.raises(NotImplementedError, match="data.tokenizer=affixes"):
            card_run(run, tmp_path, monkeypatch, capsys)
        return
    _, printed = card_run(run, tmp_path, monkeypatch, capsys)
    text = " ".join(task.read("val")["source"][0].split())[:60]
    lines = list(task.predict(run, [text]))
    if tests is test_tagging:
        assert printed.split() == [line.split("\t")[1] for line in lines if line]
    else:
        assert f'"label": "{printed.strip()}"' in lines[0]


KEY = jax.random.key(1)
