"""Tagging: tags at first tokens, scores of scikit-learn and seqeval."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from seqeval.metrics import f1_score as seqeval_f1
from sklearn.metrics import accuracy_score, classification_report, f1_score

from headcount.data import encoder_tokenizers
from headcount.data.tokenizers import BOS, EOS, UNK, load_or_make
from headcount.models.maps import single_example
from headcount.tasks import class_scores, classes
from tests.tasks.untrained import (
    ENCODER_ONLY,
    evaluate,
    model_of,
    output_of,
    small_task,
    untrained_run,
)

WORDS = [
    "Ann",
    "Bo",
    "saw",
    "met",
    "the",
    "old",
    "Rhine",
    "river",
    "near",
    "Cologne",
    "today",
]
TAGS = ["B-PER", "B-PER", "O", "O", "O", "O", "B-LOC", "I-LOC", "O", "B-LOC", "O"]


def write_sentences(path, seed, count, extra=()):
    """Write sentences of random words, with their tags in the last column."""
    rng = np.random.default_rng(seed)
    sentences = []
    for _ in range(count):
        chosen = rng.integers(len(WORDS), size=rng.integers(1, 9))
        sentences.append([f"{WORDS[i]}\tx\t{TAGS[i]}" for i in chosen])
    sentences += [[line] for line in extra]
    path.write_text("\n\n".join("\n".join(lines) for lines in sentences))


def make_task(folder, tokenizer="sentencepiece", **changes):
    """Return a task on such sentences, after its vocabulary is made."""
    write_sentences(folder / "train.conll", 0, 60)
    write_sentences(folder / "val.conll", 1, 25)
    keys = {"task.name": "tagging", "task.entities": True, "data.name": "conll"}
    keys |= {"data.directory": str(folder), "data.tokenizer": tokenizer}
    keys |= {"data.vocab_size": 40} | ENCODER_ONLY
    task = small_task(folder / "tokenizer", **keys | changes)
    task.load("train")
    return task


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("tagging"))


@pytest.fixture(scope="module")
def run(task):
    return untrained_run(task, scale=3.0)


def logits_of(run, ids, trial=0):
    """Return the logits of each token of a sentence, from a batch of one row."""
    return output_of(run, "class_logits", trial, source=ids)


@pytest.mark.parametrize(
    "tokenizer", ["sentencepiece", "characters", "words", "affixes"]
)
def test_the_first_token_of_each_word_carries_its_tag(tmp_path, tokenizer):
    task = make_task(tmp_path, tokenizer)
    examples = task.load("val")
    sizes = []
    for i, (ids, tags) in enumerate(
        zip(examples.fields["source"], examples.fields["tags"], strict=True)
    ):
        words = examples.text["source"][i].split(" ")
        wanted_ids, wanted_tags = [BOS], [0]
        for word, tag in zip(words, examples.text["tags"][i].split(" "), strict=True):
            of_word = task.tokenizer.encode([word], eos=False)[0].tolist()
            wanted_ids += of_word
            number = task.classes.index(tag) + 1
            wanted_tags += [number] + [0] * (len(of_word) - 1)
            sizes.append(len(of_word))
        assert ids.tolist() == [*wanted_ids, EOS]
        assert tags.tolist() == [*wanted_tags, 0]
    assert (max(sizes) > 1) == (tokenizer in ("sentencepiece", "characters"))


def test_tags_stay_at_their_tokens_in_packed_and_unpacked_batches(task):
    examples = task.load("train")
    counts = np.bincount(examples.fields["tags"].tokens)
    packed = task.evaluation_batches(examples)
    unpacked = task.evaluation_batches(examples, packed=False)
    for batches in (packed, unpacked):
        for batch in batches:
            assert (batch["source"][batch["tags"] > 0] > EOS).all()
        found = sum(
            np.bincount(
                batch["tags"][batch["source_segments"] > 0], minlength=len(counts)
            )
            for batch in batches
        )
        np.testing.assert_array_equal(found, counts)
    training = task.batches(examples, seeds=[0, 1])
    assert training.spec.keys() == task.spec().keys()
    assert training[2]["tags"].shape == training[2]["source"].shape


def test_loss_and_tags_are_those_of_the_logits_at_first_tokens(task, run):
    """Packed or not, and of each trial."""
    examples = task.load("val")
    rows = evaluate(run, examples)
    for trial, row in enumerate(rows):
        nats, lines = [], []
        for ids, tags in zip(*examples.fields.values(), strict=True):
            logits = logits_of(run, ids, trial)[tags > 0]
            log_probs = scipy.special.log_softmax(logits, -1)
            nats += (-log_probs[np.arange(len(logits)), tags[tags > 0] - 1]).tolist()
            lines.append(" ".join(task.classes[i] for i in logits.argmax(-1)))
        assert row["loss"] == pytest.approx(np.mean(nats), rel=1e-5)
        assert row["predictions"] == lines
    assert rows[0]["predictions"] != rows[1]["predictions"]
    assert evaluate(run, examples, trials=[1]) == rows[1:]


def test_scores_of_a_run_equal_scikit_learn_and_seqeval(task, run):
    examples = task.load("val")
    true = [line.split(" ") for line in examples.text["tags"]]
    flat = [tag for line in true for tag in line]
    for row in evaluate(run, examples):
        lines = [line.split(" ") for line in row["predictions"]]
        guesses = [tag for line in lines for tag in line]
        assert row["accuracy"] == accuracy_score(flat, guesses)
        options = {"average": "macro", "labels": sorted(set(flat)), "zero_division": 0}
        assert row["macro_f1"] == pytest.approx(f1_score(flat, guesses, **options))
        assert row["entity_f1"] == seqeval_f1(true, lines, zero_division=0)
    quick = evaluate(run, examples, quick=True)
    assert quick[0].keys() == {"loss", "accuracy", "macro_f1", "entity_f1"}


@pytest.mark.slow
def test_label_smoothing_mixes_in_the_uniform_distribution(task, run):
    examples = task.load("val")
    (batch,) = task.evaluation_batches(examples)[:1]
    batch = jax.tree.map(jax.numpy.asarray, batch)
    found, weight = task.loss(model_of(run), batch, label_smoothing=0.3)
    logits = np.float64(model_of(run).class_logits(batch))
    log_probs = scipy.special.log_softmax(logits, -1)[np.array(batch["tags"]) > 0]
    labels = np.array(batch["tags"])[np.array(batch["tags"]) > 0] - 1
    target = 0.7 * np.eye(len(task.classes))[labels] + 0.3 / len(task.classes)
    assert weight == len(labels)
    assert found == pytest.approx(-(target * log_probs).sum(), rel=1e-5)


def test_predict_has_word_tag_and_probability_and_keeps_empty_lines(task, run):
    lines = ["Ann saw Bo", "", "  the  Rhine river "]
    found = list(task.predict(run, lines, trial=1))
    blocks = "\n".join(found).split("\n\n")
    words = [
        [row.split("\t")[0] for row in b.strip().splitlines()]
        for b in blocks
        if b.strip()
    ]
    assert words == [lines[0].split(), lines[2].split()]
    assert found.count("") == len(lines)
    ids = task.tokenizer.encode(["the", "Rhine", "river"], eos=False)
    starts = 1 + np.cumsum(ids.lengths) - ids.lengths
    logits = logits_of(run, [BOS, *ids.tokens, EOS], trial=1)[starts]
    probs = scipy.special.softmax(logits, -1)
    rows = [row.split("\t") for row in found[-4:-1]]
    for row, prob in zip(rows, probs, strict=True):
        assert row[1] == task.classes[prob.argmax()]
        assert float(row[2]) == pytest.approx(prob.max(), abs=1e-4)


def test_a_class_unknown_in_training_counts_as_wrong_and_is_logged(tmp_path, caplog):
    task = make_task(tmp_path)
    before = evaluate(untrained_run(task), task.load("val"))
    write_sentences(tmp_path / "val.conll", 1, 25, extra=["Ann\tx\tB-NEW"])
    with caplog.at_level(logging.WARNING):
        examples = task.load("val")
    assert "B-NEW" in caplog.text
    rows = evaluate(untrained_run(task), examples)
    count = sum(len(line.split(" ")) for line in examples.text["tags"])
    for row, old in zip(rows, before, strict=True):
        assert row["accuracy"] * count == pytest.approx(old["accuracy"] * (count - 1))
        assert row["loss"] == pytest.approx(old["loss"])


def test_classes_are_read_back_and_those_of_equal_letters_logged(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        task = make_task(tmp_path)
    assert caplog.text == ""
    assert task.classes == sorted(set(TAGS))
    saved = tmp_path / "tokenizer" / "classes.json"
    assert json.loads(saved.read_text()) == task.classes
    with caplog.at_level(logging.WARNING):
        task.make_vocabulary(["x"], ["Dog", "dog", "Dog", *TAGS])
    assert "'Dog' and 'dog'" in caplog.text
    assert "single training example: I-LOC, dog" in caplog.text
    saved.unlink()
    del task.classes
    with pytest.raises(FileNotFoundError, match="classes.json"):
        task.classes  # noqa: B018


@pytest.mark.parametrize(
    "text", ["", "[", "{}", "[]", "[1]", '["O", "O"]', '"O"', b"\xff", "[" * 10**5]
)
def test_a_damaged_list_of_classes_is_named(tmp_path, text):
    path = tmp_path / "classes.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match="classes.json"):
        classes.read_classes(path)


@pytest.mark.parametrize("kind", ["words", "affixes"])
def test_a_vocabulary_that_has_a_word_twice_is_damaged(tmp_path, kind):
    name = encoder_tokenizers.KINDS[kind][0]
    (tmp_path / name).write_text('["word a", "word a"]')
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        load_or_make(tmp_path, kind, None, 9, encoder_tokenizers.KINDS)


@pytest.mark.parametrize(
    "split, tags, culprits",
    [
        ("train", {"x": "O"}, "only one class, 'O'.*data.tag"),
        ("train", {"x": "O", "y": "PERSON"}, "task.entities.*'train' has PERSON"),
        ("val", {"x": "O", "y": "B"}, "task.entities.*'val' has B"),
        ("val", {"x": "B-NEW"}, "'val' has no class.*B-NEW.*B-LOC"),
    ],
)
def test_tags_that_cannot_be_learned_or_scored_are_named(
    tmp_path, split, tags, culprits
):
    task = make_task(tmp_path)
    lines = [f"{word}\t{tag}" for word, tag in tags.items()]
    (tmp_path / f"{split}.conll").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=culprits):
        task.load(split)


def test_a_task_that_reads_a_sentence_with_a_tag_too_few_is_named(tmp_path):
    task = make_task(tmp_path)
    task.read = lambda split: {"source": ["a b", "c d"], "tags": ["O O", "O"]}
    match = "task tagging .* sentence 2 of the split 'val' has 2 words and 1 tags"
    with pytest.raises(ValueError, match=match):
        task.load("val")


def test_a_word_without_a_token_is_one_unknown_token(tmp_path):
    """Normalisation may leave nothing of a word, as of a zero-width space."""
    task = make_task(tmp_path)
    assert task.tokenizer.encode(["\u200b"], eos=False).lengths[0] == 0
    text = {"source": ["Ann \u200b Bo"], "tags": ["B-PER O B-PER"]}
    examples = task.encode("x", text, [[1, 2, 1]])
    source, tags = (field[0] for field in examples.fields.values())
    starts = np.flatnonzero(tags)
    assert source[starts[1]] == UNK and tags[starts].tolist() == [1, 2, 1]


def test_more_tokens_than_positions_are_counted_and_scored(tmp_path, caplog):
    task = make_task(
        tmp_path, **{"model.positions": "learned", "model.max_positions": 12}
    )
    with caplog.at_level(logging.WARNING):
        examples = task.load("val")
    count = (examples.fields["source"].lengths > 12).sum()
    assert 0 < count < 25
    assert f"{count} of 25 examples of val" in caplog.text
    assert "model.max_positions=12" in caplog.text
    assert len(evaluate(untrained_run(task), examples)[0]["predictions"]) == 25


def test_classes_of_another_run_stay_if_they_include_all_tags(tmp_path):
    """Otherwise the classes, and so the classifier, are new."""
    task = make_task(tmp_path)
    saved = tmp_path / "tokenizer" / "classes.json"
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for names, same in ((["X", *sorted(set(TAGS))], True), (["X", "O"], False)):
        for path in (saved, theirs / "classes.json"):
            path.write_text(json.dumps(names))
        del task.classes
        task.load("train")
        assert (task.classes == names) == same
        assert set(TAGS) <= set(task.classes)
        new = task.new_parameters(theirs)
        assert new == (() if same else ("classifier",))
    assert task.new_parameters(tmp_path / "nowhere") == ("classifier",)
    (tmp_path / "metrics.jsonl").write_text("{}\n")  # trained: the classes are fixed
    before = saved.read_bytes()
    task.make_vocabulary(["x"], ["new", *TAGS])
    assert saved.read_bytes() == before


@pytest.mark.slow
def test_token_dropout_hides_words_in_training_alone(tmp_path):
    """The word and its lower case, not its affixes; never BOS and EOS."""
    changes = {"task.token_dropout": 0.4, "data.vocab_size": 300}
    task = make_task(tmp_path, "affixes", **changes)
    (batch, *_) = task.evaluation_batches(task.load("val"))
    batch = jax.tree.map(jax.numpy.asarray, batch)
    dropped = classes.drop_tokens(batch, 0.4, jax.random.key(0), task.special)
    assert dropped.keys() == {"source", "source_features_0"}
    text = np.array(batch["source"]) > EOS
    for name, ids in dropped.items():
        gone = np.array(ids) != np.array(batch[name])
        assert not gone[~text].any() and (np.array(ids)[gone] == UNK).all()
        assert gone[text].mean() == pytest.approx(0.4, abs=0.1)
    model = model_of(untrained_run(task, scale=3.0))
    quiet, loud = (
        task.loss(model, batch, key=key, rate=0.0)[0]
        for key in (None, jax.random.key(0))
    )
    assert quiet == task.loss(model, batch)[0] != loud
    with pytest.raises(ValueError, match="task.token_dropout .* got 1"):
        make_task(tmp_path, **{"task.token_dropout": 1.0})


@pytest.mark.parametrize(
    "changes, culprit",
    [
        ({"model.num_encoder_layers": 0}, "model.num_encoder_layers"),
        ({"model.num_decoder_layers": 1}, "model.num_decoder_layers 0"),
        ({"data.tokenizer": "letters"}, "data.tokenizer .*'letters'"),
    ],
)
@pytest.mark.parametrize("name", ["tagging", "classification"])
def test_an_encoder_task_with_another_config_raises_with_the_key(
    name, changes, culprit
):
    with pytest.raises(ValueError, match=culprit):
        small_task(None, **{"task.name": name} | ENCODER_ONLY | changes)


LABELS = np.random.default_rng(0).choice(
    list("abcd"), (2, 300), p=[0.5, 0.3, 0.15, 0.05]
)


def test_report_equals_scikit_learns():
    true, guesses = LABELS.tolist()
    wanted = classification_report(true, guesses, output_dict=True, zero_division=0)
    for row in class_scores.report(true, guesses):
        theirs = wanted[row["class"]]
        for ours, name in (("precision",) * 2, ("recall",) * 2, ("f1", "f1-score")):
            assert row[ours] == pytest.approx(theirs[name])
        assert row["support"] == theirs["support"]
    assert class_scores.score(true, guesses)["accuracy"] == wanted["accuracy"]


def test_macro_f1_is_over_the_classes_that_occur():
    """A class that is only predicted lowers the recall of others, no more."""
    true, guesses = ["a", "a", "b", "b"], ["a", "z", "b", "b"]
    found = class_scores.score(true, guesses)
    assert found["macro_f1"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["accuracy"] == 3 / 4
    assert [row["class"] for row in class_scores.report(true, guesses)] == [
        "a",
        "b",
        "z",
    ]


def test_confusions_are_the_most_frequent_wrong_pairs():
    true, guesses = ["a", "a", "a", "b", "b"], ["b", "b", "c", "a", "b"]
    found = class_scores.confusions(true, guesses)
    assert found[0] == {"true": "a", "predicted": "b", "count": 2}
    assert sum(row["count"] for row in found) == 4


def test_entity_f1_needs_the_whole_entity():
    """One of two entities is found exactly: precision and recall are 1/2."""
    true = [["B-LOC", "I-LOC", "O", "B-PER"]]
    assert class_scores.entity_f1(true, [["B-LOC", "O", "O", "B-PER"]]) == 0.5
    assert class_scores.entity_f1(true, true) == 1
    assert class_scores.entity_f1(true, [["O"] * 4]) == 0


def test_entities_are_reported_by_type():
    """One of two places is found, and one that is none; the person is missed."""
    true = [["B-LOC", "I-LOC", "O", "B-PER"], ["B-LOC", "O"]]
    guesses = [["B-LOC", "I-LOC", "O", "O"], ["O", "B-LOC"]]
    loc, per = class_scores.entity_report(true, guesses)
    shares = {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2}
    assert loc == {"class": "LOC"} | shares
    assert per == {"class": "PER"} | dict.fromkeys(shares, 0) | {"support": 1}
    assert class_scores.entity_report([["O"]], [["O"]]) == []


@pytest.mark.slow
def test_attention_maps_of_words_with_features_are_of_the_models_own_input(tmp_path):
    """Their batch has segments and positions for every feature."""
    task = make_task(tmp_path, "affixes")
    run = untrained_run(task, num_trials=1)
    fields = task.fields_to_plot(run, task.load("val"), 0, 0)
    assert "source_features_0" in fields
    model = model_of(run, 0)
    T = len(fields["source"])
    batch = {name: jnp.array([ids]) for name, ids in fields.items()}
    batch["source_segments"] = jnp.ones((1, T), int)
    batch["source_positions"] = jnp.arange(T)[None]
    found = model.hidden(single_example(fields))[:, :T]
    np.testing.assert_allclose(found, model.hidden(batch), rtol=1e-5, atol=1e-6)
