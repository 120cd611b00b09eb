"""Schemas of JSON files: types and ranges, checked when a file is read.

A schema is one of

    a type                a value of the type; int excludes bool, float includes int
    a Number              a number in a range
    a frozenset           one of its values
    Optional(schema)      null, or a value that matches the schema
    [schema]              a nonempty list of values that match the schema
    {key: schema, ...}    an object with at least these keys
    a function            a value for which it does not raise a ValueError
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

LARGEST = sys.float_info.max  # larger integers overflow when converted to float
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
}


class Number(NamedTuple):
    """A finite number of at least `low`, by default an integer."""

    low: float
    kind: type = int


class Optional(NamedTuple):
    """A value that may be null."""

    schema: Any


def matches(value, schema) -> bool:
    """Return whether a JSON value matches a schema."""
    return violation(value, schema) is None


def violation(value, schema, name: str = "it") -> str | None:
    """Describe where a JSON value does not match a schema; return None if it matches.

    Args:
        name: name of the value in the description.
    """
    if isinstance(schema, Optional):
        return None if value is None else violation(value, schema.schema, name)
    if isinstance(schema, Number):
        wrong = violation(value, schema.kind, name)
        if wrong is None and not value >= schema.low:
            return f"{name} must be at least {schema.low}, got {value}"
        return wrong
    if isinstance(schema, frozenset):
        if isinstance(value, str | int) and value in schema:
            return None
        choices = ", ".join(sorted(map(str, schema)))
        return f"{name} must be one of {choices}, got {shown(value)}"
    if isinstance(schema, list):
        return _in_list(value, schema[0], name)
    if isinstance(schema, dict):
        return _in_object(value, schema, name)
    if isinstance(schema, type):
        return _of_kind(value, schema, name)
    return _by_function(value, schema, name)


def _in_list(value, schema, name: str) -> str | None:
    if not isinstance(value, list) or not value:
        return f"{name} must be a list that is not empty, got {shown(value)}"
    of = "" if name == "it" else name
    violations = (violation(item, schema, f"{of}[{i}]") for i, item in enumerate(value))
    return next((wrong for wrong in violations if wrong), None)


def _in_object(value, schema: dict, name: str) -> str | None:
    if not isinstance(value, dict):
        return f"{name} must be an object, got {shown(value)}"
    of = "" if name == "it" else f"{name}."
    for key, subschema in schema.items():
        if key not in value:
            return f"{of}{key} is missing"
        if wrong := violation(value[key], subschema, f"{of}{key}"):
            return wrong
    return None


def _of_kind(value, kind: type, name: str) -> str | None:
    if isinstance(value, bool):
        fits = kind in (bool, object)
    else:
        fits = isinstance(value, int | float if kind is float else kind)
    if fits and isinstance(value, int | float) and not abs(value) <= LARGEST:
        return f"{name} must be finite, got {shown(value)}"
    if fits:
        return None
    return f"{name} must be {KINDS[kind]}, got {shown(value)}"


def _by_function(value, check: Callable, name: str) -> str | None:
    try:
        check(value)
    except ValueError as error:
        text = str(error).rstrip(".")
        return text if name == "it" else f"{name}: {text}"
    return None


def shown(value) -> str:
    """Format a value for a message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
