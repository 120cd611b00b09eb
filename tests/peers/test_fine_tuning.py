"""BERT with a classifier beside transformers: logits, and the first three updates."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from headcount.configs.run import load_config
from headcount.configs.validation import flat
from headcount.data.batches import unpacked_batches
from headcount.data.encoder_tokenizers import WordPieceTokenizer
from headcount.exchange import huggingface, usage_examples
from headcount.exchange.exporting import export, facts_of, to_huggingface
from headcount.exchange.importing import import_checkpoint, load_model
from headcount.models.cost import abstract
from headcount.tasks import make_task
from headcount.training.restore import (
    parameters_to_start_from,
    restore_parameters,
    with_parameters,
)
from headcount.training.step import init, make_static, train_steps
from headcount.training.trials import hyperparameters, make_trials
from tests.tasks.untrained import untrained_run

LABELS = ["B", "I", "O"]
WORDS = ["the", "dog", "barks", "##ing", "bark", "a", "cat", "##s", "un", "##able"]
SENTENCES = [
    ("the dog barking", ["O", "B", "I"]),
    ("a cats", ["O", "B"]),
    ("unable dogs bark the zebra", ["B", "I", "O", "O", "B"]),
]
STEPS = 3


VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


@pytest.fixture(scope="module")
def tokenizer():
    """A WordPiece tokenizer of transformers'."""
    return make_tokenizer()


def make_tokenizer(**options):
    vocabulary = {name: number for number, name in enumerate(VOCABULARY)}
    return transformers.BertTokenizer(vocab=vocabulary, **options)


