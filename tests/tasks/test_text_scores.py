"""Scores of text against sacreBLEU and the files that Multi30k publishes."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table
from sacrebleu.metrics import BLEU, CHRF

from headcount.analysis.tables import heading, print_table
from headcount.data import numbers
from headcount.data.tokenizers import SentencePieceTokenizer, train_sentencepiece
from headcount.tasks.text_scores import (
    moses,
    paired_bootstrap,
    published,
    score,
    squad_scores,
)

MULTI30K = Path(__file__).resolve().parents[3] / "shared/data/multi30k"
needs_multi30k = pytest.mark.skipif(
    not MULTI30K.exists(), reason="Multi30k is not beside the project (never committed)"
)


def lines(name: str) -> list[str]:
    with gzip.open(MULTI30K / name, "rt", encoding="utf-8") as file:
        return file.read().removesuffix("\n").split("\n")


@needs_multi30k
@pytest.mark.parametrize("language", ["en", "de", "fr"])
def test_moses_reproduces_the_published_tokenisation(language):
    """All but at most one caption of the test set."""
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
    scores, signatures = published(hypotheses, references, "de")
    assert scores["published_bleu"] == pytest.approx(100)
    # all but one caption
    assert scores["published_chrf"] == pytest.approx(100, abs=0.01)
    assert all("moses:lc.norm.tok" in text for text in signatures.values())
    assert "tok:none" in signatures["published_bleu"]


@needs_multi30k
def test_published_scores_tokenise_by_the_rules_of_the_target_language():
    references = lines("tok/val.lc.norm.tok.de.gz")
    hypotheses = [line.replace("Hund", "Kater") for line in lines("raw/val.de.gz")]
    german, english = (published(hypotheses, references, x)[0] for x in ("de", "en"))
    assert german["published_bleu"] > english["published_bleu"]


REFERENCES = ["ein Hund läuft über die Wiese", "zwei Kinder spielen im Sand"]
NAMES = ("bleu", "chrf", "exact_match")


def test_references_score_100_against_themselves():
    scores, _ = score(REFERENCES, REFERENCES, NAMES)
    assert scores == {
        "bleu": pytest.approx(100),
        "chrf": pytest.approx(100),
        "exact_match": 1,
    }


def test_scores_and_signatures_equal_sacrebleu():
    hypotheses = [REFERENCES[0], "etwas anderes"]
    scores, signatures = score(hypotheses, REFERENCES, NAMES)
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        wanted = metric.corpus_score(hypotheses, [REFERENCES]).score
        assert 0 < wanted < 100 and scores[name] == wanted
        assert signatures[name] == str(metric.get_signature())
    assert scores["exact_match"] == 0.5


def test_only_the_scores_that_are_asked_for_are_computed():
    scores, signatures = score(REFERENCES, REFERENCES, {"exact_match", "bleu", "loss"})
    assert scores.keys() == {"exact_match", "bleu"} and signatures.keys() == {"bleu"}


def test_a_text_that_a_vocabulary_decodes_to_is_an_exact_match():
    references = numbers.phrases(range(90, 130), "te")  # their signs in another order
    references += ["ein  Hund\u00a0läuft ", "№ 5", "…"]
    made = SentencePieceTokenizer(train_sentencepiece(references, 300))
    hypotheses = [made.decode(ids) for ids in made.encode(references)]
    assert hypotheses != references
    found, _ = score(hypotheses, references, NAMES)
    assert found["exact_match"] == 1 and found["chrf"] < 99.9
    assert score(["ein Hund"], ["ein hund"], NAMES)[0]["exact_match"] == 0


def test_different_numbers_of_hypotheses_and_references_raise():
    with pytest.raises(ValueError, match="2 hypotheses.*3 references"):
        score(["a", "b"], ["a", "b", "c"], NAMES)


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_bootstrap_tells_worse_from_equal_systems(metric):
    """Every second number of one system is wrong; the other equals the baseline."""
    references = numbers.phrases(range(1000, 1200), "en")
    swapped = numbers.phrases(np.arange(1000, 1200)[::-1], "en")
    worse = [swapped[i] if i % 2 else text for i, text in enumerate(references)]
    systems = {"baseline": references, "same": references, "worse": worse}
    found = paired_bootstrap(systems, references, metric, samples=100)
    assert [found["baseline"][0], found["same"][0]] == pytest.approx([100, 100])
    assert found["baseline"][2] is None and found["same"][2] == 1
    assert found["worse"][0] == score(worse, references, {metric})[0][metric]
    assert found["worse"][1] > 0 and found["worse"][2] < 0.05


def test_bootstrap_of_one_system_has_an_interval_and_no_p_value():
    references = numbers.phrases(range(1000, 1100), "en")
    worse = [text if i % 3 else "nothing" for i, text in enumerate(references)]
    ((score_of, half, p),) = paired_bootstrap(
        {"only": worse}, references, "bleu", samples=100
    ).values()
    assert 0 < half < score_of < 100 and p is None


def test_columns_are_headed_by_the_last_parts_of_their_key():
    assert heading("optimizer.learning_rate") == "learning rate"
    assert heading("head_gates.cross.0.3") == "cross 0 3"


@pytest.mark.parametrize("terminal", [False, True])
def test_no_cell_of_a_table_is_cut_off(terminal, capsys, monkeypatch):
    """Long names stay distinct, on a terminal (in several lines) and in a file."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    table = Table("arm", "parameters", "multiply-adds per token")
    name = "num_encoder_layers_of_the_second_stack=4"
    table.add_row(name, "953,088", "1,008,640")
    print_table(table)
    printed = capsys.readouterr().out
    assert (name in printed) != terminal
    first = [line.split("│")[1].strip() for line in printed.splitlines() if "│" in line]
    assert "".join(first) == name


