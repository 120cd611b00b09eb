"""The tables of a sweep, per trial and per arm, in SQLite and as CSV.

They are rebuilt from the groups' folders whenever a group ends, so they can be deleted
at any time.
"""

import contextlib
import csv
import io
import json
import sqlite3
import statistics
from pathlib import Path

from headcount.runtime import files
from headcount.runtime.files import locked
from headcount.sweeps.looks import verdict_rows
from headcount.sweeps.plan import Arm, Group, Plan
from headcount.sweeps.store import (
    TRAINED,
    Sweep,
    diverged_at,
    read_failure,
    read_run,
)
from headcount.tasks import Metric
from headcount.training.metrics import read_metrics

# Settings that must be fixed before any score is seen.
PLAN = "metric", "seeds", "looks", "margin", "earlier_seeds"
# Columns about training, from metrics.jsonl; older tables may lack them.
LOGGED = "gradient_norm", "largest_gradient_norm", "train_loss", "generalization_gap"
VERDICT_COLUMNS = [
    *("arm", "verdict", "metric", "split", "difference", "low", "high", "margin"),
    *("bound", "seeds", "looks", "lost", "chance", "sentence"),
]


def column_names(metrics: tuple[Metric, ...]) -> list[str]:
    """Return the columns of the trial table, with two score columns per metric."""
    return [
        *("id", "arm", "is_baseline", "verdict", "status", "stage", "selected", "seed"),
        *("overrides", "nuisance", "mlp_dim", "parameters", "flops"),
        *("steps", "best_step", "diverged_at", "tokens_per_second", "seconds"),
        *LOGGED,
        *(f"{split}_{metric.name}" for split in ("dev", "test") for metric in metrics),
        *("test_split", "checkpoint", "open_heads", "options", "signatures"),
        *("device", "attention", "versions", "python", "commit", "folder", "error"),
        "plan",
    ]


def collect(sweep: Sweep) -> list[dict]:
    """Rebuild the tables from the files on disk; return the rows of the trial table."""
    with locked(sweep.workdir / ".table"):
        rows = make_rows(sweep)
        columns = column_names(sweep.task.metrics)
        verdicts = verdict_rows(sweep.plan, sweep.settings, sweep.metric, rows)
        of_arm = {row["arm"]: row["verdict"] for row in verdicts}
        for row in rows:
            row["verdict"] = of_arm.get(row["arm"], "baseline")
        tables = {"trials": (columns, rows), "verdicts": (VERDICT_COLUMNS, verdicts)}
        write_sqlite(sweep.workdir / "sweep.sqlite", tables)
        write_csv(sweep.workdir / "sweep.csv", columns, rows)
        write_csv(sweep.workdir / "verdicts.csv", VERDICT_COLUMNS, verdicts)
    return rows


def make_rows(sweep: Sweep) -> list[dict]:
    """Return the rows of the trial table, in the order of the plan."""
    splits = {"dev": "val", "test": sweep.settings["test_split"]}
    results = {side: sweep.read_results(split) for side, split in splits.items()}
    rows = []
    for group in sweep.groups:
        group_results = {
            side: rows.get(group.name) for side, (rows, _) in results.items()
        }
        errors = [errors.get(group.name) for _, errors in results.values()]
        rows += group_rows(
            sweep, group, group_results, next(filter(None, errors), None)
        )
    mark_selected(rows)
    order = {trial.id: index for index, trial in enumerate(sweep.plan.trials)}
    return sorted(rows, key=lambda row: order[row["id"]])


def group_rows(
    sweep: Sweep, group: Group, results: dict, error: str | None
) -> list[dict]:
    """Return a row for every trial of a group that is in the plan.

    Args:
        results: rows of result-*.json, or None, by "dev" and "test".
        error: why a result can't be used, or None.
    """
    folder, plan, run, failure = sweep.folder(group), sweep.plan, None, None
    try:
        run = read_run(folder)
    except ValueError as damaged:
        error = str(damaged)
    try:
        failure = read_failure(folder)
    except ValueError as damaged:
        failure = {"error": str(damaged)}
    metrics = read_metrics(folder)
    tokens_per_second, seconds = throughput(metrics)
    arm_names = {trial.id: trial.arm for trial in plan.trials}
    rows = []
    for index, trial in enumerate(group.trials):
        if trial.id not in arm_names:
            continue
        scores = {side: result and result[index] for side, result in results.items()}
        row = dict.fromkeys(column_names(sweep.task.metrics))
        row |= arm_columns(plan.arm(arm_names[trial.id]))
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
            "test_split": sweep.settings["test_split"],
            "folder": f"groups/{group.name}",
            "plan": json.dumps({name: sweep.settings[name] for name in PLAN}),
        }
        warmup = trial.config["optimizer"]["warmup_steps"]
        row |= logged([m for m in metrics if m["trial"] == index], warmup)
        if run is not None:
            row |= {
                "parameters": run["num_parameters"],
                "device": ", ".join(sorted(set(run["devices"]))),
                "attention": json.dumps(run["attention"]),
                "versions": json.dumps(run["versions"]),
                "python": run["python"],
                "commit": run["commit"],
            }
        for side, result in scores.items():
            row |= score_columns(side, result, sweep.task.metrics) if result else {}
        row["status"] = trial_status(row, run, scores)
        if failure is not None and row["status"] not in ("done", "diverged"):
            row |= {"status": "failed", "error": failure["error"]}
        if error is not None:
            row |= {"status": "failed", "error": error}
        rows.append(row)
    return rows


