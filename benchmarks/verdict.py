"""Count the trials that several designs train until a sweep's arms have verdicts.

    .venv/bin/python -m benchmarks.verdict [--results DIR] [--metric test_loss]
        [--margin 0.005] [--looks 4,6,8,12,16] [--fixed 16] [--sweeps 4000]

Sweeps are simulated from the scores per seed in results/*/sweep.csv. For every
simulated seed, the arms' differences from the baseline are drawn from a normal
distribution with the mean and covariance over the real seeds. This preserves the
differences between arms, and the effects that a seed has on all arms. With so few real
seeds, the observed differences tend to overestimate the true ones. Therefore everything
is repeated without any differences, where every verdict of better or worse is false.

The designs are planned looks, a fixed number of seeds for every arm, and the common
practice of a single seed, where the sign of the difference is the verdict. With planned
looks, arms also stop if a verdict is unlikely. For each sweep, this prints how many
models planned looks train, as a share of the fixed design's; the share of arms with a
verdict, with planned looks and with the fixed number; and how often any arm has a false
verdict, with planned looks, the fixed number and one seed. False is better or worse
with the wrong sign, or equivalent beyond the margin. Last, planned looks are applied to
the scores themselves, in the order of the seeds, where a sweep has as many seeds as the
fixed design.
"""

import argparse
import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headcount.analysis.sequential import (
    VERDICTS,
    Decisions,
    Looks,
    check_looks,
    decide,
)
from headcount.tasks.base import LOSS

ROOT = Path(__file__).resolve().parent.parent
BETTER, WORSE, EQUIVALENT, UNDECIDED = range(4)
assert VERDICTS == ("better", "worse", "equivalent", "undecided")
HEADER = ("sweep", "differences", "share", "decided", "fixed", "false", "fixed", "one")


class Outcome(NamedTuple):
    """The results of a design, averaged over many simulated sweeps."""

    trainings: float  # number of trained models
    decided: float  # share of arms with a verdict
    false: float  # share of sweeps with a false verdict on any arm


