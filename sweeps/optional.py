"""Packages that only a part of the sweeps needs: requirements-sweeps.txt."""

import importlib


def package(name: str):
    """An optional package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(
            f"This needs the package {name}: pip install -r requirements-sweeps.txt"
        ) from None