def test_rouge_of_sentences_by_hand():
    """F1 of unigrams, bigrams and the longest common subsequence: means over texts."""
    hypotheses = ["the cat sat on a mat", "nothing"]
    references = ["the cat was on the mat", "all of it"]
    scores, signatures = score(hypotheses, references, {"rouge1", "rouge2", "rougeL"})
    # common: the cat on mat; the cat; the cat on mat. Of 6 words and 5 bigrams each.
    assert scores["rouge1"] == pytest.approx(100 * (4 / 6) / 2)
    assert scores["rouge2"] == pytest.approx(100 * (1 / 5) / 2)
    assert scores["rougeL"] == pytest.approx(100 * (4 / 6) / 2)
    assert scores.keys() == signatures.keys()
    assert score(hypotheses, hypotheses, {"rougeL"})[0]["rougeL"] == 100


@pytest.mark.parametrize(
    "hypothesis, reference, exact, f1",
    [
        ("The  Rhine.", "rhine", 1, 1),
        ("the Rhine river", "Rhine", 0, 2 / 3),
        ("in 1998, in May", "in May 1998", 0, 6 / 7),
        ("an", "", 1, 1),
        ("Bonn", "the", 0, 0),
        ("Bonn", "Cologne", 0, 0),
        # as SQuAD's script has it, where words end at any punctuation
        ("Rhine–the Ruhr", "Rhine– Ruhr", 1, 1),
        ("theatre", "atre", 0, 0),
    ],
)
def test_squad_scores_by_hand(hypothesis, reference, exact, f1):
    """Articles, case and punctuation do not count; repeated words count once."""
    found = squad_scores(hypothesis, reference)
    assert found == (exact, pytest.approx(f1))
    names = {"squad_f1", "squad_exact_match"}
    scores, _ = score([hypothesis, "b"], [reference, "b"], names)
    assert scores["squad_exact_match"] == (exact + 1) / 2
    assert scores["squad_f1"] == pytest.approx((f1 + 1) / 2)
