"""Hugging Face weights in and out, byte for byte; the peers' suite compares outputs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import sentencepiece
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headcount.data import tokenizers
from headcount.exchange import huggingface
from headcount.exchange.exporting import export, facts_of
from headcount.exchange.huggingface_config import settings_of
from headcount.exchange.importing import config_of, import_checkpoint, load_model, split
from headcount.exchange.marian import vocabulary_order
from headcount.training.run import load as load_run

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {
    "marian": {
        "model_type": "marian",
        "vocab_size": 40,
        "d_model": 8,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 12,
        "decoder_ffn_dim": 12,
        "activation_function": "swish",
        "max_position_embeddings": 64,
        "scale_embedding": True,
        "pad_token_id": 39,
        "decoder_start_token_id": 39,
        "eos_token_id": 0,
    },
    "bert": {
        "model_type": "bert",
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "hidden_act": "gelu",
        "max_position_embeddings": 16,
        "type_vocab_size": 2,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 20,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 16,
        "activation_function": "gelu_new",
    },
}
TEXT = ["the dog sees a cat", "a cat sees the dog", "dogs and cats", "a dog, a cat!"]


def tensors_of(family):
    """Random tensors of a checkpoint, by the names and shapes of Hugging Face."""
    rng = np.random.default_rng(0)
    settings = settings_of(CONFIGS[family])
    if family == "bert":
        settings |= {
            f"model.{key}": True
            for key in ("pooler", "output_transform", "output_bias")
        }
    if family == "marian":
        settings["data.vocab_size"] -= 1
    params = huggingface.named(split(config_of(settings))[1])
    arrays = {
        name: rng.normal(size=leaf.shape).astype(np.float32)
        for name, leaf in params.items()
    }
    return huggingface.to_huggingface(family, arrays)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of each family."""
    root = tmp_path_factory.mktemp("checkpoints")
    for family, config in CONFIGS.items():
        folder = root / family
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors_of(family), folder / "model.safetensors")
    model = tokenizers.train_sentencepiece(TEXT, 30)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [pieces.id_to_piece(i) for i in range(4, pieces.vocab_size())]
    names = ["</s>", "<unk>", *pieces[::-1], ">>de<<"]
    names += [f"unused{i}" for i in range(39 - len(names))] + ["<pad>"]
    vocabulary = {name: i for i, name in enumerate(names)}
    (root / "marian" / "vocab.json").write_text(json.dumps(vocabulary))
    for side in ("source", "target"):
        (root / "marian" / f"{side}.spm").write_bytes(model)
    return root


@pytest.mark.parametrize("family", CONFIGS)
def test_what_comes_in_goes_out_the_same(folders, family, tmp_path):
    generation = folders / family / "generation_config.json"
    generation.write_text('{"num_beams": 6}')
    import_checkpoint(folders / family, tmp_path / "run")
    export(tmp_path / "run", "huggingface", tmp_path / "out")
    assert (tmp_path / "out" / generation.name).read_text() == generation.read_text()
    there, back = (
        load_file(folder / "model.safetensors")
        for folder in (folders / family, tmp_path / "out")
    )
    assert there.keys() == back.keys()
    for which in ("last", "average"):
        model = huggingface.named(nnx.split(load_model(tmp_path / "run", which))[1])
        best = huggingface.named(nnx.split(load_model(tmp_path / "run"))[1])
        assert all(np.array_equal(x, best[name]) for name, x in model.items())
    for name, tensor in there.items():
        np.testing.assert_array_equal(tensor, back[name], err_msg=name)
    config = (tmp_path / "out" / "config.json").read_text()
    assert json.loads(config) == CONFIGS[family]
    for name in ("source.spm", "target.spm", "vocab.json"):
        path = folders / family / name
        if path.exists():
            assert (tmp_path / "out" / name).read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="holds a run already"):
        import_checkpoint(folders / family, tmp_path / "run")
    with pytest.raises(ValueError, match="is not empty"):
        export(tmp_path / "run", "huggingface", tmp_path / "out")


