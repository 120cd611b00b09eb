"""Score a model while removing its heads, the least important first."""

from collections import Counter
from collections.abc import Iterator

import jax
import numpy as np

from headcount.analysis.heads import all_gates, importance, with_progress
from headcount.data.examples import Examples
from headcount.tasks import Run

ORDERS = ("importance", "normalized_importance", "added_loss", "random")
DRAWS = 5  # minimum number of random orders, over all trials


def orders(rows: list[dict], seed) -> dict[str, list[tuple]]:
    """Return several orders in which to remove all heads, the least important first.

    A head is its site, layer and number.

    Normalised importance (Michel et al. 2019) is divided by the L2 norm of the
    importance of the layer's heads, so that layers with large gradients lose heads,
    too. The random order is a control.

    Args:
        rows: a row for every head of a trial; see `analysis.heads.importance`. Heads
            with a gate of 0 are already removed, and come first.
        seed: seed of the random order.
    """
    draws = np.random.default_rng(seed).random(len(rows))
    squares = Counter()
    for row in rows:
        if row["gate"]:
            squares[row["site"], row["layer"]] += row["importance"] ** 2
    values = []
    for row, draw in zip(rows, draws, strict=True):
        norm = squares[row["site"], row["layer"]] ** 0.5 or 1.0
        normalized = row["importance"] / norm
        values.append(row | {"normalized_importance": normalized, "random": draw})
    return {
        name: [
            (row["site"], row["layer"], row["head"])
            for row in sorted(values, key=lambda row: (row["gate"] != 0, row[name]))
        ]
        for name in ORDERS
    }


def counts(num_heads: int) -> list[int]:
    """Return the numbers of heads to remove: none, a tenth, ..., all."""
    return sorted({round(num_heads * tenth / 10) for tenth in range(11)})


def without(head_gates: dict, removed: dict[int, list[tuple]]) -> dict:
    """Set the gates of removed heads to 0.

    Args:
        head_gates: gates of all trials, of shape R L N by site.
        removed: heads to remove, by trial.
    """
    gates = {site: np.array(values) for site, values in head_gates.items()}
    for trial, heads in removed.items():
        for site, layer, head in heads:
            gates[site][trial, layer, head] = 0
    return gates


def curve(
    run: Run,
    dev: Examples,
    examples: Examples,
    trials: list[int],
    site: str | None = None,
    **options,
) -> Iterator[dict]:
    """Yield a row of scores for each trial, order and number of removed heads.

    A row has the trial, the order, the number and names of the removed heads, and the
    scores of `Task.evaluate`. With few trials, each has several random orders, numbered
    by `draw`.

    Args:
        dev: examples to rank the heads on.
        examples: examples to score.
        trials: indices of the trials to score.
        site: remove only heads of this site; None removes heads of all sites.
        options: options of `Task.evaluate`.
    """
    R = len(run.trials)
    ones = all_gates(run, run.of(0)[0], {})
    gates = {site: np.repeat(np.asarray(x)[None], R, 0) for site, x in ones.items()}
    gates |= run.head_gates
    draws = -(-DRAWS // len(trials))
    ranked = {}  # by trial and draw
    for trial in trials:
        rows = importance(run, dev, trial, is_full=False)
        rows = [row for row in rows if site in (None, row["site"])]
        for draw in range(draws):
            ranked[trial, draw] = orders(rows, seed=(trial, draw))
    num_heads = len(rows)
    todo = [
        (count, name, draw)
        for count in counts(num_heads)
        for name in ORDERS
        for draw in range(draws if name == "random" else 1)
    ]
    order_free = {}  # scores that no order changes: with none or all heads removed
    for count, name, draw in with_progress(todo):
        removed = {trial: ranked[trial, draw][name][:count] for trial in trials}
        scores_by_trial = order_free.get(count)
        if scores_by_trial is None:
            fewer = run._replace(head_gates=without(gates, removed))
            with jax.set_mesh(run.mesh):
                scores = run.task.evaluate(fewer, examples, trials=trials, **options)
            scores_by_trial = dict(zip(trials, scores, strict=True))
            for row in scores:
                row.pop("predictions", None)
            if count in (0, num_heads):
                order_free[count] = scores_by_trial
        for trial in trials:
            row = {
                "trial": trial,
                "order": name,
                "draw": draw,
                "removed": count,
                "heads": num_heads,
                "removed_heads": [".".join(map(str, head)) for head in removed[trial]],
            }
            yield row | scores_by_trial[trial] | {"site": site}
