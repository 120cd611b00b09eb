"""Printing of tables on the terminal."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from headcount.analysis.formatting import grouped
from headcount.analysis.heads import by_rank, mean_per_trial
from headcount.analysis.roles import by_role
from headcount.analysis.sequential import judge_at_last, unplanned_looks
from headcount.analysis.significance import summary
from headcount.tasks.base import LOSS, Metric


def print_table(table: Table) -> Console:
    """Print a table without truncating cells, and return the console used.

    On a terminal, long cells are folded; elsewhere, lines are as long as necessary.
    """
    console = Console(highlight=False, markup=False)
    for column in table.columns:
        column.overflow = "fold"
    if not console.is_terminal:
        endless = console.options.update(width=1000)
        console.width = max(console.width, console.measure(table, options=endless)[1])
    console.print(table)
    return console


def print_scores(
    rows: list[dict],
    metrics: tuple[Metric, ...],
    settings: list[str],
    path: Path,
    selects: Metric | None = None,
) -> None:
    """Print the scores of every trial, with signatures and decoding options.

    With several trials, show only settings that differ, and the mean and sample
    standard deviation over trials that differ only in their seed.

    Args:
        rows: rows of result-SPLIT.json.
        metrics: metrics of the task.
        settings: keys in which trials may differ.
        path: file to which the rows were written.
        selects: the metric on dev that has chosen the best checkpoints.
    """
    if len(rows) > 1:
        settings = [name for name in settings if len({row[name] for row in rows}) > 1]
    metrics = [m for m in metrics if rows[0].get(m.name) is not None]
    columns = ["trial", *settings, "step"]
    if any(row["diverged_at"] for row in rows):
        columns.append("diverged_at")
    title = f"{rows[0]['split']}, {rows[0]['checkpoint']} checkpoint"
    if rows[0]["checkpoint"] == "best" and selects is not None:
        title += f" by dev {selects.label}"
    labels = [metric.label for metric in metrics]
    table = Table(*map(heading, columns), *labels, title=title)
    for row in rows:
        cells = ["" if row[name] is None else number(row[name]) for name in columns]
        table.add_row(*cells, *(metric.show(row[metric.name]) for metric in metrics))
    arms = {}
    arm_keys = [name for name in settings if name != "seed"]
    for row in rows:
        if row["diverged_at"] is None:
            arms.setdefault(tuple(row[name] for name in arm_keys), []).append(row)
    for values, sound in arms.items():
        if len(sound) == 1:
            continue
        table.add_section()
        shown = dict(zip(arm_keys, map(number, values), strict=True))
        of_arm = [shown.get(name, "") for name in columns[1:]]
        sd = partial(np.std, ddof=1)
        for name, of in ((f"mean of {len(sound)}", np.mean), ("sd", sd)):
            cells = [m.show(of([row[m.name] for row in sound])) for m in metrics]
            table.add_row(name, *of_arm, *cells)
    console = print_table(table)
    for name, signature in rows[0]["signatures"].items():
        console.print(f"{name}: {signature}", soft_wrap=True)
    if rows[0]["options"]:
        console.print(f"decoding: {rows[0]['options']}", soft_wrap=True)
    console.print(f"Wrote {path}", soft_wrap=True)


def print_report(
    report: list[dict], confusions: list[dict], entities: list[dict] | None
) -> None:
    """Print precision, recall and F1 per class, and the most frequent confusions.

    Args:
        report: a row per class.
        confusions: a row per pair of classes, with its count.
        entities: a row per type of entity, if tags mark entities.
    """
    for title, rows in (("classes", report), ("entities", entities)):
        if not rows:
            continue
        table = Table(title=title)
        for name in ("class", "precision", "recall", "F1", "support"):
            table.add_column(name, justify="left" if name == "class" else "right")
        for row in rows:
            shares = (f"{row[name]:.2%}" for name in ("precision", "recall", "f1"))
            table.add_row(row["class"], *shares, str(int(row["support"] or 0)))
        print_table(table)
    if not confusions:
        return
    table = Table("true", "predicted", "count", title="most frequent confusions")
    for row in confusions:
        table.add_row(row["true"], row["predicted"], str(row["count"]))
    print_table(table)


def number(value) -> str:
    """Format a setting: integers in full, floats with six significant digits."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def print_examples(text: dict[str, list[str]], predictions: list[str], count: int):
    """Print the first examples, field by field, with their predictions."""
    width = max(map(len, [*text, "prediction"])) + 2
    for index in range(min(count, len(predictions))):
        fields = {name: lines[index] for name, lines in text.items()}
        print()
        for name, line in (fields | {"prediction": predictions[index]}).items():
            print(f"{name:{width}}{line}")


