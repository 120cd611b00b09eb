"""Verdicts on an arm in many simulated sweeps."""

from typing import NamedTuple

import numpy as np

from headcount.analysis.sequential import VERDICTS, Looks, decide


class Simulation(NamedTuple):
    """Many simulated sweeps of one arm with a known difference."""

    rates: dict[str, float]  # fraction of each verdict
    seeds: float  # mean number of seeds until the verdict
    covered: float  # fraction whose intervals contain the truth at every look


def simulate(differences: np.ndarray, truth: float, looks: Looks) -> Simulation:
    """Summarize the verdicts on an arm in many simulated sweeps.

    Args:
        differences: sweeps x seeds.
        truth: the true mean of the differences.
        looks: the plan.
    """
    found = decide(differences, looks, stop_futile=True)
    shares = np.bincount(found.kinds, minlength=len(VERDICTS)) / len(differences)
    rates = dict(zip(VERDICTS, shares.tolist(), strict=True))
    covered = ((found.low <= truth) & (truth <= found.high)).all(1).mean()
    return Simulation(rates, float(found.seeds.mean()), float(covered))