def test_every_parameter_has_its_own_place():
    """A transposed or swapped kernel would come back elsewhere than it should."""
    tensors = tensors_of("gpt2")
    settings = config_of(settings_of(CONFIGS["gpt2"]))
    params = huggingface.from_huggingface(
        "gpt2", tensors, huggingface.named(split(settings)[1])
    )
    fused = tensors["transformer.h.1.attn.c_attn.weight"]  # inputs × outputs
    key = params["decoder.1.self_attention.key"]
    np.testing.assert_array_equal(key[3, 1], fused[3, 8 + 4 : 8 + 8])
    tensors = tensors_of("bert")
    settings = settings_of(CONFIGS["bert"]) | huggingface.settings_of("bert", tensors)
    params = huggingface.from_huggingface(
        "bert", tensors, huggingface.named(split(config_of(settings))[1])
    )
    out = tensors["bert.encoder.layer.0.attention.output.dense.weight"]  # outputs × in
    merge = params["encoder.0.self_attention.merge.kernel"]
    np.testing.assert_array_equal(merge[1, 2], out[:, 4 + 2])
    params["encoder.0.self_attention.sink"] = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="attention.sink has no place in a bert check"):
        huggingface.to_huggingface("bert", params)


def test_imported_models_read_a_corpus_of_their_task():
    assert settings_of(CONFIGS["gpt2"])["data.name"] == "text"
    tensors = tensors_of("bert") | {"classifier.weight": np.zeros((3, 4), np.float32)}
    assert "bert.pooler.dense.weight" in tensors  # old taggers have one, too
    found = huggingface.settings_of("bert", tensors, is_tagger=True)
    assert found["task.name"] == "tagging"
    found = huggingface.settings_of("bert", tensors)
    assert found["task.name"] == "classification" and found["data.name"] == "labelled"


def test_gpt2_begins_with_its_bos_which_may_be_0():
    for change, bos in (({}, 19), ({"bos_token_id": 0}, 0), ({"bos_token_id": 7}, 7)):
        assert settings_of(CONFIGS["gpt2"] | change)["model.bos"] == bos


def test_names_of_old_and_headless_checkpoints():
    tensors = tensors_of("bert")
    old = {
        name.removeprefix("bert.")
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    old["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"]
    old["cls.seq_relationship.weight"] = np.zeros((2, 8), np.float32)
    found, left_out = huggingface.leave_out("bert", huggingface.full_names("bert", old))
    assert found.keys() == tensors.keys()
    assert left_out == ["cls.seq_relationship.weight"]
    tied = tensors_of("gpt2")
    tied["lm_head.weight"] = tied["transformer.wte.weight"] + 1
    with pytest.raises(ValueError, match="lm_head.weight must be equal to transf"):
        huggingface.full_names("gpt2", tied)


def test_marian_ids_are_ours(folders):
    folder = folders / "marian"
    vocabulary = json.loads((folder / "vocab.json").read_text())
    marian = tokenizers.MarianTokenizer(
        (folder / "source.spm").read_bytes(), vocabulary
    )
    assert marian.vocab_size == 41
    encoded = marian.encode(["the dog", ">>de<< a cat", "x", ""])
    own = tokenizers.SentencePieceTokenizer((folder / "source.spm").read_bytes())
    pieces = own.pieces(own.encode(["the dog"])[0])
    assert marian.pieces(encoded[0]) == pieces
    assert marian.decode(encoded[0]) == "the dog"
    assert marian.pieces(encoded[1])[0] == ">>de<<"
    assert tokenizers.UNK in encoded[2].tolist() and encoded[3].tolist() == [2]
    with pytest.raises(ValueError, match="<pad>"):
        tokenizers.marian_order({"</s>": 0, "<unk>": 1})
    with pytest.raises(ValueError, match="number its 4 pieces 0 to 3"):
        tokenizers.marian_order({"</s>": 0, "<unk>": 1, "<pad>": 2, "a": 2})


def command(*args, input=None):
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, capture_output=True, text=True, input=input
    )


