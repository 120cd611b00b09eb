"""Which cases of a parametrized test `make test` runs."""

from collections.abc import Collection, Iterable

import pytest


def slow_but(quick: Collection, cases: Iterable) -> list:
    """Mark all cases slow that are not in `quick`; a tuple has several arguments."""
    return [
        case
        if case in quick
        else pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow
        )
        for case in cases
    ]
