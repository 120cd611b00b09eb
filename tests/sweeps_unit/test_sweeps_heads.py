"""Which arms of a sweep have models to measure."""

from types import SimpleNamespace

import numpy as np
import pytest
from sweep_fakes import finish, finish_all, only_workdir, options

from headcount.analysis.tables import arrow_of
from headcount.sweeps.heads import design, measure_arms
from headcount.sweeps.settings import open_sweep


def measure(sweep):
    """Return the arms that have rows; every model can be loaded."""
    run = SimpleNamespace(diverged_at=[None, None])
    rows = measure_arms(sweep, lambda folder: (run, None), lambda *_: [{}])
    return list(dict.fromkeys(row["arm"] for row in rows))


def test_arms_without_checkpoints_are_named(tmp_path, corpus, capsys):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    (sweep.folder(sweep.groups[1]) / "checkpoints").mkdir()
    assert measure(sweep) == ["K=2"]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "Left out, without a checkpoint to load: K=4, K=1."


def test_a_sweep_without_checkpoints_says_what_to_do(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish(sweep, 0)
    with pytest.raises(ValueError, match=f"run --workdir={sweep.workdir} resumes it"):
        measure(sweep)
    finish_all(sweep)
    with pytest.raises(ValueError, match="that --finished took over have none"):
        measure(sweep)


def test_seeds_added_without_a_plan_make_arrows_rarer(tmp_path, corpus):
    planned = open_sweep(options(tmp_path / "planned", corpus, seeds=8))
    given = options(tmp_path / "added", corpus, seeds=4)
    open_sweep(given)
    added = open_sweep(only_workdir(given, seeds=8))
    base = dict.fromkeys(range(8), 0.0)
    arrows = []
    for effect in np.linspace(0, 1, 50):
        means = {seed: effect + (-1) ** seed / 2 for seed in base}
        arrows.append([arrow_of(means, base, design(s, [])) for s in (planned, added)])
    assert ["↑", ""] in arrows and ["", "↑"] not in arrows and ["↑", "↑"] in arrows
