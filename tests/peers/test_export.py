"""Trained runs and random models, written for other libraries and loaded by them."""

import json
import re
import subprocess
import sys
from importlib.metadata import distribution

import ctranslate2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from packaging.requirements import Requirement
from tokenizers import Tokenizer

from headcount.configs.base import get_config
from headcount.decoding.generate import generate
from headcount.decoding.search import Vocabulary
from headcount.exchange import (
    ctranslate2_format,
    exporting,
    folding,
    huggingface,
    huggingface_export,
    usage_examples,
)
from headcount.exchange.files import save_tensors
from headcount.models.transformer import Transformer
from headcount.training.run import load
from tests.runs import arguments, read, succeed, training, write_corpus
from tests.scripts.test_train_script import MEMORIZING, TEN_PAIRS
from tests.tasks import test_language_model, test_tagging
from tests.tasks.untrained import untrained_run

VOCAB = 40
PIECES = ["<pad>", "<s>", "</s>", "<unk>", *map(str, range(4, VOCAB))]
LENGTH = 12
GATES = {"decoder": np.array([[1.0, 0.5, 0.0, 2.0]] * 2)}


def make(text=False, num_classes=None, **changes):
    """A config and a model of it with random parameters, gates included."""
    config = get_config()
    config.model.width, config.model.mlp_dim = 32, 48
    if text:
        config.model.num_encoder_layers, config.task.name = 0, "language_model"
    for key, value in changes.items():
        section = config.model
        *path, last = key.split(".")
        for name in path:
            section = section[name]
        section[last] = value
    settings = config.model.to_dict()
    model = Transformer(VOCAB, num_classes=num_classes, **settings, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [
        leaf + 0.3 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return config, graph, jax.tree.unflatten(structure, noisy)


def folded(config, params, gates=None):
    arrays = {k: np.asarray(v) for k, v in huggingface.named(params).items()}
    return folding.plain_heads(config, arrays, gates or {})


def prompts(text):
    rng = np.random.default_rng(0)
    found = [rng.integers(4, VOCAB, n).tolist() for n in (7, 4, 1, 9)]
    return [[1, *ids] if text else [*ids, 2] for ids in found]


def ours(graph, params, text, gates=None):
    """Greedy tokens of every prompt, up to EOS."""
    vocabulary = Vocabulary(eos=1, banned=(0, 2, 3)) if text else Vocabulary()
    given = jax.tree.map(jnp.asarray, gates or {})
    options = {"limits": [LENGTH] * 4, "vocabulary": vocabulary, "head_gates": given}
    found, _ = generate(graph, params, prompts(text), **options)
    return [[int(i) for i in ids if i != vocabulary.eos] for ids in found]


def log_probabilities(graph, params, text, gates, target, source=None):
    """Of each token of a target, computed as in training."""
    sides = {"target": target} if text else {"source": source, "target": target}
    batch = {}
    for side, ids in sides.items():
        batch[side] = jnp.asarray([ids])
        batch[f"{side}_segments"] = jnp.ones_like(batch[side])
        batch[f"{side}_positions"] = jnp.arange(len(ids))[None]
    given = jax.tree.map(jnp.asarray, gates or {})
    logits = nnx.merge(graph, params)(batch, head_gates=given)[0]
    return jax.nn.log_softmax(logits)[jnp.arange(len(target)), jnp.asarray(target)]


QK_NORM = {"attention.qk_norm": True, "norm_epsilon": 1e-2}  # not negligible
BLOCK = {
    "norm": "pre",
    "norm_type": "rms_norm",
    "mlp": "gated",
    "activation": "silu",
    "positions": "rotary",
    "use_bias": False,
    "attention.use_bias": False,
    "scale_embeddings": False,
}
SITES = ("encoder_attention", "decoder_attention", "cross_attention")
CTRANSLATE2 = {
    "default": {},
    "pre": {"norm": "pre", "activation": "gelu_tanh", "positions": "sinusoidal_paper"},
    "grouped": {"attention.num_kv_heads": 2, "attention.scale": 0.2},
    "head_dim": {"attention.head_dim": 12, "attention.value_dim": 12},
    "mean": {"attention.merge": "mean", "output_bias": True},
    "learned": {"positions": "learned", "embedding_norm": True, "activation": "gelu"},
    "relative": {"positions": "relative", "norm": "pre"},
    "none": {"positions": "none"},
    "tied": {"tie_embeddings": True},
    "block": BLOCK,
    "block_grouped": BLOCK | {"attention.num_kv_heads": 1},
    "qk_norm": BLOCK | QK_NORM | {"attention.num_kv_heads": 2},
}


@pytest.mark.parametrize("name", CTRANSLATE2)
@pytest.mark.parametrize("text", [False, True], ids=["pairs", "texts"])
def test_ctranslate2_generates_the_same_tokens_and_scores(name, text, tmp_path):
    # with a tied table of random numbers a model repeats the token that it reads
    changes = {"tie_embeddings": False} | CTRANSLATE2[name]
    if name == "qk_norm" and not text:
        with pytest.raises(ValueError, match="model.attention.qk_norm must be False"):
            ctranslate2_format.check(make(**changes)[0])
        return
    gates = GATES if name == "default" else None
    config, graph, params = make(text=text, **changes)
    ctranslate2_format.check(config)
    arrays = folded(config, params, gates)
    ctranslate2_format.write(config, arrays, [PIECES], tmp_path)
    wanted = ours(graph, params, text, gates)
    given = [[PIECES[i] for i in ids] for ids in prompts(text)]
    # random models may repeat a token: the scores of random texts tell them apart
    rng = np.random.default_rng(1)
    targets = [rng.integers(4, VOCAB, n).tolist() for n in (5, 1, 9, 3)]
    pieces = [[PIECES[i] for i in ids] for ids in targets]
    if text:
        generator = ctranslate2.Generator(str(tmp_path), compute_type="float32")
        results = generator.generate_batch(
            given,
            max_length=LENGTH,
            sampling_topk=1,
            include_prompt_in_result=False,
            suppress_sequences=[["<pad>"], ["</s>"], ["<unk>"]],
        )
        found = [result.sequences_ids[0] for result in results]
        scored = generator.score_batch([["<s>", *ids] for ids in pieces])
    else:
        translator = ctranslate2.Translator(str(tmp_path), compute_type="float32")
        results = translator.translate_batch(
            given,
            beam_size=1,
            max_decoding_length=LENGTH - 1,
            suppress_sequences=[["<pad>"], ["<s>"]],
        )
        found = [[int(PIECES.index(x)) for x in r.hypotheses[0]] for r in results]
        scored = translator.score_batch(given, pieces)
        targets = [[*ids, 2] for ids in targets]
    for source, target, result in zip(prompts(text), targets, scored, strict=True):
        expected = log_probabilities(graph, params, text, gates, target, source)
        np.testing.assert_allclose(result.log_probs, expected, rtol=1e-4, atol=1e-4)
    assert [ids[: LENGTH - 1] for ids in found] == [ids[: LENGTH - 1] for ids in wanted]


def saved(config, params, folder, gates=None, labels=None):
    """What transformers can load, of our parameters."""
    family = huggingface_export.family_of(config)
    settings, generation, tensors = huggingface_export.convert(
        config, family, folded(config, params, gates), labels
    )
    (folder / "config.json").write_text(json.dumps(settings))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    save_tensors(tensors, folder)
    return family, tensors


def side(name, tokens):
    place = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return {
        name: jnp.asarray(tokens, jnp.int32),
        f"{name}_segments": jnp.ones(tokens.shape, jnp.int32),
        f"{name}_positions": place,
    }


def close(mine, theirs):
    mine, theirs = np.asarray(mine), theirs.detach().numpy()
    assert np.abs(theirs).max() > 1  # else the bound says little
    bound = 1e-5 * np.abs(theirs).max()
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=bound)


MARIAN = {
    "default": {},
    "same_epsilon": {"norm_epsilon": 1e-5, "positions": "sinusoidal_paper"},
    "weighted": {"attention.merge": "weighted", "attention.use_bias": False},
    "scaled": {"attention.merge": "scaled", "activation": "gelu", "use_bias": False},
}


@pytest.mark.parametrize("name", MARIAN)
def test_marian_has_the_same_logits_and_translations(name, tmp_path):
    config, graph, params = make(**MARIAN[name])
    gates = GATES if name == "default" else None
    assert saved(config, params, tmp_path, gates)[0] == "marian"
    theirs = transformers.MarianMTModel.from_pretrained(tmp_path).eval()
    rng = np.random.default_rng(1)
    source, target = (rng.integers(4, VOCAB, (3, n)) for n in (9, 6))
    inputs = np.concatenate([np.ones((3, 1), int), target[:, :-1]], 1)
    with torch.no_grad():
        logits = theirs(
            input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(inputs)
        ).logits
    model = nnx.merge(graph, params)
    given = jax.tree.map(jnp.asarray, gates or {})
    close(
        model(side("source", source) | side("target", target), head_gates=given), logits
    )
    for ids, wanted in zip(
        prompts(False), ours(graph, params, False, gates), strict=True
    ):
        found = theirs.generate(
            input_ids=torch.tensor([ids]), max_new_tokens=LENGTH, do_sample=False
        )[0].tolist()
        assert [i for i in found if i > 2][: LENGTH - 1] == wanted[: LENGTH - 1]


CAUSAL = {
    "gpt2": {"norm": "pre", "positions": "learned", "activation": "gelu_tanh"},
    "gpt2_untied": {"norm": "pre", "tie_embeddings": False, "use_bias": False},
    "llama": BLOCK | {"attention.num_kv_heads": 2, "attention.merge": "mean"},
    "llama_biases": BLOCK
    | {"use_bias": True, "attention.use_bias": True, "scale_embeddings": True}
    | {"attention.head_dim": 12, "attention.value_dim": 12},
    "qwen3": BLOCK | QK_NORM | {"attention.scale": 0.5},
}


@pytest.mark.parametrize("name", CAUSAL)
def test_language_models_have_the_same_logits_and_continuations(name, tmp_path):
    config, graph, params = make(text=True, **CAUSAL[name])
    gates = GATES if name == "llama" else None
    family, _ = saved(config, params, tmp_path, gates)
    assert name.startswith(family)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    target = np.random.default_rng(1).integers(4, VOCAB, (3, 9))
    inputs = np.concatenate([np.ones((3, 1), int), target[:, :-1]], 1)
    with torch.no_grad():
        logits = theirs(torch.tensor(inputs)).logits
    model = nnx.merge(graph, params)
    given = jax.tree.map(jnp.asarray, gates or {})
    close(model(side("target", target), head_gates=given), logits)
    for ids, wanted in zip(
        prompts(True), ours(graph, params, True, gates), strict=True
    ):
        found = theirs.generate(
            torch.tensor([ids]), max_new_tokens=LENGTH, do_sample=False
        )[0, len(ids) :].tolist()
        assert [i for i in found if i != 1][: LENGTH - 1] == wanted[: LENGTH - 1]


def test_bert_has_the_same_logits_of_tags(tmp_path):
    changes = {"num_decoder_layers": 0, "embedding_norm": True}
    config, graph, params = make(num_classes=5, **changes)
    config.task.name = "tagging"
    assert saved(config, params, tmp_path, labels=list("abcde"))[0] == "bert"
    theirs = transformers.BertForTokenClassification.from_pretrained(tmp_path).eval()
    source = np.random.default_rng(1).integers(4, VOCAB, (3, 9))
    with torch.no_grad():
        logits = theirs(torch.tensor(source)).logits
    close(nnx.merge(graph, params).class_logits(side("source", source)), logits)
    assert theirs.config.id2label[4] == "e"


def test_the_card_of_a_tagger_prints_what_predict_says(tmp_path, monkeypatch, capsys):
    keys = {"model.embedding_norm": True, "data.vocab_size": 60}
    task = test_tagging.make_task(tmp_path, "words", **keys)
    run, out = untrained_run(task, num_trials=1, scale=3.0), tmp_path / "out"
    out.mkdir()
    facts = exporting.facts_of(run)
    card = usage_examples.section(exporting.to_huggingface(run, 0, out), facts)
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(out)
    exec(code, {})
    lines = task.predict(run, [facts["example"]])
    tags = [line.split("\t")[1] for line in lines if line]
    assert capsys.readouterr().out.split() == tags and len(set(tags)) > 1


@pytest.mark.parametrize(
    "tokenizer, positions",
    [("characters", 512), ("bytes", 512), ("sentencepiece", 512), ("characters", 40)],
)
def test_the_card_of_a_language_model_continues_as_predict_does(
    tokenizer, positions, tmp_path, monkeypatch, capsys
):
    """With weights, tokenizer and code of the export alone."""
    for split in ("train", "val"):
        texts = getattr(test_language_model, split.upper())
        (tmp_path / f"{split}.txt").write_text("\n\n".join(texts))
    keys = {f"model.{key}": value for key, value in CAUSAL["gpt2"].items()}
    keys["model.max_positions"] = positions
    task = test_language_model.make_task(tmp_path, tokenizer, **keys)
    run = untrained_run(task, num_trials=1, scale=3.0)
    table = run.params["embedding"]
    # logits of 0: the other special tokens are never the most probable ones
    table[...] = table[...].at[:, jnp.array(task.vocabulary.banned)].set(0.0)
    out = tmp_path / "out"
    out.mkdir()
    facts = exporting.facts_of(run)
    card = usage_examples.section(exporting.to_huggingface(run, 0, out), facts)
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(out)
    exec(code, {})
    limit = facts["new_tokens"]
    (wanted,) = task.predict(run, [facts["example"]], max_new_tokens=limit)
    assert len(wanted) > len(facts["example"])
    bos = transformers.AutoTokenizer.from_pretrained(out).bos_token
    assert capsys.readouterr().out.strip("\n").split(bos)[1] == wanted


def test_a_tagger_with_features_of_words_is_no_bert(tmp_path):
    task = test_tagging.make_task(tmp_path, "affixes", **{"model.embedding_norm": True})
    with pytest.raises(ValueError, match="data.tokenizer must be .*got affixes"):
        huggingface_export.family_of(task.config)


@pytest.mark.parametrize("name", ["marian", "gpt2", "llama"])
def test_tensors_come_back_bit_by_bit(name, tmp_path):
    text = name != "marian"
    changes = MARIAN["same_epsilon"] if name == "marian" else CAUSAL[name]
    changes = {k: v for k, v in changes.items() if k != "attention.merge"}
    config, _, params = make(text=text, **changes | {"scale_embeddings": not text})
    family, tensors = saved(config, params, tmp_path)
    arrays = folded(config, params)
    like = arrays | ({} if text else {"output_bias": np.zeros(VOCAB, np.float32)})
    kept = {k: v for k, v in tensors.items() if "embed_positions" not in k}
    back = huggingface.from_huggingface(family, kept, like)
    assert back.keys() == like.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(back[key], array, err_msg=key)


WRONG = [
    ({"attention.merge": "gated"}, "model.attention.merge must be concat, scaled"),
    ({"attention.sink": True}, "model.attention.sink must be False"),
    ({"cross_attention.num_heads": 2}, "model.cross_attention.num_heads"),
    ({"attention.value_dim": 4}, "model.attention.value_dim"),
    ({"output_transform": True}, "model.output_transform must be False"),
    ({"positions": "alibi"}, "model.positions must be sinusoidal"),
]
FOR_MARIAN = [
    ({"norm": "pre"}, "model.norm must be post for Hugging Face's Marian"),
    (
        {"attention.num_kv_heads": 2},
        "model.attention.num_kv_heads must be num_heads = 4",
    ),
    ({"positions": "rotary"}, "model.positions must be sinusoidal"),
    ({"norm_type": "rms_norm"}, "model.norm_type must be layer_norm"),
]


@pytest.mark.parametrize("changes, message", WRONG)
def test_ctranslate2_names_what_it_cannot_express(changes, message):
    config, _, params = make(**changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        ctranslate2_format.check(config)
        folded(config, params)


@pytest.mark.parametrize("changes, message", WRONG + FOR_MARIAN)
def test_marian_names_what_it_cannot_express(changes, message):
    config, _, params = make(**changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        huggingface_export.family_of(config)
        folded(config, params)


@pytest.mark.parametrize("kind", ["bytes", "characters", "words"])
def test_ctranslate2_knows_the_tokens_that_prompts_consist_of(
    kind, tmp_path, monkeypatch
):
    for split, texts in (
        ("train", test_language_model.TRAIN),
        ("val", test_language_model.VAL),
    ):
        (tmp_path / f"{split}.txt").write_text("\n\n".join(texts))
    task = test_language_model.make_task(tmp_path, kind)
    written = []
    monkeypatch.setattr(
        ctranslate2_format, "write", lambda *given: written.append(given)
    )
    (tmp_path / "out").mkdir()
    run = untrained_run(task, num_trials=1)
    exporting.to_ctranslate2(run, 0, tmp_path / "out")
    ((_, _, (names,), _, _),) = written
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    text = test_language_model.VAL[0]
    ids = [names.index(token) for token in tokenizer.encode(text).tokens]
    assert ids == task.tokenizer.encode([text], eos=False)[0].tolist()
    assert names[run.config.model.bos] == exporting.facts_of(run)["separator"]


KINDS = ("ctranslate2", "ctranslate2_int8", "huggingface", "stablehlo")
UNSEEN = ["a girl plays in the cold lake", "the old dog runs down a street at night"]


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """A translator that knows ten pairs, and its exports, by format."""
    folder = tmp_path_factory.mktemp("exports")
    corpus = write_corpus(folder / "corpus", TEN_PAIRS, TEN_PAIRS.values())
    succeed(training(folder / "run", **corpus | MEMORIZING))
    scoring = {"split": "val", "beam_size": 1}
    succeed(arguments("eval.py", workdir=folder / "run", **scoring))
    for kind in KINDS:
        to = f"{kind}:{folder / kind}"
        succeed(arguments("weights.py", workdir=folder / "run", to=to))
    return folder


def translated(folder):
    """The run, lines, and its translations of them."""
    run, lines = load(folder / "run"), [*TEN_PAIRS, *UNSEEN]
    texts = run.task.translate(run, lines)
    assert texts[: len(TEN_PAIRS)] == [*TEN_PAIRS.values()]
    return run, lines, texts


def card_of(folder) -> tuple[list[str], list[str]]:
    """What a model card installs, and its blocks of Python code."""
    card = (folder / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return re.search(r"^pip install (.*)$", card, re.MULTILINE)[1].split(), code


def required(names) -> dict:
    """The packages that pip installs for these names, with all that they require."""
    found, waiting = {}, [*names]
    while waiting:
        package = distribution(waiting.pop())
        if package.name not in found:
            found[package.name] = package
            needs = map(Requirement, package.requires or [])
            needs = [n for n in needs if not n.marker or n.marker.evaluate()]
            waiting += [need.name for need in needs]
    return found


def run_alone(code, folder, packages, lines=()) -> str:
    """Return what code prints where only some packages are installed.

    Args:
        lines: its standard input.
    """
    paths = {
        path.parts[0]: package.locate_file(path.parts[0])
        for package in required(packages).values()
        for path in package.files
        if path.parts[0] not in ("..", "__pycache__")
    }
    site = folder.parent / f"site-{'-'.join(packages)}"
    if not site.exists():
        site.mkdir()
        for name, path in paths.items():
            (site / name).symlink_to(path)
    start = f"import sys; sys.path.append({str(site)!r})\n"
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start + code],
        cwd=folder,
        capture_output=True,
        text=True,
        input="".join(f"{line}\n" for line in lines),
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_model_cards_translate_where_only_what_they_install_is(kind, exports):
    """Their code has the first sentence of the dev split."""
    packages, (code, *_) = card_of(exports / kind)
    assert not {"flax", "headcount"} & required(packages).keys()
    found = run_alone(code, exports / kind, packages)
    assert next(iter(TEN_PAIRS.values())) in found
    with pytest.raises(AssertionError, match="ModuleNotFoundError|ImportError"):
        run_alone(code, exports / kind, packages[1:])


GRADIO = """
import sys, types
sys.modules["gradio"] = types.ModuleType("gradio")

class Interface:
    def __init__(self, call, inputs, outputs):
        assert (inputs, outputs) == ("text", "text")
        self.call = call

    def launch(self):
        for line in sys.stdin:
            print(self.call(line.rstrip()))

sys.modules["gradio"].Interface = Interface
"""


def test_the_server_of_a_model_card_gets_a_function_that_translates(exports):
    """In place of Gradio something that reads standard input."""
    packages, code = card_of(exports / "ctranslate2")
    lines = [*TEN_PAIRS]
    served = "".join([GRADIO, *code])
    found = run_alone(served, exports / "ctranslate2", packages, lines).splitlines()
    assert found[-len(lines) :] == [*TEN_PAIRS.values()]


def test_model_cards_say_what_was_trained_and_scored(exports):
    card = (exports / "ctranslate2" / "README.md").read_text()
    (row,) = read(exports / "run", "result-val.json")
    commit = read(exports / "run", "run.json")["commit"]
    for words in (
        *("model.width = 64", "text, en to de", row["signatures"]["bleu"], commit),
        f"| {100 * row['exact_match']:.2f} |",
    ):
        assert words in card


def test_a_trained_run_translates_alike_in_ctranslate2(exports):
    run, lines, wanted = translated(exports)
    source, target = run.task.tokenizers
    encoded = source.encode(lines)
    sizes = {}
    for kind in ("ctranslate2", "ctranslate2_int8"):
        theirs = ctranslate2.Translator(str(exports / kind))
        found = []
        for ids in encoded:
            (result,) = theirs.translate_batch(
                [source.pieces(ids)],
                beam_size=1,
                max_decoding_length=2 * len(ids) + 15,  # ours ends with an EOS there
            )
            ids = [target._processor.piece_to_id(x) for x in result.hypotheses[0]]
            found += [target.decode(ids)]
        sizes[kind] = (exports / kind / "model.bin").stat().st_size
        # eight bits may change what an unseen sentence becomes
        number = len(TEN_PAIRS) if kind.endswith("int8") else len(lines)
        assert found[:number] == wanted[:number]
    assert sizes["ctranslate2_int8"] < sizes["ctranslate2"]


def test_a_trained_run_translates_alike_in_transformers(exports):
    run, lines, wanted = translated(exports)
    folder = exports / "huggingface"
    theirs = transformers.MarianMTModel.from_pretrained(folder).eval()
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    encoded = run.task.tokenizers[0].encode(lines)
    for line, ids, text in zip(lines, encoded, wanted, strict=True):
        batch = tokenizer([line], return_tensors="pt")
        assert batch["input_ids"][0].tolist() == ids.tolist()
        found = theirs.generate(**batch, max_new_tokens=2 * len(ids) + 15)
        (back,) = tokenizer.batch_decode(found, skip_special_tokens=True)
        assert back == text


def test_stablehlo_scores_and_decodes_where_ours_is_not_installed(exports):
    run, lines, texts = translated(exports)
    packages, (code,) = card_of(exports / "stablehlo")
    code += f"""
import json
found = generate(source.encode({lines}, add_eos=True), 60)
texts = [source.encode({lines}, add_eos=True), target.encode({texts}, add_eos=True)]
log_probs = program("score")(params, *padded(texts[0]), *padded(texts[1]))
print(json.dumps([found, np.asarray(log_probs).sum(1).tolist()]))
"""
    printed = run_alone(code, exports / "stablehlo", packages)
    tokens, sums = json.loads(printed.splitlines()[-1])
    scores = [score for score, _ in run.task.score(run, lines, texts)]
    np.testing.assert_allclose(sums, scores, rtol=1e-4, atol=1e-4)
    source, target = run.task.tokenizers
    for ids, of, text in zip(tokens, source.encode(lines), texts, strict=True):
        most = 2 * len(of) + 15  # ours ends with an EOS there
        assert [target.decode(ids[:most])] == [text]
