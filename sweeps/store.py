"""What a sweep leaves on disk: the truth in its groups' folders, a table made of it.

A group's folder is a workdir of train.py with `group.json` (its trials) beside. The
table is sweep.sqlite (and sweep.csv), a row a trial, and holds nothing that could not
be made again: so a process may be killed at any moment, and several may share a sweep.
"""

import contextlib
import csv
import fcntl
import hashlib
import json
import math
import re
import sqlite3
from pathlib import Path
from typing import NamedTuple

from headcount.runtime.workdir import write_json
from headcount.sweeps.plan import Arm, Group, Plan, Trial, grouped
from headcount.sweeps.records import read_group, read_record, read_result
from headcount.sweeps.search import LOST, Search, known_trials
from headcount.tasks.scores import untied
from headcount.training.metrics import metrics_of

SCORES = ("bleu", "chrf", "published_bleu", "published_chrf", "exact_match")
TOLD = (*SCORES, "loss")  # what is reported; arms are ranked by one of the scores
TRAINED = ".trained"  # made when train.py has nothing left to do
COLUMNS = (
    *("id", "arm", "is_baseline", "status", "stage", "selected", "seed"),
    *("overrides", "nuisance", "mlp_dim", "parameters", "flops"),
    *("steps", "best_step", "diverged_at", "tokens_per_second", "seconds"),
    *(f"{split}_{score}" for split in ("dev", "test") for score in TOLD),
    *("test_split", "checkpoint", "decoding"),
    *("signature", "chrf_signature", "published_signature"),
    *("published_chrf_signature", "device", "attention", "versions", "python"),
    *("commit", "folder", "error"),
)


@contextlib.contextmanager
def locked(path: Path, wait: bool = True):
    """Hold a file's lock; yields the file, or None where another process has it.

    The system gives the lock back when the last process that has the file open ends,
    however it ends; a child that the file is passed on to keeps it.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
        else:
            yield file


class Sweep(NamedTuple):
    """A sweep with its place on disk."""

    workdir: Path
    plan: Plan
    search: Search
    groups: list[Group]  # in the order of the plan's trials
    settings: dict  # as in sweep.json

    def folder(self, group: Group) -> Path:
        """Where a group is."""
        return self.workdir / "groups" / group.name

    def searches(self) -> bool:
        """Whether groups may follow from those there are."""
        return any(map(self.search.is_for, self.plan.arms))

    def num_trials(self) -> int:
        """Of the whole sweep, also those that are still to be chosen, at most."""
        arms = self.plan.arms
        return sum(len(arm.seeds) + self.search.size(arm) for arm in arms)

    def splits(self, group: Group) -> list[str]:
        """What a group is scored on: a search on dev alone."""
        is_search = group.trials[0].is_search
        return ["val"] if is_search else ["val", self.settings["test_split"]]

    def extended(self, propose: bool = True, writes: bool = True) -> "Sweep":
        """With the trials that follow from what is on disk by now, in groups.

        Groups on disk stay as they are, the rest become new ones. So a sweep that is
        given more seeds or arms keeps what it has, and an interrupted group resumes
        with the very trials that it started with. `writes` False puts none there.
        """
        folder, lock = self.workdir / "groups", contextlib.nullcontext()
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            lock = locked(self.workdir / ".plan")
        with lock:
            groups = [read_group(path) for path in sorted(folder.glob("*/group.json"))]
            there = [
                (trial, dev_score(self, group, index))
                for group in groups
                for index, trial in enumerate(group.trials)
            ]
            trials = known_trials(self.plan.arms, self.search, there, propose)
            wanted = {trial.id: index for index, trial in enumerate(trials)}
            groups = [g for g in groups if any(t.id in wanted for t in g.trials)]
            placed = {trial.id for group in groups for trial in group.trials}
            left = [trial for trial in trials if trial.id not in placed]
            for new in grouped(left, self.settings["group_size"]):
                group = Group(group_name(new), new)
                groups.append(group)
                if writes:
                    self.folder(group).mkdir(exist_ok=True)
                    rows = [trial._asdict() for trial in new]
                    write_json(self.folder(group) / "group.json", rows)
        first = len(wanted)
        groups.sort(
            key=lambda g: min(wanted.get(trial.id, first) for trial in g.trials)
        )
        return self._replace(plan=self.plan._replace(trials=trials), groups=groups)

    def rows(self) -> list[dict]:
        """The table's rows, of what every group's files say by now."""
        rows = [row for group in self.groups for row in rows_of(self, group)]
        select(rows)
        order = {trial.id: index for index, trial in enumerate(self.plan.trials)}
        return sorted(rows, key=lambda row: order[row["id"]])

    def collect(self) -> list[dict]:
        """Write the table anew; returns its rows."""
        with locked(self.workdir / ".table"):
            rows = self.rows()
            write_sqlite(self.workdir / "sweep.sqlite", rows)
            write_csv(self.workdir / "sweep.csv", rows)
        return rows


def dev_score(sweep: Sweep, group: Group, index: int) -> float | None:
    """Of a search's trial; `LOST` where it diverged, None where it has none yet."""
    if not group.trials[index].is_search:
        return None
    folder, settings = sweep.folder(group), sweep.settings
    try:
        found = read_result(folder, "val", group, settings)
    except ValueError:  # which the table tells
        return None
    if found is not None and found[index]["diverged_at"] is None:
        loss = found[index].get("loss")
        loss = loss if isinstance(loss, float) else math.inf
        return untied(found[index][settings["metric"]], loss)
    diverged = diverged_at(metrics_of(folder), index)
    return LOST if found is not None or diverged is not None else None