FORMATS = {
    "gate": "{:g}",
    **dict.fromkeys(("importance", "added_loss", "noise_loss", "alone"), "{:.4f}"),
}
SHORT = {
    "previous": "i-1",
    "current": "i",
    "following": "i+1",
    "max_logit": "max\nlogit",
    "added_loss": "added\nloss",
    "noise_loss": "noise\nloss",
    "learned_sink": "learned\nsink",
    "merge_weight": "merge\nweight",
    "merge_weight_sd": "its\nsd",
}
LEGEND = {
    "entropy": "entropy (nats), confidence (largest weight), distance (tokens) and "
    "i-1, i, i+1 (weight on the token before, itself, after): means over tokens; "
    "max logit: the largest of all",
    "sink": "sink: weight on EOS, in the decoder on BOS; the other columns count it",
    "learned_sink": "learned sink: weight on it; the other columns leave it out",
    "share": "share: of the norms of what the heads of a layer add to its output",
    "merge_weight": "merge weight: the factor that the merge rule applies to the head",
    "importance": "importance: mean absolute derivative of an example's loss by the "
    "head's gate",
    "added_loss": "added loss: loss without this head, minus loss with all heads",
    "noise_loss": "noise loss: loss with noise on this head's output, likewise",
    "alone": "alone: loss with this head as the only one of its layer, likewise",
}


def print_heads(rows: list[dict], split: str, rank_by: str, path: Path) -> None:
    """Print the measurements of each head, in one table per site.

    With several trials, heads are matched by their rank in the layer, and the tables
    have the mean and standard deviation over the trials.

    Args:
        rows: rows of `analysis.heads.describe` or `importance`, with a column `trial`.
        split: split on which heads were measured.
        rank_by: column by which heads are ranked.
        path: file to which the rows were written.
    """
    names = [n for n in rows[0] if n not in ("trial", "site", "layer", "head")]
    if all(row["gate"] == 1 for row in rows):
        names.remove("gate")
    trials = list(dict.fromkeys(row["trial"] for row in rows))
    is_single = len(trials) == 1
    whose = f"trial {trials[0]}" if is_single else f"mean of {len(trials)} trials"
    shown = set()
    for site in dict.fromkeys(row["site"] for row in rows):
        of_site = [row for row in rows if row["site"] == site]
        columns = [n for n in names if any(row[n] is not None for row in of_site)]
        shown |= set(columns)
        table = Table(
            "head" if is_single else "layer,\nrank",
            box=box.SIMPLE,
            title=f"{site}, {whose}, {split}",
            padding=0,
        )
        for name in columns:
            table.add_column(SHORT.get(name, heading(name)), justify="right")
        lines = (
            each_head(of_site, columns)
            if is_single
            else each_rank(of_site, columns, rank_by)
        )
        for label, values in lines:
            cells = (
                "–" if value is None else FORMATS.get(name, "{:.2f}").format(value)
                for name, value in zip(columns, values, strict=True)
            )
            table.add_row(label, *cells)
        console = print_table(table)
    for name, text in LEGEND.items():
        if name in shown:
            console.print(text, soft_wrap=True)
    if not is_single:
        ranked = f"rank: by {heading(rank_by)} within each trial and layer"
        console.print(f"{ranked}; sd: over the trials", soft_wrap=True)
    console.print(f"Wrote {path}", soft_wrap=True)


