"""Open a sweep from flags and the settings stored in its workdir's sweep.json.

A sweep's settings are fixed when it is started. Later calls need only --workdir. If a
setting is given again, it must be the same, except that `run` may add seeds.
"""

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from headcount.analysis.budget import BUDGETS
from headcount.analysis.formatting import format_settings
from headcount.analysis.report_markdown import CHECKPOINTS
from headcount.configs.validation import choose, flat, read_config
from headcount.runtime.files import locked
from headcount.runtime.logging import say
from headcount.runtime.schema import Number, Optional, violation
from headcount.runtime.workdir import FORMAT_VERSION, differences, summarize, write_json
from headcount.sweeps.ablation import (
    arms_of,
    find_ablation,
    name_in_errors,
    nuisance_keys,
)
from headcount.sweeps.labels import MATCH
from headcount.sweeps.looks import margin_of, parse_margin
from headcount.sweeps.plan import IGNORED, Group, Plan, Shard, expand
from headcount.sweeps.search import Search, make_search, optional_package
from headcount.sweeps.store import Sweep, read_optional_json
from headcount.tasks import Task, best_metric, make_task

SETTINGS = {  # schema of sweep.json; see `runtime.schema`
    "format_version": int,
    "base": read_config,
    "ablation": str,
    "match": Optional(frozenset(BUDGETS)),
    "tune": list,
    "search": Optional(str),
    "search_seeds": Number(1),
    "checkpoint": frozenset(CHECKPOINTS),
    "metric": str,
    "test_split": str,
    "looks": Optional([Number(2)]),
    "margin": Optional(Number(0, float)),
    "arms": [{}],
    "docstring": str,
    "seeds": Number(1),
    "earlier_seeds": Optional([Number(1)]),  # numbers of seeds before some were added
    "config": str,
    "overrides": {},
    "group_size": Number(1),
    "note": Optional(str),
}
CHANGEABLE = ("seeds", "group_size", "note")  # by `run`, of a sweep that has started
# Settings that a later call keeps if it names --config, but not their flags.
KEPT = (*CHANGEABLE, "looks", "margin")


class Options(NamedTuple):
    """The values of the flags.

    None or an empty list stands for the stored setting or, in a new sweep, the default.
    """

    verb: str  # only "run" changes settings, and "run" and "list" add groups
    workdir: Path
    task_file: Path | None = None
    proposes: bool = False  # whether a search may start its next round
    config: ConfigDict | None = None  # locked, with overrides applied
    config_file: str | None = None
    overrides: dict | None = None
    ablation: str | None = None
    seeds: int | None = None
    looks: list[int] | None = None
    margin: str | None = None
    match: str | None = None
    tune: list[str] | None = None
    search: str | None = None
    search_seeds: int | None = None
    checkpoint: str | None = None
    metric: str | None = None
    test_split: str | None = None
    group_size: int | None = None
    note: str | None = None


OWN_MEANING = ("config", "overrides")  # a ConfigDict; its changes
# flags with a setting of the same name
FLAGS = [x for x in Options._fields if x in SETTINGS and x not in OWN_MEANING]


