"""From flags, or from what a workdir remembers, to a sweep."""

import ast
import importlib.util
import shlex
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs import ablations
from configs.ablations import grid, over
from configs.commandline import flat, near_miss
from sweeps.plan import NO_RESULT_DEPENDS_ON, expand, nuisance_keys
from sweeps.runner import Sweep
from sweeps.store import SCORES, locked, place, read_json
from training.trials import variable
from training.workdir import write_json

TEST_SPLITS = {"multi30k": "test_2016_flickr"}  # else "test"
IDENTITY = ("base", "ablation", "match", "tune", "checkpoint", "metric", "test_split")


class Options(NamedTuple):
    """The flags; what is None there takes its default, or what the workdir has."""

    config: Any  # a locked ConfigDict, with its overrides
    config_file: str | None
    overrides: dict
    ablation: str | None
    seeds: int | None
    workdir: Path
    match: str | None
    tune: list[str]
    checkpoint: str
    metric: str | None
    test_split: str | None
    group_size: int
    note: str | None
    is_new: bool  # whether this call may be a sweep's first


def open_sweep(options: Options) -> Sweep:
    """Expand a sweep and find its groups on disk.

    Raises:
        ValueError: there is no such sweep or ablation, the workdir holds another one,
            or an arm can't be built.
    """
    workdir = options.workdir
    there = read_json(workdir / "sweep.json")
    if options.config is None or options.ablation is None:
        if there is None:
            needed = "--config and --ablation are needed" if options.is_new else ""
            raise ValueError(
                f"{workdir} holds no sweep; {needed or 'start one with sweep.py run'}, "
                f"as in python sweep.py run --config=configs/numbers.py "
                f"--ablation=heads --seeds=3 --workdir={workdir}"
            )
        settings = there | ({"seeds": options.seeds} if options.seeds else {})
    else:
        settings = settings_of(options)
        if there is not None:
            refuse_other(workdir, there, settings)
            settings["seeds"] = options.seeds or there["seeds"]
    if options.note is not None:
        settings["note"] = options.note
    generator = find_ablation(settings["ablation"])
    base = ConfigDict(settings["base"]).lock()
    nuisance = nuisance_keys(generator.__doc__ or "")
    plan = expand(
        base,
        list(generator(base)),
        settings["seeds"],
        nuisance=nuisance,
        tuned=tuned(settings["tune"], settings["base"], nuisance),
        match=settings["match"],
    )
    settings["docstring"] = generator.__doc__ or generator.__name__
    workdir.mkdir(parents=True, exist_ok=True)
    groups = place(workdir, plan, settings["group_size"])
    with locked(workdir / ".plan"):
        if read_json(workdir / "sweep.json") != settings:
            write_json(workdir / "sweep.json", settings)
    return Sweep(workdir, plan, groups, settings)


def settings_of(options: Options) -> dict:
    """What a workdir remembers of the flags, all as JSON has it."""
    config = options.config.to_dict()
    metric = options.metric or config["train"]["best_metric"].removeprefix("dev_")
    metric = "bleu" if metric == "loss" else metric
    if metric not in SCORES:
        raise ValueError(
            f"--metric must be one of {', '.join(SCORES)}, got {metric!r}."
        )
    return {
        "config": options.config_file,
        "overrides": options.overrides,
        "base": config,
        "ablation": options.ablation,
        "seeds": config["seeds"] if options.seeds is None else options.seeds,
        "match": options.match,
        "tune": list(options.tune),
        "checkpoint": options.checkpoint,
        "metric": metric,
        "test_split": options.test_split
        or TEST_SPLITS.get(config["data"]["name"], "test"),
        "group_size": options.group_size,
        "note": options.note,
        "command": shlex.join(["python", "sweep.py", "run", *sys.argv[1:]]),
    }


def refuse_other(workdir: Path, there: dict, now: dict) -> None:
    """Raise a ValueError where a workdir holds another sweep, saying what differs."""
    old, new = (
        flat({key: settings[key] for key in IDENTITY}) for settings in (there, now)
    )
    differing = [
        f"{key.removeprefix('base.')} (there {old.get(key)!r}, now {new.get(key)!r})"
        for key in sorted(old | new)
        if old.get(key) != new.get(key)
        and key.removeprefix("base.") not in (*NO_RESULT_DEPENDS_ON, "seeds")
    ]
    if differing:
        raise ValueError(
            f"{workdir} holds another sweep: {', '.join(differing)}; choose another "
            f"--workdir, or the settings of that one."
        )


def names_of(module) -> list[str]:
    """The ablations of a module: its functions that say what is scientific."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and "Scientific:" in (value.__doc__ or "")
    ]


def find_ablation(name: str):
    """The generator of a name in configs/ablations.py, or of FILE.py:NAME."""
    module, where = ablations, "configs/ablations.py"
    if ":" in name:
        where, name = name.rsplit(":", 1)
        if not Path(where).exists():
            raise ValueError(f"There is no file {where} to find the ablation in.")
        spec = importlib.util.spec_from_file_location("own_ablations", where)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    names = names_of(module)
    if name not in names:
        near = get_close_matches(name, names, n=1)
        meant = f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}."
        raise ValueError(f"There is no ablation {name!r} in {where}; {meant}")
    return getattr(module, name)


def tuned(assignments: list[str], base: dict, nuisance: list[str]) -> list[dict]:
    """The nuisance settings of --tune, every combination of them.

    Raises:
        ValueError: a key that the ablation does not name, or no number.
    """
    base, sweeps = flat(base), []
    for assignment in assignments:
        key, _, values = assignment.partition("=")
        if key not in base:
            raise ValueError(f"--tune: there is no config key {key}.{near_miss(key)}")
        if key not in nuisance or key not in variable(base):
            raise ValueError(
                f"--tune may set what the ablation names as nuisance, "
                f"{', '.join(nuisance) or 'which is nothing'}; got {key}."
            )
        try:
            sweeps.append(over(key, *map(ast.literal_eval, values.split(","))))
        except (ValueError, SyntaxError):
            raise ValueError(
                f"--tune={assignment} needs numbers with commas between them, as in "
                f"--tune={key}=0.002,0.005"
            ) from None
    return grid(*sweeps)


def chosen(num_groups: int, group: int | None, shard: str | None) -> list[int]:
    """The numbers of the groups that --group or --shard choose; without them, all."""
    if group is not None:
        if group >= num_groups:
            raise ValueError(f"--group must be below {num_groups}, got {group}.")
        return [group]
    if shard is None:
        return list(range(num_groups))
    try:
        index, count = map(int, shard.split("/"))
        if not 0 <= index < count:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--shard must be i/n with i from 0 to n - 1, as in 0/4, got {shard}."
        ) from None
    return list(range(index, num_groups, count))