class Design(NamedTuple):
    """How the arms of a sweep are compared with its baseline."""

    baseline: str
    num_arms: int  # other arms, finished or not
    looks: tuple[int, ...] | None  # numbers of seeds at planned looks; None: no looks
    earlier_seeds: list[int]  # numbers of seeds before some were added, unplanned
    lost: set[str]  # arms with trials that diverged or failed


def print_arms(
    tables: dict[str, list[list[str]]], legend: list[str], split: str, path: Path
) -> None:
    """Print the tables of `arm_tables`, and their legend.

    Args:
        split, path: see `print_heads`.
    """
    for site, (header, *lines) in tables.items():
        table = Table(header[0], box=box.SIMPLE, title=f"{site}, {split}", padding=0)
        for name in header[1:]:
            table.add_column(name, justify="right")
        for line in lines:
            table.add_row(*(x if x.endswith(("↑", "↓")) else f"{x} " for x in line))
        console = print_table(table)
    for text in legend:
        console.print(text, soft_wrap=True)
    console.print(f"Wrote {path}", soft_wrap=True)


def arm_tables(
    rows: list[dict], design: Design
) -> tuple[dict[str, list[list[str]]], list[str]]:
    """Return a table of means over the heads of each arm by site, and their legend.

    A mean is followed by half the width of Student's 95% interval over seeds, and by an
    arrow if it differs from the baseline's. An arrow is a test at the level 5% over all
    arms of its column, paired by seed. Arms that lost trials are not tested, because
    their other seeds are a biased sample.

    Args:
        rows: rows of `analysis.heads.describe` or `importance`, with the columns arm
            and seed.

    Returns:
        Tables, each a list of lines, the first of which is the header; and paragraphs.
    """
    tables, baseline = {}, design.baseline
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    for site in dict.fromkeys(row["site"] for row in rows):
        of_site = [row for row in rows if row["site"] == site]
        columns = columns_of_arms(of_site)
        names = (SHORT.get(name, heading(name)) for name in columns)
        tables[site] = [["arm", "seeds", *names]]
        for arm in arms:
            seeds = {row["seed"] for row in of_site if row["arm"] == arm}
            cells = [arm, str(len(seeds))]
            for name in columns:
                means = means_by_seed(of_site, arm, name)
                baseline_means = means_by_seed(of_site, baseline, name)
                cell = cell_of_arm(means, FORMATS.get(name, "{:.2f}"))
                if arm != baseline and not {arm, baseline} & design.lost:
                    cell += arrow_of(means, baseline_means, design)
                cells.append(cell)
            tables[site].append(cells)
    return tables, arms_legend(rows, baseline)


def columns_of_arms(rows: list[dict]) -> list[str]:
    """Return the measurements of heads whose means can differ between arms."""
    excluded = ("arm", "seed", "site", "layer", "head", "gate", "share")
    names = [name for name in rows[0] if name not in excluded]
    return [name for name in names if any(row[name] is not None for row in rows)]


def arms_legend(rows: list[dict], baseline: str) -> list[str]:
    """Explain the columns and cells of `arm_tables`."""
    columns = columns_of_arms(rows)
    cells = "Means over the heads, ± half of their 95% interval over seeds"
    if any(row["arm"] == baseline for row in rows):
        cells += f"; ↑ and ↓: above and below {baseline}, paired by seed (5% over all "
        cells += "arms of a column)"
    return [*(text for name, text in LEGEND.items() if name in columns), cells]


def means_by_seed(rows: list[dict], arm: str, name: str) -> dict[int, float]:
    """Return an arm's mean over its heads by seed, ignoring heads without a value."""
    values = {}
    for row in rows:
        if row["arm"] == arm and row.get(name) is not None:  # older files lack some
            values.setdefault(row["seed"], []).append(row[name])
    return {seed: float(np.mean(of_seed)) for seed, of_seed in values.items()}


def cell_of_arm(means: dict[int, float], form: str) -> str:
    """Format the mean over seeds, with half the width of its interval if it has one."""
    if not means:
        return "–"
    stats = summary(list(means.values()))
    cell = form.format(stats.mean)
    if np.isfinite(stats.high):
        cell += f" ± {form.format(stats.high - stats.mean)}"
    return cell


