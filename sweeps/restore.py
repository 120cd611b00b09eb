"""Take over the finished trials of a sweep from a kept sweep.csv.

A workdir stays on the machine that trained it, but its sweep.csv is small and holds all
scores. With `sweep.py run --finished=FILE`, a new workdir starts from that file and
trains only what is missing. Checkpoints, predictions and curves stay behind.
"""

import csv
import json
import math
import shutil
from pathlib import Path

from headcount.runtime.files import locked, write
from headcount.runtime.logging import say
from headcount.runtime.workdir import FORMAT_VERSION, with_digest, write_json
from headcount.sweeps.plan import Group
from headcount.sweeps.store import Sweep, group_name, write_group
from headcount.sweeps.table import LOGGED, PLAN, column_names
from headcount.tasks import Metric

ENDED = ("done", "diverged")


def restore(sweep: Sweep, path: Path, proposes: bool = True) -> Sweep:
    """Write the folders of all groups whose trials a sweep.csv holds.

    Groups that have started are left alone. A search or a look may add groups once its
    scores are there; they are taken over as well.

    Args:
        sweep: the sweep.
        path: the file.
        proposes: whether a search may start another round.

    Returns:
        The sweep with all trials that follow.

    Raises:
        ValueError: the file is not a sweep.csv of this sweep, or its scores used other
            settings.
        OSError: it can't be read.
    """
    rows, count = read_rows(sweep, path), 0
    row = next(iter(rows.values()), {})
    earlier = {"earlier_seeds": earlier_seeds(sweep, path, row)}
    if sweep.settings != sweep.settings | earlier:
        sweep = sweep._replace(settings=sweep.settings | earlier)
        write_json(sweep.workdir / "sweep.json", sweep.settings)
    with locked(sweep.workdir / ".restore"):  # other hosts may do the same
        sweep = sweep.extended(proposes)
        while new_groups := [
            g for g in split_groups(sweep, rows) if g.trials[0].id in rows
        ]:
            for group in new_groups:
                write_files(sweep, group, [rows[trial.id] for trial in group.trials])
                count += len(group.trials)
            sweep = sweep.extended(proposes)
    say(f"Took over {count} of the {len(rows)} finished trials in {path}.")
    return sweep


def split_groups(sweep: Sweep, rows: dict[str, dict]) -> list[Group]:
    """Return the groups that have not started, split by the state of their trials.

    A group's trials must all be unfinished, all have scores, or all have diverged
    without scores, because a group is marked as finished as a whole.
    """
    groups = []
    for group in sweep.groups:
        folder = sweep.folder(group)
        if any((folder / name).exists() for name in ("run.json", "log.txt")):
            continue
        parts = {}
        for trial in group.trials:
            row = rows.get(trial.id)
            parts.setdefault(row and row["options"] is not None, []).append(trial)
        if len(parts) == 1:
            groups.append(group)
            continue
        shutil.rmtree(folder)
        for trials in parts.values():
            part = Group(group_name(trials), trials)
            write_group(sweep, part)
            groups.append(part)
    return groups


def read_rows(sweep: Sweep, path: Path) -> dict[str, dict]:
    """Read the rows of finished trials by id; empty cells become None.

    It raises the same errors as `restore`.
    """
    empty = dict.fromkeys(column_names(sweep.task.metrics))
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            names = {*(reader.fieldnames or ())}
            table = list(reader)
    except (csv.Error, UnicodeError) as error:
        raise ValueError(
            f"--finished={path} is not a complete CSV file: {error}; copy it again."
        ) from None
    # an older table may lack metrics that are new
    if missing := {*column_names((sweep.metric,))} - names - {*LOGGED, "plan"}:
        raise ValueError(
            f"--finished={path} has no column {min(missing)}; it must be the sweep.csv "
            f"of this sweep in another workdir."
        )
    for number, row in enumerate(table, start=1):
        if None in row.values():  # an empty cell is ""
            raise ValueError(
                f"--finished={path} is not a complete CSV file: row {number} of "
                f"{len(table)} ends early; copy the file again."
            )
    rows = [empty | {k: v or None for k, v in row.items()} for row in table]
    arms = {json.dumps(arm.overrides) for arm in sweep.plan.arms}
    if not {row["overrides"] for row in rows} <= arms:
        raise ValueError(
            f"--finished={path} has arms that this sweep does not have; it must be the "
            f"sweep.csv of this sweep in another workdir."
        )
    ended = {row["id"]: row for row in rows if row["status"] in ENDED}
    for row in ended.values():
        check_scores(path, row, sweep.task.metrics)
        for name in ("checkpoint", "test_split"):
            expected = sweep.settings[name]
            if row[name] not in (expected, None):
                raise ValueError(
                    f"--finished={path} has scores with --{name}={row[name]}, and "
                    f"this sweep has {expected}; use the same."
                )
    trial_ids = {trial.id for trial in sweep.plan.trials}
    if ended and trial_ids.isdisjoint(row["id"] for row in rows):
        raise ValueError(
            f"--finished={path} has no training of this sweep: its config or its code "
            f"had other keys or values."
        )
    return ended


