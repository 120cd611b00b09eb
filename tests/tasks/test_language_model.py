"""Language models: what is scored, bits per byte, documents apart, continuations."""

import json
import shutil
from functools import partial

import jax
import numpy as np
import pytest
import scipy.special
from flax import nnx

from headcount.data import recall
from headcount.data.windows import evaluation_windows, window_spec
from headcount.tasks.heldout_loss import batch_log_probabilities
from headcount.tasks.language_model import context_gain
from tests.data.test_tokenizers import write_byte_level_bpe
from tests.marks import slow_but
from tests.tasks.untrained import (
    DECODER_ONLY,
    evaluate,
    model_of,
    output_of,
    small_task,
    untrained_run,
)

TRAIN = [f"{'to be or not – '[: 3 + i % 12]}{i * 7919} ß" for i in range(60)]
VAL = ["not to be", "ß 42", "or 7 – 19 be", "b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language_model")
    (folder / "train.txt").write_text("\n\n".join(TRAIN))
    for split in ("val", "test"):
        (folder / f"{split}.txt").write_text("\n\n".join(VAL))
    return folder


def make_task(folder, tokenizer="characters", **changes):
    """Return a task on the documents above, after its vocabulary is made."""
    keys = {"data.name": "text", "data.directory": str(folder), "model.width": 12}
    keys |= DECODER_ONLY | {"data.tokenizer": tokenizer, "data.max_length": 16}
    task = small_task(folder / tokenizer, **keys | changes)
    task.load("train")
    return task


@pytest.mark.slow
def test_a_model_trains_from_scratch_with_gpt2s_tokenizer(folder, tmp_path):
    """The folder of the texts has the file; model.bos separates documents."""
    shutil.copytree(folder, tmp_path / "texts")
    theirs = write_byte_level_bpe(tmp_path / "texts")
    end = theirs.token_to_id("<|endoftext|>")
    task = make_task(tmp_path / "texts", "gpt2", **{"model.bos": end})
    wanted = [x.ids for x in theirs.encode_batch(TRAIN)]
    examples = task.load("train")
    assert [ids.tolist() for ids in examples.fields["target"]] == wanted
    assert task.token_stream(examples)[0] == end
    assert np.isfinite(evaluate(untrained_run(task), task.load("val"))[0]["loss"])


def log_probs_of(run, ids, trial=0):
    """Return the log-probability of each token of a document, from the logits."""
    logits = output_of(run, "__call__", trial, target=ids)
    log_probs = scipy.special.log_softmax(logits, -1)
    return log_probs[np.arange(len(ids)), ids]


@pytest.mark.parametrize(
    "tokenizer",
    slow_but(["sentencepiece"], ["sentencepiece", "characters", "bytes", "words"]),
)
def test_bits_per_byte_are_nats_over_bytes_for_any_tokenizer(folder, tokenizer):
    """All but the first token of the stream are predicted: separators, too."""
    task = make_task(folder, tokenizer)
    run, examples = untrained_run(task), task.load("test")
    tokens = examples.fields["target"].lengths.sum() + len(VAL) - 1
    num_bytes = sum(len(text.encode()) for text in VAL)
    assert num_bytes > sum(map(len, VAL))  # as VAL is not ASCII
    rows = evaluate(run, examples)
    assert rows[0]["loss"] != rows[1]["loss"]
    for row in rows:
        bits = row["loss"] * tokens / (np.log(2) * num_bytes)
        assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
        assert row["perplexity"] == pytest.approx(np.exp(row["loss"]))
    assert evaluate(run, examples, trials=[1]) == rows[1:]


def test_the_context_gain_compares_tokens_with_little_and_much_context(folder):
    task = make_task(folder)
    run, examples = untrained_run(task, num_trials=1), task.load("val")
    nats = {"near": [], "far": []}
    for batch in task.evaluation_batches(examples):
        params, gates = run.of(0)
        rows = batch_log_probabilities(run.graph, params, gates, batch)
        rows = np.where(batch["target_weights"] > 0, rows, np.nan)
        nats["near"] += [-rows[:, :2].reshape(-1)]  # of windows of 16 tokens
        nats["far"] += [-rows[:, 8:].reshape(-1)]
    near, far = (np.nanmean(np.concatenate(each)) for each in nats.values())
    (row,) = evaluate(run, examples)
    assert row["context_gain"] == pytest.approx(near - far, rel=1e-4)
    assert "context_gain" not in evaluate(run, examples, quick=True)[0]
    assert evaluate(run, examples, stride=5)[0]["context_gain"] is None
    assert context_gain(0.0, 0.0, 3.0, 2.0) is None
    with pytest.raises(ValueError, match="train.best_metric can't be context_gain"):
        make_task(folder, **{"train.best_metric": "context_gain"})


