"""Masked language modelling: which tokens are hidden, the loss on them, filling in."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from headcount.data import documents
from headcount.data.tokenizers import BOS, EOS, UNK
from headcount.tasks.encoder import is_text
from tests.tasks.untrained import (
    ENCODER_ONLY,
    evaluate,
    model_of,
    small_task,
    untrained_run,
)

WORDS = ["the", "dog", "cat", "sees", "walks", "old", "a", "runs", "home", "talking"]


def make_task(folder, tokenizer="words", **changes):
    rng = np.random.default_rng(0)
    for split, count in (("train", 60), ("val", 40)):
        sizes = rng.integers(5, 60, count)
        documents = [" ".join(rng.choice(WORDS, size)) for size in sizes]
        (folder / f"{split}.txt").write_text("\n\n".join(documents))
    keys = {"task.name": "masked_language_model", "data.name": "text"}
    keys |= {"data.directory": str(folder), "data.tokenizer": tokenizer}
    keys |= ENCODER_ONLY | {"data.max_length": 24, "data.vocab_size": 80}
    task = small_task(folder / "tokenizer", **keys | changes)
    task.load("train")
    return task


@pytest.mark.parametrize(
    "tokenizer", ["words", "sentencepiece", "affixes", "characters"]
)
def test_a_document_is_cut_into_pieces_that_fit(tmp_path, tokenizer):
    task = make_task(tmp_path, tokenizer)
    examples, text = task.load("val"), (tmp_path / "val.txt").read_text()
    assert " ".join(examples.text["text"]).split() == text.split()
    source = examples.fields["source"]
    assert source.lengths.max() <= 24 < len(text.split()) / 40
    for ids in source:
        assert ids[0] == BOS and ids[-1] == EOS
        assert not {BOS, EOS} & set(ids[1:-1].tolist())


def shares(task, model, batch, key):
    """Return shares of the text's tokens: predicted; of these masked, kept, other."""
    inputs, chosen = task.masked(batch, key, model)
    source, new = np.array(batch["source"]), np.array(inputs["source"])
    text = (source > EOS) & (np.array(batch["source_segments"]) > 0)
    chosen = np.array(chosen)
    assert not chosen[~text].any() and (new == source)[~chosen].all()
    masked = (new == UNK)[chosen].mean()
    return chosen[text].mean(), masked, (new == source)[chosen].mean()


def test_15_percent_are_predicted_and_80_percent_of_these_masked(tmp_path):
    """10% of the rest are random tokens, 10% stay (Devlin et al. 2019)."""
    task = make_task(tmp_path)
    model = model_of(untrained_run(task, num_trials=1))
    batch = task.batches(task.load("train"), seeds=[0])[0]
    batch = jax.tree.map(lambda x: jnp.asarray(np.repeat(x[0], 40, axis=0)), batch)
    found = shares(task, model, batch, jax.random.key(3))
    vocabulary = model.embedding.shape[0]
    # a random token may be the same or UNK
    np.testing.assert_allclose(
        found, [0.15, 0.8 + 0.1 / vocabulary, 0.1 + 0.1 / vocabulary], atol=0.02
    )
    one, other = (task.masked(batch, jax.random.key(i), model)[1] for i in (1, 2))
    assert 0.2 < (one != other).mean() < 0.3  # 2 · 0.15 · 0.85
    same = [np.array(task.masked(batch, None, model)[1]) for _ in "ab"]
    np.testing.assert_array_equal(*same)


def test_features_do_not_tell_what_is_hidden(tmp_path):
    task = make_task(tmp_path, "affixes")
    model = model_of(untrained_run(task, num_trials=1))
    (batch, *_) = task.evaluation_batches(task.load("val"))
    inputs, chosen = task.masked(batch, None, model)
    changed = np.array(inputs["source"]) != batch["source"]
    assert changed.any() and np.array(chosen)[changed].all()
    for name in batch:
        if name.startswith("source_features_"):
            assert (np.array(inputs[name])[changed] == UNK).all()
            np.testing.assert_array_equal(
                np.array(inputs[name])[~np.array(chosen)],
                batch[name][~np.array(chosen)],
            )


