"""From flags, or from what a workdir remembers, to a sweep."""

import importlib.util
import re
import shlex
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs import ablations
from configs.commandline import flat
from sweeps.optional import package
from sweeps.plan import NO_RESULT_DEPENDS_ON, Group, expand, nuisance_keys
from sweeps.runner import Sweep
from sweeps.search import make_search
from sweeps.store import SCORES, locked, read_json
from training.workdir import write_json

TEST_SPLITS = {"multi30k": "test_2016_flickr"}  # else "test"
IDENTITY = (
    *("base", "ablation", "match", "tune", "search", "search_seeds"),
    *("checkpoint", "metric", "test_split"),
)
# Flags that say which part of a sweep runs where: all of it is what a report names.
WHERE = (
    *("--group=", "--shard=", "--launcher=", "--address=", "--resources="),
    *("--calibrate", "--nocalibrate", "--examples="),
    *("--coordinator", "--num_processes=", "--process_id="),
)


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
    search: str | None
    search_seeds: int
    checkpoint: str
    metric: str | None
    test_split: str | None
    group_size: int
    note: str | None
    is_new: bool  # whether this call may be a sweep's first
    proposes: bool  # whether it may begin the next round of a search


def open_sweep(options: Options) -> Sweep:
    """Expand a sweep and find its groups on disk.

    Raises:
        ValueError: there is no such sweep or ablation, the workdir holds another one,
            or an arm can't be built.
    """
    workdir = options.workdir
    there = read_json(workdir / "sweep.json")
    if there is not None:  # of before there was a search, perhaps
        there = {"search": None, "search_seeds": 1} | there
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
    search, candidates = make_search(
        settings["search"], settings["tune"], settings["search_seeds"], base, nuisance
    )
    plan = expand(
        base,
        list(generator(base)),
        settings["seeds"],
        nuisance=nuisance,
        tuned=candidates,
        match=settings["match"],
    )
    settings["docstring"] = generator.__doc__ or generator.__name__
    if search.count is not None and any(len(a.candidates) > 1 for a in plan.arms):
        raise ValueError(
            "The ablation gives its arms nuisance settings itself, so there is nothing "
            "for --search to choose; leave it out."
        )
    if search.count is not None and options.proposes:
        package("optuna")
    workdir.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(workdir, plan, search, [], settings).extended(options.proposes)
    with locked(workdir / ".plan"):
        if read_json(workdir / "sweep.json") != settings:
            write_json(workdir / "sweep.json", settings)
    return sweep


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
        "search": options.search,
        "search_seeds": options.search_seeds,
        "checkpoint": options.checkpoint,
        "metric": metric,
        "test_split": options.test_split
        or TEST_SPLITS.get(config["data"]["name"], "test"),
        "group_size": options.group_size,
        "note": options.note,
        "command": shlex.join(
            [
                *("python", "sweep.py", "run"),
                *(arg for arg in sys.argv[1:] if not arg.startswith(WHERE)),
            ]
        ),
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
    return getattr(module, name)


def chosen(sweep: Sweep, group: str | None, shard: str | None) -> list[Group] | None:
    """The groups that --group or --shard choose; None: all, also those to come.

    Raises:
        ValueError: there is no such group or shard.
    """
    if group is not None:
        for index, each in enumerate(sweep.groups):
            if group in (str(index), each.name):
                return [each]
        raise ValueError(
            f"--group must be a group's name or its number, below "
            f"{len(sweep.groups)}, got {group}."
        )
    if shard is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", shard)
    index, count = map(int, found.groups()) if found else (0, 0)
    if not index < count:
        raise ValueError(
            f"--shard must be i/n with i from 0 to n - 1, as in 0/4, got {shard}."
        )
    if sweep.searches():
        raise ValueError(
            "--shard deals out groups that are known from the start, and after a "
            "search more follow; run the same command without it on every machine: "
            "they share the work."
        )
    return sweep.groups[index::count]
