"""Scores against the files of Multi30k and against what must hold of any score."""

import gzip
from pathlib import Path

import pytest
from rich.table import Table
from sacrebleu.metrics import BLEU, CHRF

from headcount.analysis.tables import heading, print_table
from headcount.data import numbers
from headcount.data.tokenizer import Tokenizer, train
from headcount.tasks.scores import moses, published_scores, scores

MULTI30K = Path(__file__).resolve().parents[2] / "shared/data/multi30k"
needs_multi30k = pytest.mark.skipif(
    not MULTI30K.exists(), reason="Multi30k is not beside the project (never committed)"
)


def lines(name: str) -> list[str]:
    with gzip.open(MULTI30K / name, "rt", encoding="utf-8") as file:
        return file.read().removesuffix("\n").split("\n")


@needs_multi30k
@pytest.mark.parametrize("language", ["en", "de", "fr"])
def test_published_tokenisation_is_reproduced(language):
    """All but one caption of the test set come out as the publisher made them."""
    ours = moses(lines(f"raw/test_2016_flickr.{language}.gz"), language)
    theirs = lines(f"tok/test_2016_flickr.lc.norm.tok.{language}.gz")
    different = [
        pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1].strip()
    ]
    assert len(different) <= 1


@needs_multi30k
def test_references_score_100_in_the_published_protocol():
    references = lines("tok/test_2016_flickr.lc.norm.tok.de.gz")
    hypotheses = lines("raw/test_2016_flickr.de.gz")
    got = published_scores(hypotheses, references, "de")
    assert got["published_bleu"] == pytest.approx(100)
    assert got["published_chrf"] == pytest.approx(100, abs=0.01)  # all but one caption
    assert "moses:lc.norm.tok" in got["published_chrf_signature"]
    assert "tok:none" in got["published_signature"]


def test_scores():
    references = ["ein Hund läuft über die Wiese", "zwei Kinder spielen im Sand"]
    perfect = scores(references, references)
    assert perfect["bleu"] == pytest.approx(100)
    assert perfect["chrf"] == pytest.approx(100)
    assert perfect["exact_match"] == 1
    half = scores([references[0], "etwas anderes"], references)
    assert half["exact_match"] == 0.5
    assert 0 < half["bleu"] < 100
    assert "tok:13a" in half["signature"] and "nc:6" in half["chrf_signature"]
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        got = metric.corpus_score([references[0], "etwas anderes"], [references])
        assert half[name] == got.score
        key = {"bleu": "signature", "chrf": "chrf_signature"}[name]
        assert half[key] == str(metric.get_signature())
    without = scores(references, references, chrf=False)
    assert without.keys() == {"bleu", "exact_match", "signature"}


def test_a_translation_is_exact_if_it_is_what_a_vocabulary_makes_of_the_reference():
    references = numbers.phrases(range(90, 130), "te")  # their signs in another order
    references += ["ein  Hund\u00a0läuft ", "№ 5", "…"]
    made = Tokenizer(train(references, 300))
    hypotheses = made.decode_many(made.encode(references))
    assert hypotheses != references
    found = scores(hypotheses, references)
    assert found["exact_match"] == 1 and found["chrf"] < 99.9
    assert scores(["ein Hund"], ["ein hund"])["exact_match"] == 0


def test_as_many_hypotheses_as_references():
    with pytest.raises(ValueError, match="2 translations.*3 references"):
        scores(["a", "b"], ["a", "b", "c"])


def test_columns_are_headed_by_what_they_are_of():
    assert heading("optimizer.learning_rate") == "learning rate"
    assert heading("head_gates.cross.0.3") == "cross 0 3"


@pytest.mark.parametrize("terminal", [False, True])
def test_no_cell_of_a_table_is_cut_off(terminal, capsys, monkeypatch):
    """Or arms that begin alike look the same, on a terminal or in a file."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    table = Table("arm", "parameters", "multiply-adds a token")
    name = "num_encoder_layers_of_the_second_stack=4"
    table.add_row(name, "953,088", "1,008,640")
    print_table(table)
    printed = capsys.readouterr().out
    assert (name in printed) != terminal
    first = [line.split("│")[1].strip() for line in printed.splitlines() if "│" in line]
    assert "".join(first) == name
