"""The trials of a group, which share one compiled program.

The hyperparameters in which trials differ are inputs of the program. A trial is a dict
from dotted config key to number: its seed, and every key that differs from the config
in some trial of the group. Configs are flat here, too. In addition to the config's keys
there is `head_gates.SITE.LAYER.HEAD`, a factor on the output of one head: 1 by default;
0 trains the model without that head.
"""

import re
from pathlib import Path

import numpy as np

from headcount.configs.base import get_config
from headcount.configs.sites import SITES
from headcount.configs.validation import near_miss
from headcount.runtime.workdir import parse_json

SMALLEST = float(np.finfo(np.float32).smallest_normal)  # XLA flushes subnormals to 0
LARGEST = 3.4e38  # larger numbers overflow float32
PAST_ONE = 1.0000001  # exclusive limit of ranges that include 1
# Ranges [low, high) of hyperparameters; the others are [0, LARGEST).
RANGES = {
    "seed": (0, 2**32),
    "model.dropout": (0, 1),
    "optimizer.beta1": (0, 1),
    "optimizer.beta2": (0, 1),
    "optimizer.muon_beta": (0, 1),
    "optimizer.epsilon": (1e-37, LARGEST),  # less is 0 in float32, and leads to 0 / 0
    "optimizer.label_smoothing": (0, 1),
    "optimizer.final_share": (0, PAST_ONE),
    "optimizer.decay_share": (0, PAST_ONE),
}
# Settings that are not numbers are compiled into the program that a group shares.
OPTIMIZER_PROGRAM_KEYS = tuple(
    key
    for key, value in get_config().optimizer.items()
    if isinstance(value, (str, bool))
)
GATE = re.compile(rf"head_gates\.({'|'.join(SITES)})\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")


def trial_keys(config: dict) -> list[str]:
    """Return the config keys that trials of one program may differ in."""
    program = {f"optimizer.{key}" for key in OPTIMIZER_PROGRAM_KEYS}
    optimizer = [key for key in config if key.startswith("optimizer.")]
    optimizer = [key for key in optimizer if key not in program]
    return ["seed", "model.dropout", *optimizer]


def make_trials(config: dict, path: Path | None = None) -> list[dict]:
    """Return the trials of a config: those listed in a file, or one per seed.

    Raises:
        ValueError, OSError: the file is not a list of trials, or a number in it or in
            the config is out of range.
    """
    if config["seeds"] < 1:
        raise ValueError(f"seeds must be at least 1, got {config['seeds']}.")
    check_numbers(config)
    if path is None:
        first = config["seed"]
        trials = [{"seed": seed} for seed in range(first, first + config["seeds"])]
        check_value("the last seed", "seed", trials[-1]["seed"])
        return trials
    if config["seeds"] > 1:
        raise ValueError(
            f"--trials={path} lists every trial with its seed, so config.seeds must be "
            f"1, got {config['seeds']}."
        )
    return read_trials(path, config)


def read_trials(path: Path, config: dict) -> list[dict]:
    """Read a file of trials; fill in defaults so that all have the same keys.

    The seed is the first key.
    """
    try:
        listed = parse_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} can't be read as JSON: {error}.") from None
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{path} must contain a list of at least one trial.")
    check_trials(path, listed, config)
    keys = dict.fromkeys(["seed", *(key for trial in listed for key in trial)])
    default = {key: 1 if GATE.fullmatch(key) else config[key] for key in keys}
    trials, first = [default | trial for trial in listed], {}
    for index, trial in enumerate(trials):
        values = tuple(np.float32(v) if k != "seed" else v for k, v in trial.items())
        if values in first:
            raise ValueError(
                f"trial {index} of {path} is the same as trial {first[values]} (in "
                f"float32, which is what is trained with)."
            )
        first[values] = index
    return trials


def check_trials(path: Path, trials: list, config: dict) -> None:
    """Raise a ValueError unless each trial is a dict from keys to numbers in range.

    Args:
        path: the file that lists the trials, for error messages.
        config: flat.
    """
    may_differ = set(trial_keys(config))
    for index, trial in enumerate(trials):
        place = f"trial {index} of {path}"
        if not isinstance(trial, dict):
            raise ValueError(
                f"{place} must be an object from config key to number, got {trial!r}."
            )
        for key, value in trial.items():
            if key.startswith("head_gates."):
                check_gate(place, key, config)
            elif key not in config:
                raise ValueError(
                    f"{place}: there is no config key {key}.{near_miss(key)}"
                )
            elif key not in may_differ:
                raise ValueError(
                    f"{place}: {key} changes the program, so it needs a run of its "
                    f"own; trials may differ in {', '.join(trial_keys(config))} and "
                    f"head_gates.SITE.LAYER.HEAD."
                )
            check_value(f"{place}: {key}", key, value)


