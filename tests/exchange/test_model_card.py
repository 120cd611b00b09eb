"""The scores on the card of an exported model."""

import json

from headcount.exchange.model_card import scores
from headcount.tasks.base import Metric

METRICS = Metric("bleu", "BLEU"), Metric("exact", "exact match", "%", format=".1f")


def row(trial, seed, bleu, dropout=0.1, diverged_at=None):
    found = {"trial": trial, "seed": seed, "model.dropout": dropout}
    found |= {"split": "test", "checkpoint": "best", "diverged_at": diverged_at}
    return found | {"options": {}, "signatures": {}, "bleu": bleu, "exact": bleu / 100}


def test_the_mean_is_over_other_seeds_of_the_same_model(tmp_path):
    """Not over other settings, nor over trials that diverged."""
    rows = [row(0, 0, 30.0), row(1, 1, 32.0), row(2, 0, 10.0, dropout=0.5)]
    rows.append(row(3, 2, 1.0, diverged_at=7))
    (tmp_path / "result-test.json").write_text(json.dumps(rows))
    lines = scores(tmp_path, METRICS, 1, {"seed": 1, "model.dropout": 0.1})
    bleu, exact = (line.split(" | ") for line in lines[2:])
    assert bleu[1:3] == ["BLEU", "32.00"] and bleu[3].startswith("31.00, ")
    assert exact[1:3] == ["exact match (%)", "32.0"] and "2 trials" in exact[3]
    (_, _, line, _) = scores(tmp_path, METRICS, 3, {"seed": 2, "model.dropout": 0.2})
    assert line.endswith("| 1.00 | – |")