def read_scores(path: Path, metric: str) -> tuple[np.ndarray, int]:
    """Return the scores of a sweep.csv, arms x seeds, and the baseline's index."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["stage"] == "report"]
    found = {}
    for row in rows:
        if row["status"] == "done" and row.get(metric):
            found.setdefault(row["arm"], {})[row["seed"]] = float(row[metric])
    names = [row["arm"] for row in rows if row["is_baseline"] == "1"]
    if not found or not names or names[0] not in found:
        return np.empty((0, 0)), 0
    common = set.intersection(*(set(scores) for scores in found.values()))
    seeds = sorted(common, key=int)
    scores = [[of_arm[seed] for seed in seeds] for of_arm in found.values()]
    return np.array(scores), list(found).index(names[0])


def simulate(scores: np.ndarray, baseline: int, shape: tuple, is_null: bool):
    """Simulate differences from the baseline.

    Args:
        scores: arms x seeds.
        baseline: index of the baseline's row.
        shape: numbers of sweeps and seeds to simulate.
        is_null: whether to simulate arms without true differences.

    Returns:
        The simulated differences, arms x sweeps x seeds, and the true ones, arms; both
        without the baseline.
    """
    each = np.delete(scores - scores[baseline], baseline, 0)
    truth = np.zeros(len(each)) if is_null else each.mean(1)
    rng = np.random.default_rng(0)
    covariance = np.atleast_2d(np.cov(each))
    drawn = rng.multivariate_normal(truth, covariance, shape, method="svd")
    return np.moveaxis(drawn, -1, 0), truth


def judged(differences: np.ndarray, looks: Looks, truth: np.ndarray) -> Outcome:
    """Evaluate planned looks; a single look is a fixed number of seeds."""
    options = {"higher_is_better": False, "stop_futile": True}
    found = [decide(each, looks, **options) for each in differences]
    kinds = np.array([each.kinds for each in found])
    return outcome(kinds, trainings_of(found), truth, looks.margin)


def trainings_of(found: list[Decisions]) -> np.ndarray:
    """Return the number of trained models of every sweep, given an item per arm."""
    seeds = np.array([each.seeds for each in found])
    return seeds.sum(0) + seeds.max(0)  # the baseline needs every arm's seeds


def replay(scores: np.ndarray, baseline: int, looks: Looks) -> tuple[int, bool]:
    """Apply planned looks to the scores of a sweep, arms x seeds.

    Returns:
        The number of trained models, and whether every arm gets the verdict that the
        last look alone gives.
    """
    each = np.delete(scores - scores[baseline], baseline, 0)[:, None]
    single = looks._replace(seeds=looks.seeds[-1:])
    found = [decide(one, looks, stop_futile=True) for one in each]
    alone = [decide(one, single) for one in each]
    same = [x.kinds == y.kinds for x, y in zip(found, alone, strict=True)]
    return int(trainings_of(found)[0]), bool(np.all(same))


def by_sign(differences: np.ndarray, truth: np.ndarray) -> Outcome:
    """Evaluate the practice of a single seed, with the sign as the verdict."""
    kinds = np.where(differences[..., 0] < 0, BETTER, WORSE)
    trainings = np.full(differences.shape[1], len(differences) + 1)
    return outcome(kinds, trainings, truth, None)


def outcome(kinds, trainings, truth, margin) -> Outcome:
    """Compare verdicts, arms x sweeps, with the truth; a lower metric is better."""
    true = truth[:, None]
    false = (kinds == BETTER) & (true >= 0) | (kinds == WORSE) & (true <= 0)
    if margin is not None:
        false |= (kinds == EQUIVALENT) & (np.abs(true) >= margin)
    decided = (kinds != UNDECIDED).mean()
    return Outcome(float(trainings.mean()), float(decided), float(false.any(0).mean()))


def main() -> None:
    """Simulate every sweep of results/, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--metric", default="test_loss", help="lower is better")
    parser.add_argument("--margin", type=float, default=LOSS.margin)
    parser.add_argument("--looks", default="4,6,8,12,16")
    parser.add_argument("--fixed", type=int, default=16, help="seeds for every arm")
    parser.add_argument("--sweeps", type=int, default=4000, help="to simulate")
    arguments = parser.parse_args()
    try:
        seeds = tuple(map(int, arguments.looks.split(",")))
        check_looks(seeds)
    except ValueError as error:
        parser.error(f"--looks={arguments.looks}: {error}")
    if min(arguments.fixed - 1, arguments.sweeps) < 1 or not arguments.margin > 0:
        parser.error(
            "--fixed must be at least 2, --sweeps at least 1, --margin above 0."
        )
    paths = sorted(arguments.results.glob("*/sweep.csv"))
    # models that were trained for their speed alone
    paths = [path for path in paths if not path.parent.name.startswith("head_speed_")]
    if not any(read_scores(path, arguments.metric)[0].size for path in paths):
        parser.error(
            f"--results={arguments.results} has no sweep with --metric="
            f"{arguments.metric}; it is a column of sweep.csv, as test_loss."
        )
    print(f"{arguments.metric}, margin {arguments.margin:g}\n")
    print(f"| {' | '.join(HEADER)} |\n| --- | --- |{' ---: |' * 6}")
    for path in paths:
        scores, baseline = read_scores(path, arguments.metric)
        if len(scores) < 2 or scores.shape[1] < 3:
            continue
        for is_null in (False, True):
            shape = (arguments.sweeps, max(*seeds, arguments.fixed))
            drawn, truth = simulate(scores, baseline, shape, is_null)
            planned, fixed = (
                judged(drawn, Looks(plan, arguments.margin, len(drawn)), truth)
                for plan in (seeds, (arguments.fixed,))
            )
            cells = (
                path.parent.name,
                "none" if is_null else "as observed",
                f"{planned.trainings / fixed.trainings:.0%}",
                f"{planned.decided:.0%}",
                f"{fixed.decided:.0%}",
                f"{planned.false:.1%}",
                f"{fixed.false:.1%}",
                f"{by_sign(drawn, truth).false:.0%}",
            )
            print(f"| {' | '.join(cells)} |")
    print()
    for path in paths:
        dev = arguments.metric.replace("test_", "dev_")
        scores, baseline = read_scores(path, dev)
        if len(scores) < 2 or scores.shape[1] < seeds[-1]:
            continue
        looks = Looks(seeds, arguments.margin, len(scores) - 1)
        count, is_same = replay(scores, baseline, looks)
        total = len(scores) * seeds[-1]
        verdicts = "the same verdicts" if is_same else "other verdicts"
        print(f"{path.parent.name}: {count} of {total} models by {dev}, {verdicts}")


if __name__ == "__main__":
    main()