def bert(kind, tokenizer, folder):
    """Return a random model of theirs, saved with its tokenizer in a folder."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=24,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
        id2label=dict(enumerate(LABELS)),
        label2id={label: i for i, label in enumerate(LABELS)},
    )
    theirs = getattr(transformers, kind)(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    theirs.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return theirs.eval()


def write_corpus(folder, is_tagging):
    for name in ("train", "val"):
        if is_tagging:
            lines = [
                "".join(f"{w} {t}\n" for w, t in zip(text.split(), tags, strict=True))
                for text, tags in SENTENCES
            ]
            (folder / f"{name}.conll").write_text("\n".join(lines))
        else:
            lines = [f"{tags[0]}\t{text}\ta cat" for text, tags in SENTENCES]
            lines[0] = lines[0].replace("O\t", "I\t")
            (folder / f"{name}.tsv").write_text("\n".join(lines))


def their_inputs(tokenizer, is_tagging, labels):
    """Return the batch of theirs: padded rows, types, and -100 for unscored tokens."""
    texts = [text for text, _ in SENTENCES]
    if not is_tagging:
        batch = tokenizer(texts, ["a cat"] * 3, padding=True, return_tensors="pt")
        batch["labels"] = torch.tensor(labels)
        return batch
    split = [text.split() for text in texts]
    batch = tokenizer(
        split, is_split_into_words=True, padding=True, return_tensors="pt"
    )
    found = torch.full(batch["input_ids"].shape, -100)
    for row in range(3):
        words = batch.word_ids(row)
        for place, word in enumerate(words):
            if word is not None and word != words[place - 1]:
                found[row, place] = labels[row][word]
    batch["labels"] = found
    return batch


@pytest.mark.parametrize("task_name", ["tagging", "classification"])
def test_logits_and_three_updates_equal_transformers(task_name, tokenizer, tmp_path):
    is_tagging = task_name == "tagging"
    kind = "BertForTokenClassification" if is_tagging else None
    kind = kind or "BertForSequenceClassification"
    theirs = bert(kind, tokenizer, tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "run")
    write_corpus(tmp_path, is_tagging)
    config = load_config(tmp_path / "run" / "config.json")
    assert config.task.name == task_name
    changes = {
        "data.name": "conll" if is_tagging else "labelled",
        "data.directory": str(tmp_path),
        "data.max_length": 24,
        "data.batch_tokens": 96,
        "model.dropout": 0.0,
        "model.attention.implementation": "reference",
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.learning_rate": 1e-3,
        "optimizer.beta2": 0.999,
        "optimizer.epsilon": 1e-8,
        "optimizer.weight_decay": 0.01,
        "optimizer.label_smoothing": 0.0,
        "optimizer.clip_norm": 1.0,
    }
    config.update_from_flattened_dict(changes)
    task = make_task(config, tmp_path / "run" / "tokenizer")
    examples = task.load("train")
    assert task.classes == LABELS

    numbers = [[LABELS.index(tag) for tag in tags] for _, tags in SENTENCES]
    if not is_tagging:
        numbers = [LABELS.index(label) for label in examples.text["label"]]
    inputs = their_inputs(tokenizer, is_tagging, numbers)
    mask = inputs["attention_mask"].bool().numpy()
    for row, ids in enumerate(examples.fields["source"]):
        assert inputs["input_ids"][row].numpy()[mask[row]].tolist() == ids.tolist()

    model = load_model(tmp_path / "run")
    ((indices, batch),) = unpacked_batches(examples.fields, batch_tokens=4096)
    logits = np.asarray(model.class_logits(jax.tree.map(jnp.asarray, batch)))
    with torch.no_grad():
        wanted = theirs(**inputs).logits.numpy()
    for row, index in enumerate(indices):
        count = mask[index].sum()
        ours = logits[row, :count] if is_tagging else logits[row, 0]
        target = wanted[index, :count] if is_tagging else wanted[index]
        np.testing.assert_allclose(ours, target, atol=1e-5)
    assert np.abs(wanted).max() > 0.3

    trials = make_trials(flat(config.to_dict()))
    arrays = hyperparameters(flat(config.to_dict()), trials)
    static = make_static(abstract(task.build), config, task.loss)
    state = init(arrays, static=static, build=task.build)
    like = jax.tree.map(lambda x: x[0], state.params)
    params, *_ = restore_parameters(tmp_path / "run", "best", 1, like)
    state = state._replace(params=jax.tree.map(jnp.asarray, params))
    # several sentences per row here, one per row there
    (packed,) = task.evaluation_batches(examples)
    assert packed["source_segments"].max() > 1
    steps = {k: np.stack([v] * STEPS)[None] for k, v in packed.items()}
    state, metrics = train_steps(state, arrays, steps, STEPS, static=static)

    matrices, vectors = (
        [p for p in theirs.parameters() if (p.ndim > 1) == wanted]
        for wanted in (True, False)
    )
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, 1e-3, (0.9, 0.999), 1e-8, weight_decay=0.01)
    for step in range(STEPS):
        loss = theirs(**inputs).loss
        np.testing.assert_allclose(metrics["loss"][0, step], loss.item(), rtol=1e-5)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        adamw.step()
    named = huggingface.named(jax.tree.map(lambda x: np.asarray(x[0]), state.params))
    tensors = huggingface.to_huggingface("bert", named)
    moved = 0.0
    for name, tensor in theirs.state_dict().items():
        # the softmax ignores it: its gradient is rounding, which Adam makes steps of
        if name.endswith("self.key.bias"):
            continue
        np.testing.assert_allclose(tensors[name], tensor.numpy(), atol=1e-4)
        moved = max(moved, np.abs(tensor.numpy()).max())
    assert moved > 1e-3


def pretrained(task_name, tokenizer, tmp_path):
    """Return theirs, and a task that starts from it, with the folder of its words."""
    theirs = bert("BertForPreTraining", tokenizer, tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "run")
    write_corpus(tmp_path, task_name == "tagging")
    config = load_config(tmp_path / "run" / "config.json")
    assert config.task.name == "masked_language_model"
    changes = {
        "task.name": task_name,
        "task.pooling": "first",
        "data.name": "conll" if task_name == "tagging" else "labelled",
        "data.directory": str(tmp_path),
        "data.max_length": 24,
        "data.batch_tokens": 96,
    }
    config.update_from_flattened_dict(changes)
    folder = tmp_path / "tuned" / "tokenizer"
    folder.mkdir(parents=True)
    from_there = tmp_path / "run" / "tokenizer"
    vocabulary = (from_there / "wordpiece.json").read_bytes()
    (folder / "wordpiece.json").write_bytes(vocabulary)
    task = make_task(config, folder)
    task.load("train")
    return theirs, task, from_there


@pytest.mark.parametrize("task_name", ["tagging", "classification"])
def test_a_new_classifier_on_pretrained_weights(task_name, tokenizer, tmp_path):
    """train.init_from takes the encoder of a language model, and leaves its head."""
    theirs, task, from_there = pretrained(task_name, tokenizer, tmp_path)
    config = task.config
    assert task.new_parameters(from_there) == ("classifier",)
    trials = make_trials(flat(config.to_dict()))
    arrays = hyperparameters(flat(config.to_dict()), trials)
    static = make_static(abstract(task.build), config, task.loss)
    state = init(arrays, static=static, build=task.build)
    found = parameters_to_start_from(
        str(tmp_path / "run"), config, trials, state.params, ("classifier",)
    )
    started = huggingface.named(with_parameters(state, found).params)
    wanted = theirs.state_dict()["bert.encoder.layer.1.output.dense.weight"].numpy()
    np.testing.assert_array_equal(started["encoder.1.mlp.down.kernel"][0], wanted.T)
    head = "classifier.linear.kernel"
    np.testing.assert_array_equal(started[head], huggingface.named(state.params)[head])


def test_a_tagger_on_pretrained_weights_is_exported(
    tokenizer, tmp_path, monkeypatch, capsys
):
    """With their words, and without the parts that a tagger does not use."""
    _, task, _ = pretrained("tagging", tokenizer, tmp_path)
    run, out = untrained_run(task, num_trials=1, scale=3.0), tmp_path / "out"
    out.mkdir()
    facts = facts_of(run)
    card = usage_examples.section(to_huggingface(run, 0, out), facts)
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(out)
    exec(code, {})
    lines = task.predict(run, [facts["example"]])
    tags = [line.split("\t")[1] for line in lines if line]
    assert capsys.readouterr().out.split() == tags
    kind = transformers.BertForTokenClassification
    _, told = kind.from_pretrained(out, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert json.loads((out / "config.json").read_text())["bos_token_id"] == 2  # [CLS]


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece_from_a_vocabulary_alone(tokenizer, tmp_path, lowercase):
    """Older checkpoints have vocab.txt, and no tokenizer.json."""
    bert("BertForMaskedLM", tokenizer, tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    (tmp_path / "theirs" / "vocab.txt").write_text("\n".join(VOCABULARY))
    about = tmp_path / "theirs" / "tokenizer_config.json"
    about.write_text(json.dumps({"do_lower_case": lowercase}))
    import_checkpoint(tmp_path / "theirs", tmp_path / "run")
    ours = WordPieceTokenizer(tmp_path / "run" / "tokenizer" / "wordpiece.json")
    lines = ["The dogs, unable", "barking", ""]
    other = make_tokenizer(do_lower_case=lowercase)
    for line, ids in zip(lines, ours.encode(lines, eos=False), strict=True):
        assert ids.tolist() == other(line, add_special_tokens=False)["input_ids"]


def test_a_fine_tuned_checkpoint_goes_out_the_same(tokenizer, tmp_path):
    theirs = bert("BertForTokenClassification", tokenizer, tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "run")
    export(tmp_path / "run", "huggingface", tmp_path / "out", "best")
    kind = transformers.BertForTokenClassification
    back = kind.from_pretrained(tmp_path / "out")
    assert theirs.state_dict().keys() == back.state_dict().keys()
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name
