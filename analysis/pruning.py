"""What is left of a model as its heads are removed, the least important first."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from flax import nnx

from headcount.analysis.heads import measure, shown
from headcount.training.run import Pairs, Trained, decoded, scored

ORDERS = ("importance", "normalized_importance", "added_loss", "random")
DRAWS = 5  # random orders of all trials together, at least: chance has a spread too


class Head(NamedTuple):
    """One head of a model."""

    site: str
    layer: int
    head: int


def orders(rows: list[dict], seed) -> dict[str, list[Head]]:
    """All heads in the orders in which they may go, the least important first.

    The normalised importance is Michel's within a layer: divided by the l2 norm of the
    importance of its heads, so that layers of large gradients lose heads too.

    Args:
        rows: of every head of a trial, see `analysis.heads.measure`. Those whose gate
            is 0 are gone already, and come first.
        seed: of the random order, which the others have to beat.
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
            Head(row["site"], row["layer"], row["head"])
            for row in sorted(values, key=lambda row: (row["gate"] != 0, row[name]))
        ]
        for name in ORDERS
    }


def counts(num_heads: int) -> list[int]:
    """How many heads go: none, a tenth, ..., all."""
    return sorted({round(num_heads * tenth / 10) for tenth in range(11)})


def without(head_gates: dict, gone: dict[int, list[Head]]) -> dict:
    """Gates of every trial, R L N by site, 0 where a head of a trial is gone."""
    gates = {site: np.array(each) for site, each in head_gates.items()}
    for trial, heads in gone.items():
        for site, layer, head in heads:
            gates[site][trial, layer, head] = 0
    return gates


def curve(
    run: Trained,
    dev: Pairs,
    pairs: Pairs,
    trials: list[int],
    site: str | None = None,
    **options,
) -> Iterator[dict]:
    """Rows: the scores of each trial with ever fewer heads, in every order.

    A row has the trial, the order, how many heads were removed and which, the loss
    (nats a token), and the scores of `training.run.scored`. Of few trials each has
    several random orders, numbered by `draw`.

    Args:
        dev: what the heads are ranked on.
        pairs: what is scored.
        trials: which of the run's.
        site: whose heads may go, "encoder", "decoder" or "cross"; None: all.
        options: see `decoding.generate.translate_trials`.
    """
    R = len(run.step)
    ones = nnx.merge(run.graph, run.of(0)[0]).head_gates()
    gates = {site: np.repeat(np.asarray(x)[None], R, 0) for site, x in ones.items()}
    gates |= run.head_gates
    batch_tokens = run.config.data.batch_tokens
    draws = -(-DRAWS // len(trials))
    ranked = {}  # by trial and draw
    for trial in trials:
        model = run.graph, *run.of(trial)
        rows = measure(*model, dev.source, dev.target, batch_tokens, alone=False)
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
    same = {}  # what all orders have in common: no head gone, and all
    for count, name, draw in shown(todo):
        gone = {trial: ranked[trial, draw][name][:count] for trial in trials}
        if count in same:
            found = same[count]
        else:
            left = without(gates, gone)
            loss, texts = decoded(run, pairs, trials, left, **options)
            found = {}
            for trial in trials:
                hypotheses = run.tokenizers[1].decode_many(texts[trial])
                found[trial] = {"loss": float(loss[trial])}
                found[trial] |= scored(run, pairs, hypotheses)
            if count in (0, num_heads):
                same[count] = found
        for trial in trials:
            row = {
                "trial": trial,
                "order": name,
                "draw": draw,
                "removed": count,
                "heads": num_heads,
                "gone": [".".join(map(str, head)) for head in gone[trial]],
            }
            yield row | found[trial] | {"site": site}