def open_sweep(options: Options) -> Sweep:
    """Expand a sweep and find its groups on disk.

    The ablation function is called only if the options name it. Otherwise the arms come
    from sweep.json; nothing read from the workdir is executed.

    Raises:
        ValueError: there is no such sweep or ablation, the workdir holds another sweep,
            or an arm can't be built.
    """
    workdir, path = options.workdir, options.workdir / "sweep.json"
    stored = read_settings(path)
    if stored is None and (workdir / "config.json").exists():
        raise ValueError(
            f"{workdir} holds a training run, not a sweep; choose another --workdir."
        )
    can_start = options.verb in ("list", "run")
    if stored is None and not (can_start and options.config and options.ablation):
        needed = (
            "--config and --ablation are needed to start one"
            if can_start
            else "start one with sweep.py run"
        )
        raise ValueError(
            f"{workdir} holds no sweep; {needed}, as in python sweep.py run "
            f"--config=configs/numbers.py --ablation=heads --seeds=3 "
            f"--workdir={workdir}"
        )
    config = options.config or ConfigDict(stored["base"])
    task = make_task(config)
    settings = merge(options, stored, task)
    if stored is not None:
        check_same_sweep(options, stored, settings, task)
        if settings["seeds"] > stored["seeds"]:
            earlier = [*(stored["earlier_seeds"] or []), stored["seeds"]]
            settings["earlier_seeds"] = earlier
    if options.ablation is not None:
        function = find_ablation(settings["ablation"])
        settings["arms"] = arms_of(function, settings["ablation"], settings["base"])
        settings["docstring"] = function.__doc__ or function.__name__
    if settings["looks"] and any("seed" in arm for arm in settings["arms"]):
        raise ValueError(
            "--seeds=FIRST:LAST: the ablation itself sets the seeds of its arms; give "
            "a single number, or leave the seeds to --seeds."
        )
    if settings["looks"] and len(settings["arms"]) < 2:
        raise ValueError(
            "--seeds=FIRST:LAST compares arms with the baseline, and the ablation has "
            "only one arm; give a single number."
        )
    search, plan = make_plan(settings)
    if options.search_seeds is not None and not any(map(search.has_choice, plan.arms)):
        raise ValueError("--search_seeds has no meaning without --tune or --search.")
    if options.ablation is not None:
        log_repeated(settings, plan)
    if stored is not None and any(
        stored[key] != settings[key] for key in ("arms", "docstring")
    ):
        before = make_plan(stored)[1]
        check_same_arms(workdir, before, plan)
        earlier = {  # an ablation's own seeds may be added, too
            len(arm.seeds)
            for arm in before.arms
            if len(plan.arm(arm.name).seeds) > len(arm.seeds)
        }
        earlier |= {*(settings["earlier_seeds"] or [])}
        settings["earlier_seeds"] = sorted(earlier) or None
    if search.count is not None and any(a.candidates != [{}] for a in plan.arms):
        raise ValueError(
            "--search: the ablation itself sets the nuisance settings of its arms; "
            "leave --search out."
        )
    if search.count is not None and options.proposes:
        optional_package("optuna")
    if stored is None:
        check_splits(settings, task)
    sweep = Sweep(workdir, plan, search, [], settings, task, options.task_file)
    if options.verb in ("status", "report"):
        return sweep.extended(propose=False, write=False)
    sweep = sweep.extended(options.proposes)
    with locked(workdir / ".plan"):
        on_disk = read_settings(path)
        if options.verb != "run" or on_disk == settings:
            return sweep
        if on_disk == stored:
            write_json(path, settings)
            return sweep
    return open_sweep(options)  # retry: another process has written sweep.json


def read_settings(path: Path) -> dict | None:
    """Read sweep.json; return None if there is no file.

    Raises:
        ValueError: the file is damaged, or has another format version.
    """
    stored = read_optional_json(path)
    if stored is None:
        return None
    if isinstance(stored, dict):
        stored.setdefault("earlier_seeds", None)  # not in every file
    wrong = violation(stored, SETTINGS)
    if wrong is None and not all(isinstance(text, str) for text in stored["tune"]):
        wrong = "tune must be a list of strings"
    looks = stored["looks"] if wrong is None else None
    if looks and (looks != sorted(set(looks)) or looks[-1] != stored["seeds"]):
        wrong = "looks must be ascending, up to the number of seeds"
    if wrong is None and stored["margin"] is not None and not stored["margin"] > 0:
        wrong = "margin must be positive"
    if wrong:
        raise ValueError(
            f"{path} is damaged ({wrong}); restore it, or start again in another "
            f"--workdir."
        )
    return stored