def tune_and_export(run, tmp_path, vocabulary, scores, **settings):
    """What came in can be trained further, with its own vocabulary, and goes out.

    Args:
        vocabulary: the vocabulary's file, of the run and of the export.
        scores: function from a run to its scores of some text.
        settings: keys of the config.
    """
    tuned = tmp_path / "tuned"
    settings |= {"train.init_from": run, "train.num_steps": 2, "data.name": "text"}
    settings |= {"data.directory": tmp_path, "data.batch_tokens": 256}
    options = [f"--config.{key}={value}" for key, value in settings.items()]
    ran = command(
        "train.py", f"--config=configs/run.py:{run}", *options, f"--workdir={tuned}"
    )
    assert ran.returncode == 0, ran.stderr
    assert f"{run}, step 0" in ran.stderr
    theirs, ours = ((x / "tokenizer" / vocabulary).read_bytes() for x in (run, tuned))
    assert theirs == ours
    before, after = (load_run(folder, "last").params for folder in (run, tuned))
    shapes = [jax.tree.map(np.shape, params) for params in (before, after)]
    assert shapes[0] == shapes[1]
    moved = jax.tree.map(lambda x, y: float(abs(x - y).max()), before, after)
    assert 0 < max(jax.tree.leaves(moved)) < 0.01  # two steps of the warm-up
    out, again = tmp_path / "tuned_out", tmp_path / "again"
    for flags in (
        [f"--workdir={tuned}", f"--to=huggingface:{out}", "--checkpoint=last"],
        [f"--from={out}", f"--workdir={again}"],
    ):
        ran = command("weights.py", *flags)
        assert ran.returncode == 0, ran.stderr
    assert json.loads((out / vocabulary).read_bytes()) == json.loads(theirs)
    found = [scores(each) for each in (load_run(tuned, "last"), load_run(again))]
    np.testing.assert_allclose(*found, rtol=1e-4)
    return out


def translation_scores(run):
    return run.task.score(run, TEXT, TEXT, 0)


def write_bpe(path):
    """Write a byte-level BPE of single letters, with 20 tokens."""
    letters = {letter: i for i, letter in enumerate("thedogĠacsuvwxyzbnr")}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


def test_gpt2_is_fine_tuned_and_exported_again(folders, tmp_path):
    checkpoint, run = tmp_path / "gpt2", tmp_path / "run"
    shutil.copytree(folders / "gpt2", checkpoint)
    write_bpe(checkpoint / "tokenizer.json")
    imported = command("weights.py", f"--from={checkpoint}", f"--workdir={run}")
    assert imported.returncode == 0, imported.stderr
    for name, text in (("train", TEXT), ("val", TEXT[:1])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(text))

    def scores(run):
        # 16 positions: "the dog sees a c" and the like
        found = run.task.log_probabilities(run, [text[:16] for text in TEXT], 0, 0)
        return np.concatenate([of_tokens for _, of_tokens in found])

    settings = {"optimizer.learning_rate": 1e-4, "optimizer.warmup_steps": 2}
    settings |= {"optimizer.label_smoothing": 0, "optimizer.weight_decay": 0.1}
    out = tune_and_export(run, tmp_path, "tokenizer.json", scores, **settings)
    configuration = json.loads((out / "tokenizer_config.json").read_text())
    assert configuration["model_input_names"] == ["input_ids", "attention_mask"]
    assert configuration["bos_token"] == "<|endoftext|>"


def test_gpt2_searches_a_beam_for_one_line_too(folders, tmp_path):
    """Which can't be streamed. Each of its tokens may be generated."""
    run = tmp_path / "run"
    import_checkpoint(folders / "gpt2", run)
    (run / "tokenizer").mkdir()
    write_bpe(run / "tokenizer" / "tokenizer.json")
    found = facts_of(load_run(run, "last"))
    assert found["banned"] == [] and found["eos"] == found["bos"]
    flags = ["--beam_size=2", "--max_new_tokens=3"]
    ran = command("predict.py", f"--workdir={run}", *flags, input="the dog\n")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("the dog") and ran.stdout.count("\n") == 1


def test_the_command_lines(folders, tmp_path):
    run = tmp_path / "run"
    out = command("weights.py", f"--from={folders / 'marian'}", f"--workdir={run}")
    assert out.returncode == 0, out.stderr
    text = "the dog\n\na cat\n"
    lines = command("predict.py", f"--workdir={run}", "--beam_size=1", input=text)
    assert lines.returncode == 0, lines.stderr
    assert lines.stdout.count("\n") == 3 and lines.stdout.split("\n")[1] == ""
    for name, texts in (("train", TEXT), ("val", TEXT[:1])):
        (tmp_path / f"{name}.tsv").write_text("".join(f"{x}\t{x}\n" for x in texts))
    out = tune_and_export(run, tmp_path, "vocab.json", translation_scores)
    kept = run / "tokenizer" / "vocab.json"
    assert (out / "vocab.json").read_bytes() == kept.read_bytes()
    bert = tmp_path / "bert"
    import_checkpoint(folders / "bert", bert)
    refused = command("eval.py", f"--workdir={bert}", "--split=val")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "wordpiece.json" in refused.stderr
    other = ["--config=configs/numbers.py", f"--workdir={run}"]
    refused = command("train.py", *other)
    assert refused.returncode == 2 and "another config" in refused.stderr
    assert (run / "tokenizer" / "vocab.json").exists()


