"""The README.md of an exported model: description, scores, and how to load it."""

import json
from pathlib import Path

import numpy as np

from headcount.analysis.significance import summary
from headcount.configs.base import get_config
from headcount.configs.validation import flat
from headcount.runtime.workdir import read_json
from headcount.tasks import make_task


def model_card(workdir: Path, config, trial: int, which: str, usage: str) -> str:
    """Format the model card of a trial in Markdown.

    Args:
        workdir: the run's folder; scores come from its result-SPLIT.json.
        config: the run's config.
        trial: index of the exported trial.
        which: "best", "last" or "average" checkpoint.
        usage: how to use the export, in Markdown.
    """
    facts = read_json(workdir / "run.json")
    of_trial = read_json(workdir / "trials.json")[trial]
    settings = changed(config) | of_trial
    data = facts.get("data", {})
    rows = {
        "task": config.task.name,
        "data": data_of(config),
        "training examples": data.get("examples", "unknown"),
        "parameters": f"{facts['num_parameters']:,}",
        "checkpoint": f"{which}, of trial {trial}",
        "commit of Headcount": facts.get("commit") or "unknown",
    }
    lines = [
        "# Model card",
        "",
        "Trained with Headcount.",
        "",
        "| | |",
        "| --- | --- |",
    ]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    metrics = make_task(config).metrics
    lines += ["", "## Scores", "", *scores(workdir, metrics, trial, of_trial)]
    lines += ["", "## Use", "", usage]
    lines += ["## Config", "", "What differs from the defaults:", "", "```"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    return "\n".join([*lines, "```", ""])


def changed(config) -> dict:
    """Return the settings that differ from the defaults, except local folders."""
    defaults = flat(get_config().to_dict())
    return {
        key: value
        for key, value in flat(config.to_dict()).items()
        if value != defaults[key] and key not in ("data.directory", "train.init_from")
    }


def data_of(config) -> str:
    """Describe the training data."""
    data = config.data
    pair = f", {data.source} to {data.target}" * (config.task.name == "translation")
    return f"{data.name}{pair}"


def scores(workdir: Path, metrics, trial: int, of_trial: dict) -> list[str]:
    """Format the scores in result-*.json as a table, followed by their signatures.

    Means are over the trials that differ from this one in their seed alone, and did not
    diverge.
    """
    lines, notes = ["| split | metric | this model | mean, 95% interval |"], []
    lines.append("| --- | --- | --- | --- |")
    for path in sorted(workdir.glob("result-*.json")):
        rows = read_json(path)
        mine = next(row for row in rows if row["trial"] == trial)
        fixed = {key: value for key, value in of_trial.items() if key != "seed"}
        siblings = [
            row
            for row in rows
            if row["diverged_at"] is None
            and fixed == {key: row.get(key) for key in fixed}
        ]
        decoding = "".join(f", {k} {v}" for k, v in mine["options"].items())
        for metric in metrics:
            values = [row.get(metric.name) for row in siblings]
            if mine.get(metric.name) is None:
                continue
            values = [value * metric.scale for value in values if value is not None]
            unit = f" ({metric.unit})" if metric.unit else ""
            split = f"{mine['split']} ({mine['checkpoint']}{decoding})"
            shown = format(mine[metric.name] * metric.scale, metric.format)
            mean = interval(values, metric.format)
            cells = split, metric.label + unit, shown, mean
            lines.append(f"| {' | '.join(cells)} |")
        notes += [f"- {name}: `{text}`" for name, text in mine["signatures"].items()]
    if len(lines) == 2:
        return ["None yet: `eval.py` writes them."]
    return [*lines, "", *sorted(set(notes))] if notes else lines


def interval(values: list[float], form: str) -> str:
    """Format the mean over trials with its interval, or "one seed" without several."""
    if not values:
        return "–"
    stats = summary(values)
    if not np.isfinite(stats.low):
        return "one seed"
    low, high = format(stats.low, form), format(stats.high, form)
    return f"{format(stats.mean, form)}, {low} to {high}, {len(values)} trials"
