"""A sweep on disk, with one folder per group.

    sweep.json            the sweep's settings; see `sweeps.settings`
    groups/NAME/          a workdir of train.py
      group.json          the group's trials
      failed.json         the error, if a process failed
      result-SPLIT.json   scores written by eval.py
      log.txt             output of the group's processes

There is no other state: the table is derived from these files. A process may therefore
be killed at any moment, and several processes or machines may work on one sweep.
"""

import contextlib
import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from headcount.analysis.sequential import Looks
from headcount.configs.validation import read_config
from headcount.runtime.files import locked, remove_parts
from headcount.runtime.schema import Number, Optional, violation
from headcount.runtime.workdir import (
    FORMAT_VERSION,
    differences,
    has_digest,
    parse_json,
    read_json,
    summarize,
    write_json,
)
from headcount.sweeps.looks import make_looks, staged_trials
from headcount.sweeps.plan import Group, Plan, Trial, group_trials, trial_id
from headcount.sweeps.search import DIVERGED, DevScore, Search, dev_score
from headcount.tasks import Metric, Task
from headcount.training.metrics import read_metrics

SIDES = "in the sweep", "in the file"  # of a result, in errors
TRAINED = ("finished", "diverged")  # statuses in run.json with nothing left to train
# Schemas of what the table needs of a group's files; see `runtime.schema`.
RUN = {
    "format_version": frozenset({FORMAT_VERSION}),
    "status": str,
    "num_parameters": Number(0),
    "devices": [str],
    "attention": {},
    "versions": {},
    "python": str,
    "commit": Optional(str),
}
RESULT = {
    "trial": Number(0),
    "step": Number(0),
    "checkpoint": str,
    "diverged_at": Optional(Number(0)),
    "options": {},
    "signatures": {},
}
TRIAL = {
    "id": str,
    "arm": str,
    "nuisance": {},
    "seed": Number(0),
    "config": read_config,
    "attempt": Number(0),
}