def arrow_of(
    means: dict[int, float], baseline_means: dict[int, float], design: Design
) -> str:
    """Return ↑ or ↓ if an arm's means differ from the baseline's, else nothing."""
    differences = [
        means[seed] - baseline_means[seed] for seed in means if seed in baseline_means
    ]
    looks = design.looks or unplanned_looks(design.earlier_seeds, len(differences))
    verdict = judge_at_last(differences, looks, design.num_arms)
    return "↑" if verdict.low > 0 else "↓" if verdict.high < 0 else ""


def each_head(rows: list[dict], names) -> Iterator[tuple[str, list]]:
    """Yield a line per head."""
    for row in rows:
        yield f"{row['layer']}.{row['head']}", [row[name] for name in names]


def each_rank(rows: list[dict], names, rank_by: str) -> Iterator[tuple[str, list]]:
    """Yield two lines per rank: mean and standard deviation over the trials."""
    for (_, layer, rank), trials in by_rank(rows, rank_by).items():
        means = [mean_per_trial(trials, name) for name in names]
        yield f"{layer}, {rank}", [x.mean() if len(x) else None for x in means]
        yield "sd", [x.std(ddof=1) if len(x) > 1 else None for x in means]


def print_pruning(rows: list[dict], metric: Metric, path: Path) -> None:
    """Print scores against the number of removed heads; see `analysis.pruning.curve`.

    Means are followed by half the width of Student's 95% interval over the trials or,
    with one trial, over its random orders.
    """
    trials = list(dict.fromkeys(row["trial"] for row in rows))
    is_single = len(trials) == 1
    whose = f"trial {trials[0]}" if is_single else f"mean of {len(trials)} trials"
    split, ranked_on = rows[0]["split"], rows[0]["ranked_on"]
    title = f"{heads_label(rows)} removed, {whose}, {split} (ranked on {ranked_on})"
    table = Table("\nremoved", title=title)
    orders = dict.fromkeys(row["order"] for row in rows)
    metrics = [metric] if metric.name == LOSS.name else [metric, LOSS]
    for order in orders:
        for shown_metric in metrics:
            above = heading(order) if shown_metric == metrics[0] else ""
            table.add_column(f"{above}\n{shown_metric.label}", justify="right")
    for count in dict.fromkeys(row["removed"] for row in rows):
        cells = [f"{count} of {rows[0]['heads']}"]
        for order in orders:
            for shown_metric in metrics:
                stats = summary(scores_without(rows, order, count, shown_metric))
                cells.append(format(stats.mean, shown_metric.format))
                if np.isfinite(stats.high):
                    cells[-1] += f" ± {stats.high - stats.mean:{shown_metric.format}}"
        table.add_row(*cells)
    print_table(table).print(f"Wrote {path}", soft_wrap=True)


def scores_without(
    rows: list[dict], order: str, removed: int, metric: Metric
) -> np.ndarray:
    """Return the scaled metric with a given number of heads removed.

    There is one value per trial, the mean over its draws; with one trial, there is one
    value per draw.

    Args:
        rows: rows from `analysis.pruning.curve`.
    """
    rows = [row for row in rows if (row["order"], row["removed"]) == (order, removed)]
    trials = grouped(rows, "trial").values()
    values = [[row[metric.name] for row in trial_rows] for trial_rows in trials]
    scores = metric.scale * np.array(values, float)
    return scores[0] if len(scores) == 1 else scores.mean(1)


