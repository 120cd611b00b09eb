"""Classification: texts and pairs as tokens, pooling, scores, answers."""

import json
import logging

import jax
import numpy as np
import pytest
import scipy.special
from sklearn.metrics import accuracy_score, f1_score

from headcount.data.tokenizers import BOS, EOS
from tests.marks import slow_but
from tests.tasks.untrained import (
    ENCODER_ONLY,
    evaluate,
    model_of,
    output_of,
    small_task,
    untrained_run,
)

POOLING = ("first", "mean", "attention")
WORDS = ["good", "bad", "fine", "dull", "a", "the", "film", "plot"]


def write_texts(path, seed, count, pairs=False):
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        texts = [" ".join(rng.choice(WORDS, rng.integers(1, 12))) for _ in "ab"]
        label = rng.choice(["neg", "pos", "so-so"])
        lines.append("\t".join([label, *texts[: 1 + pairs]]))
    path.write_text("\n".join(lines) + "\n")


def make_task(folder, pooling="mean", pairs=False, **changes):
    """Return a task on random texts, after its vocabulary is made."""
    write_texts(folder / "train.tsv", 0, 60, pairs)
    write_texts(folder / "dev.tsv", 1, 25, pairs)
    keys = {"task.name": "classification", "task.pooling": pooling}
    keys |= {"data.name": "labelled", "data.directory": str(folder)}
    task = small_task(folder / "tokenizer", **ENCODER_ONLY | keys | changes)
    task.load("train")
    return task


def with_scores(run):
    """Replace the weights of attention pooling, which are 0 at first."""

    def random(path, leaf):
        name = jax.tree_util.keystr(path)
        if "classifier" not in name or "scores" not in name:
            return leaf
        return jax.random.normal(jax.random.key(1), leaf.shape)

    return run._replace(params=jax.tree_util.tree_map_with_path(random, run.params))


def logits_of(run, ids, trial=0):
    """Return the logits of a text by itself: pool its hidden vectors, then map them."""
    hidden = output_of(run, "hidden", trial, source=ids)
    classifier, pooling = model_of(run, trial).classifier, run.task.pooling
    weights = {"first": np.eye(len(ids))[0], "mean": np.full(len(ids), 1 / len(ids))}
    if pooling == "attention":
        scores = hidden @ np.float64(classifier.scores.kernel[...])[:, 0]
        weights["attention"] = scipy.special.softmax(scores)
    pooled = weights[pooling] @ hidden
    linear = classifier.linear
    return pooled @ np.float64(linear.kernel[...]) + np.float64(linear.bias[...])


@pytest.mark.parametrize("pooling", slow_but(["attention"], POOLING))
def test_loss_and_labels_are_those_of_each_text_alone(tmp_path, pooling):
    """Although several texts share a row, of whose tokens only their own are pooled."""
    task = make_task(tmp_path, pooling)
    run, examples = with_scores(untrained_run(task, scale=2.0)), task.load("val")
    batches = task.evaluation_batches(examples)
    assert max(batch["source_segments"].max() for batch in batches) > 1
    rows = evaluate(run, examples)
    for trial, row in enumerate(rows):
        logits = [logits_of(run, ids, trial) for ids in examples.fields["source"]]
        labels = [task.classes.index(label) for label in examples.text["label"]]
        log_probs = scipy.special.log_softmax(logits, -1)
        nats = -log_probs[np.arange(len(labels)), labels].mean()
        assert row["loss"] == pytest.approx(nats, rel=1e-5)
        guesses = [task.classes[i] for i in np.argmax(logits, -1)]
        assert row["predictions"] == guesses
        true = examples.text["label"]
        assert row["accuracy"] == accuracy_score(true, guesses)
        wanted = f1_score(true, guesses, average="macro", zero_division=0)
        assert row["macro_f1"] == pytest.approx(wanted)
    assert rows[0]["loss"] != rows[1]["loss"]
    assert evaluate(run, examples, trials=[1]) == rows[1:]
    quick = evaluate(run, examples, quick=True)
    assert [row.keys() for row in quick] == [{"loss", "accuracy", "macro_f1"}] * 2


@pytest.mark.slow
def test_the_loss_is_shown_per_text_and_comparable_between_vocabularies(tmp_path):
    (loss,) = [m for m in make_task(tmp_path).metrics if m.name == "loss"]
    assert (loss.unit, loss.per_token) == ("nats per text", False)


def test_kinds_of_pooling_differ(tmp_path):
    """So that the test above would notice one in place of another."""
    tasks = {}
    for pooling in POOLING:
        (tmp_path / pooling).mkdir()
        tasks[pooling] = make_task(tmp_path / pooling, pooling)
    ids = tasks["mean"].load("val").fields["source"][0]
    runs = {
        pooling: with_scores(untrained_run(task, scale=2.0))
        for pooling, task in tasks.items()
    }
    logits = [logits_of(run, ids) for run in runs.values()]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs(logits[one] - logits[other]).max() > 1e-3


