"""Tagged words: CoNLL columns and CoNLL-U files, and errors that name the line."""

from pathlib import Path

import pytest

from headcount.data.columns import Sentence, load

SHARED = Path(__file__).resolve().parents[3] / "shared/data"
needs_ewt, needs_wnut = (
    pytest.mark.skipif(
        not (SHARED / name).is_dir(), reason=f"{name} is not beside the project"
    )
    for name in ("ud_ewt", "wnut17")
)
CONLLU = """# newdoc id = a
# text = vámonos al mar.
1-2\tvámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tvamos\tir\tVERB\tV\tMood=Imp|Number=Plur\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\tP\tCase=Acc\t1\tobj\t_\t_
2.1\tgone\tgo\tVERB\tV\t_\t_\t_\t_\t_
3\tmar\tmar\tNOUN\tN\t_\t1\tobl\t_\tSpaceAfter=No

1\tNo\tno\tINTJ\tI\tPolarity=Neg\t0\troot\t_\t_
"""


def write(folder, content, name="train.conllu"):
    (folder / name).write_bytes(content.encode())
    return str(folder)


@pytest.mark.parametrize(
    "tag, tags",
    [
        ("upos", [["VERB", "PRON", "NOUN"], ["INTJ"]]),
        ("xpos", [["V", "P", "N"], ["I"]]),
        ("relation", [["root", "obj", "obl"], ["root"]]),
        ("feature:Number", [["Plur", "_", "_"], ["_"]]),
        ("feature:Case", [["_", "Acc", "_"], ["_"]]),
    ],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_conllu_words_have_the_tag_that_is_chosen(tmp_path, tag, tags, ending):
    """Comments, multiword tokens and empty nodes are no words."""
    folder = write(tmp_path, CONLLU.replace("\n", ending))
    words = [["vamos", "nos", "mar"], ["No"]]
    wanted = [Sentence(*each) for each in zip(words, tags, strict=True)]
    assert load("conllu", "train", folder, tag) == wanted


def test_conll_words_have_the_tag_of_the_last_column(tmp_path):
    text = "-DOCSTART- -X- O\n\n\nEU NNP B-ORG\n#tag\tNN O\r\n \nno I"
    folder = write(tmp_path, text, "eng.train.conll")
    assert load("conll", "train", folder, "upos") == [
        Sentence(["EU", "#tag"], ["B-ORG", "O"]),
        Sentence(["no"], ["I"]),
    ]


@pytest.mark.parametrize("name", ["en-dev.conllu", "valid.conllu", "val.conllu"])
def test_the_val_split_may_be_called_dev_or_valid(tmp_path, name):
    for other in ("evaluation.conllu", "latest.conllu", "intervals.txt"):
        write(tmp_path, CONLLU, other)
    assert len(load("conllu", "val", write(tmp_path, CONLLU, name), "upos")) == 2


@pytest.mark.parametrize(
    "content, tag, culprit",
    [
        (CONLLU, "upo", "data.tag must be one of upos, .*'upo'"),
        ("1\ta\tb\n", "upos", "train.conllu, line 1, has 3 "),
        (CONLLU.replace("Acc\t1", "Acc 1"), "upos", "train.conllu, line 5, has 9 "),
        ("1\t \t" + 7 * "_\t" + "_\n", "upos", "train.conllu, line 1, has no word"),
        ("# nothing\n\n", "upos", "train.conllu has no sentences"),
    ],
)
def test_a_malformed_conllu_file_raises_with_the_line(tmp_path, content, tag, culprit):
    with pytest.raises(ValueError, match=culprit):
        load("conllu", "train", write(tmp_path, content), tag)


def test_columns_with_tabs_may_have_blanks_inside(tmp_path):
    text = "New York\tx y\tB-LOC\n10\u00a0000\tO\n \n"
    (sentence,) = load("conll", "train", write(tmp_path, text, "train.conll"), "upos")
    assert sentence == Sentence(["New York", "10\u00a0000"], ["B-LOC", "O"])


def test_a_conll_line_without_a_tag_raises_with_the_line(tmp_path):
    folder = write(tmp_path, "a B\n\nc\n", "train.txt")
    with pytest.raises(ValueError, match="train.txt, line 3, has one column"):
        load("conll", "train", folder, "upos")


def test_a_missing_or_ambiguous_file_of_a_split_raises(tmp_path):
    with pytest.raises(ValueError, match="conll .*data.directory"):
        load("conll", "train", None, "upos")
    with pytest.raises(ValueError, match="data.name.* conll, conllu .*'conlu'"):
        load("conlu", "train", str(tmp_path), "upos")
    with pytest.raises(FileNotFoundError, match=r"nowhere \(data.directory\)"):
        load("conll", "train", str(tmp_path / "nowhere"), "upos")
    folder = write(tmp_path, CONLLU)
    with pytest.raises(FileNotFoundError, match="'val'.* val or dev.* train.conllu"):
        load("conllu", "val", folder, "upos")
    write(tmp_path, CONLLU, "more-train.conll")
    with pytest.raises(ValueError, match="'train': more-train.conll, train.conllu"):
        load("conllu", "train", folder, "upos")


@needs_ewt
def test_universal_dependencies_have_the_17_tags():
    """universaldependencies.org/u/pos; sentences per split from stats.xml."""
    found = {
        split: load("conllu", split, str(SHARED / "ud_ewt"), "upos")
        for split in ("train", "val", "test")
    }
    tags = {tag for split in found.values() for s in split for tag in s.tags}
    assert tags == {
        "ADJ",
        "ADP",
        "ADV",
        "AUX",
        "CCONJ",
        "DET",
        "INTJ",
        "NOUN",
        "NUM",
        "PART",
        "PRON",
        "PROPN",
        "PUNCT",
        "SCONJ",
        "SYM",
        "VERB",
        "X",
    }
    assert {k: len(v) for k, v in found.items()} == {
        "train": 12_544,
        "val": 2_001,
        "test": 2_077,
    }


@needs_wnut
@pytest.mark.parametrize(
    "split, posts, tokens",
    [("train", 3_394, 62_730), ("val", 1_009, 15_733), ("test", 1_287, 23_394)],
)
def test_wnut17_has_the_published_numbers_of_posts_and_tokens(split, posts, tokens):
    """Derczynski et al. 2017, table 2."""
    found = load("conll", split, str(SHARED / "wnut17"), "upos")
    assert len(found) == posts and sum(len(s.words) for s in found) == tokens
    assert {tag for s in found for tag in s.tags} <= {"O"} | {
        f"{place}-{kind}"
        for place in "BI"
        for kind in (
            *("corporation", "creative-work", "group"),
            *("location", "person", "product"),
        )
    }
