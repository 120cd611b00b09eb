"""Formatting of numbers for tables and sentences, and grouping of rows."""

import math
from collections.abc import Iterable

NOTHING = "–"


def count(number: int, noun: str) -> str:
    """Format a count with its noun: 1 arm, 2 arms."""
    return f"{number} {noun}{'s' * (number != 1)}"


def format_settings(values: dict) -> str:
    """Format config settings: learning_rate=0.002, dropout=0.1."""

    def text(value):  # integers in full: a seed may have many digits
        return f"{value:g}" if isinstance(value, float) else value

    parts = (f"{key.split('.')[-1]}={text(value)}" for key, value in values.items())
    return ", ".join(parts) or NOTHING


def number(value, spec: str = ".2f") -> str:
    """Format a number; None and NaN become a dash."""
    if value is None or math.isnan(value):
        return NOTHING
    return format(value, spec).replace("-", "−")


def signed(value, spec: str = ".2f") -> str:
    """Format a number with its sign."""
    return number(value, f"+{spec}")


def interval(low, high, spec: str = ".2f", form=number) -> str:
    """Format an interval."""
    return NOTHING if math.isnan(low) else f"{form(low, spec)} to {form(high, spec)}"


def p_value(p) -> str:
    """Format a p-value."""
    if p is None or math.isnan(p):
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def grouped(rows: Iterable[dict], *columns: str) -> dict[tuple, list[dict]]:
    """Group rows by the values of columns, in the order of first occurrence."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in columns), []).append(row)
    return groups