def arm_columns(arm: Arm) -> dict:
    """Return the columns that describe a trial's arm."""
    return {
        "arm": arm.name,
        "is_baseline": int(arm.is_baseline),
        "overrides": json.dumps(arm.overrides),
        "mlp_dim": arm.config["model"]["mlp_dim"],
        "parameters": arm.parameters,
        "flops": arm.training_flops,
    }


def score_columns(side: str, result: dict, metrics: tuple[Metric, ...]) -> dict:
    """Return the columns that come from a row of a result-SPLIT.json."""
    return {f"{side}_{metric.name}": result[metric.name] for metric in metrics} | {
        "best_step": result["step"],
        "diverged_at": result["diverged_at"],
        "checkpoint": result["checkpoint"],
        "open_heads": result.get("open_heads"),
        "options": json.dumps(result["options"]),
        "signatures": json.dumps(result["signatures"]),
    }


def trial_status(row: dict, run: dict | None, scores: dict) -> str:
    """Return the status of a trial."""
    status = None if run is None else run["status"]
    if row["diverged_at"] is not None or status == "diverged":
        return "diverged"
    if scores["dev"]:  # with test scores only, dev was moved away to be scored again
        is_done = scores["test"] or row["stage"] == "search"
        return "done" if is_done else "dev scored"
    if status in TRAINED:
        return "trained"
    return "training" if row["steps"] else "waiting"


def throughput(metrics: list[dict]) -> tuple[float | None, float]:
    """Return the tokens per second of a whole group, and the seconds of its updates.

    Both exclude compilation, evaluation and saving.
    """
    rates = "steps_per_second", "tokens_per_second"
    logged = {m["step"]: m for m in metrics if all(m.get(rate) for rate in rates)}
    seconds, tokens, previous = 0.0, 0.0, 0
    for step, row in sorted(logged.items()):
        duration = (step - previous) / row["steps_per_second"]
        seconds += duration
        tokens += duration * row["tokens_per_second"]
        previous = step
    return (tokens / seconds if seconds else None), seconds


def logged(metrics: list[dict], warmup: int) -> dict:
    """Return what training logged of one trial; without a value, a column is missing.

    `gradient_norm` is the median, and `largest_gradient_norm` the maximum, of the norms
    before clipping after the warm-up, in rows that don't begin within it. The others
    are of the last evaluation.
    """
    columns = {}
    for name in LOGGED:
        rows = [m for m in metrics if m.get(name) is not None]
        values = [m[name] for m in rows]
        if name.endswith("gradient_norm"):
            steps = [m["step"] for m in rows]
            begins = [warmup, *steps][: len(steps)]  # of the windows that rows cover
            values = [
                value
                for value, begin, step in zip(values, begins, steps, strict=True)
                if step > warmup and begin >= warmup
            ]
            if values:
                of = max if name.startswith("largest") else statistics.median
                columns[name] = of(values)
        elif values:
            columns[name] = values[-1]
    return columns


def is_lost(row: dict) -> bool:
    """Return whether a row is of a trial to report that diverged or failed."""
    return row["stage"] == "report" and row["status"] in ("diverged", "failed")


def count_unfinished(plan: Plan, rows: list[dict]) -> int:
    """Count the unfinished trials, including those that will follow a search.

    No trials follow a search in which a trial of every setting diverged.
    """
    tried = {(row["arm"], row["nuisance"]) for row in rows}
    lost = {(r["arm"], r["nuisance"]) for r in rows if r["status"] == "diverged"}
    reported = {row["arm"] for row in rows if row["stage"] == "report"}
    running = {arm for arm, _ in tried - lost}
    decided = reported | ({row["arm"] for row in rows} - running)
    waiting = [len(arm.seeds) for arm in plan.arms if arm.name not in decided]
    ended = ("done", "diverged", "failed")
    return sum(waiting) + sum(row["status"] not in ended for row in rows)


def mark_selected(rows: list[dict]) -> None:
    """Set `selected` to 1 for the settings that an arm's search chose, else to 0.

    For arms whose search is unfinished, it stays None.
    """
    chosen = {r["arm"]: r["nuisance"] for r in rows if r["stage"] == "report"}
    for row in rows:
        if row["arm"] in chosen:
            row["selected"] = int(row["nuisance"] == chosen[row["arm"]])


def write_sqlite(path: Path, tables: dict[str, tuple[list[str], list[dict]]]) -> None:
    """Replace the database by a new file, so that readers of the old one don't block.

    Args:
        tables: columns and rows by name; the first column is the primary key.
    """
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        for table, (columns, rows) in tables.items():
            names = ", ".join(f'"{name}"' for name in columns)
            values = ", ".join("?" * len(columns))
            cells = [[row[name] for name in columns] for row in rows]
            key = f"PRIMARY KEY ({columns[0]})"
            database.execute(f"CREATE TABLE {table} ({names}, {key})")
            database.executemany(
                f"INSERT INTO {table} ({names}) VALUES ({values})", cells
            )
        database.commit()
        content = database.serialize()
    # SQLite would apply the old file's journal to the new file
    path.with_name(path.name + "-journal").unlink(missing_ok=True)
    files.write(path, content)


def write_csv(path: Path, columns: list[str], rows: list[dict]) -> None:
    """Write rows as a CSV file."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    files.write(path, text.getvalue())
