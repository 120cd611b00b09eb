"""weights.py --to: tokenizers in the form of another library."""

import shutil

import pytest

from headcount.data import tokenizers
from headcount.data.encoder_tokenizers import AffixTokenizer
from headcount.exchange.tokenizer_json import tokenizer_json
from headcount.runtime.workdir import read_json, write_json
from tests.runs import fails

TEXTS = [
    "To be, or not to be:\nthat is  the question.\n\n“quoted” ﬁne",
    "a\tb  c ",
    " x",
    "forty-five thousand",
    "",
]


@pytest.mark.parametrize(
    "kind", ["sentencepiece", "documents", "characters", "words", "bytes"]
)
def test_a_tokenizer_json_gives_the_same_ids_and_text(kind):
    from tokenizers import Tokenizer

    made = {
        "sentencepiece": lambda: tokenizers.SentencePieceTokenizer(
            tokenizers.train_sentencepiece(TEXTS * 3, 70)
        ),
        "documents": lambda: tokenizers.SentencePieceTokenizer(
            tokenizers.train_on_documents([*TEXTS * 3, "a\n  b\tc\n"], 70)
        ),
        "characters": lambda: tokenizers.TableTokenizer(
            sorted(set("".join(TEXTS))), ""
        ),
        "words": lambda: tokenizers.TableTokenizer(
            sorted(set(" ".join(TEXTS).split())), " "
        ),
        "bytes": tokenizers.ByteTokenizer,
    }
    ours = made[kind]()
    theirs = Tokenizer.from_str(tokenizer_json(ours))
    for text in [*TEXTS, *["\n a  b\n\n"] * (kind == "documents")]:
        ids = ours.encode([text], eos=False)[0].tolist()
        assert theirs.encode(text).ids == ids
        assert theirs.decode(ids) == ours.decode(ids)
    assert ours.encode(["☃"], eos=False)[0].tolist() == theirs.encode("☃").ids


def test_a_word_named_like_a_special_token_has_no_tokenizer_json():
    """Both would have one id, and the ids of others would shift."""
    with pytest.raises(NotImplementedError, match="<unk>"):
        tokenizer_json(tokenizers.TableTokenizer(["a", "<unk>"], " "))


def test_a_tokenizer_with_features_has_no_tokenizer_json():
    with pytest.raises(NotImplementedError, match="AffixTokenizer"):
        tokenizer_json(AffixTokenizer(["word a", "prefix a"]))


def set_positions(run):
    config = read_json(run / "config.json")
    config["model"]["positions"] = "rotary"
    write_json(run / "config.json", config)


def stop(run):
    write_json(run / "run.json", read_json(run / "run.json") | {"status": "stopped"})


def fill(run):
    (run.parent / "out").mkdir()
    (run.parent / "out" / "mine.txt").write_text("mine")


@pytest.mark.parametrize(
    "kind, trial, change, culprits",
    [
        ("huggingface", 1, set_positions, ["model.positions", "rotary"]),
        ("stablehlo", 1, stop, ["--checkpoint=last", "stopped"]),
        ("stablehlo", None, None, ["--trial", "2 trials"]),
        ("stablehlo", 2, None, ["--trial must be below 2"]),
        ("stablehlo", 1, fill, ["out", "is not empty"]),
        ("onnx", 1, None, ["FORMAT:FOLDER", "onnx"]),
    ],
)
def test_what_cannot_be_exported_is_named_and_nothing_is_written(
    kind, trial, change, culprits, trained, call, tmp_path
):
    workdir, out = shutil.copytree(trained, tmp_path / "run"), tmp_path / "out"
    if change is not None:
        change(workdir)
    before = sorted(tmp_path.rglob("*"))
    fails(
        call("weights.py", workdir=workdir, to=f"{kind}:{out}", trial=trial), *culprits
    )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "flags, culprits",
    [
        ({"to": "stablehlo:OUT", "heads": "cross.0.0"}, ["--heads", "--prune"]),
        ({"from": "OUT", "trial": 1}, ["--trial", "--to and --prune"]),
        ({"from": "gpt2"}, ["--from=gpt2 is not a folder", "hf download"]),
        ({"from": "OUT", "checkpoint": "last"}, ["--checkpoint", "--to and --prune"]),
        ({"prune": "OUT", "heads": "cross.0.0"}, ["OUT is not empty"]),
        ({"to": "stablehlo:OUT", "directory": "x"}, ["--directory has no meaning"]),
        ({"to": "stablehlo:OUT", "task_file": "x.py"}, ["x.py"]),
    ],
)
def test_a_flag_without_a_meaning_or_a_full_folder_is_named(
    flags, culprits, trained, call, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "OUT").mkdir()
    (tmp_path / "OUT" / "mine.txt").write_text("mine")
    fails(call("weights.py", workdir=trained, **flags), *culprits)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["OUT", "mine.txt"]