def check_scores(path: Path, row: dict, metrics: tuple[Metric, ...]) -> None:
    """Raise a ValueError unless all scores of a row are finite and within bounds."""
    for metric in metrics:
        for name in (f"dev_{metric.name}", f"test_{metric.name}"):
            if row[name] is None:
                continue
            try:
                value = metric.scale * float(row[name])
            except ValueError:
                value = math.nan
            # a perfect score may exceed its bound by a rounding error
            is_within = all(
                math.isclose(value, end, abs_tol=1e-6)
                for end in metric.clip(value, value)
            )
            if not (math.isfinite(value) and is_within):
                raise ValueError(
                    f"--finished={path} is damaged: {name} of arm {row['arm']}, seed "
                    f"{row['seed']}, can't be {row[name]}; restore the file."
                )


def earlier_seeds(sweep: Sweep, path: Path, row: dict) -> list[int] | None:
    """Return the numbers of seeds before some were added, as in sweep.json.

    Args:
        row: any row of the table; older tables don't say how they were planned.

    Raises:
        ValueError: the table's sweep had another plan than this one, which would have
            been chosen after its results were seen, or its plan can't be read.
    """
    settings = sweep.settings
    if not row.get("plan"):
        return settings["earlier_seeds"]
    try:
        recorded = {name: json.loads(row["plan"])[name] for name in PLAN}
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"--finished={path} is damaged: its column plan can't be read."
        ) from None
    fixed = [
        "metric",
        "looks",
        "margin",
        *["seeds"] * (settings["seeds"] < recorded["seeds"]),
    ]
    changed = [
        f"{name} (there {recorded[name]}, now {settings[name]})"
        for name in fixed
        if recorded[name] != settings[name]
    ]
    if changed:
        raise ValueError(
            f"--finished={path} is of a sweep with another plan: {', '.join(changed)}; "
            f"use its plan. Without looks, seeds may be added, not removed."
        )
    numbers = {*(settings["earlier_seeds"] or ()), *(recorded["earlier_seeds"] or ())}
    if recorded["seeds"] < settings["seeds"]:
        numbers.add(recorded["seeds"])
    return sorted(numbers) or None


def write_files(sweep: Sweep, group: Group, rows: list[dict]) -> None:
    """Write the files of a group; raise a ValueError if a row can't be read."""
    try:
        files = group_files(sweep, group, rows)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"The table of --finished is damaged: a row of arm {rows[0]['arm']} can't "
            f"be read ({error})."
        ) from None
    for name, text in files.items():
        write(sweep.folder(group) / name, text)


def group_files(sweep: Sweep, group: Group, rows: list[dict]) -> dict[str, str]:
    """Return what train.py and eval.py leave in a group's folder, as far as known.

    The last file makes a group count as trained, so it must be written last.
    """
    files = {}
    for split in sweep.splits(group):
        side = "dev" if split == "val" else "test"
        scored = [score(sweep, side, index, row) for index, row in enumerate(rows)]
        if any(scored):
            if None in scored:
                raise ValueError("it has no scores")
            files[f"result-{split}.json"] = json.dumps(scored)
        elif any(row["status"] == "done" for row in rows):
            raise ValueError("it has no scores")
    steps, total = [], sum(float(row["seconds"] or 0) for row in rows)
    longest = max(int(row["steps"]) for row in rows)
    for index, row in enumerate(rows):
        step = {"step": int(row["steps"]), "trial": index}
        if row["diverged_at"] is not None:
            step["diverged_at"] = int(row["diverged_at"])
        step |= {name: float(row[name]) for name in LOGGED if row.get(name)}
        if total and step["step"] == longest:
            step["steps_per_second"] = longest / total
            step["tokens_per_second"] = float(row["tokens_per_second"])
        steps.append(json.dumps(step) + "\n")
    first, is_diverged = rows[0], all(row["status"] == "diverged" for row in rows)
    run = {
        "format_version": FORMAT_VERSION,
        "status": "diverged" if is_diverged else "finished",
        "num_parameters": int(first["parameters"]),
        "devices": first["device"].split(", "),
        "attention": json.loads(first["attention"]),
        "versions": json.loads(first["versions"]),
        "python": first["python"],
        "commit": first["commit"],
    }
    return files | {"metrics.jsonl": "".join(steps), "run.json": json.dumps(run)}


def score(sweep: Sweep, side: str, index: int, row: dict) -> dict | None:
    """Return a row of a result-SPLIT.json; None if the trial was not scored."""
    is_missing = row[f"{side}_{sweep.metric.name}"] is None
    if row["options"] is None or (is_missing and row["diverged_at"] is None):
        return None
    names = [metric.name for metric in sweep.task.metrics]
    cells = {name: row[f"{side}_{name}"] for name in names}
    result = {
        "trial": index,
        "step": int(row["best_step"]),
        "checkpoint": row["checkpoint"],
        "diverged_at": None if row["diverged_at"] is None else int(row["diverged_at"]),
        "options": json.loads(row["options"]),
        "signatures": json.loads(row["signatures"]),
    }
    result |= {name: None if x is None else float(x) for name, x in cells.items()}
    if row["open_heads"] is not None:
        result["open_heads"] = int(row["open_heads"])
    return with_digest(result)
