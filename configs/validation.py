"""Checks of configs from files or workdirs; errors name the key."""

import functools
import re
import sys
from difflib import get_close_matches

from ml_collections import ConfigDict

from headcount.configs import base

LARGEST = 2**31 - 1  # largest index on a device
# Allowed range of integers. Other keys are checked where they are used.
RANGES = {
    "seeds": (1, 2**20),
    "data.vocab_size": (1, LARGEST),
    "data.max_length": (1, LARGEST),
    "data.max_decode_length": (1, LARGEST),
    "data.batch_tokens": (1, LARGEST),
    "data.num_classes": (1, LARGEST),
    "data.stride": (1, LARGEST),
    "data.fold": (0, 9),
    "model.width": (1, LARGEST),
    "model.mlp_dim": (1, LARGEST),
    "model.max_positions": (1, LARGEST),
    "model.num_encoder_layers": (0, 1000),  # tracing more would take hours
    "model.num_decoder_layers": (0, 1000),
    "model.attention.mixture_heads": (1, LARGEST),
    "train.num_steps": (1, LARGEST),
    "train.steps_per_dispatch": (1, LARGEST),
    "train.accumulate_steps": (1, LARGEST),
    "train.log_every_steps": (1, LARGEST),
    "train.eval_every_steps": (1, LARGEST),
    "train.checkpoint_every_steps": (1, LARGEST),
    "train.keep_checkpoints": (1, LARGEST),
    "train.patience": (1, LARGEST),
}
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
}
OF_A_SITE = re.compile(r"^model\.[a-z]+_attention\.")


def choose(name: str, value, choices, hint: str = "") -> None:
    """Raise a ValueError, ending with the hint, if the value is not a choice."""
    if value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(choices)}, got {value!r}{hint}."
        )


@functools.cache
def known_keys() -> dict[str, tuple[type, bool]]:
    """Return the type of every config key, and whether it may be None."""

    def walk(section: ConfigDict, prefix: str):
        for key in section:
            if isinstance(section[key], ConfigDict):
                yield from walk(section[key], f"{prefix}{key}.")
            else:
                is_optional = section[key] is None
                yield f"{prefix}{key}", (section.get_type(key), is_optional)

    return dict(walk(base.get_config(), ""))


def flat(tree: dict, prefix: str = "") -> dict:
    """Flatten nested dicts to dotted keys."""
    values = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values


def flat_config(tree: dict) -> dict:
    """Flatten a config to dotted keys; raise a ValueError if a section is no dict."""
    values = flat(tree)
    sections = {key.rpartition(".")[0] for key in known_keys()}
    for path in values.keys() & sections:
        raise ValueError(f"{path} must be a section of keys, got {values[path]!r}.")
    return values


def check_values(config: dict) -> None:
    """Raise a ValueError if a flat config's value has a wrong type or is out of range.

    Unknown keys are ignored; see `check_keys`.
    """
    types = known_keys()
    for key, value in config.items():
        if key in types:
            check_value(key, value, *types[key])


def check_value(key: str, value, kind: type, is_optional: bool) -> None:
    """Raise a ValueError if a value has a wrong type or is out of its key's range."""
    if value is None:
        if is_optional:
            return
        raise ValueError(f"{key} must have a value, got None.")
    kinds = (int, float) if kind is float else kind
    if not isinstance(value, kinds) or (kind is not bool and isinstance(value, bool)):
        raise ValueError(f"{key} must be {KINDS[kind]}, got {value!r}.")
    # written so that NaN fails, and integers beyond the range of floats
    if kind is float and not abs(value) <= sys.float_info.max:
        raise ValueError(f"{key} must be finite, got {value}.")
    if kind is str and "\0" in value:
        raise ValueError(f"{key} must not contain a NUL character, got {value!r}.")
    of_all_sites = OF_A_SITE.sub("model.attention.", key)
    low, high = RANGES.get(of_all_sites, (value, value))
    if value < low:
        raise ValueError(f"{key} must be at least {low}, got {value}.")
    if value > high:
        raise ValueError(f"{key} must be at most {high}, got {value}.")
    if key == "model.norm_epsilon" and value <= 0:
        raise ValueError(f"{key} must be above 0, got {value}.")


def check_keys(config: dict, owner: str = "It") -> None:
    """Raise a ValueError if a flat config lacks a key, or has an unknown one.

    Args:
        config: values by dotted key.
        owner: what the config is in a sentence.
    """
    known = known_keys()
    for key in config.keys() - known.keys():
        hint = near_miss(key)
        raise ValueError(f"{owner} sets {key}, which is not a config key.{hint}")
    for key in known.keys() - config.keys():
        raise ValueError(f"{owner} lacks {key}.")


def read_config(tree) -> ConfigDict:
    """Convert the dicts of a config.json to a locked config.

    Raises:
        ValueError: a key is unknown or missing, or a value has a wrong type or is out
            of range.
    """
    if not isinstance(tree, dict):
        raise ValueError("It is not an object of config keys.")
    values = flat_config(tree)
    check_keys(values)
    check_values(values)
    config = base.get_config().lock()
    config.update_from_flattened_dict(values)
    return config


def initials(name: str) -> str:
    """Return the first letters of the parts of a name with underscores."""
    return "".join(part[0] for part in name.split("_"))


def near_miss(path: str, prefix: str = "") -> str:
    """Return a hint with the config keys, after a prefix, that resemble `path`."""
    keys = list(known_keys())
    section, _, last = path.rpartition(".")
    here = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == section}
    names = [key for key in keys if key.endswith(f".{last}")]
    # abbreviations, such as lr for learning_rate
    names = names or [k for n, k in here.items() if last == initials(n)]
    names = names or [here[name] for name in get_close_matches(last, here, n=2)]
    names = names or get_close_matches(path, keys, n=1)
    if not names:
        return " configs/base.py lists them all."
    return f" Did you mean {' or '.join(prefix + name for name in names)}?"