def merge(options: Options, stored: dict | None, task: Task) -> dict:
    """Merge flags and stored settings; return them as in sweep.json.

    Settings without a flag keep their stored values. With --config, however, the flags
    describe the whole sweep, so most settings without a flag get their defaults.
    """
    changes = {name: getattr(options, name) for name in FLAGS}
    changes = {name: v for name, v in changes.items() if v is not None and v != []}
    settings = stored or {"earlier_seeds": None}
    if stored and options.config and options.config.seeds != stored["base"]["seeds"]:
        changes = {"seeds": options.config.seeds} | changes
    if options.config is not None:
        config = options.config.to_dict()
        carried = {name: settings[name] for name in KEPT if name in settings}
        settings = settings | defaults(task) | {"seeds": config["seeds"]} | carried
        settings |= {
            "format_version": FORMAT_VERSION,
            "config": options.config_file,
            "overrides": options.overrides,
            "base": config,
        }
    metrics = {metric.name: metric for metric in task.metrics}
    name = changes.get("metric", settings["metric"])
    source = "--metric" if "metric" in changes or not stored else "metric in sweep.json"
    choose(source, name, metrics)
    metric = metrics[name]
    if "margin" in changes:
        margin = parse_margin(changes["margin"], metric)
        changes["margin"] = None if margin == metric.margin else margin
    if "seeds" in changes:  # --seeds without a range turns looks off
        changes = {"looks": None} | changes
    return settings | changes


def defaults(task: Task) -> dict:
    """Return the settings that a new sweep has without flags."""
    return {
        "match": None,
        "tune": [],
        "search": None,
        "search_seeds": 1,
        # without a test split, nothing may be chosen on val
        "checkpoint": "last" if task.test_split == "val" else "best",
        "metric": best_metric(task).name,
        "test_split": task.test_split,
        "looks": None,
        "margin": None,
        "group_size": 16,
        "note": None,
    }


def command_of(sweep: Sweep) -> str:
    """Return the command that starts the sweep, without flags for where it runs."""
    settings, default = sweep.settings, defaults(sweep.task)
    looks = settings["looks"]
    flags = {"config": settings["config"]}
    flags |= {f"config.{key}": value for key, value in settings["overrides"].items()}
    flags |= {"ablation": settings["ablation"], "seeds": settings["seeds"]}
    flags |= {
        name: settings[name] for name in default if settings[name] != default[name]
    }
    if looks:
        flags["seeds"] = f"{looks[0]}:{looks[-1]}"
        flags["looks"] = ",".join(map(str, looks))
    if sweep.task_file is not None:
        flags["task_file"] = sweep.task_file
    flags["workdir"] = sweep.workdir
    tune = flags.pop("tune", [])
    words = [f"--{name}={value}" for name, value in flags.items()]
    words += [f"--tune={setting}" for setting in tune]
    return shlex.join(["python", "sweep.py", "run", *words])


def check_same_sweep(
    options: Options, stored: dict, settings: dict, task: Task
) -> None:
    """Raise a ValueError if settings differ from the sweep in the workdir.

    Only `run` may add seeds; seeds can't be removed.
    """
    runs = options.verb == "run"
    free = CHANGEABLE if runs else ("note",)
    keys = ["base", *(name for name in FLAGS if name not in free)]
    old, new = (flat({key: of[key] for key in keys}) for of in (stored, settings))
    if stored["metric"] == settings["metric"]:  # report a default margin as a number
        metric = next(m for m in task.metrics if m.name == settings["metric"])
        old["margin"], new["margin"] = (
            margin_of(of, metric) for of in (stored, settings)
        )
    ignored = [f"base.{key}" for key in (*IGNORED, "seeds")]
    changed = [
        f"{key.removeprefix('base.')} (there {old.get(key)!r}, now {new.get(key)!r})"
        for key in sorted(old | new)
        if old.get(key) != new.get(key) and key not in ignored
    ]
    if runs and settings["seeds"] < stored["seeds"]:
        changed.append(f"seeds (there {stored['seeds']}, now {settings['seeds']})")
    if changed:
        seeds = (
            "its looks and seeds are planned once"
            if stored["looks"]
            else "seeds may be added, not removed"
        )
        fix = (
            f"choose another --workdir, or the settings of that sweep ({seeds})."
            if runs
            else f"leave that out: {options.verb} shows the sweep as it is, and only "
            f"run adds seeds."
        )
        raise ValueError(
            f"{options.workdir} holds another sweep: {', '.join(changed)}; {fix}"
        )