def test_of_so_few_tokens_that_none_is_drawn_all_are_predicted(tmp_path):
    """Else the loss would be 0 / 0."""
    task = make_task(tmp_path)
    (batch, *_) = task.evaluation_batches(task.load("val"))
    model = model_of(untrained_run(task), 0)
    _, drawn = task.masked(batch, None, model)
    few = dict(batch)
    few["source_segments"] = np.where(np.array(drawn), 0, batch["source_segments"])
    few["source_segments"][1:] = 0
    _, chosen = task.masked(few, None, model)
    np.testing.assert_array_equal(chosen, is_text(few, task.special))
    assert chosen.any()


@pytest.mark.slow
def test_loss_and_accuracy_are_those_of_the_logits_at_predicted_tokens(tmp_path):
    task = make_task(tmp_path)
    run, examples = untrained_run(task, scale=3.0), task.load("val")
    rows = evaluate(run, examples)
    assert rows[0] != rows[1]
    for trial, row in enumerate(rows):
        model, nats, right = model_of(run, trial), [], []
        for batch in task.evaluation_batches(examples):
            batch = jax.tree.map(jnp.asarray, batch)
            inputs, chosen = task.masked(batch, None, model)
            logits = np.float64(model(inputs))[np.array(chosen)]
            labels = np.array(batch["source"])[np.array(chosen)]
            log_probs = scipy.special.log_softmax(logits, -1)
            nats += (-log_probs[np.arange(len(labels)), labels]).tolist()
            right += (logits.argmax(-1) == labels).tolist()
        assert row["loss"] == pytest.approx(np.mean(nats), rel=1e-5)
        assert row["masked_accuracy"] == pytest.approx(np.mean(right))


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["words", "affixes"])
def test_predict_fills_in_each_mask(tmp_path, tokenizer):
    task = make_task(tmp_path, tokenizer)
    run = untrained_run(task, scale=2.0)
    lines = ["the [MASK] sees a [MASK]", "nothing hidden", "[MASK]"]
    found = [json.loads(line) for line in task.predict(run, lines, trial=1)]
    assert [len(answers) for answers in found] == [2, 0, 1]
    for answers in found:
        for answer in answers:
            probs = list(answer.values())
            assert probs == sorted(probs, reverse=True) and 0 < sum(probs) < 1.001
    the, sees_a = task.tokenizer.encode(["the", "sees a"], eos=False)
    ids = [BOS, *the, UNK, *sees_a, UNK, EOS]
    examples, _ = task.encode_parts("x", [["the q sees a q"]])
    batch = {k: np.array([v[0]]) for k, v in examples.items()}
    assert batch["source"][0].tolist() == ids  # q is unknown: UNK, as a mask
    if tokenizer == "affixes":  # which has affixes, unlike a mask
        for name in batch:
            if name != "source":
                batch[name] = np.where(batch["source"] == UNK, UNK, batch[name])
    batch["source_segments"] = np.ones_like(batch["source"])
    batch["source_positions"] = np.arange(len(ids))[None]
    batch = {name: jnp.asarray(array, jnp.int32) for name, array in batch.items()}
    probs = scipy.special.softmax(np.float64(model_of(run, 1)(batch))[0, 2])
    best = task.tokenizer.pieces([probs.argmax()])[0]
    assert found[0][0][best] == pytest.approx(probs.max(), abs=1e-4)


def test_a_model_with_a_decoder_raises_with_the_key():
    with pytest.raises(ValueError, match="model.num_decoder_layers 0"):
        small_task(None, **{"task.name": "masked_language_model"})


def test_a_share_of_shakespeare_is_the_test_split(tmp_path, monkeypatch):
    """As in language models. Without it, final scores are of val."""
    keys = {"task.name": "masked_language_model", "data.name": "shakespeare"}
    keys |= ENCODER_ONLY | {"data.tokenizer": "characters"}
    shared = small_task(tmp_path, **keys | {"data.test_share": 0.5})
    assert shared.test_split == "test" and "test_share" in shared.corpus_keys
    assert small_task(tmp_path, **keys).test_split == "val"
    monkeypatch.setattr(documents, "load", lambda data, split: data.test_share)
    assert shared.read("val")["text"] == 0.5
    with pytest.raises(ValueError, match="data.test_share must be .*got 1"):
        small_task(tmp_path, **keys | {"data.test_share": 1.0})