@pytest.mark.slow
def test_a_model_without_context_has_the_same_loss_for_any_stride(folder):
    """Without heads and positions a token depends on the one before it alone."""
    gates = {"decoder": np.zeros((1, 1, 2), np.float32)}
    found = []
    for stride in (None, 16, 11, 5, 1):
        changes = {"data.stride": stride, "model.positions": "none"}
        task = make_task(folder, **changes)
        run = untrained_run(task, num_trials=1, head_gates=gates)
        (row,) = evaluate(run, task.load("val"))
        found.append(row["loss"])
    np.testing.assert_allclose(found, found[0], rtol=1e-5)


def test_evaluation_computes_no_more_rows_at_once_than_training(folder):
    task = make_task(folder, **{"data.batch_tokens": 32})
    parts = make_task(folder, **{"data.batch_tokens": 32, "train.accumulate_steps": 2})
    run, found = untrained_run(task), []
    for each, rows in ((task, 2), (parts, 1)):
        examples = each.load("val")
        batches = each.evaluation_batches(examples)
        assert {len(batch["target"]) for batch in batches} == {rows}
        found.append(evaluate(run._replace(task=each), examples))
    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_a_stride_of_an_evaluation_replaces_that_of_the_config(folder):
    fine = make_task(folder, **{"data.stride": 5})
    task = make_task(folder)
    run, examples = untrained_run(task, scale=2.0), task.load("val")
    rows = evaluate(run, examples, stride=5)
    wanted = evaluate(run._replace(task=fine), examples)
    assert [row.pop("options") for row in rows] == [{"stride": 5}] * 2
    assert rows == wanted != evaluate(run, examples)
    task.check_options({"stride": 16}, evaluates=True)
    for stride in (0, 17):
        with pytest.raises(ValueError, match=f"--stride .*max_length=16, got {stride}"):
            task.check_options({"stride": stride}, evaluates=True)
    with pytest.raises(ValueError, match="--beam_size .*language_model when it is sco"):
        task.check_options({"beam_size": 4}, evaluates=True)
    task.check_options({"beam_size": 4})
    with pytest.raises(ValueError, match="--stride .*language_model"):
        task.check_options({"stride": 16})


@pytest.mark.parametrize("stride", [0, 17])
def test_a_stride_from_python_that_skips_tokens_raises(folder, stride):
    run = untrained_run(make_task(folder))
    with pytest.raises(ValueError, match=f"stride .*max_length=16, got {stride}"):
        run.evaluate("val", stride=stride)


def test_no_new_tokens_raise_with_the_option(folder):
    """Not with a prompt that is too long for the context."""
    run = untrained_run(make_task(folder))
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        run.predict(["to"], max_new_tokens=0)


def test_a_vocabulary_larger_than_the_corpus_supports_raises(tmp_path):
    (tmp_path / "train.txt").write_text("to be or not to be")
    keys = {"data.vocab_size": 500, "data.name": "text"}
    keys |= {"data.directory": str(tmp_path), "data.tokenizer": "sentencepiece"}
    task = small_task(tmp_path / "tokenizer", **DECODER_ONLY | keys)
    with pytest.raises(ValueError, match="data.vocab_size=500 .*set it to [1-9]"):
        task.load("train")
    copied = {"train.init_from": "a run with this vocabulary"}
    task = small_task(tmp_path / "tokenizer", **DECODER_ONLY | keys | copied)
    task.load("train")  # one that is not made here may be smaller


@pytest.mark.parametrize(
    "stride",
    [
        pytest.param(16, marks=pytest.mark.slow),
        pytest.param(11, marks=pytest.mark.slow),
        pytest.param(1, marks=pytest.mark.slow),
        5,
    ],
)
@pytest.mark.parametrize("cross", [True, False])
def test_every_token_of_a_split_is_scored_once_for_any_stride(folder, stride, cross):
    task = make_task(folder, **{"data.stride": stride, "data.cross_documents": cross})
    examples = task.load("val")
    stream = task.token_stream(examples)
    scored = [
        batch["target"][(batch["target_weights"] * batch["target_segments"]) > 0]
        for batch in task.evaluation_batches(examples)
    ]
    scored = np.concatenate(scored)
    assert np.bincount(scored).tolist() == np.bincount(stream[1:]).tolist()
    assert stream[0] == task.config.model.bos
    run = untrained_run(task, num_trials=1)
    batch = next(iter(task.evaluation_batches(examples)))
    _, weight = task.loss(model_of(run), jax.tree.map(jax.numpy.asarray, batch))
    assert weight == batch["target_weights"].sum()