def check_same_arms(workdir: Path, stored: Plan, current: Plan) -> None:
    """Raise a ValueError if an ablation no longer yields the arms of the sweep.

    Otherwise an arm could vanish from the report after its results were seen, and the
    p-values would be corrected for too few comparisons.
    """
    old, new = (
        {
            f"arm {arm.name}": arm.overrides
            | {"nuisance": json.dumps(arm.candidates), "baseline": arm.is_baseline}
            for arm in plan.arms
        }
        for plan in (stored, current)
    )
    seeds = {arm.name: arm.seeds for arm in current.arms}
    changed = differences(old, new) + [
        f"arm {arm.name}.seeds (there {arm.seeds}, now {seeds[arm.name]})"
        for arm in stored.arms
        if not set(arm.seeds) <= set(seeds.get(arm.name, arm.seeds))
    ]
    if changed:
        raise ValueError(
            f"{workdir} holds a sweep with other arms than its ablation has now: "
            f"{summarize(changed)}; choose another --workdir, or restore the function "
            f"(without --ablation, the sweep keeps its arms)."
        )


def check_splits(settings: dict, task: Task) -> None:
    """Raise a ValueError or OSError if the trained sweep could not be scored."""
    test_split = settings["test_split"]
    parts = {part.split("[")[0].strip() for part in test_split.split("+")}
    if test_split == task.test_split == "val":
        chooses = {
            "--checkpoint=best": settings["checkpoint"] == "best",
            "--tune": settings["tune"],
            "--search": settings["search"],
            "train.patience": settings["base"]["train"]["patience"],
        }
        for flag, value in chooses.items():
            if value:
                raise ValueError(
                    f"{flag} selects on val, but this corpus has no test split, so val "
                    f"also gives the final scores; leave {flag} out, or choose a "
                    f"corpus with a test split."
                )
    elif parts & {"train", "val", "validation"}:
        raise ValueError(
            f"--test_split={test_split} must not contain examples that models are "
            f"trained on or selected by; the report shows dev scores anyway."
        )
    for split in ("val", test_split):
        task.check_scoring(split)


def make_plan(settings: dict) -> tuple[Search, Plan]:
    """Expand the arms of a sweep's settings."""
    base = ConfigDict(settings["base"]).lock()
    nuisance = nuisance_keys(settings["docstring"])
    search, candidates = make_search(
        settings["search"], settings["tune"], settings["search_seeds"], base, nuisance
    )
    with name_in_errors(settings["ablation"], ValueError):
        plan = expand(
            base,
            settings["arms"],
            settings["seeds"],
            nuisance=nuisance,
            tuned=candidates,
            match=settings["match"],
        )
    return search, plan


def log_repeated(settings: dict, plan: Plan) -> None:
    """Log the arms of an ablation that are left out because they repeat others.

    Matched arms are not named: it is expected that some of them equal others.
    """
    free = ("seed", *nuisance_keys(settings["docstring"]))
    kept_overrides, arms = [arm.overrides for arm in plan.arms], settings["arms"]
    repeated = [
        format_settings(arm)
        for index, arm in enumerate(arms)
        if MATCH not in arm
        and (
            arm in arms[:index]
            or {k: v for k, v in arm.items() if k not in free} not in kept_overrides
        )
    ]
    if repeated:
        say(f"Arms that repeat others are left out: {'; '.join(repeated)}.")


def select_groups(
    sweep: Sweep, group: str | None, shard: str | None
) -> list[Group] | Shard:
    """Return the group of --group or the shard of --shard; by default, all groups.

    Raises:
        ValueError: there is no such group or shard.
    """
    if group is not None:
        for index, candidate in enumerate(sweep.groups):
            if group in (str(index), candidate.name):
                return [candidate]
        raise ValueError(
            f"--group must be the name of a group or its number, below "
            f"{len(sweep.groups)}; got {group}."
        )
    return Shard(0, 1) if shard is None else parse_shard(shard)


def parse_shard(shard: str) -> Shard:
    """Parse --shard; raise a ValueError unless it is i/n with i below n."""
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    index, count = map(int, match.groups()) if match else (0, 0)
    if not index < count:
        raise ValueError(
            f"--shard must be i/n with i from 0 to n - 1, as in 0/4; got {shard}."
        )
    return Shard(index, count)
