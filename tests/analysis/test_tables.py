"""The tables that eval.py and heads.py print."""

import numpy as np
import pytest
from rich.table import Table
from scipy import stats

from headcount.analysis.tables import print_pruning, print_scores, print_table
from headcount.tasks.base import LOSS, Metric

BLEU, CHRF = Metric("bleu", "BLEU"), Metric("chrf", "chrF")
EXACT = Metric("exact_match", "exact match", "%")
ROW = {"split": "test", "checkpoint": "best", "step": 9, "diverged_at": None}
ROW |= {"signatures": {}, "options": {}}


def test_every_metric_and_its_signature_is_printed(capsys):
    row = ROW | {"trial": 0, "bleu": 31.25, "chrf": 55.5, "exact_match": 0.25}
    row |= {"loss": 1.5, "signatures": {"bleu": "of:bleu", "chrf": "of:chrf"}}
    print_scores([row], (BLEU, CHRF, EXACT, LOSS), [], "result-test.json")
    printed = capsys.readouterr().out
    for cell in ("31.25", "55.50", "25.00%", "1.5000", "bleu: of:bleu", "chrf: of:chr"):
        assert cell in printed


def test_the_metric_that_chose_the_best_checkpoint_is_named(capsys):
    row = ROW | {"trial": 0, "bleu": 31.25}
    print_scores([row], (BLEU,), [], "result-test.json", LOSS)
    assert "by dev loss" in " ".join(capsys.readouterr().out.split())
    last = row | {"checkpoint": "last"}
    print_scores([last], (BLEU,), [], "result-test.json", LOSS)
    assert "by dev" not in capsys.readouterr().out


def test_text_in_brackets_is_printed_as_it_is(capsys):
    """Otherwise rich takes it for markup, and fails at what looks like an end tag."""
    print_table(Table("label", "count", title="[a]"))
    table = Table("label")
    table.add_row("[/b] [spam]")
    print_table(table)
    printed = capsys.readouterr().out
    assert "[a]" in printed and "[/b] [spam]" in printed


def test_the_mean_is_over_trials_that_did_not_diverge(capsys):
    rows = [
        ROW | {"trial": trial, "bleu": bleu, "diverged_at": at}
        for trial, (bleu, at) in enumerate([(30.0, None), (32.0, None), (1.0, 5)])
    ]
    print_scores(rows, (BLEU,), [], "result-test.json")
    printed = capsys.readouterr().out.splitlines()
    (line,) = [line for line in printed if "mean of 2" in line]
    assert " 31.00 " in line


def test_means_are_over_trials_that_differ_only_in_their_seed(capsys):
    settings = [(0, 0.1), (1, 0.1), (0, 0.2), (1, 0.2), (2, 0.3)]
    rows = [
        ROW
        | {"trial": trial, "seed": seed, "model.dropout": dropout, "bleu": 10.0 * trial}
        for trial, (seed, dropout) in enumerate(settings)
    ]
    print_scores(rows, (BLEU,), ["seed", "model.dropout"], "result-test.json")
    printed = capsys.readouterr().out
    means = [line for line in printed.splitlines() if "mean of 2" in line]
    assert len(means) == 2 and "mean of 5" not in printed
    assert "0.1" in means[0] and "5.00" in means[0]
    assert "0.2" in means[1] and "25.00" in means[1]


@pytest.mark.parametrize("metric, cell", [(EXACT, " 50.00"), (LOSS, " 3.0000 ± ")])
def test_scores_without_heads_have_half_of_their_interval(capsys, metric, cell):
    rows = [
        {"order": "random", "removed": 0, "heads": 4, "split": "test", "loss": loss}
        | {"ranked_on": "val", "trial": trial, "exact_match": 0.5, "site": None}
        for trial, loss in enumerate((1.0, 2.0, 6.0))
    ]
    print_pruning(rows, metric, "pruning-test.json")
    printed = capsys.readouterr().out
    half = stats.t.ppf(0.975, 2) * np.std([1, 2, 6], ddof=1) / np.sqrt(3)
    assert cell in printed and f" 3.0000 ± {half:.4f} " in printed


def test_a_metric_without_a_value_is_left_out(capsys):
    """The context gain has none where windows overlap."""
    rows = [ROW | {"trial": t, "loss": 1.5, "chrf": None} for t in (0, 1)]
    print_scores(rows, (LOSS, CHRF), [], "result-test.json")
    printed = capsys.readouterr().out
    assert "1.5000" in printed and "chrF" not in printed
