"""Ablations: functions that yield the arms of a sweep, described by their docstrings.

An ablation's code runs only if its name is given on the command line. A workdir stores
the arms, never the code.
"""

import contextlib
import importlib.util
import inspect
import json
import re
import traceback
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from ml_collections import ConfigDict

from headcount.attention import MERGE_RULES
from headcount.configs import ablations
from headcount.configs.commandline import describe
from headcount.configs.validation import known_keys, near_miss
from headcount.runtime.logging import say
from headcount.sweeps.labels import MATCH, name_arms
from headcount.sweeps.plan import apply_overrides, name_arm_in_errors
from headcount.sweeps.search import unique
from headcount.tasks import TASKS
from headcount.training.checks import check_config


def find_ablation(name: str) -> Callable:
    """Return the ablation NAME of configs/ablations.py, or FUNCTION of FILE.py.

    Args:
        name: value of --ablation: NAME or FILE.py:FUNCTION.

    Raises:
        ValueError: there is no such file or function, it fails to import, or its
            docstring lacks "Scientific:" or names no config keys after "Nuisance:".
    """
    module, file = ablations, "configs/ablations.py"
    if ":" in name:
        file, name = name.rsplit(":", 1)
        module = _import(file, name)
    elif Path(name).suffix == ".py":
        raise ValueError(
            f"--ablation={name} must name a function of the file, as in {name}:depth."
        )
    names = ablation_names(module)
    if name not in names and callable(getattr(module, name, None)):
        raise ValueError(
            f"--ablation: the docstring of {name} in {file} needs a line "
            f'"Scientific: ..." that says what is compared; see docs/guides/sweeps.md.'
        )
    if name not in names:
        close = get_close_matches(name, names, n=1)
        hint = (
            f"did you mean {close[0]}?"
            if close
            else f"it has {', '.join(names) or 'none (see docs/guides/sweeps.md)'}."
        )
        raise ValueError(f"--ablation: {file} has no ablation {name!r}; {hint}")
    function = getattr(module, name)
    # "none" and an empty list are fine; anything else must contain config keys
    none = "(?i:none|nothing|Fixed:|Scientific:)"
    has_text = re.search(rf"Nuisance:\s*(?!{none})\S", function.__doc__)
    if has_text and not nuisance_keys(function.__doc__):
        raise ValueError(
            f"--ablation: the docstring of {name} in {file} must list config keys "
            f'after "Nuisance:", such as optimizer.learning_rate. Otherwise arms that '
            f"differ only in those settings would be compared with each other."
        )
    for key in nuisance_keys(function.__doc__):
        if key not in known_keys():
            raise ValueError(
                f"--ablation: the docstring of {name} in {file} lists {key} after "
                f'"Nuisance:", which is not a config key.{near_miss(key)}'
            )
    return function


def _import(file: str, function: str) -> ModuleType:
    """Execute a file that the user named on the command line.

    Raises:
        ValueError: this fails, or adds a task or a merge rule that --task_file has not.
    """
    if not Path(file).is_file() or Path(file).suffix != ".py":
        raise ValueError(f"--ablation: there is no Python file {file}.")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    registered = {*TASKS, *MERGE_RULES}
    with name_in_errors(f"{file}:{function}"):
        spec.loader.exec_module(module)
    if added := {*TASKS, *MERGE_RULES} - registered:
        raise ValueError(
            f"--ablation={file}:{function} adds {', '.join(sorted(added))}, which the "
            f"processes that train would not know; add --task_file={file}."
        )
    return module


def ablation_names(module: ModuleType) -> list[str]:
    """List the functions of a module whose docstring has a line "Scientific: ..."."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and "Scientific:" in (value.__doc__ or "")
    ]


def nuisance_keys(docstring: str) -> list[str]:
    """List the config keys after "Nuisance:" in an ablation's docstring."""
    end = r"Fixed:|Scientific:|\n\s*\n|$"
    match = re.search(f"Nuisance:(.*?)(?:{end})", docstring, re.DOTALL)
    return re.findall(r"\b[a-z]\w*(?:\.\w+)+", match.group(1)) if match else []


def arms_of(function: Callable, name: str, base: dict) -> list[dict]:
    """Call an ablation; return its arms as they will be read back from JSON.

    An ablation with the attribute `leaves_out` loses the arms that the base config
    excludes; see `configs.ablations.leaves_out`.

    Args:
        function: the ablation.
        name: value of --ablation, for error messages.
        base: the base config, nested.

    Raises:
        ValueError: the function fails, or yields something other than arms.
    """
    with name_in_errors(name):
        takes_base = bool(inspect.signature(function).parameters)
        arms = function(ConfigDict(base).lock()) if takes_base else function()
        if arms is None:
            raise ValueError("It returns None; it must yield its arms.")
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
                    f"The values of an arm must be numbers or strings, got {arm!r} "
                    f"({error})."
                ) from None
    arms = json.loads(json.dumps(arms))
    if hasattr(function, "leaves_out"):
        return without_excluded(arms, ConfigDict(base).lock())
    return arms


def without_excluded(arms: list[dict], base: ConfigDict) -> list[dict]:
    """Leave out arms that can't be built over the base config, and log why."""

    def error_of(arm: dict, name: str) -> str | None:
        with name_arm_in_errors(name):
            config = ConfigDict(apply_overrides(base, arm, name))
            try:
                check_config(config)
            except ValueError as error:
                return f"Arm {name} can't be built: {error}"

    if error_of({}, "baseline"):  # the base config itself is invalid: blame no arm
        return arms
    settings = [{k: v for k, v in arm.items() if k != MATCH} for arm in arms]
    distinct, excluded = unique(settings), []
    for arm_settings, name in zip(distinct, name_arms(distinct)[0], strict=True):
        if error := error_of(arm_settings, name):
            say(f"{error} It is left out.")
            excluded.append(arm_settings)
    pairs = zip(arms, settings, strict=True)
    return [arm for arm, arm_settings in pairs if arm_settings not in excluded]


@contextlib.contextmanager
def name_in_errors(ablation: str, kinds=Exception) -> Iterator[None]:
    """Prefix errors with the ablation's name and the failing line of its file.

    Args:
        ablation: value of --ablation.
        kinds: exceptions to convert. By default all, because user code may raise any.

    Raises:
        ValueError: in place of any exception in `kinds`.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, SyntaxError):
            lines, message = [error.lineno], f"This is not Python: {error.msg}."
        else:
            frames = traceback.extract_tb(error.__traceback__)
            file = Path(ablation.rsplit(":", 1)[0]).resolve()
            lines = [f.lineno for f in frames if Path(f.filename).resolve() == file]
            while error.args and isinstance(error.args[0], Exception):
                error = error.args[0]  # ConfigDict wraps its KeyError in another
            is_key = isinstance(error, KeyError)
            message = (
                " ".join(str(error.args[0]).split()) if is_key else describe(error)
            )
            if not isinstance(error, ValueError):
                message = f"{type(error).__name__}: {message}"
        place = f", line {lines[-1]}" if lines else ""
        raise ValueError(f"--ablation={ablation}{place}: {message}") from error