@pytest.mark.parametrize(
    "family, change, message",
    [
        ("gpt2", {"model_type": "llama"}, "model_type marian, bert, gpt2, got 'llama'"),
        ("gpt2", {"n_embd": None}, "n_embd must have a value, got None"),
        ("gpt2", {"n_head": "2"}, "n_head must be a whole number, got '2'"),
        ("gpt2", {"n_embd": 0}, "gpt2/config.json: model.(width|mlp_dim) must be"),
        ("gpt2", {"n_head": 3}, r"gpt2/config.json: .*num_heads must divide .*3 and 8"),
        (
            "gpt2",
            {"layer_norm_epsilon": "1e-5"},
            "epsilon must be a number, got '1e-5'",
        ),
        ("marian", {"vocab_size": "40"}, "vocab_size must be a whole number, got '40'"),
        ("marian", {"scale_embedding": 1}, "scale_embedding must be true or false"),
        ("gpt2", {"n_embd": 16}, r"wte.weight must have the shape \(20, 16\).*20, 8"),
        ("gpt2", {"n_layer": 3}, "has no transformer.h.2.ln_1.weight"),
        ("gpt2", {"n_layer": 1}, "transformer.h.1.* has no place in a gpt2 model"),
        ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings must be True"),
        ("bert", {"hidden_act": "mish"}, "hidden_act must be one of relu.*'mish'"),
        ("bert", {"is_decoder": True}, "is_decoder must be False for bert here"),
        ("bert", {"problem_type": "regression"}, "problem_type must be 'single_label"),
        ("marian", {"normalize_before": True}, "normalize_before must be False"),
        ("marian", {"decoder_ffn_dim": 16}, "the same here, got 12 and 16"),
        ("marian", {"pad_token_id": 1}, "decoder_start_token_id must be pad.*= 1"),
        ("marian", {"eos_token_id": 2}, "eos_token_id must be 0, the id of </s>"),
        (
            "marian",
            {"vocab_size": 50},
            "vocab.json must hold vocab_size = 50 .* got 40",
        ),
    ],
)
def test_bad_checkpoints_are_named(folders, family, change, message, tmp_path):
    folder = tmp_path / family
    folder.mkdir()
    for path in (folders / family).iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(CONFIGS[family] | change))
    with pytest.raises(ValueError, match=message):
        import_checkpoint(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_must_fit_the_embedding(folders, tmp_path):
    """Some embeddings are padded, to sizes that suit the hardware."""
    folder = shutil.copytree(folders / "gpt2", tmp_path / "gpt2")
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate("abc")}, []))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    message = r"tokenizer.json has 4 tokens, but the embedding has 20 rows.*\(4\)"
    with pytest.raises(ValueError, match=message):
        import_checkpoint(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_models_that_predict_a_number_are_refused():
    rows = np.zeros((1, 8), np.float32)
    tensors = {"bert.pooler.dense.weight": rows, "classifier.weight": rows}
    with pytest.raises(ValueError, match="classifier.weight has one row"):
        huggingface.settings_of("bert", tensors)


def test_missing_and_broken_files_are_named(folders, tmp_path):
    with pytest.raises(OSError, match="config.json"):
        import_checkpoint(tmp_path, tmp_path / "run")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json must hold an object"):
        import_checkpoint(tmp_path, tmp_path / "run")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match="config.json has no vocab_size"):
        import_checkpoint(tmp_path, tmp_path / "run")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gpt2"]))
    with pytest.raises(FileNotFoundError, match="must hold model.safetensors"):
        import_checkpoint(tmp_path, tmp_path / "run")
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="model.safetensors: it can't be read"):
        import_checkpoint(tmp_path, tmp_path / "run")
    header = b'{"x":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}'
    one_byte = len(header).to_bytes(8, "little") + header + b"0"
    (tmp_path / "model.safetensors").write_bytes(one_byte)
    with pytest.raises(ValueError, match="it can't be read: .*float8_e4m3fn"):
        import_checkpoint(tmp_path, tmp_path / "run")
    with pytest.raises(ValueError, match="eos_token_id must be 0, .* got None"):
        vocabulary_order(folders / "marian" / "vocab.json", {"pad_token_id": 39})
    with pytest.raises(FileNotFoundError, match="is no run|holds no run"):
        export(tmp_path / "none", "huggingface", tmp_path / "out")