def setting_at(config: dict, site: str, name: str):
    """Return an attention setting of a site, which defaults to model.attention's."""
    site_value = config[f"model.{site}_attention.{name}"]
    return config[f"model.attention.{name}"] if site_value is None else site_value


def heads_at(config: dict, site: str) -> tuple[int, int]:
    """Return the numbers of layers L and heads N of "encoder", "decoder" or "cross"."""
    stack = "encoder" if site == "encoder" else "decoder"
    layers = config[f"model.num_{stack}_layers"]
    if site == "cross" and not config["model.num_encoder_layers"]:
        layers = 0
    num_heads = setting_at(config, site, "num_heads")
    if setting_at(config, site, "differential"):
        num_heads //= 2  # a gate per pair
    return layers, num_heads


def check_gate(place: str, key: str, config: dict) -> None:
    """Raise a ValueError unless the key names a head of the model."""
    match = GATE.fullmatch(key)
    if match is None:
        raise ValueError(
            f"{place}: {key} must be head_gates.SITE.LAYER.HEAD, as in "
            f"head_gates.cross.0.3, with a SITE of encoder, decoder and cross."
        )
    L, N = heads_at(config, match[1])
    if int(match[2]) >= L or int(match[3]) >= N:
        raise ValueError(
            f"{place}: {key} is not a head: {match[1]} has {L} layers of {N} heads, "
            f"counted from 0."
        )


def head_gates(config: dict, trials: list[dict]) -> dict[str, np.ndarray]:
    """Return the head gates, of shape R L N, of each site where a trial sets one."""
    gates = {}
    for index, trial in enumerate(trials):
        for key, value in trial.items():
            if match := GATE.fullmatch(key):
                site = match[1]
                if site not in gates:
                    shape = (len(trials), *heads_at(config, site))
                    gates[site] = np.ones(shape, np.float32)
                gates[site][index, int(match[2]), int(match[3])] = value
    return gates


def check_numbers(config: dict) -> None:
    """Raise a ValueError unless every `trial_keys` value of a config is in range."""
    for key in trial_keys(config):
        check_value(f"config.{key}", key, config[key])


def check_value(name: str, key: str, value) -> None:
    """Raise a ValueError unless a value is a number in the range of a config key.

    Except for seeds, it must be in range in float32, too: the program computes in it.
    """
    low, high = RANGES.get(key, (0, LARGEST))
    kinds = (int,) if key == "seed" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        kind = "a whole number" if key == "seed" else "a number"
        raise ValueError(f"{name} must be {kind}, got {value!r}.")
    end = "1" if high == PAST_ONE else f"below {high}"
    if not low <= value < high:
        raise ValueError(f"{name} must be from {low} to {end}, got {value}.")
    single = 0.0 if abs(value) < SMALLEST else float(np.float32(value))
    if key != "seed" and (single >= high or value and not single):
        raise ValueError(
            f"{name} must be from {low} to {end} in float32, and {value} "
            f"becomes {single} there."
        )


def hyperparameters(config: dict, trials: list[dict]) -> dict:
    """Return the argument `trials` of `train_steps`: arrays of shape R, gates R L N."""

    def column(key, dtype=np.float32):
        return np.array([trial.get(key, config[key]) for trial in trials], dtype)

    optimizer = {
        key.removeprefix("optimizer."): column(key)
        for key in trial_keys(config)
        if key.startswith("optimizer.")
    }
    steps = optimizer["decay_steps"]
    optimizer["decay_steps"] = np.where(steps > 0, steps, config["train.num_steps"])
    optimizer["decay_steps"] = optimizer["decay_steps"].astype(np.float32)
    return {
        "seed": column("seed", np.uint32),
        "dropout": column("model.dropout"),
        "label_smoothing": optimizer.pop("label_smoothing"),
        "optimizer": optimizer,
        "head_gates": head_gates(config, trials),
    }


def describe_trial(trials: list[dict], index: int) -> str:
    """Format a trial's index and its settings."""
    text = ", ".join(
        f"{key} {value if isinstance(value, int) else format(value, 'g')}"
        for key, value in trials[index].items()
    )
    return f"trial {index} ({text})"
