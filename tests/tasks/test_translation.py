"""Translation: examples, scores of each trial, and answers line by line."""

from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.special

from headcount.data import multi30k, numbers, tokenizers
from headcount.data.examples import Ragged
from headcount.tasks import heldout_loss, text_scores, translation
from tests.runs import write_corpus
from tests.tasks.untrained import evaluate, output_of, small_task, untrained_run

EOS = tokenizers.EOS
MULTI30K = Path(__file__).resolve().parents[3] / "shared/data/multi30k"
ENGLISH, GERMAN = (numbers.phrases(range(100, 400, 3), name) for name in ("en", "de"))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A task whose sides have vocabularies of their own."""
    folder = tmp_path_factory.mktemp("translation")
    keys = write_corpus(folder / "corpus", ENGLISH, GERMAN, held_out=7)
    keys |= {"data.directory": str(keys["data.directory"]), "model.output_bias": True}
    task = small_task(folder / "tokenizer", **keys, **{"data.joint_vocabulary": False})
    task.load("train")
    return task


@pytest.fixture(scope="module")
def run(task):
    """Models that end their output after a few tokens."""
    run = untrained_run(task, scale=1.5)
    params = run.params
    bias = params["output_bias"][...].at[:, EOS].set(1.0)
    params["output_bias"] = params["output_bias"].replace(bias)
    return run


def by_hand(run, trial, source, target) -> float:
    """Return the log-probability of a target, from the logits of a batch of one row."""
    logits = output_of(run, "__call__", trial, source=source, target=target)
    log_probs = scipy.special.log_softmax(logits, -1)
    return log_probs[np.arange(len(target)), target].sum()


def test_examples_are_encoded_by_the_vocabulary_of_their_side(task):
    examples = task.load("val")
    assert examples.text == {"source": ENGLISH[:7], "target": GERMAN[:7]}
    for tokenizer, (side, field) in zip(
        task.tokenizers, examples.fields.items(), strict=True
    ):
        assert [tokenizer.decode(ids) for ids in field] == examples.text[side]
        assert all(ids[-1] == EOS for ids in field)
    german, english = examples.text["target"], examples.fields["source"]
    assert [task.tokenizers[0].decode(ids) for ids in english] != german


def test_score_equals_the_log_probability_of_the_logits(run, task, monkeypatch):
    """In several batches, of both trials, with the number of tokens."""
    monkeypatch.setattr(heldout_loss, "SCORING_TOKENS", 128)
    source, target = (
        of.encode(text)
        for of, text in zip(task.tokenizers, (ENGLISH, GERMAN), strict=True)
    )
    for trial in (0, 1):
        found = task.score(run, ENGLISH, GERMAN, trial)
        assert [tokens for _, tokens in found] == target.lengths.tolist()
        for i in (0, 50, len(ENGLISH) - 1):
            wanted = by_hand(run, trial, source[i], target[i])
            assert found[i][0] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.slow
def test_a_translation_scores_what_the_search_gives_it(task):
    """With a head gate, in the n-best lists of a search of several batches."""
    gates = {"decoder": np.array([[[1, 0]]], np.float32)}
    run = untrained_run(task, num_trials=1, head_gates=gates, scale=1.0)
    bias = run.params["output_bias"][...].at[:, EOS].set(1.0)
    run.params["output_bias"] = run.params["output_bias"].replace(bias)
    lines, options = ENGLISH[:6], {"beam_size": 4, "length_penalty": 0.0}
    source = [ids.tolist() for ids in task.tokenizers[0].encode(lines)]
    params, gate = run.of(0)
    lists = translation.generate(
        run.graph, params, source, head_gates=gate, n_best=3, **options
    )
    limits = [2 * len(ids) + 16 for ids in source]
    hypotheses = [
        (i, [*ids, EOS], score)
        for i, each in enumerate(lists)
        for ids, score in each
        if len(ids) + 1 < limits[i]  # it has ended by itself
    ]
    assert len(hypotheses) > 8
    fields = {
        "source": Ragged.of([source[i] for i, *_ in hypotheses]),
        "target": Ragged.of([ids for _, ids, _ in hypotheses]),
    }
    found = heldout_loss.token_log_probabilities(run, fields, 0)
    for (_, ids, score), of_tokens in zip(hypotheses, found, strict=True):
        assert of_tokens.sum() == pytest.approx(score, rel=1e-4)
        assert len(of_tokens) == len(ids)


@pytest.mark.slow
def test_every_trial_is_scored_by_its_own_translations_and_loss(run, task):
    examples = task.load("val")
    rows = evaluate(run, examples)
    assert rows[0]["predictions"] != rows[1]["predictions"]
    for trial, row in enumerate(rows):
        with_search = translation.search_defaults({})
        assert row["predictions"] == task.translate(
            run, ENGLISH[:7], trial, **with_search
        )
        names = ("bleu", "chrf", "exact_match")
        scores, signatures = text_scores.score(row["predictions"], GERMAN[:7], names)
        assert {name: row[name] for name in names} == scores
        assert row["signatures"] == signatures
        assert row["options"] == {"beam_size": 5, "length_penalty": 0.6}
        found = task.score(run, ENGLISH[:7], GERMAN[:7], trial)
        log_prob, tokens = np.sum(found, axis=0)
        assert row["loss"] == pytest.approx(-log_prob / tokens, rel=1e-5)
    (alone,) = evaluate(run, examples, trials=[1])
    assert alone == rows[1]


@pytest.mark.slow
def test_long_sentences_are_cut_at_the_longest_decoding_and_it_says_so(
    run, task, capsys
):
    fields = task.load("val").fields["source"]

    def translated():
        with jax.set_mesh(run.mesh):
            return translation.translations(run, fields, [0], beam_size=1)[0]

    whole = translated()
    assert max(map(len, whole)) > 3
    assert "max_decode_length" not in capsys.readouterr().err
    most = task.config.data.max_decode_length
    with task.config.unlocked():
        task.config.data.max_decode_length = 3
    cut = translated()
    with task.config.unlocked():
        task.config.data.max_decode_length = most
    assert cut == [ids[:2] for ids in whole]  # EOS is the third
    assert "7 of 7 sentences" in (told := capsys.readouterr().err)
    assert "data.max_decode_length=3 tokens" in told


@pytest.mark.slow
def test_quick_evaluation_is_greedy_and_has_chrf_only_to_select_by_it(run, task):
    examples = task.load("val")
    (row,) = evaluate(run, examples, trials=[0], quick=True)
    assert row["options"] == {"beam_size": 1}
    assert row["predictions"] == task.translate(run, ENGLISH[:7], beam_size=1)
    assert "chrf" not in row and "bleu" in row
    with task.config.unlocked():
        task.config.train.best_metric = "chrf"
    (row,) = evaluate(run, examples, trials=[0], quick=True)
    with task.config.unlocked():
        task.config.train.best_metric = None
    assert "chrf" in row


@pytest.mark.slow
def test_quick_evaluation_translates_nothing_if_the_loss_selects(
    run, task, monkeypatch
):
    examples = task.load("val")
    (whole,) = evaluate(run, examples, trials=[0], quick=True)
    monkeypatch.delattr(translation, "translations")
    with task.config.unlocked():
        task.config.train.best_metric = "loss"
    (row,) = evaluate(run, examples, trials=[0], quick=True)
    with task.config.unlocked():
        task.config.train.best_metric = None
    assert row == {"loss": whole["loss"]}


@pytest.mark.slow
def test_lines_without_a_token_have_empty_translations(run, task):
    lines = [ENGLISH[0], "", ENGLISH[1], "  "]
    found = list(task.predict(run, lines))
    assert [found[0], found[2]] == list(task.predict(run, lines[::2]))
    assert found[1] == found[3] == ""


@pytest.mark.slow
def test_samples_of_equal_lines_differ_by_their_number(run, task):
    options = {"temperature": 1.0, "seed": 3}
    four = list(task.predict(run, [ENGLISH[0]] * 4, **options))
    assert len(set(four)) > 1
    assert list(task.predict(run, [ENGLISH[0]] * 2, first=2, **options)) == four[2:]


@pytest.mark.slow
def test_n_best_lines_are_numbered_and_sorted(run, task):
    found = list(task.predict(run, ENGLISH[:2], first=5, n_best=3))
    columns = [line.split(" ||| ") for line in found]
    assert [int(number) for number, *_ in columns] == [5] * 3 + [6] * 3
    for start in (0, 3):
        scores = [float(score) for *_, score in columns[start : start + 3]]
        assert scores == sorted(scores, reverse=True)
    assert [columns[i][1] for i in (0, 3)] == list(task.predict(run, ENGLISH[:2]))


def test_score_lines_have_log_probability_and_tokens(run, task):
    lines = [f"{a}\t{b}" for a, b in zip(ENGLISH[:3], GERMAN[:3], strict=True)]
    found = list(task.score_lines(run, lines, trial=1))
    wanted = task.score(run, ENGLISH[:3], GERMAN[:3], 1)
    assert found == [f"{log_prob:.4f}\t{tokens}" for log_prob, tokens in wanted]


@pytest.mark.parametrize("line, count", [("", 1), ("a", 1), ("a\tb\tc", 3)])
def test_a_line_that_is_not_a_pair_raises_with_its_number(run, task, line, count):
    with pytest.raises(ValueError, match=f"Line 8 .* {count} tab-separated"):
        list(task.score_lines(run, ["a\tb", line], first=6))


@pytest.mark.slow
def test_lines_longer_than_any_in_training_are_logged(run, task, capsys):
    source, target = task.tokenizers
    longest = task.config.data.max_length
    en, de = ENGLISH[0], GERMAN[0]
    long_en, long_de = " ".join(ENGLISH[:16]), " ".join(GERMAN[:16])
    sizes = [
        int(of.encode([text]).lengths[0])
        for of, text in ((source, long_en), (target, long_de))
    ]
    assert min(sizes) > longest
    lines = [f"{en}\t{de}", f"{long_en}\t{de}", f"{en}\t{long_de}"]
    list(task.score_lines(run, lines, first=6))
    logged = capsys.readouterr().err.splitlines()
    named = (("Line 8 ", sizes[0]), ("Line 9's target ", sizes[1]))
    for text, (place, size) in zip(logged, named, strict=True):
        assert place in text and f"{size} tokens" in text and f"{longest} " in text


def test_another_directory_is_read_after_set_directory(task, tmp_path):
    write_corpus(tmp_path, ["c"], ["d"])
    before = task.config.data.directory
    task.set_directory(str(tmp_path))
    try:
        assert task.read("val") == {"source": ["c"], "target": ["d"]}
    finally:
        task.set_directory(before)


def test_arguments_that_a_run_cannot_take_raise(run, task):
    for trial in (2, -1):  # an array would take the latter
        with pytest.raises(ValueError, match=f"trial must be from 0 to 1, got {trial}"):
            run.of(trial)
    for call, name in (
        (lambda: task.translate(run, "a"), "lines"),
        (lambda: task.score(run, "a", ["b"]), "sources"),
        (lambda: task.score(run, ["a"], "b"), "targets"),
    ):
        with pytest.raises(TypeError, match=f"{name} must be a list"):
            call()
    with pytest.raises(ValueError, match="got 2 and 1"):
        task.score(run, ["a", "b"], ["c"])
    with pytest.raises(ValueError, match="--samples"):
        task.check_options({"beam_size": 4, "samples": 2})


@pytest.mark.parametrize("key", ["num_encoder_layers", "num_decoder_layers"])
def test_translation_without_one_of_its_stacks_raises(key):
    with pytest.raises(ValueError, match=f"model.{key}"):
        small_task(None, **{f"model.{key}": 0})


def test_spec_equals_the_arrays_of_the_batches_of_its_size(task):
    batches = task.batches(task.load("train"), seeds=[0, 1])
    for name, array in batches[3].items():
        spec = batches.spec[name]
        assert (array.shape, array.dtype) == ((2, *spec.shape), spec.dtype)
    assert task.spec(*batches.spec["target"].shape).keys() == batches.spec.keys()
    assert task.spec(4, 8)["source_segments"].shape == (4, 8)


@pytest.mark.slow
def test_fields_to_plot_are_a_source_and_its_translation(run, task):
    examples = task.load("val")
    found = task.fields_to_plot(run, examples, 3, 1, beam_size=2)
    assert found["source"] == examples.fields["source"][3].tolist()
    target = task.tokenizers[1].decode(found["target"])
    assert [target] == task.translate(
        run, ENGLISH[3:4], 1, beam_size=2, length_penalty=0.6
    )
    assert found["target"][-1] == EOS
    labels = task.token_strings("target", found["target"])
    assert labels == task.tokenizers[1].pieces(found["target"])


@pytest.mark.slow
@pytest.mark.skipif(not MULTI30K.exists(), reason="Multi30k is not beside the project")
def test_multi30k_is_also_scored_in_its_published_protocol(tmp_path, monkeypatch):
    """Against the tokenised references of the split that is scored."""
    keys = {"data.name": "multi30k", "data.directory": str(MULTI30K)}
    task = small_task(tmp_path, **keys)
    assert task.test_split == "test_2016_flickr"
    text = task.read("val")
    tokenizers.load_or_train_pair(tmp_path, *text.values(), 300, joint=True)
    examples = task.load("val")
    hypotheses = [line.replace("Hund", "Kater") for line in text["target"]]
    ids = [each.tolist() for each in task.tokenizers[1].encode(hypotheses)]
    monkeypatch.setattr(translation, "translations", lambda *_, **__: {0: ids})
    (row,) = evaluate(untrained_run(task, num_trials=1), examples)
    references = multi30k.tokenized("de", "val", MULTI30K)
    decoded = [task.tokenizers[1].decode(ids) for ids in ids]
    scores, signatures = text_scores.published(decoded, references, "de")
    assert row | scores == row and row["signatures"] | signatures == row["signatures"]
    assert row["bleu"] < 100 > row["published_bleu"]


@pytest.mark.slow
def test_a_prefix_precedes_every_source_but_empty_ones(tmp_path):
    """In training, in evaluation, and in lines of predict and score."""
    keys = write_corpus(tmp_path / "corpus", ENGLISH, GERMAN, held_out=7)
    keys |= {"data.directory": str(keys["data.directory"]), "data.vocab_size": 90}
    plain, task = (
        small_task(tmp_path / "tokenizer", **keys, **{"data.prefix": prefix})
        for prefix in ("", "into German: ")
    )
    task.load("train")
    source = task.tokenizers[0]
    examples = task.load("val")
    assert examples.text == plain.load("val").text
    for ids, line in zip(examples.fields["source"], ENGLISH, strict=False):
        assert source.decode(ids) == f"into German: {line}"
    run = untrained_run(task, num_trials=1)
    by_hand = [f"into German: {line}" for line in ENGLISH[:3]]
    assert list(task.predict(run, ["", *ENGLISH[:3]])) == [
        "",
        *plain.predict(run, by_hand),
    ]
    assert task.score(run, ENGLISH[:3], GERMAN[:3]) == plain.score(
        run, by_hand, GERMAN[:3]
    )


def test_metrics_are_those_of_the_config():
    names = {"task.metrics": "rougeL, squad_f1"}
    found = [metric.name for metric in small_task(None, **names).metrics]
    assert found == ["rougeL", "squad_f1", "loss"]
    with pytest.raises(ValueError, match="task.metrics must be one of .*'blue'"):
        small_task(None, **{"task.metrics": "blue"})


def test_only_the_metrics_that_are_resampled_have_a_bootstrap(task):
    """Otherwise numbers of BLEU would be shown as those of another metric."""
    examples = task.load("val").text
    systems = {"base": ENGLISH[:7], "other": examples["target"]}
    for metric in task.metrics:
        found = task.bootstrap(metric, systems, examples)
        assert (found is not None) == (metric.name in ("bleu", "chrf")), metric.name
        if metric.name == "chrf":
            assert found["base"][0] < found["other"][0] == pytest.approx(100)
