"""Claims are tested by sweeps with known differences, and by nothing else."""

import csv
import json

import numpy as np
import pytest
from scipy import stats

from headcount.analysis import claims
from headcount.analysis.claims import (
    CLAIMS,
    CONTRADICTED,
    SUPPORTED,
    UNDECIDED,
    UNTESTED,
    Claim,
    cheaper,
    fill,
    find_effects,
    has,
    loss_is,
    make_rows,
    no_slower,
    ratio_of_spreads,
    read_results,
    same_parameters,
)

NOISE = np.array([0.0, 0.001, -0.001, 0.0005, -0.0005, 0.0008])


def write_sweep(folder, losses, **columns):
    """Write a sweep.csv with arms N=..., and losses by N; N = 1 is the baseline."""
    folder.mkdir(parents=True)
    rows = []
    for N, of_arm in losses.items():
        for seed, loss in enumerate(of_arm):
            overrides = {"model.attention.num_heads": N}
            row = {"arm": f"N={N}", "is_baseline": int(N == 1), "status": "done"}
            row |= {"stage": "report", "seed": seed, "parameters": 100}
            row |= {"flops": 1e9, "tokens_per_second": 1000 / N, "test_loss": loss}
            row |= {"overrides": json.dumps(overrides)}
            rows.append(row | {key: value[N] for key, value in columns.items()})
    with (folder / "sweep.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return read_results(folder)


def claim(rule, **changes):
    test = rule if callable(rule) else claims.partial(loss_is, rule)
    return Claim("x", "y", "z", "heads", test)._replace(**changes)


@pytest.mark.parametrize(
    "shift, verdicts",
    [
        (-0.05, (SUPPORTED, CONTRADICTED, CONTRADICTED, SUPPORTED)),
        (0.05, (CONTRADICTED, SUPPORTED, SUPPORTED, CONTRADICTED)),
        (0.0, (CONTRADICTED, CONTRADICTED, SUPPORTED, SUPPORTED)),
    ],
)
def test_each_rule_follows_the_interval_and_the_margin(tmp_path, shift, verdicts):
    losses = {1: 2 + NOISE, 8: 2 + shift - NOISE / 2}
    sweep = write_sweep(tmp_path / "heads_x", losses)
    rules = ("lower", "higher", "no lower", "little higher")
    for rule, verdict in zip(rules, verdicts, strict=True):
        (effect,) = find_effects(claim(rule), [sweep])
        assert effect.verdict == verdict, rule
        each = losses[8] - losses[1]
        interval = stats.ttest_1samp(each, 0).confidence_interval(0.95)
        assert effect.difference == pytest.approx((each.mean(), *interval))
        assert (effect.corpus, effect.seeds) == ("x", 6)


def test_noise_leaves_a_claim_undecided(tmp_path):
    losses = {1: 2 + 100 * NOISE, 8: 2 - 100 * NOISE}
    sweep = write_sweep(tmp_path / "heads_x", losses)
    for rule in claims.RULES:
        assert find_effects(claim(rule), [sweep])[0].verdict == UNDECIDED


def test_several_arms_share_the_error_rate_and_looks_widen_the_interval(tmp_path):
    losses = {1: 2 + NOISE, 8: 2 - NOISE, 16: 2 - NOISE}
    sweep = write_sweep(tmp_path / "heads_x", losses)
    (alone,) = find_effects(claim("lower", arms=has(num_heads=8)), [sweep])
    both = find_effects(claim("lower"), [sweep])
    assert len(both) == 2 and both[0].difference[2] > alone.difference[2]
    path = tmp_path / "heads_x" / "verdicts.csv"
    path.write_text('arm,looks\nN=8,"2,4,6"\n')
    planned = read_results(tmp_path / "heads_x")
    assert planned.looks == (2, 4, 6)
    (wider,) = find_effects(claim("lower", arms=has(num_heads=8)), [planned])
    assert wider.difference[2] > alone.difference[2]


def test_an_arm_that_lost_a_trial_supports_nothing(tmp_path):
    losses = {1: 2 + NOISE, 8: 1 - NOISE}
    sweep = write_sweep(tmp_path / "heads_x", losses)
    arms = [arm._replace(lost=arm.name == "N=8") for arm in sweep.arms]
    (effect,) = find_effects(claim("lower"), [sweep._replace(arms=arms)])
    assert effect.verdict == UNDECIDED


def test_parameters_costs_and_speeds_are_compared(tmp_path):
    losses = {1: 2 + NOISE, 8: 2 - NOISE}
    sweep = write_sweep(tmp_path / "heads_x", losses)
    other = write_sweep(tmp_path / "heads_y", losses, parameters={1: 100, 8: 90})
    verdict_of = {
        name: [e.verdict for e in find_effects(claim(test), [sweep, other])]
        for name, test in (
            ("same", same_parameters),
            ("cheaper", cheaper),
            ("speed", no_slower),
        )
    }
    assert verdict_of == {
        "same": [SUPPORTED, CONTRADICTED],
        "cheaper": [CONTRADICTED, SUPPORTED],
        "speed": [CONTRADICTED, CONTRADICTED],
    }


def test_the_interval_of_the_ratio_of_spreads_covers_it():
    rng, hits = np.random.default_rng(1), 0
    for _ in range(2000):
        shared = rng.standard_normal(8)
        x, y = (shared + rng.standard_normal(8) for _ in range(2))
        ratio, low, high = ratio_of_spreads(3 * x, y)
        assert low <= ratio <= high
        hits += low <= 3 <= high
    assert 0.93 < hits / 2000 < 0.97


def test_a_folder_belongs_to_the_ablation_with_the_longest_name(tmp_path):
    sweep = write_sweep(tmp_path / "merge_start_x", {1: NOISE, 8: NOISE})
    assert (sweep.ablation, sweep.corpus) == ("merge_start", "x")
    assert write_sweep(tmp_path / "unknown_x", {1: NOISE, 8: NOISE}) is None
    assert read_results(tmp_path) is None


def test_an_untested_claim_is_said_to_be_untested(tmp_path):
    rows = make_rows([(claim("lower"), [])])
    assert rows[0][-1] == UNTESTED and "needs: heads" in rows[0][-2]
    for each in CLAIMS:
        assert find_effects(each, []) == []


def test_claims_name_ablations_that_exist_or_will():
    for each in CLAIMS:
        if each.test is not None and each.ablation != "variants":
            assert hasattr(claims.ablations, each.ablation)


def test_the_page_is_filled_between_its_marks_again_and_again():
    start, end = claims.MARKS
    page = f"before\n{start}\nold\n{end}\nafter\n"
    once = fill(page, "new")
    assert "old" not in once and once.startswith("before") and fill(once, "new") == once
    with pytest.raises(ValueError, match="must have the lines"):
        fill("no marks", "new")


def test_the_claims_of_the_results_that_are_kept(tmp_path, monkeypatch):
    """Everything runs on the real files; number phrases have been swept long ago."""
    page = tmp_path / "page.md"
    page.write_text("\n".join(claims.MARKS))
    folder = tmp_path / "results"
    folder.mkdir()
    source = claims.ROOT / "results" / "heads_numbers"
    (folder / "heads_numbers").symlink_to(source)
    monkeypatch.setattr("sys.argv", ["claims", f"--results={folder}", f"--page={page}"])
    claims.main()
    text = page.read_text()
    assert "6 arms: 96,512 parameters | supported" in text
    assert text.count(UNTESTED) > 10
    assert (folder / "claims.png").read_bytes().startswith(b"\x89PNG")