def print_roles(rows: list[dict], split: str, path: Path) -> None:
    """Print the roles of heads; see `analysis.roles.measure_roles`.

    A table per site has one line per role, with the best head of each trial. A list
    below the tables names the heads that have a role.
    """
    trials = list(dict.fromkeys(row["trial"] for row in rows))
    is_single = len(trials) == 1
    whose = f"trial {trials[0]}" if is_single else f"{len(trials)} trials"
    matched = by_role(rows)
    columns = ("role", "trials", "best head", "weight", "95%", "by norm", "chance")
    columns += ("fixed\noffset", "untrained")
    for site in dict.fromkeys(row["site"] for row in matched):
        table = Table(title=f"{site}, {whose}, {split}", box=box.SIMPLE, padding=0)
        for name in columns:
            table.add_column(name, justify="left" if name == "role" else "right")
        for row in matched:
            if row["site"] != site:
                continue
            shares = (row[name] for name in ("norm_weight", "chance", "offset_weight"))
            table.add_row(
                row["role"],
                f"{row['having']} of {row['trials']}",
                " ".join(row["best"][:5]) + " …" * (len(row["best"]) > 5),
                f"{row['weight']:.2f}",
                f"{row['low']:.2f}–{row['high']:.2f}",
                *("" if x is None else f"{x:.2f}" for x in (*shares, row["untrained"])),
            )
        console = print_table(table)
    for trial in trials:
        mine = [row for row in rows if row["trial"] == trial and row["has_role"]]
        mine = sorted(mine, key=lambda row: -row["weight"])
        of_heads = grouped(mine, "site", "layer", "head")
        for (site, layer, head), of_head in sorted(of_heads.items()):
            text = ", ".join(f"{r['role']} ({r['weight']:.2f})" for r in of_head)
            name = f"{site} {layer}.{head}"
            console.print(f"trial {trial}, {name}: {text}", soft_wrap=True)
    console.print(
        "trials: in how many a head has the role, that is beats chance, the best fixed "
        "offset and untrained models\n(Holm over heads and roles, 5%); weight: on the "
        "right tokens, of each trial's best head; by norm: of ‖αf(x)‖",
        soft_wrap=True,
    )
    console.print(f"Wrote {path}", soft_wrap=True)


PAIRS_SHOWN = 10  # per site and trial
PAIR_LEGEND = {
    "divergence": "divergence: Jensen-Shannon's, of the two maps, mean over tokens, in "
    "bits: 0 for equal maps, 1 for disjoint ones",
    "cka": "cka: of the two outputs, 1 if one is the other, rotated and scaled",
    "added_loss": "added loss: loss without both heads, minus loss with all",
    "interaction": "interaction: that minus the added losses of each alone; above 0 "
    "one stands in for the other, below 0 they need each other",
}


def print_pairs_of_heads(rows: list[dict], split: str, by: str, path: Path) -> None:
    """Print the pairs of heads with the largest absolute values in the column `by`.

    The rows are those of `analysis.similarity`.
    """
    at = ("trial", "site", "layer", "head", "other_layer", "other_head")
    names = [name for name in rows[0] if name not in at] if rows else []
    for (trial, site), pairs in grouped(rows, "trial", "site").items():
        title = f"{site}, trial {trial}, {split}, by {heading(by)}"
        table = Table("heads", title=title, box=box.SIMPLE, padding=0)
        for name in names:
            table.add_column(heading(name), justify="right")
        pairs = sorted(pairs, key=lambda row: -abs(row[by]))[:PAIRS_SHOWN]
        for row in pairs:
            one, two = (f"{row[f'{x}layer']}.{row[f'{x}head']}" for x in ("", "other_"))
            values = ("–" if row[n] is None else f"{row[n]:.4f}" for n in names)
            table.add_row(f"{one} and {two}", *values)
        print_table(table)
    console = Console(highlight=False, markup=False)
    for name in names:
        console.print(PAIR_LEGEND[name], soft_wrap=True)
    console.print(f"Wrote {path}", soft_wrap=True)


def heads_label(rows: list[dict]) -> str:
    """Return a label for the removable heads in pruning rows: "decoder heads"."""
    return " ".join(filter(None, (rows[0]["site"], "heads")))


def heading(name: str) -> str:
    """Return a column's heading: the last part of its key, or the head of a gate."""
    if name.startswith("head_gates."):
        return name.removeprefix("head_gates.").replace(".", " ")
    return name.rsplit(".")[-1].replace("_", " ")


def print_pairs(title: str, rows: list[tuple[str, str]]) -> None:
    """Print a table of names and values."""
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    print_table(table)
