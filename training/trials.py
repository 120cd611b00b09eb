"""What the trials of a group differ in: numbers that enter a program as data.

A trial is a dict from dotted config path to number: its seed, and whatever else some
trial of the group differs from the config in. The config is flat here too. Beside the
config's keys there is `head_gates.SITE.LAYER.HEAD`, what the output of one head is
multiplied by: 1 if not given, and 0 trains the model without that head.
"""

import re
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from headcount.runtime.workdir import parsed

LEAST = float(np.finfo(np.float32).smallest_normal)  # what is below it counts as 0
MOST = 3.4e38  # and above it infinite
# From the first number to below the second; the other numbers start at 0.
RANGES = {
    "seed": (0, 2**32),
    "model.dropout": (0, 1),
    "optimizer.beta1": (0, 1),
    "optimizer.beta2": (0, 1),
    "optimizer.epsilon": (1e-37, MOST),  # in float32 less is 0, and 0 / 0 follows
    "optimizer.label_smoothing": (0, 1),
}
SITES = ("encoder", "decoder", "cross")
GATE = re.compile(rf"head_gates\.({'|'.join(SITES)})\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")


def variable(config: dict) -> list[str]:
    """The config's keys that trials of one program may differ in."""
    optimizer = [key for key in config if key.startswith("optimizer.")]
    optimizer.remove("optimizer.schedule")  # part of the program
    return ["seed", "model.dropout", *optimizer]


def trials_of(config: dict, path: Path | None = None) -> list[dict]:
    """The trials of a config: those that a file lists, or `seeds` of them.

    Raises:
        ValueError, OSError: the file is none of trials, or a number of the config or
            of the file is out of its range; the sentence names it.
    """
    if config["seeds"] < 1:
        raise ValueError(f"seeds must be at least 1, got {config['seeds']}.")
    check_numbers(config)
    if path is None:
        first = config["seed"]
        trials = [{"seed": seed} for seed in range(first, first + config["seeds"])]
        check("the last seed", "seed", trials[-1]["seed"])
        return trials
    if config["seeds"] > 1:
        raise ValueError(
            f"--trials={path} lists every trial with its seed, so config.seeds must "
            f"stay 1, got {config['seeds']}."
        )
    return listed(path, config)


def listed(path: Path, config: dict) -> list[dict]:
    """The trials of a file, all with the same keys, the seed first."""
    try:
        found = parsed(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} can't be read as JSON: {error}.") from None
    if not isinstance(found, list) or not found:
        raise ValueError(f"{path} must hold a list of trials, one at least.")
    for index, trial in enumerate(found):
        place = f"trial {index} of {path}"
        if not isinstance(trial, dict):
            raise ValueError(
                f"{place} must be an object from config path to number, got {trial!r}."
            )
        for key, value in trial.items():
            if key.startswith("head_gates."):
                check_gate(place, key, config)
            elif key not in config:
                near = get_close_matches(key, config, n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise ValueError(f"{place}: there is no config key {key}.{hint}")
            elif key not in variable(config):
                raise ValueError(
                    f"{place}: {key} changes the program, so it needs a run of its "
                    f"own; trials may differ in {', '.join(variable(config))} and "
                    f"head_gates.SITE.LAYER.HEAD."
                )
            check(f"{place}: {key}", key, value)
    keys = dict.fromkeys(["seed", *(key for trial in found for key in trial)])
    usual = {key: 1 if GATE.fullmatch(key) else config[key] for key in keys}
    trials = [usual | trial for trial in found]
    for index, trial in enumerate(trials):
        if trial in trials[:index]:
            raise ValueError(
                f"trial {index} of {path} is the same as trial {trials.index(trial)}."
            )
    return trials


def setting_at(config: dict, site: str, name: str):
    """A setting of the attention at a site: its own where set, else that of all."""
    own = config[f"model.{site}_attention.{name}"]
    return config[f"model.attention.{name}"] if own is None else own


def heads_at(config: dict, site: str) -> tuple[int, int]:
    """L and N of a site, "encoder", "decoder" or "cross"."""
    stack = "encoder" if site == "encoder" else "decoder"
    layers = config[f"model.num_{stack}_layers"]
    return layers, setting_at(config, site, "num_heads")


def check_gate(place: str, key: str, config: dict) -> None:
    """Raise a ValueError unless the key is that of a head of the model."""
    match = GATE.fullmatch(key)
    if match is None:
        raise ValueError(
            f"{place}: {key} must be head_gates.SITE.LAYER.HEAD, as in "
            f"head_gates.cross.0.3, with a SITE of encoder, decoder and cross."
        )
    L, N = heads_at(config, match[1])
    if int(match[2]) >= L or int(match[3]) >= N:
        raise ValueError(
            f"{place}: {key} is no head: {match[1]} has {L} layers of {N} heads, "
            f"counted from 0."
        )


def head_gates(config: dict, trials: list[dict]) -> dict[str, np.ndarray]:
    """The gates of every head, R L N, of the sites where a trial has one."""
    gates = {}
    for index, trial in enumerate(trials):
        for key, value in trial.items():
            if match := GATE.fullmatch(key):
                ones = np.ones((len(trials), *heads_at(config, match[1])), np.float32)
                of_site = gates.setdefault(match[1], ones)
                of_site[index, int(match[2]), int(match[3])] = value
    return gates


def check_numbers(config: dict) -> None:
    """Raise a ValueError unless what trials may differ in is in its range."""
    for key in variable(config):
        check(f"config.{key}", key, config[key])


def check(name: str, key: str, value) -> None:
    """Raise a ValueError unless the value is a number that the key may have.

    But for the seed in float32, which is what the program computes with.
    """
    low, high = RANGES.get(key, (0, MOST))
    kinds = (int,) if key == "seed" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        kind = "a whole number" if key == "seed" else "a number"
        raise ValueError(f"{name} must be {kind}, got {value!r}.")
    if not low <= value < high:
        raise ValueError(f"{name} must be from {low} to below {high}, got {value}.")
    single = 0.0 if abs(value) < LEAST else float(np.float32(value))
    if key != "seed" and (single >= high or value and not single):
        raise ValueError(
            f"{name} must be from {low} to below {high} in float32 too, and {value} is "
            f"{single} there."
        )


def numbers(config: dict, trials: list[dict]) -> dict:
    """What `training.step` takes of the trials: arrays of shape R, gates R L N."""

    def column(key, dtype=np.float32):
        return np.array([trial.get(key, config[key]) for trial in trials], dtype)

    optimizer = {
        key.removeprefix("optimizer."): column(key)
        for key in variable(config)
        if key.startswith("optimizer.")
    }
    return {
        "seed": column("seed", np.uint32),
        "dropout": column("model.dropout"),
        "label_smoothing": optimizer.pop("label_smoothing"),
        "optimizer": optimizer,
        "head_gates": head_gates(config, trials),
    }


def named(trials: list[dict], index: int) -> str:
    """A trial by its number and what it differs in."""
    text = ", ".join(
        f"{key} {value if isinstance(value, int) else format(value, 'g')}"
        for key, value in trials[index].items()
    )
    return f"trial {index} ({text})"


def divergence(step: int, num_trials: int, saved: Path) -> str:
    """What to say when no trial is left, and where the last good parameters are."""
    where = "" if num_trials == 1 else f" in all {num_trials} trials, in the last one"
    return (
        f"The loss or its gradient stopped being finite{where} at step {step}; {saved} "
        f"holds the parameters before. A lower optimizer.learning_rate or a longer "
        f"optimizer.warmup_steps may help."
    )
