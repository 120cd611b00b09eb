"""From flags, or from what a workdir remembers, to a sweep."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from headcount.configs.commandline import flat
from headcount.data import pairs as corpora
from headcount.runtime import cluster
from headcount.runtime.workdir import differing, summary, write_json
from headcount.sweeps.optional import package
from headcount.sweeps.plan import (
    DEFAULTS,
    NO_RESULT_DEPENDS_ON,
    Group,
    Plan,
    expand,
    nuisance_keys,
)
from headcount.sweeps.questions import arms_of, find_ablation, naming
from headcount.sweeps.records import read_json
from headcount.sweeps.search import Search, make_search
from headcount.sweeps.store import SCORES, Sweep, locked

TEST_SPLITS = {"multi30k": "test_2016_flickr"}  # else "test"
IDENTITY = (
    *("base", "ablation", "match", "tune", "search", "search_seeds"),
    *("checkpoint", "metric", "test_split"),
)
REMEMBERED = (
    *IDENTITY,
    "seeds",
    "config",
    "overrides",
    "group_size",
    "note",
    "command",
)
# Flags that say which part of a sweep runs where: all of it is what a report names.
WHERE = ("group", "shard", "launcher", "address", "resources", "examples")
WHERE += tuple(flag.name for flag in cluster.FLAGS)
SWITCHES = ("calibrate", "nocalibrate")  # the same, but for a value of their own


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
    search_seeds: int | None
    checkpoint: str | None
    metric: str | None
    test_split: str | None
    group_size: int | None
    note: str | None
    verb: str  # only "run" changes a sweep
    proposes: bool  # whether it may begin the next round of a search


def open_sweep(options: Options) -> Sweep:
    """Expand a sweep and find its groups on disk.

    The ablation's function is called where the options name it. Else the arms are those
    that the workdir remembers, whatever has become of the function.

    Raises:
        ValueError: there is no such sweep or ablation, the workdir holds another one,
            or an arm can't be built.
    """
    workdir = options.workdir
    there = remembered(workdir / "sweep.json")
    is_new = options.verb in ("list", "run")
    if there is None and not (is_new and options.config and options.ablation):
        needed = "--config and --ablation are needed" if is_new else ""
        raise ValueError(
            f"{workdir} holds no sweep; {needed or 'start one with sweep.py run'}, "
            f"as in python sweep.py run --config=configs/numbers.py "
            f"--ablation=heads --seeds=3 --workdir={workdir}"
        )
    settings = settings_of(options, there)
    if there is not None:
        refuse_other(options, there, settings)
    told = {"arms", "docstring"}  # sweeps of earlier versions lack the arms
    remembers = there is not None and there.keys() >= told
    if options.ablation is not None or not remembers:
        generator = find_ablation(settings["ablation"])
        settings["arms"] = arms_of(settings, generator)
        settings["docstring"] = generator.__doc__ or generator.__name__
    search, plan = plan_of(settings)
    if remembers and any(there[key] != settings[key] for key in told):
        refuse_other_arms(workdir, plan_of(there)[1], plan)
    if search.count is not None and any(len(a.candidates) > 1 for a in plan.arms):
        raise ValueError(
            "The ablation gives its arms nuisance settings itself, so there is nothing "
            "for --search to choose; leave it out."
        )
    if search.count is not None and options.proposes:
        package("optuna")
    if options.verb == "run" and there is None:
        check_data(settings)
    sweep = Sweep(workdir, plan, search, [], settings)
    if options.verb == "status":
        return sweep.extended(propose=False, writes=False)
    sweep = sweep.extended(options.proposes)
    with locked(workdir / ".plan"):
        now = remembered(workdir / "sweep.json")
        if options.verb != "run" or now == settings:
            return sweep
        if now == there:
            write_json(workdir / "sweep.json", settings)
            return sweep
    return open_sweep(options)  # another process has written its own meanwhile


def check_data(settings: dict) -> None:
    """Raise a ValueError or an OSError where the sweep could not be scored.

    Which would be known only after its trials are trained, and by then a workdir keeps
    its splits and its metric.
    """
    data, test_split = settings["base"]["data"], settings["test_split"]
    parts = {part.split("[")[0].strip() for part in test_split.split("+")}
    if parts & {"train", "val", "validation"}:
        raise ValueError(
            f"--test_split={test_split} must be of sentences that nothing was learnt "
            f"from or chosen on; the report has the scores on dev beside them."
        )
    if settings["metric"].startswith("published_") and data["name"] != "multi30k":
        raise ValueError(
            f"--metric={settings['metric']} is of multi30k, whose tokenised references "
            f"are published; choose another for data.name={data['name']}, as bleu."
        )
    names = (data["name"], data["source"], data["target"])
    corpora.load(*names, test_split, data["directory"])
    if data["name"] == "multi30k":  # eval.py scores by the published protocol too
        for split in ("val", test_split):
            corpora.tokenized_references(
                data["name"], data["target"], split, data["directory"]
            )


def remembered(path: Path) -> dict | None:
    """The settings of the sweep that a workdir holds, if any."""
    there = read_json(path)
    if there is None:
        return None
    old = {"search": None, "search_seeds": 1}  # of before there was a search
    known = old | there if isinstance(there, dict) else {}
    missing = [key for key in REMEMBERED if key not in known]
    if missing:
        raise ValueError(
            f"{path} is damaged (it lacks {summary(missing)}); restore it, or begin "
            f"anew in another --workdir."
        )
    return known


def settings_of(options: Options, there: dict | None) -> dict:
    """What a workdir remembers of the flags, all as JSON has it.

    What no flag says is as the workdir has it, or where a config is given, with which
    the whole sweep is named, the flag's default.
    """
    flags = ("ablation", "seeds", "match", "tune", "search", "search_seeds")
    flags += ("checkpoint", "metric", "test_split", "group_size", "note")
    given = {name: getattr(options, name) for name in flags}
    given = {name: v for name, v in given.items() if v is not None and v != []}
    settings = there or {}
    if options.config is not None:
        config = options.config.to_dict()
        metric = config["train"]["best_metric"].removeprefix("dev_")
        data = config["data"]["name"]
        kept = {"seeds": config["seeds"], "group_size": 16, "note": None} | settings
        settings = kept | {
            "config": options.config_file,
            "overrides": options.overrides,
            "base": as_before(config, (there or {"base": config})["base"], DEFAULTS),
            "match": None,
            "tune": [],
            "search": None,
            "search_seeds": 1,
            "checkpoint": "best",
            "metric": "bleu" if metric == "loss" else metric,
            "test_split": TEST_SPLITS.get(data, "test"),
        }
        if there is None or options.verb == "run":
            words = of_the_whole(sys.argv[1:])
            settings["command"] = shlex.join(["python", "sweep.py", "run", *words])
    elif options.verb == "run" and there is not None:  # as with more seeds
        more = [f"--{name}={v}" for name, v in given.items() if v != there[name]]
        command = shlex.join([*shlex.split(there["command"]), *more])
        settings = settings | {"command": command}
    settings = settings | given
    if settings["metric"] not in SCORES:
        raise ValueError(
            f"--metric must be one of {', '.join(SCORES)}, got {settings['metric']!r}."
        )
    return settings


def as_before(config: dict, there, defaults: dict) -> dict:
    """A config without the defaults of keys that did not exist when another was made.

    So a sweep keeps the ids of its trials, which are made of all keys.
    """
    there = there if isinstance(there, dict) else {}
    return {
        key: as_before(value, there.get(key, {}), defaults[key])
        if isinstance(value, dict)
        else value
        for key, value in config.items()
        if key in there or value != defaults[key]
    }


def of_the_whole(words: list[str]) -> list[str]:
    """A command line without the flags of `WHERE`, --name=value or --name value."""
    left, kept = iter(words), []
    for word in left:
        name, equals, _ = word.lstrip("-").partition("=")
        if not word.startswith("-") or name not in WHERE + SWITCHES:
            kept.append(word)
        elif name in WHERE and not equals:
            next(left, None)  # its value
    return kept


def refuse_other(options: Options, there: dict, now: dict) -> None:
    """Raise a ValueError where a workdir holds another sweep, saying what differs.

    More seeds are another sweep to all verbs but run, and fewer are to run too.
    """
    runs = options.verb == "run"
    keys = IDENTITY if runs else (*IDENTITY, "seeds", "group_size")
    free = [f"base.{key}" for key in (*NO_RESULT_DEPENDS_ON, "seeds")]
    old, new = (flat({key: settings[key] for key in keys}) for settings in (there, now))
    differs = [
        f"{key.removeprefix('base.')} (there {old.get(key)!r}, now {new.get(key)!r})"
        for key in sorted(old | new)
        if old.get(key) != new.get(key) and key not in free
    ]
    if runs and now["seeds"] < there["seeds"]:
        differs.append(f"seeds (there {there['seeds']}, now {now['seeds']})")
    if differs:
        mend = (
            "choose another --workdir, or the settings of that one (more seeds may be "
            "added, none left out)."
            if runs
            else f"leave that out: {options.verb} takes the sweep as it is, and only "
            f"run adds seeds."
        )
        raise ValueError(
            f"{options.workdir} holds another sweep: {', '.join(differs)}; {mend}"
        )


def refuse_other_arms(workdir: Path, there: Plan, now: Plan) -> None:
    """Raise a ValueError where an ablation's arms are no longer those of the sweep.

    What was compared would vanish from the report, or be corrected for fewer arms.
    """
    old, new = (
        {
            f"arm {arm.name}": arm.overrides
            | {"nuisance": json.dumps(arm.candidates), "baseline": arm.is_baseline}
            for arm in plan.arms
        }
        for plan in (there, now)
    )
    seeds = {arm.name: arm.seeds for arm in now.arms}
    differs = differing(old, new) + [
        f"arm {arm.name}.seeds (there {arm.seeds}, now {seeds[arm.name]})"
        for arm in there.arms
        if not set(arm.seeds) <= set(seeds.get(arm.name, arm.seeds))
    ]
    if differs:
        raise ValueError(
            f"{workdir} holds a sweep of other arms than its ablation has now: "
            f"{summary(differs)}; choose another --workdir, or restore the function "
            f"(without --ablation, the arms are those of the sweep)."
        )


def plan_of(settings: dict) -> tuple[Search, Plan]:
    """The arms that settings stand for, and how their nuisance settings are found."""
    base = ConfigDict(settings["base"]).lock()
    nuisance = nuisance_keys(settings["docstring"])
    search, candidates = make_search(
        settings["search"], settings["tune"], settings["search_seeds"], base, nuisance
    )
    with naming(settings["ablation"], ValueError):
        plan = expand(
            base,
            settings["arms"],
            settings["seeds"],
            nuisance=nuisance,
            tuned=candidates,
            match=settings["match"],
        )
    return search, plan


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
