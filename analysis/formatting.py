"""Numbers as a report's cells and sentences have them."""

import math
from functools import partial

import numpy as np

from headcount.analysis.significance import MOST_SEEDS

NOTHING = "–"


def counted(count: int, noun: str) -> str:
    """How many there are of something."""
    return f"{count} {noun}{'s' * (count != 1)}"


def seeds_told(needed: float | None) -> str:
    """How many seeds are needed, in a cell or a sentence."""
    if needed is None:
        return NOTHING
    return f"> {MOST_SEEDS:,}" if math.isinf(needed) else str(needed)


def settings(values: dict) -> str:
    """Settings in a cell."""

    def told(value):
        return f"{value:g}" if isinstance(value, int | float) else value

    cells = (f"{key.split('.')[-1]}={told(value)}" for key, value in values.items())
    return ", ".join(cells) or NOTHING


def number(value, digits: int = 2, sign: str = "") -> str:
    """A number in a cell; a dash where there is none."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:{sign}.{digits}f}".replace("-", "−")


signed = partial(number, sign="+")  # a difference


def span(low, high, form=number) -> str:
    """An interval in a cell."""
    return NOTHING if math.isnan(low) else f"{form(low)} to {form(high)}"


def probability(p) -> str:
    """A p-value in a cell."""
    if p is None or math.isnan(p):
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def of_100(score: str, values):
    """Values of a score, the share that is exact in per cent as the others are."""
    return 100 * values if score == "exact_match" else values


def score_without(rows: list[dict], order: str, removed: int, score: str) -> np.ndarray:
    """A score with so many heads removed: a number a trial, the mean of its draws.

    Of one trial a number a draw, for the spread of chance. The rows are of
    `analysis.pruning.curve`.
    """
    trials = {}
    for row in rows:
        if (row["order"], row["removed"]) == (order, removed):
            trials.setdefault(row["trial"], []).append(row[score])
    found = of_100(score, np.array(list(trials.values()), float))
    return found[0] if len(found) == 1 else found.mean(1)


def heads_of(rows: list[dict]) -> str:
    """What may go in rows of `analysis.pruning.curve`: "heads", or "decoder heads"."""
    return " ".join(filter(None, (rows[0]["site"], "heads")))