def test_without_cross_documents_the_loss_is_that_of_documents_alone(folder):
    """A document ends in the separator; the last one of the stream does not."""
    changes = {"data.max_length": 64, "data.cross_documents": False}
    task = make_task(folder, **changes)
    run, examples = untrained_run(task, scale=2.0), task.load("test")
    documents = [ids.tolist() for ids in examples.fields["target"]]
    bos = task.config.model.bos
    alone = [[*ids, bos] for ids in documents[:-1]] + documents[-1:]
    rows = evaluate(run, examples)
    for trial, row in enumerate(rows):
        sums = [log_probs_of(run, ids, trial).sum() for ids in alone]
        wanted = -sum(sums) / sum(map(len, alone))
        assert row["loss"] == pytest.approx(wanted, rel=1e-5)
    crossing = make_task(folder, **changes | {"data.cross_documents": True})
    other = evaluate(run._replace(task=crossing), examples)
    assert abs(other[0]["loss"] - rows[0]["loss"]) > 1e-3


@pytest.mark.parametrize("cross", [True, False])
def test_a_window_leaks_across_documents_only_if_it_may(tmp_path, cross):
    """The second document's loss has no gradient by what the first one's tokens are."""
    (tmp_path / "train.txt").write_text("abcabc\n\nxyzyx")
    keys = {"data.name": "text", "data.directory": str(tmp_path)}
    keys |= {"data.tokenizer": "characters", "data.max_length": 4}
    keys |= {"data.cross_documents": cross, "model.tie_embeddings": False}
    task = small_task(tmp_path / "tokenizer", **DECODER_ONLY | keys)
    examples = task.load("train")
    stream = task.token_stream(examples)
    (batch, *_) = evaluation_windows(
        stream, length=12, stride=12, batch_tokens=12, separator=1, cross=cross
    )
    second = int(np.flatnonzero(stream == 1)[1])
    batch["target_weights"] = (np.arange(12) >= second).astype(np.int32)[None]
    run = untrained_run(task, num_trials=1)

    def loss(params):
        model = nnx.merge(run.graph, params)
        return task.loss(model, jax.tree.map(jax.numpy.asarray, batch))[0]

    table = jax.jit(jax.grad(loss))(run.of(0)[0])["embedding"][...]
    first, second = (task.tokenizer.encode([x], eos=False)[0] for x in ("abc", "xyz"))
    assert (table[first] != 0).any() == cross
    assert (table[second[:2]] != 0).all(axis=1).any()


def test_score_lines_equal_the_log_probabilities_of_the_logits(folder):
    task = make_task(folder)
    run = untrained_run(task, scale=2.0)
    lines = [*VAL, "a much longer line, of other length than the rest"]
    fields = task.tokenizer.encode(lines, eos=False)
    for trial in (0, 1):
        for line, ids in zip(task.score_lines(run, lines, trial), fields, strict=True):
            log_prob, tokens = line.split("\t")
            assert int(tokens) == len(ids)
            wanted = log_probs_of(run, ids, trial).sum()
            assert float(log_prob) == pytest.approx(wanted, rel=1e-4)
        for line, ids in zip(task.score_tokens(run, lines, trial), fields, strict=True):
            found = json.loads(line)
            assert "".join(found["tokens"]) == task.tokenizer.decode(ids)
            wanted = log_probs_of(run, ids, trial)
            np.testing.assert_allclose(found["log_probabilities"], wanted, atol=2e-4)


def test_a_batch_of_windows_is_a_function_of_seed_and_step(folder):
    task = make_task(folder)
    examples = task.load("train")
    group, alone = (task.batches(examples, seeds) for seeds in ([5, 8], [8]))
    assert group.spec == alone.spec == task.spec()
    assert task.spec(3, 7) == window_spec(3, 7)
    for step in (40, 0, 7):
        for name, array in alone[step].items():
            np.testing.assert_array_equal(group[step][name][1], array[0])
    first, second = group[0]["target"]
    assert (first != second).any()


