"""The tables that eval.py and a dry run print."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from headcount.analysis.formatting import heads_of, score_without
from headcount.analysis.significance import summary
from headcount.attention import HeadStatistics


def print_table(table: Table) -> Console:
    """Print a table with nothing cut off, and return the console that did.

    A terminal has a width, and longer cells are folded; a file's lines are as long as
    they must be.
    """
    console = Console(highlight=False)
    for column in table.columns:
        column.overflow = "fold"
    if not console.is_terminal:
        endless = console.options.update(width=1000)
        console.width = max(console.width, console.measure(table, options=endless)[1])
    console.print(table)
    return console


def print_scores(rows: list[dict], differs: list[str], path: Path) -> None:
    """A table of the scores, with the signatures that define them.

    Of many trials it has only what differs, and ends in the mean and the standard
    deviation (of a sample) of those that differ in nothing but their seed.
    """
    if len(rows) > 1:
        differs = [name for name in differs if len({row[name] for row in rows}) > 1]
    arm = [name for name in differs if name != "seed"]
    scored = {
        "bleu": "{:.2f}",
        "published_bleu": "{:.2f}",
        "chrf": "{:.2f}",
        "published_chrf": "{:.2f}",
        "exact_match": "{:.2%}",
        "loss": "{:.4f}",
    }
    scored = {name: form for name, form in scored.items() if name in rows[0]}
    columns = {"trial": "{}", **dict.fromkeys(differs, "{:g}"), "step": "{}"}
    if any(row["diverged_at"] for row in rows):
        columns["diverged_at"] = "{}"
    table = Table(
        *map(heading, columns | scored),
        title=rows[0]["split"],
    )
    for row in rows:
        cells = [form.format(row[name]) for name, form in (columns | scored).items()]
        table.add_row(*["" if cell == "None" else cell for cell in cells])
    arms = {}
    for row in rows:
        if row["diverged_at"] is None:
            arms.setdefault(tuple(row[name] for name in arm), []).append(row)
    for settings, sound in arms.items():
        if len(sound) == 1:
            continue
        table.add_section()
        told = dict(zip(arm, settings, strict=True))
        of_arm = [f"{told[name]:g}" if name in told else "" for name in columns]
        stdev = partial(np.std, ddof=1)
        for name, of in ((f"mean of {len(sound)}", np.mean), ("sd", stdev)):
            cells = [
                form.format(of([row[score] for row in sound]))
                for score, form in scored.items()
            ]
            table.add_row(name, *of_arm[1:], *cells)
    console = print_table(table)
    for name, of in rows[0].items():
        if name.endswith("signature"):
            console.print(f"{name}: {of}", soft_wrap=True)
    console.print(f"decoding: {rows[0]['decoding']}; written to {path}", soft_wrap=True)


def print_sentences(pairs, hypotheses: list[str], count: int) -> None:
    """The first so many translations beside their sources and references.

    Args:
        pairs: `training.run.Pairs`.
    """
    for index in range(min(count, len(hypotheses))):
        print(f"\nsource       {pairs.sources[index]}")
        print(f"reference    {pairs.references[index]}")
        print(f"translation  {hypotheses[index]}")


def print_heads(rows: list[dict], split: str, path: Path) -> None:
    """A table a site of the heads, see `analysis.heads.measure`.

    Of several trials it has the mean and standard deviation over them, by the rank of
    the head in its layer.
    """
    forms = {"gate": "{:g}", **dict.fromkeys(HeadStatistics._fields, "{:.2f}")}
    forms |= dict.fromkeys(("importance", "added_loss", "alone"), "{:.4f}")
    own = dict.fromkeys(("merge_weight", "merge_weight_sd"), "{:.2f}")
    forms |= dict.fromkeys(("sink", "learned_sink", "share"), "{:.2f}") | own
    own["learned_sink"] = forms["learned_sink"]  # where a site has them
    if all(row["gate"] == 1 for row in rows):
        del forms["gate"]
    names = {"previous": "i-1", "current": "i", "following": "i+1"}
    names |= {"added_loss": "added\nloss", "learned_sink": "learned\nsink"}
    names |= {"merge_weight": "merge\nweight", "merge_weight_sd": "its\nsd"}
    trials = list(dict.fromkeys(row["trial"] for row in rows))
    one = len(trials) == 1
    whose = f"trial {trials[0]}" if one else f"mean of {len(trials)} trials"
    for site in dict.fromkeys(row["site"] for row in rows):
        title = f"{site}, {whose}, {split}"
        label = "head" if one else "layer,\nrank"
        table = Table(label, box=box.SIMPLE, title=title, padding=0)
        of_site = [row for row in rows if row["site"] == site]
        columns = {
            name: form
            for name, form in forms.items()
            if name not in own or any(row[name] is not None for row in of_site)
        }
        for name in columns:
            table.add_column(names.get(name, heading(name)), justify="right")
        for label, numbers in (each_head if one else each_rank)(of_site, columns):
            cells = (
                "–" if number is None else form.format(number)
                for number, form in zip(numbers, columns.values(), strict=True)
            )
            table.add_row(label, *cells)
        console = print_table(table)
    legend = "sink: the share on EOS, in the decoder on BOS; entropy to i+1 count it"
    if any(row["learned_sink"] is not None for row in rows):
        legend += ", but not the learned sink"
    legend += "\nshare: of the norms of what the layer's heads add to its output"
    if any(row["merge_weight"] is not None for row in rows):
        legend += "\nmerge weight: what the rule multiplies the head by"
    if not one:
        legend += "\nrank: by added loss, in each trial and layer; sd: over the trials"
    console.print(f"{legend}\nwritten to {path}", soft_wrap=True)


def each_head(rows: list[dict], names) -> Iterator[tuple[str, list]]:
    """A line a head."""
    for row in rows:
        yield f"{row['layer']}.{row['head']}", [row[name] for name in names]


def each_rank(rows: list[dict], names) -> Iterator[tuple[str, list]]:
    """Two lines a rank, mean and standard deviation over the trials."""
    from headcount.analysis.heads import by_rank, over_trials

    for (_, layer, rank), trials in by_rank(rows).items():
        found = [over_trials(trials, name) for name in names]
        yield f"{layer}, {rank}", [x.mean() if len(x) else None for x in found]
        yield "sd", [x.std(ddof=1) if len(x) > 1 else None for x in found]


def print_pruning(rows: list[dict], metric: str, path: Path) -> None:
    """A table of the scores with ever fewer heads, see `analysis.pruning.curve`.

    It has means, with half of Student's 95 % interval over the trials; of one trial,
    over its random orders.
    """
    orders = dict.fromkeys(row["order"] for row in rows)
    trials = list(dict.fromkeys(row["trial"] for row in rows))
    whose = (
        f"trial {trials[0]}" if len(trials) == 1 else f"mean of {len(trials)} trials"
    )
    split, ranked_on = rows[0]["split"], rows[0]["ranked_on"]
    title = f"without {heads_of(rows)}, {whose}, {split} (ranked on {ranked_on})"
    table = Table("\nremoved", title=title)
    for order in orders:
        for name in (metric, "loss"):
            above = heading(order) if name == metric else ""
            table.add_column(f"{above}\n{heading(name)}", justify="right")
    for count in dict.fromkeys(row["removed"] for row in rows):
        cells = [f"{count} of {rows[0]['heads']}"]
        for order in orders:
            for name, form in ((metric, ".2f"), ("loss", ".3f")):
                found = summary(score_without(rows, order, count, name))
                cells.append(f"{found.mean:{form}}")
                if np.isfinite(found.high):
                    cells[-1] += f" ± {found.high - found.mean:{form}}"
        table.add_row(*cells)
    print_table(table).print(f"written to {path}", soft_wrap=True)


def heading(name: str) -> str:
    """Of a column: the last part of a key, or which head a gate is of."""
    if name.startswith("head_gates."):
        return name.removeprefix("head_gates.").replace(".", " ")
    return name.rsplit(".")[-1].replace("_", " ")


def print_pairs(title: str, rows: list[tuple[str, str]]) -> None:
    """A table of names and values."""
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    print_table(table)