def diverged_at(metrics: list[dict], index: int) -> int | None:
    """The step at which a group's trial diverged, if it did."""
    steps = [
        m["diverged_at"] for m in metrics if m["trial"] == index and "diverged_at" in m
    ]
    return max(steps, default=None)


def group_name(trials: list[Trial]) -> str:
    """A folder's name: readable, and apart from that of any other group."""
    ids = hashlib.sha256(" ".join(trial.id for trial in trials).encode())
    readable = re.sub(r"[^\w=.]+", "_", trials[0].arm)[:40]
    readable += "-search" if trials[0].is_search else ""
    return f"{readable}-{ids.hexdigest()[:8]}"


def last_step(folder: Path) -> int:
    """Updates that a group's metrics tell of."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        steps = re.findall(rb'^\{"step": (\d+),', file.read(), re.MULTILINE)
    return int(steps[-1]) if steps else 0


def pace(metrics: list[dict]) -> tuple[float | None, float]:
    """Tokens a second of a whole group, and seconds that its updates took.

    Compilation, evaluation and saving are left out.
    """
    logged = {m["step"]: m for m in metrics if m.get("steps_per_second")}
    seconds, tokens, before = 0.0, 0.0, 0
    for step, row in sorted(logged.items()):
        span = (step - before) / row["steps_per_second"]
        seconds, tokens = seconds + span, tokens + span * row["tokens_per_second"]
        before = step
    return (tokens / seconds if seconds else None), seconds


def rows_of(sweep: Sweep, group: Group) -> list[dict]:
    """A row of the table for every trial of a group that the plan has."""
    folder, plan, settings = sweep.folder(group), sweep.plan, sweep.settings
    test_split = settings["test_split"]
    run, failed, results, unusable = None, None, {}, None
    try:
        run = read_record(folder / "run.json")
    except ValueError as error:
        unusable = str(error)
    try:
        failed = read_record(folder / "failed.json")
    except ValueError as error:
        failed = {"error": str(error)}
    for side, split in (("dev", "val"), ("test", test_split)):
        try:
            results[side] = read_result(folder, split, group, settings)
        except ValueError as error:
            results[side], unusable = None, str(error)
    metrics = metrics_of(folder)
    tokens_per_second, seconds = pace(metrics)
    planned = {trial.id: trial.arm for trial in plan.trials}
    rows = []
    for index, trial in enumerate(group.trials):
        if trial.id not in planned:
            continue
        scores = {side: found and found[index] for side, found in results.items()}
        # by the plan's name: an earlier version may have given the group another
        row = dict.fromkeys(COLUMNS) | arm_columns(plan.arm(planned[trial.id]))
        row |= {
            "id": trial.id,
            "stage": "search" if trial.is_search else "report",
            "seed": trial.seed,
            "diverged_at": diverged_at(metrics, index),
            "nuisance": json.dumps(trial.nuisance),
            "steps": max(
                (m["step"] for m in metrics if m["trial"] == index), default=0
            ),
            "seconds": seconds / len(group.trials) if seconds else None,
            "tokens_per_second": tokens_per_second,
            "test_split": test_split,
            "folder": f"groups/{group.name}",
        }
        if run is not None:
            row |= {
                "parameters": run["num_parameters"],
                "device": ", ".join(sorted(set(run["devices"]))),
                "attention": json.dumps(run["attention"]),
                "versions": json.dumps(run["versions"]),
                "python": run["python"],
                "commit": run["commit"],
            }
        for side, found in scores.items():
            row |= score_columns(side, found) if found else {}
        row["status"] = status(folder, row, scores)
        if failed is not None and row["status"] not in ("done", "diverged"):
            row |= {"status": "failed", "error": failed["error"]}
        if unusable is not None:
            row |= {"status": "failed", "error": unusable}
        rows.append(row)
    return rows


def arm_columns(arm: Arm) -> dict:
    """What a row says of its arm."""
    return {
        "arm": arm.name,
        "is_baseline": int(arm.is_baseline),
        "overrides": json.dumps(arm.overrides),
        "mlp_dim": arm.config["model"]["mlp_dim"],
        "parameters": arm.parameters,
        "flops": arm.training_flops,
    }


def score_columns(side: str, found: dict) -> dict:
    """What a row takes from a row of a result-SPLIT.json."""
    columns = {f"{side}_{s}": found[s] for s in TOLD if s in found}
    columns |= {k: v for k, v in found.items() if k.endswith("signature")}
    return columns | {
        "best_step": found["step"],
        "diverged_at": found["diverged_at"],
        "checkpoint": found["checkpoint"],
        "decoding": json.dumps(found["decoding"]),
    }


def status(folder: Path, row: dict, scores: dict) -> str:
    """How far a trial has come."""
    if row["diverged_at"] is not None:
        return "diverged"
    if scores["dev"]:  # also where test is: one that was taken away is to be made anew
        is_done = scores["test"] or row["stage"] == "search"
        return "done" if is_done else "dev scored"
    if (folder / TRAINED).exists():
        return "trained"
    return "training" if row["steps"] else "waiting"


def unfinished(plan: Plan, rows: list[dict]) -> int:
    """Trials that are not done; those that wait for a search too.

    None will follow a search in which everything diverged.
    """
    reported = {row["arm"] for row in rows if row["stage"] == "report"}
    going = {row["arm"] for row in rows if row["status"] != "diverged"}
    known = reported | ({row["arm"] for row in rows} - going)
    waiting = [len(arm.seeds) for arm in plan.arms if arm.name not in known]
    settled = ("done", "diverged", "failed")
    return sum(waiting) + sum(row["status"] not in settled for row in rows)


def select(rows: list[dict]) -> None:
    """Mark the settings that each arm's search ended in, and what has them.

    `selected` becomes 1 or 0, or stays None where that is not known yet.
    """
    chosen = {r["arm"]: r["nuisance"] for r in rows if r["stage"] == "report"}
    for row in rows:
        if row["arm"] in chosen:
            row["selected"] = int(row["nuisance"] == chosen[row["arm"]])


def write_sqlite(path: Path, rows: list[dict]) -> None:
    """Write the rows as a new file: who reads the old one can't hold us up."""
    columns = ", ".join(f'"{name}"' for name in COLUMNS)
    values = ", ".join(f":{name}" for name in COLUMNS)
    with contextlib.closing(sqlite3.connect(":memory:")) as base:
        base.execute(f"CREATE TABLE trials ({columns}, PRIMARY KEY (id))")
        base.executemany(f"INSERT INTO trials ({columns}) VALUES ({values})", rows)
        base.commit()
        content = base.serialize()
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    path.with_name(path.name + "-journal").unlink(missing_ok=True)  # of the old file
    part.replace(path)


def write_csv(path: Path, rows: list[dict]) -> None:
    """The same rows for a spreadsheet."""
    part = path.with_name(path.name + ".part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    part.replace(path)
