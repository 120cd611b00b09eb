"""From the name of an ablation to the arms that it yields."""

import contextlib
import importlib.util
import inspect
import json
import re
import traceback
from difflib import get_close_matches
from pathlib import Path

from ml_collections import ConfigDict

from headcount.configs import ablations
from headcount.configs.commandline import describe
from headcount.sweeps.plan import nuisance_keys


def find_ablation(name: str):
    """The generator of a name in configs/ablations.py, or of FILE.py:NAME."""
    module, where = ablations, "configs/ablations.py"
    if ":" in name:
        where, name = name.rsplit(":", 1)
        if not Path(where).is_file() or Path(where).suffix != ".py":
            raise ValueError(
                f"There is no Python file {where} to find the ablation in."
            )
        spec = importlib.util.spec_from_file_location("own_ablations", where)
        module = importlib.util.module_from_spec(spec)
        with naming(f"{where}:{name}"):
            spec.loader.exec_module(module)
    elif Path(name).suffix == ".py":
        raise ValueError(
            f"--ablation={name} must say which function of the file, as in {name}:depth"
        )
    names = names_of(module)
    if name not in names and callable(getattr(module, name, None)):
        raise ValueError(
            f"{name} in {where} is no ablation yet: its docstring lacks a line "
            f'"Scientific: ..." that says what is compared, see docs/sweeps.md.'
        )
    if name not in names:
        near = get_close_matches(name, names, n=1)
        meant = (
            f"did you mean {near[0]}?"
            if near
            else f"it has {', '.join(names) or 'none'}."
        )
        raise ValueError(f"There is no ablation {name!r} in {where}; {meant}")
    found = getattr(module, name)
    none = "(?i:none|nothing|Fixed:|Scientific:)"  # the latter: nothing in between
    named = re.search(rf"Nuisance:\s*(?!{none})\S", found.__doc__)
    if named and not nuisance_keys(found.__doc__):
        raise ValueError(
            f"The docstring of {name} in {where} must name config keys after "
            f'"Nuisance:", such as optimizer.learning_rate: without them, arms that '
            f"differ in those settings alone are compared as any others."
        )
    return found


def names_of(module) -> list[str]:
    """The ablations of a module: its functions that say what is scientific."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and "Scientific:" in (value.__doc__ or "")
    ]


def arms_of(settings: dict, generator) -> list[dict]:
    """What an ablation yields for a base config, as JSON has it.

    Raises:
        ValueError: the function fails, or yields something else than arms.
    """
    name = settings["ablation"]
    with naming(name):
        takes_base = bool(inspect.signature(generator).parameters)
        base = ConfigDict(settings["base"]).lock()
        arms = generator(base) if takes_base else generator()
        if arms is None:
            raise ValueError("It returns nothing; it must yield its arms.")
        arms = list(arms)
        for arm in arms:
            if not isinstance(arm, dict) or not all(isinstance(k, str) for k in arm):
                raise ValueError(
                    f"An arm must be a dict from config keys to values, as in "
                    f"{{'model.dropout': 0.1}}, got {arm!r}."
                )
            try:
                json.dumps(arm)
            except TypeError as error:
                raise ValueError(
                    f"The values of an arm must be plain numbers or words, got {arm!r} "
                    f"({error})."
                ) from None
    return json.loads(json.dumps(arms))


@contextlib.contextmanager
def naming(ablation: str, kinds=Exception):
    """Put an ablation's name, and its line at fault, before what is wrong with it.

    By default whatever its code, which is the user's, may raise.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, SyntaxError):
            lines, told = [error.lineno], f"This is not Python: {error.msg}."
        else:
            frames = traceback.extract_tb(error.__traceback__)
            file = Path(ablation.rsplit(":", 1)[0]).resolve()
            lines = [f.lineno for f in frames if Path(f.filename).resolve() == file]
            while error.args and isinstance(error.args[0], Exception):
                error = error.args[0]  # a locked config's unknown key
            is_key = isinstance(error, KeyError)
            told = " ".join(str(error.args[0]).split()) if is_key else describe(error)
            if not isinstance(error, ValueError):
                told = f"{type(error).__name__}: {told}"
        at = f", line {lines[-1]}" if lines else ""
        raise ValueError(f"--ablation={ablation}{at}: {told}") from error