@pytest.mark.slow
def test_recall_counts_only_the_values_that_were_asked_for(tmp_path):
    keys = {"data.name": "recall", "data.vocab_size": 24, "data.tokenizer": "words"}
    keys |= {"data.max_length": 16, "data.batch_tokens": 4096}
    task = small_task(tmp_path, **DECODER_ONLY | keys)
    assert {"max_length", "vocab_size"} <= {*task.corpus_keys}  # as others are harder
    task.load("train")
    assert task.tokenizer.vocab_size == 24
    run, examples = untrained_run(task, scale=2.0), task.load("val")
    field = examples.fields["target"]
    tokens = field.tokens.reshape(500, 16)
    batch = {"target": tokens, "target_segments": np.ones_like(tokens)}
    batch["target_positions"] = np.tile(np.arange(16, dtype=np.int32), (500, 1))
    asked = recall.is_scored(16)
    rows = evaluate(run, examples)
    for trial, row in enumerate(rows):
        model = model_of(run, trial)
        logits = np.float64(jax.jit(lambda batch, m=model: m(batch))(batch))
        exact = (logits.argmax(-1) == tokens)[:, asked]
        log_probs = scipy.special.log_softmax(logits, -1)
        nats = -np.take_along_axis(log_probs, tokens[..., None], -1)[:, asked]
        assert row["recall"] == pytest.approx(exact.mean())
        assert row["loss"] == pytest.approx(nats.mean(), rel=1e-5)
        assert row.keys() == {"loss", "recall"}
    batches = task.batches(task.load("train"), seeds=[0, 1])
    weights = batches[0]["target_weights"]
    assert weights.sum() * 4 == (batches[0]["target_segments"] > 0).sum()
    assert batches.spec.keys() == task.spec().keys()


@pytest.fixture(scope="module")
def run(folder):
    """Models of characters with learned positions up to 40."""
    changes = {"model.positions": "learned", "model.max_positions": 40}
    return untrained_run(make_task(folder, **changes), scale=3.0)


def greedy(run, prompt, steps, trial=0):
    """Return the most probable continuation, computed anew for every token."""
    task, ids = run.task, [*prompt]
    banned = list(task.vocabulary.banned)
    forward = jax.jit(lambda batch: model_of(run, trial)(batch))
    for _ in range(steps):
        target = np.zeros((1, 48), np.int32)
        target[0, : len(ids)] = ids
        segments = (np.arange(48) <= len(ids)).astype(np.int32)[None]
        positions = np.minimum(np.arange(48, dtype=np.int32), 39)[None]
        batch = {"target": target, "target_segments": segments}
        logits = np.array(forward(batch | {"target_positions": positions}))
        logits[..., banned] = -np.inf
        best = int(logits[0, len(ids)].argmax())
        if best == task.vocabulary.eos:
            break
        ids.append(best)
    return task.tokenizer.decode(ids)


def test_greedy_continuation_equals_recomputing_every_step(run):
    prompts = ["to be", "", "not – 7"]
    encoded = run.task.tokenizer.encode(prompts, eos=False)
    for trial in (0, 1):
        found = list(run.task.predict(run, prompts, trial, max_new_tokens=10))
        wanted = [greedy(run, ids.tolist(), 10, trial) for ids in encoded]
        assert found == wanted
    assert any(len(text) > len(p) + 3 for text, p in zip(found, prompts, strict=True))


@pytest.mark.parametrize(
    "options", slow_but([{}], [{}, {"temperature": 1.0, "seed": 4}])
)
def test_streamed_pieces_join_to_what_predict_returns(run, options):
    predict = partial(run.task.predict, run, ["to be"], max_new_tokens=12, **options)
    (whole,) = predict()
    pieces = list(run.task.stream(run, "to be", max_new_tokens=12, **options))
    assert "to be" + "".join(pieces) == whole and len(whole) > 8
    for stop in (whole[8:10], whole[5:10]):  # longer than what is before it
        (cut,) = predict(stop=stop)
        assert cut == "to be" + whole[5:].split(stop)[0]
        pieces = run.task.stream(run, "to be", max_new_tokens=12, stop=stop, **options)
        assert "to be" + "".join(pieces) == cut


@pytest.mark.slow
def test_samples_differ_and_do_not_depend_on_other_prompts(run):
    options = {"temperature": 1.0, "max_new_tokens": 8, "samples": 2}
    found = list(run.task.predict(run, ["to", "be", "or"], **options))
    assert len(set(found)) == 6
    assert [text[:2] for text in found] == ["to", "to", "be", "be", "or", "or"]
    assert list(run.task.predict(run, ["or"], first=2, **options)) == found[4:]


