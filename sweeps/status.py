"""Output of `sweep.py status`: the progress of every arm."""

import json

from rich.table import Table

from headcount.analysis.formatting import count, format_settings
from headcount.analysis.sequential import FUTILITY
from headcount.analysis.tables import print_table
from headcount.sweeps.looks import verdict_rows
from headcount.sweeps.runner import next_command
from headcount.sweeps.store import Sweep
from headcount.sweeps.table import count_unfinished, is_lost

STATUSES = (
    *("done", "dev scored", "trained", "training", "waiting", "diverged", "failed"),
)


def verdict_cell(row: dict) -> str:
    """Format an arm's verdict by planned looks for a table."""
    if row["lost"]:
        return "undecided: lost a trial"
    if row["seeds"] < int(row["looks"].split(",")[0]):
        return "not looked at yet"
    text = f"{row['verdict']} after {row['seeds']} seeds"
    ended = row["chance"] is not None and row["chance"] < FUTILITY
    return f"{text}, ended" if ended else text


def print_status(sweep: Sweep, rows: list[dict]) -> None:
    """Print each arm's trials by status, steps and mean dev score, then all errors.

    The last line is the command to run next.
    """
    metric = sweep.metric
    present = [s for s in STATUSES if any(row["status"] == s for row in rows)]
    table = Table(
        *("arm", *present, "steps", f"dev {metric.label}"),
        *(["chosen"] if sweep.has_search else []),
        *(["verdict"] if sweep.looks else []),
    )
    verdicts = {}
    if sweep.looks:
        judged = verdict_rows(sweep.plan, sweep.settings, metric, rows)
        verdicts = {row["arm"]: verdict_cell(row) for row in judged}
    for arm in sweep.plan.arms:
        of_arm = [row for row in rows if row["arm"] == arm.name]
        numbers = [sum(row["status"] == s for row in of_arm) for s in present]
        reported = [row for row in of_arm if row["stage"] == "report"]
        scores = [row[f"dev_{metric.name}"] for row in reported if not is_lost(row)]
        scores = [score for score in scores if score is not None]
        trials = [trial for trial in sweep.plan.trials if trial.arm == arm.name]
        steps = sum(trial.config["train"]["num_steps"] for trial in trials)
        chosen = "searching"
        if reported:
            chosen = format_settings(json.loads(reported[0]["nuisance"]))
        table.add_row(
            arm.name,
            *(str(number or "") for number in numbers),
            f"{sum(row['steps'] for row in of_arm)}/{steps}",
            metric.show(sum(scores) / len(scores)) if scores else "",
            *([chosen] if sweep.has_search else []),
            *([verdicts.get(arm.name, "baseline")] if sweep.looks else []),
        )
    console = print_table(table)
    for error in dict.fromkeys(row["error"] for row in rows if row["error"]):
        arms = dict.fromkeys(row["arm"] for row in rows if row["error"] == error)
        console.print(f"failed: {', '.join(arms)}: {error}", soft_wrap=True)
    for row in rows:
        if row["status"] == "diverged":
            nuisance = json.loads(row["nuisance"])
            console.print(
                f"diverged: {row['arm']}, seed {row['seed']}"
                f"{f', {format_settings(nuisance)}' if nuisance else ''}"
                f" at step {row['diverged_at']}",
                soft_wrap=True,
            )
    done = [row for row in rows if row["status"] == "done" and row["stage"] == "report"]
    failed = sum(row["status"] == "failed" for row in rows)
    if num_left := count_unfinished(sweep.plan, rows) + failed:
        trials = count(num_left, "trial")
        if sweep.grows:
            known = sum(row["status"] not in ("done", "diverged") for row in rows)
            trials = f"{count(known, 'trial')}, and any" if known else "trials"
            trials += " that a search or look adds"
        console.print(
            f"Not done yet: {trials}. To resume: {next_command(sweep, 'run')}",
            soft_wrap=True,
        )
    elif done:
        console.print(
            f"Everything is done: {next_command(sweep, 'report')}", soft_wrap=True
        )