class Sweep(NamedTuple):
    """A sweep and its folder."""

    workdir: Path
    plan: Plan
    search: Search
    groups: list[Group]  # in the order of the plan's trials
    settings: dict  # as in sweep.json
    task: Task  # of the base config
    task_file: Path | None  # Python file that registers the task; only from --task_file

    @property
    def metric(self) -> Metric:
        """The metric by which arms are compared."""
        return next(m for m in self.task.metrics if m.name == self.settings["metric"])

    @property
    def looks(self) -> Looks | None:
        """The planned looks, or None if every arm gets all its seeds at once."""
        return make_looks(self.settings, self.plan, self.metric)

    @property
    def grows(self) -> bool:
        """Whether the results of existing groups may add more groups."""
        return self.has_search or self.looks is not None

    @property
    def has_search(self) -> bool:
        """Whether any arm has several candidate nuisance settings."""
        return any(map(self.search.has_choice, self.plan.arms))

    def shard(self, index: int, count: int) -> list[Group]:
        """Return every count-th group, starting from group `index`.

        Groups are ordered by when they can be created. Those of later looks come last,
        so earlier groups stay in their shard. Those that follow searches may change
        their shard when others are added before them.
        """
        place = {arm.name: i for i, arm in enumerate(self.plan.arms)}
        seeds = {arm.name: arm.seeds for arm in self.plan.arms}

        def key(group):
            trial = group.trials[0]
            of_arm = seeds.get(trial.arm, [])
            late = of_arm.index(trial.seed) if trial.seed in of_arm else 0
            is_report = not trial.is_search
            return is_report, trial.attempt, late, place.get(trial.arm, 0), group.name

        return sorted(self.groups, key=key)[index::count]

    def folder(self, group: Group) -> Path:
        """Return the workdir of a group."""
        return self.workdir / "groups" / group.name

    def num_trials(self) -> int:
        """Return the maximum number of trials of the sweep, searches included."""
        arms = self.plan.arms
        return sum(len(arm.seeds) + self.search.max_trials(arm) for arm in arms)

    def splits(self, group: Group) -> list[str]:
        """Return the splits to score a group on; for search trials, only dev."""
        is_search = group.trials[0].is_search
        names = ["val"] if is_search else ["val", self.settings["test_split"]]
        return list(dict.fromkeys(names))

    def extended(self, propose: bool = True, write: bool = True) -> "Sweep":
        """Return the sweep with all trials that follow from the results on disk.

        Groups on disk stay as they are; trials without a group form new groups. A sweep
        with added seeds or arms therefore keeps its results, and an interrupted group
        resumes with the trials that it was started with.

        Args:
            propose: whether an Optuna search may start another round.
            write: whether to create the folders of new groups.
        """
        folder, lock = self.workdir / "groups", contextlib.nullcontext()
        if write:
            folder.mkdir(parents=True, exist_ok=True)
            remove_parts(self.workdir)
            lock = locked(self.workdir / ".plan")
        with lock:
            groups = [read_group(path) for path in sorted(folder.glob("*/group.json"))]
            check_placed_once(folder, groups)
            existing = self._replace(groups=groups).scored_trials()
            trials = staged_trials(
                self.plan,
                self.search,
                existing,
                propose,
                self.looks,
                self.metric.scale,
            )
            order = {trial.id: index for index, trial in enumerate(trials)}
            groups = [g for g in groups if any(t.id in order for t in g.trials)]
            placed = {trial.id for group in groups for trial in group.trials}
            unplaced = [trial for trial in trials if trial.id not in placed]
            for members in group_trials(unplaced, self.settings["group_size"]):
                group = Group(group_name(members), members)
                groups.append(group)
                if write:
                    write_group(self, group)
        last = len(order)
        groups.sort(key=lambda g: min(order.get(trial.id, last) for trial in g.trials))
        return self._replace(plan=self.plan._replace(trials=trials), groups=groups)

    def scored_trials(self) -> list[tuple[Trial, DevScore | None]]:
        """Return all trials on disk, each with its dev score or None.

        A trial that diverged, or whose group failed, is `DIVERGED`.
        """
        results, _ = self.read_results("val")
        scored = []
        for group in self.groups:
            rows, folder = results.get(group.name), self.folder(group)
            metrics = read_metrics(folder) if rows is None else []
            has_failed = (folder / "failed.json").exists()
            for index, trial in enumerate(group.trials):
                score = None
                # a failed search waits for its retry, which may change the choice
                is_lost = has_failed and not trial.is_search
                if rows is not None:
                    score = dev_score(rows[index], self.metric)
                elif is_lost or diverged_at(metrics, index) is not None:
                    score = DIVERGED
                scored.append((trial, score))
        return scored

    def read_results(self, split: str) -> tuple[dict[str, list], dict[str, str]]:
        """Read the result-SPLIT.json of all groups that have one, by group name.

        Returns:
            The rows by group name, and error messages by group name. An error is a
            damaged file, or one made with other options than most groups.
        """
        by_group, errors = {}, {}
        for group in self.groups:
            try:
                rows = read_result(self, group, split)
            except ValueError as error:
                errors[group.name] = str(error)
            else:
                by_group |= {} if rows is None else {group.name: rows}
        options_of = {
            name: json.dumps(rows[0]["options"]) for name, rows in by_group.items()
        }
        if options_of:
            usual = json.loads(Counter(options_of.values()).most_common(1)[0][0])
            for group in self.groups:
                if group.name not in by_group:
                    continue
                options = by_group[group.name][0]["options"]
                if changed := differences(usual, options, "options", (), SIDES):
                    path = self.folder(group) / f"result-{split}.json"
                    errors[group.name] = other_settings(path, changed)
                    del by_group[group.name]
        return by_group, errors


def read_optional_json(path: Path):
    """Return the content of a JSON file, or None if there is no file.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        return read_json(path)
    except FileNotFoundError:
        return None


def write_group(sweep: Sweep, group: Group) -> None:
    """Create a group's folder and its group.json."""
    sweep.folder(group).mkdir(exist_ok=True)
    rows = [trial._asdict() for trial in group.trials]
    write_json(sweep.folder(group) / "group.json", rows)


def read_group(path: Path) -> Group:
    """Read a group.json.

    Raises:
        ValueError: the file is damaged.
    """
    rows = read_json(path)
    wrong = violation(rows, [TRIAL])
    if wrong is None:
        for index, trial in enumerate(rows):
            if trial.keys() != TRIAL.keys() or trial_id(trial["config"]) != trial["id"]:
                wrong = wrong or f"[{index}] was edited: its id is of another config"
    if wrong:
        raise ValueError(
            f"{path} is damaged ({wrong}); restore it, or move its folder away and "
            f"sweep.py run trains its trials again."
        )
    return Group(path.parent.name, [Trial(**trial) for trial in rows])


