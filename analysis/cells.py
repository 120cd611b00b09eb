"""Numbers as a report's cells and sentences have them."""

import math
from functools import partial

from analysis.significance import MOST_SEEDS

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