@pytest.mark.slow
def test_lines_longer_than_learned_positions_raise_with_their_number(run, capsys):
    lines = ["to", "b" * 41]
    for length in (40, 41):  # BOS takes a position, too
        longest = f"Line 9 has {length} tokens.*model.max_positions=40.* 39"
        with pytest.raises(ValueError, match=longest):
            list(run.task.predict(run, ["to", "b" * length], first=7))
        with pytest.raises(ValueError, match=longest.replace("9 ", "8 ", 1)):
            next(run.task.stream(run, "b" * length, first=7))
    with pytest.raises(ValueError, match="Line 9 .*model.max_positions=40"):
        list(run.task.score_lines(run, lines, first=7))
    capsys.readouterr()
    (whole,) = run.task.predict(run, ["b" * 39], max_new_tokens=256)
    assert len(whole) <= 40
    log = capsys.readouterr().err
    assert "no more than 1 of the 256 tokens: then the model's context is full" in log
    list(run.task.predict(run, ["to"], max_new_tokens=30))
    assert not capsys.readouterr().err
    with pytest.raises(TypeError, match="lines"):
        list(run.task.predict(run, "to"))


def test_lines_longer_than_training_windows_are_logged(run, folder, capsys):
    """Where positions set no limit. A window of training has 16 tokens."""
    other = make_task(folder, **{"model.positions": "rotary"})
    run = run._replace(task=other)
    for check in (
        partial(other.prompts, max_new_tokens=4),
        partial(other.log_probabilities, run, trial=0),
    ):
        check(lines=["b" * 16, "b" * 17], first=7)
        log = capsys.readouterr().err
        assert "Line 9 has 17 tokens, more than the 16" in log and log.count("\n") == 1


def test_unknown_tokens_of_a_split_are_counted(tmp_path, capsys):
    """They all count as the same token, which is easy to predict."""
    (tmp_path / "train.txt").write_text("\n\n".join(TRAIN))
    (tmp_path / "val.txt").write_text("to be or яяя not to be")
    make_task(tmp_path).load("val")
    assert "val: 3 of 22 tokens are unknown to the" in capsys.readouterr().err


def test_a_validation_split_below_one_window_raises_an_error(tmp_path):
    (tmp_path / "train.txt").write_text("\n\n".join(TRAIN))
    for split in ("val", "test"):
        (tmp_path / f"{split}.txt").write_text("to be")
    task = make_task(tmp_path)
    with pytest.raises(ValueError, match="val has 5 tokens, fewer than one window"):
        task.load("val")
    task.load("test")


def test_characters_that_training_never_saw_are_logged(run, capsys):
    list(run.task.score_lines(run, ["to be", "tø be Ω"]))
    log = capsys.readouterr().err
    assert "Line 2 has characters or words that training never saw: 2" in log
    assert log.count("\n") == 1


def test_lines_without_a_token_have_no_log_probability(run):
    assert list(run.task.score_lines(run, ["", ""])) == ["0.0000\t0"] * 2
    alone = list(run.task.score_lines(run, ["to be"]))
    assert list(run.task.score_lines(run, ["", "to be"])) == ["0.0000\t0", *alone]
    (found,) = run.task.score_tokens(run, [""])
    assert json.loads(found) == {"tokens": [], "log_probabilities": []}


@pytest.mark.parametrize(
    "changes, culprit",
    [
        ({"model.num_encoder_layers": 1}, "model.num_encoder_layers 0 and"),
        ({"model.num_decoder_layers": 0}, "model.num_decoder_layers"),
        ({"data.tokenizer": "letters"}, "data.tokenizer .*'letters'"),
        ({"data.name": "recall"}, "data.tokenizer must be words .*recall"),
        ({"data.stride": 0}, "data.stride .*data.max_length=64, got 0"),
        ({"data.stride": 65}, "data.stride .*data.max_length=64, got 65"),
    ],
)
def test_a_config_that_does_not_fit_raises_with_its_key(changes, culprit):
    with pytest.raises(ValueError, match=culprit):
        small_task(None, **DECODER_ONLY | changes)


def test_the_metrics_and_the_test_split_follow_from_the_corpus():
    tasks = {
        name: small_task(
            None, **DECODER_ONLY | {"data.name": name, "data.tokenizer": "words"}
        )
        for name in ("text", "recall", "shakespeare")
    }
    names = {name: [m.name for m in task.metrics] for name, task in tasks.items()}
    wanted = ["loss", "bits_per_byte", "perplexity", "context_gain"]
    assert names["text"] == names["shakespeare"] == wanted
    assert names["recall"] == ["loss", "recall"]
    assert [task.test_split for task in tasks.values()] == ["test", "test", "val"]