def check_placed_once(folder: Path, groups: list[Group]) -> None:
    """Raise a ValueError if two groups hold a trial, as a copy of a group does."""
    places = {}
    for group in groups:
        for trial in group.trials:
            other = places.setdefault(trial.id, group.name)
            if other != group.name:
                raise ValueError(
                    f"{folder / other} and {folder / group.name} hold the same trial; "
                    f"move one of them out of {folder}."
                )


def read_run(folder: Path) -> dict | None:
    """Read a group's run.json; return None if there is no file.

    Raises:
        ValueError: the file is damaged.
    """
    hint = "restore it, or move its folder away, and sweep.py run trains it again."
    return read_record(folder / "run.json", RUN, hint)


def read_failure(folder: Path) -> dict | None:
    """Read a group's failed.json, with the error of its process; None if none failed.

    Raises:
        ValueError: the file is damaged.
    """
    hint = "sweep.py run tries its group again."
    return read_record(folder / "failed.json", {"error": str}, hint)


def read_record(path: Path, schema, hint: str):
    """Read a JSON file; return None if there is none.

    Raises:
        ValueError: it violates the schema; the message ends with the hint.
    """
    try:
        content = parse_json(path.read_text())
        wrong = violation(content, schema)
    except FileNotFoundError:
        return None
    except ValueError as error:
        wrong = error
    if wrong:
        raise ValueError(f"{path} is damaged ({wrong}); {hint}")
    return content


def read_result(sweep: Sweep, group: Group, split: str) -> list[dict] | None:
    """Read a group's result-SPLIT.json, one row per trial; None if there is no file.

    Raises:
        ValueError: the file is damaged, or used another --checkpoint than the sweep.
    """
    path, metrics = sweep.folder(group) / f"result-{split}.json", sweep.task.metrics
    hint = "move it away, and sweep.py run scores its group again."
    rows, wrong = read_record(path, [RESULT], hint), None
    if rows is None:
        return None
    if [row["trial"] for row in rows] != [*range(len(group.trials))]:
        wrong = "it needs a row per trial"
    elif not all(map(has_digest, rows)):
        wrong = "it was changed since eval.py wrote it"
    if wrong:
        raise ValueError(f"{path} is damaged ({wrong}); {hint}")
    for row in rows:
        if row.get("diverged_at") is None and row.get(sweep.metric.name) is None:
            raise ValueError(
                f"{path} is damaged ({sweep.metric.name} is missing or not finite); "
                f"{hint}"
            )
        for name in (metric.name for metric in metrics):
            value = row.setdefault(name, None)  # an older file may lack a new metric
            if value is not None and type(value) not in (int, float):
                raise ValueError(f"{path} is damaged ({name} is {value}); {hint}")
    expected = {"checkpoint": sweep.settings["checkpoint"]}
    actual = {"checkpoint": rows[0]["checkpoint"]}
    if changed := differences(expected, actual, "", (), SIDES):
        raise ValueError(other_settings(path, changed))
    return rows


def other_settings(path: Path, changed: list[str]) -> str:
    """Return the error message for a result that is not comparable to the others."""
    return (
        f"{path} was made with other settings than the rest of the sweep: "
        f"{summarize(changed)}; "
        f"move it away, and sweep.py run scores its group again."
    )


def diverged_at(metrics: list[dict], index: int) -> int | None:
    """Return the step at which a trial of a group diverged, or None."""
    steps = [
        m["diverged_at"] for m in metrics if m["trial"] == index and "diverged_at" in m
    ]
    return max(steps, default=None)


def group_name(trials: list[Trial]) -> str:
    """Return a readable, unique name for a group's folder."""
    digest = hashlib.sha256(" ".join(trial.id for trial in trials).encode()).hexdigest()
    readable = re.sub(r"[^\w=.]+", "_", trials[0].arm)[:40]
    readable += "-search" if trials[0].is_search else ""
    return f"{readable}-{digest[:8]}"


def last_step(folder: Path) -> int:
    """Return the last step in a group's metrics.jsonl, reading only its end."""
    path, end = folder / "metrics.jsonl", 4096
    if not path.exists():
        return 0
    with path.open("rb") as file:
        size = path.stat().st_size
        while True:  # rows with statistics of heads are long
            file.seek(max(0, size - end))
            steps = re.findall(rb'^\{"step": (\d+),', file.read(), re.MULTILINE)
            if steps or end >= size:
                return int(steps[-1]) if steps else 0
            end *= 8