def test_a_text_is_bos_its_tokens_and_eos_with_the_label_first(tmp_path):
    task = make_task(tmp_path)
    examples = task.load("val")
    encoded = task.tokenizer.encode(examples.text["source"])
    labels = examples.text["label"]
    for i, (ids, tags) in enumerate(zip(*examples.fields.values(), strict=True)):
        assert ids.tolist() == [BOS, *encoded[i].tolist()]
        number = task.classes.index(labels[i]) + 1
        assert tags.tolist() == [number] + [0] * (len(ids) - 1)


def test_a_pair_has_an_eos_after_each_text(tmp_path):
    task = make_task(tmp_path, pairs=True)
    examples = task.load("val")
    assert examples.fields["source"].tokens.tolist().count(EOS) == 2 * len(examples)
    for i in (0, 24):
        parts = task.tokenizer.encode(examples.text["source"][i].split("\t"))
        wanted = [BOS, *parts[0].tolist(), *parts[1].tolist()]
        assert examples.fields["source"][i].tolist() == wanted


def test_a_pair_needs_two_token_types(tmp_path):
    with pytest.raises(ValueError, match="token_types=1 .* set it to 0 or 2"):
        make_task(tmp_path, pairs=True, **{"model.token_types": 1})


def test_predict_has_the_label_and_every_probability(tmp_path):
    task = make_task(tmp_path)
    run = untrained_run(task, scale=2.0)
    lines = ["good film", "", "a dull plot the film bad bad bad bad bad"]
    assert list(task.predict(run, [])) == []
    for trial in (0, 1):
        found = [json.loads(line) for line in task.predict(run, lines, trial)]
        for line, answer in zip(lines, found, strict=True):
            ids = [BOS, *task.tokenizer.encode([line])[0].tolist()]
            probs = scipy.special.softmax(logits_of(run, ids, trial))
            wanted = dict(zip(task.classes, probs, strict=True))
            assert answer["probabilities"] == pytest.approx(wanted, abs=1e-4)
            assert answer["label"] == task.classes[probs.argmax()]


def test_words_that_training_never_saw_are_logged_with_their_line(tmp_path, capsys):
    run = untrained_run(make_task(tmp_path, **{"data.tokenizer": "words"}))
    list(run.task.predict(run, ["good film", "good kazoo zebra"], first=6))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Line 8 ") and "never saw: 2" in line


def test_batches_have_the_arrays_of_the_spec_and_one_label_per_text(tmp_path):
    task = make_task(tmp_path)
    examples = task.load("train")
    batches = task.batches(examples, seeds=[0, 1])
    batch = batches[4]
    assert batch.keys() == batches.spec.keys() == task.spec().keys()
    first = (batch["source_positions"] == 0) & (batch["source_segments"] > 0)
    np.testing.assert_array_equal(batch["tags"] > 0, first)
    assert (batch["source"][first] == BOS).all()


@pytest.mark.parametrize(
    "text, found",
    [
        ({"source": ["a", "b"], "labels": ["x", "y"]}, r"source \(2\), labels \(2\)"),
        ({"source": ["a", "b"], "label": ["x"]}, r"source \(2\), label \(1\)"),
        ({"source": [], "label": []}, r"source \(0\), label \(0\)"),
    ],
)
def test_a_task_that_reads_other_fields_or_lengths_is_named(tmp_path, text, found):
    task = make_task(tmp_path)
    task.read = lambda split: text
    match = f"task classification .* source and label, .* 'val' it returns {found}"
    with pytest.raises(ValueError, match=match):
        task.load("val")


def test_one_class_only_names_the_keys_of_the_corpus(tmp_path):
    (tmp_path / "train.tsv").write_text("pos\tgood\npos\tfine\n")
    keys = {"task.name": "classification", "data.name": "labelled"}
    keys |= {"data.directory": str(tmp_path)}
    task = small_task(tmp_path / "tokenizer", **ENCODER_ONLY | keys)
    with pytest.raises(
        ValueError, match=r"one class, 'pos'.*data.directory, data.fold"
    ):
        task.load("train")


def test_evaluate_names_an_option_that_does_not_exist(tmp_path):
    run = untrained_run(make_task(tmp_path))
    with pytest.raises(TypeError, match="no option beam; there are trials, quick"):
        run.evaluate("val", beam=3)


def test_an_unknown_pooling_raises_with_the_key(tmp_path):
    task = make_task(tmp_path, "max")
    with pytest.raises(ValueError, match="task.pooling .* attention, got 'max'"):
        untrained_run(task)


def test_an_empty_text_is_left_out_of_training_with_a_count(tmp_path, caplog):
    """And is scored like any other."""
    task = make_task(tmp_path)
    for split in ("train", "dev"):
        with (tmp_path / f"{split}.tsv").open("a") as file:
            file.write("pos\t\npos\t \n")
    with caplog.at_level(logging.INFO):
        batches = task.batches(task.load("train"), seeds=[0])
    assert "Skipped 2 examples" in caplog.text
    source = batches[0]["source"]
    assert not ((source[..., :-1] == BOS) & (source[..., 1:] == EOS)).any()
    examples = task.load("val")
    assert examples.fields["source"][-1].tolist() == [BOS, EOS]
    (row, _) = evaluate(untrained_run(task), examples)
    assert len(row["predictions"]) == 27
