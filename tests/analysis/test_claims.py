"""Claims are tested by sweeps with known differences, and by nothing else."""

import csv
import json
from functools import partial
from operator import attrgetter

import numpy as np
import pytest
from scipy import stats

from headcount.analysis import claim_tests, claims, roles
from headcount.analysis.claim_tests import (
    CONTRADICTED,
    SUPPORTED,
    TEST_LOSS,
    UNDECIDED,
    Claim,
    ablations_of,
    cheaper,
    compare,
    deeper_is_wider,
    find_effects,
    has,
    heads_differ,
    heads_have,
    heads_interact,
    most_can_go,
    no_slower,
    ratio_of_spreads,
    read_analyses,
    read_results,
    same_parameters,
)
from headcount.analysis.claims import CLAIMS, UNTESTED, fill, make_rows
from headcount.analysis.formatting import signed
from headcount.configs import ablations
from headcount.configs.base import get_config

NOISE = np.array([0.0, 0.001, -0.001, 0.0005, -0.0005, 0.0008])


def write_sweep(folder, losses, looks=None, speeds=None, **columns):
    """Write a sweep.csv with arms N=..., and losses by N; N = 1 is the baseline.

    Speeds are by N, or by N and seed.
    """
    folder.mkdir(parents=True)
    if looks:
        (folder / "verdicts.csv").write_text(f'arm,looks\nN=8,"{looks}"\n')
    rows = []
    for N, of_arm in losses.items():
        for seed, loss in enumerate(of_arm):
            overrides = {"model.attention.num_heads": N}
            row = {"arm": f"N={N}", "is_baseline": int(N == 1), "status": "done"}
            row |= {"stage": "report", "seed": seed, "parameters": 100}
            row |= {
                "test_split": "test",
                "flops": 1e9,
                "tokens_per_second": speeds[N][seed] if speeds else 1000 / N,
                "test_loss": loss,
                "dev_loss": loss,
            }
            row |= {"overrides": json.dumps(overrides)}
            rows.append(row | {key: value[N] for key, value in columns.items()})
    with (folder / "sweep.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return read_results(folder)


def claim(rule, **changes):
    test = (
        rule
        if callable(rule)
        else partial(compare, rule, attrgetter("loss"), TEST_LOSS)
    )
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
        assert effect.estimate == pytest.approx((each.mean(), *interval))
        assert (effect.corpus, effect.seeds) == ("x", 6)


def test_noise_leaves_a_claim_undecided(tmp_path):
    losses = {1: 2 + 100 * NOISE, 8: 2 - 100 * NOISE}
    sweep = write_sweep(tmp_path / "heads_x", losses)
    for rule in claim_tests.VERDICTS:
        assert find_effects(claim(rule), [sweep])[0].verdict == UNDECIDED


def test_several_arms_share_the_error_rate_and_looks_widen_the_interval(tmp_path):
    losses = {1: 2 + NOISE, 8: 2 - NOISE, 16: 2 - NOISE}
    sweep = write_sweep(tmp_path / "heads_x", losses)
    (alone,) = find_effects(claim("lower", arms=has(num_heads=8)), [sweep])
    both = find_effects(claim("lower"), [sweep])
    assert len(both) == 2 and both[0].estimate[2] > alone.estimate[2]
    planned = write_sweep(tmp_path / "heads_y", losses, looks="2,4,6")
    assert planned.looks == (2, 4, 6)
    (wider,) = find_effects(claim("lower", arms=has(num_heads=8)), [planned])
    assert wider.estimate[2] > alone.estimate[2]


@pytest.mark.parametrize(
    "test, verdict",
    [
        ("lower", SUPPORTED),
        ("higher", CONTRADICTED),
        (claim_tests.less_spread, CONTRADICTED),
    ],
)
def test_an_arm_that_lost_a_trial_decides_nothing(tmp_path, test, verdict):
    losses = {1: 2 + NOISE[::-1] / 10, 8: 1 - NOISE}
    sweep = write_sweep(tmp_path / "heads_x", losses)
    (effect,) = find_effects(claim(test), [sweep])
    assert effect.verdict == verdict
    arms = [arm._replace(lost=arm.name == "N=8") for arm in sweep.arms]
    (effect,) = find_effects(claim(test), [sweep._replace(arms=arms)])
    assert effect.verdict == UNDECIDED


def test_seeds_after_a_decisive_look_count(tmp_path):
    """Whether it is worse was clear at two seeds, by how much only at six."""
    losses = {1: 2 + np.zeros(6), 8: 2.004 + NOISE / np.array([9, 1, 9, 9, 9, 9])}
    sweep = write_sweep(tmp_path / "heads_x", losses, looks="2,6")
    (effect,) = find_effects(claim("little higher"), [sweep])
    assert (effect.verdict, effect.seeds) == (SUPPORTED, 6)


def test_differences_without_spread_decide_nothing(tmp_path):
    losses = {1: 2 + NOISE, 8: 2 + NOISE}
    sweep = write_sweep(tmp_path / "heads_x", losses)
    for rule in ("lower", "higher", "no lower", "little higher"):
        assert find_effects(claim(rule), [sweep]) == []
    constant = write_sweep(tmp_path / "heads_y", {1: 2 + 0 * NOISE, 8: 2 + NOISE})
    assert find_effects(claim(claim_tests.less_spread), [constant]) == []


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
    few = write_sweep(tmp_path / "heads_z", losses, parameters={1: 1000, 8: 1004})
    (biases,) = find_effects(claim(same_parameters), [few])
    assert biases.verdict == SUPPORTED and "1,000 to 1,004" in biases.text
    assert verdict_of == {
        "same": [SUPPORTED, CONTRADICTED],
        "cheaper": [CONTRADICTED, SUPPORTED],
        "speed": [CONTRADICTED, CONTRADICTED],
    }


def test_speeds_of_seeds_that_were_timed_alone_have_an_interval(tmp_path):
    losses = {1: 2 + NOISE, 8: 2 + NOISE, 16: 2 + NOISE}
    speeds = {1: 100 + 1000 * NOISE, 8: 99 + 1000 * NOISE, 16: 70 - 1000 * NOISE}
    path = write_sweep(tmp_path / "head_speed_x", losses, speeds=speeds)
    many = claim(no_slower, ablation=("heads", "head_speed"))
    (effect,) = find_effects(many, [path])
    logs = np.log(speeds[16] / speeds[1])
    interval = stats.ttest_1samp(logs, 0).confidence_interval(1 - 0.05 / 2)
    assert effect.estimate == pytest.approx(np.exp((logs.mean(), *interval)))
    assert "N=16 / N=1: 0.70 (" in effect.text and effect.verdict == CONTRADICTED
    close = claim(no_slower, ablation="head_speed", arms=has(num_heads=8))
    (effect,) = find_effects(close, [path])
    assert effect.verdict == SUPPORTED
    shared = {N: np.repeat(speed[:3], 2) for N, speed in speeds.items()}
    groups = write_sweep(tmp_path / "head_speed_y", losses, speeds=shared)
    (effect,) = find_effects(many, [groups])
    assert effect.text.endswith("once each") and effect.estimate is None


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


def write_analyses(folder, **rows):
    """Write what heads.py would have found, by verb."""
    folder.mkdir()
    for verb, found in rows.items():
        (folder / f"heads-{verb}-val.json").write_text(json.dumps(found))
    return read_analyses(folder)


@pytest.mark.parametrize(
    "having, verdict", [(8, SUPPORTED), (5, UNDECIDED), (0, CONTRADICTED)]
)
def test_heads_have_a_role_if_most_seeds_have_such_a_head(tmp_path, having, verdict):
    rows = [
        {"trial": trial, "site": "decoder", "layer": 0, "head": head, "role": role}
        | {"has_role": role == "other" or (head == 1 and trial < having)}
        for trial in range(8)
        for head in range(2)
        for role in ("induction", "self", "other")
    ]
    found = write_analyses(tmp_path / "roles_x", roles=rows)
    test = partial(heads_have, ("induction", "self").__contains__)
    (effect,) = find_effects(claim(test, ablation="roles"), [found])
    assert effect.verdict == verdict and (effect.corpus, effect.seeds) == ("x", 8)
    low, high = stats.binomtest(having, 8).proportion_ci(0.95)
    assert f"{having} of 8 seeds" in effect.text
    assert f"({100 * low:.2f} to {100 * high:.2f}%)" in effect.text
    assert f"{having / 8:.1f} of 2 heads" in effect.text


@pytest.mark.parametrize("shift, verdict", [(2, SUPPORTED), (-2, CONTRADICTED)])
def test_deeper_layers_are_wider_if_their_heads_look_further(tmp_path, shift, verdict):
    rows = [
        {"trial": trial, "site": site, "layer": layer, "head": head}
        | {"distance": 3 + layer * shift + head + NOISE[trial] * (layer + head)}
        for trial in range(6)
        for site in ("encoder", "cross")
        for layer in range(2)
        for head in range(2)
    ]
    found = write_analyses(tmp_path / "roles_x", describe=rows)
    (effect,) = find_effects(claim(deeper_is_wider, ablation="roles"), [found])
    assert effect.verdict == verdict and f": {signed(shift, '.2f')} (" in effect.text


@pytest.mark.parametrize("added, verdict", [(0.0, SUPPORTED), (0.1, CONTRADICTED)])
def test_most_heads_can_go_if_the_loss_stays_without_more_than_half(
    tmp_path, added, verdict
):
    rows = [
        {"trial": trial, "order": order, "removed": removed, "heads": 8}
        | {"loss": 1 + (removed > 4) * (added + NOISE[trial]) + (removed > 5)}
        for trial in range(6)
        for order in ("added_loss", "random")
        for removed in (0, 4, 5, 8)
    ]
    found = write_analyses(tmp_path / "roles_x", prune=rows)
    (effect,) = find_effects(claim(most_can_go, ablation="roles"), [found])
    assert effect.verdict == verdict and "without 5 of 8 heads" in effect.text


def test_pairs_of_heads_of_a_layer_are_compared(tmp_path):
    rows = [
        {"trial": trial, "layer": 0, "other_layer": other}
        | {"cka": 0.2 + 0.7 * other + NOISE[trial]}
        | {"interaction": 0.3 + NOISE[trial]}
        for trial in range(6)
        for other in (0, 1)
    ]
    folder = tmp_path / "roles_x"
    found = write_analyses(folder, similarity=rows, interactions=rows)
    (differ,) = find_effects(claim(heads_differ, ablation="roles"), [found])
    (interact,) = find_effects(claim(heads_interact, ablation="roles"), [found])
    assert differ.verdict == SUPPORTED and ": 0.20 (" in differ.text
    assert interact.verdict == SUPPORTED and ": 0.3001 (" in interact.text
    signs = [
        row | {"interaction": row["interaction"] * (-1) ** row["other_layer"]}
        for row in rows
    ]
    found = write_analyses(tmp_path / "roles_z", interactions=signs)
    (effect,) = find_effects(claim(heads_interact, ablation="roles"), [found])
    assert effect.verdict == SUPPORTED and ": 0.3001 (" in effect.text
    less = [row | {"interaction": row["interaction"] - 0.3} for row in rows]
    alike = [row | {"cka": 0.9 + NOISE[row["trial"]]} for row in rows]
    found = write_analyses(tmp_path / "roles_y", similarity=alike, interactions=less)
    for test in (heads_differ, heads_interact):
        (effect,) = find_effects(claim(test, ablation="roles"), [found])
        assert effect.verdict == CONTRADICTED


def write_heads(folder, verb, column, values):
    """Write what heads.py would find in a sweep: values by N and seed, of two heads."""
    rows = [
        {"arm": f"N={N}", "seed": seed, "head": head, column: value + head}
        | {"site": "decoder"}
        for N, of_arm in values.items()
        for seed, value in enumerate(of_arm)
        for head in range(2)
    ]
    other = [row | {column: 7 * row["seed"], "site": "cross"} for row in rows]
    (folder / f"heads-{verb}-test.json").write_text(json.dumps(rows + other))
    (folder / f"heads-{verb}-val.json").write_text(json.dumps(other))
    return read_results(folder)


@pytest.mark.parametrize("shift, verdict", [(-0.1, SUPPORTED), (0.1, CONTRADICTED)])
def test_a_statistic_of_heads_is_compared_by_seed(tmp_path, shift, verdict):
    folder, test = tmp_path / "heads_x", claims.sink_lower
    plain = write_sweep(folder, {1: 2 + NOISE, 8: 2 - NOISE})
    assert find_effects(claim(test), [plain]) == []
    sinks = {1: 0.4 + NOISE, 8: 0.4 + shift + NOISE[::-1]}
    sweep = write_heads(folder, "describe", "sink", sinks)
    (effect,) = find_effects(claim(test), [sweep])
    assert effect.verdict == verdict and effect.unit == claims.SINK.unit
    each = sinks[8] - sinks[1]
    interval = stats.ttest_1samp(each, 0).confidence_interval(0.95)
    low, high = (signed(x, ".3f") for x in interval)
    assert f"({low} to {high})" in effect.text
    both = find_effects(claim(claims.sink_and_loss_lower), [sweep])
    assert [effect.text[:9] for effect in both] == ["weight of", "loss of N"]
    assert find_effects(claim(claims.bad_heads_cost_less), [sweep]) == []


def test_heads_are_of_the_checkpoint_that_has_the_scores(tmp_path):
    folder, test = tmp_path / "heads_x", claims.sink_lower
    which = {1: "average", 8: "average"}
    write_sweep(folder, {1: 2 + NOISE, 8: 2 - NOISE}, checkpoint=which)
    sinks = {1: 0.4 + NOISE, 8: 0.3 + NOISE[::-1]}
    of_best = write_heads(folder, "describe", "sink", sinks)
    assert find_effects(claim(test), [of_best]) == []
    name = "heads-describe-test"
    (folder / f"{name}.json").rename(folder / f"{name}-average.json")
    (effect,) = find_effects(claim(test), [read_results(folder)])
    assert effect.verdict == SUPPORTED


def test_a_bad_head_is_one_that_is_removed_and_one_with_noise(tmp_path):
    folder, test = tmp_path / "heads_x", claim(claims.bad_heads_cost_less)
    write_sweep(folder, {1: 2 + NOISE, 8: 2 - NOISE})
    for column, quantity in claims.BAD_HEADS.items():
        losses = {1: 0.4 + NOISE, 8: 0.1 - NOISE}
        sweep = write_heads(folder, "importance", column, losses)
        (effect,) = find_effects(test, [sweep])
        assert effect.text.startswith(quantity.name) and effect.verdict == SUPPORTED


@pytest.mark.parametrize(
    "extra, verdict", [(-0.1, SUPPORTED), (0.1, CONTRADICTED), (0.0, CONTRADICTED)]
)
def test_many_heads_are_compared_with_few_under_both_rules(tmp_path, extra, verdict):
    losses = {1: 2 + NOISE, 2: 2.5 + NOISE, 8: 3 - NOISE, 9: 3.5 + extra - NOISE[::-1]}
    settings = {1: (2, "concat"), 2: (2, "mean"), 8: (16, "concat"), 9: (16, "mean")}
    overrides = {
        key: json.dumps({"model.num_heads": N, "model.merge": rule})
        for key, (N, rule) in settings.items()
    }
    sweep = write_sweep(tmp_path / "merge_heads_x", losses, overrides=overrides)
    about = claim(
        partial(claim_tests.loses_less, "num_heads", False),
        ablation="merge_heads",
        arms=claim_tests.has(merge="mean"),
        reference=claim_tests.has(merge="concat"),
    )
    (effect,) = find_effects(about, [sweep])
    each = losses[9] - losses[2] - (losses[8] - losses[1])
    interval = stats.ttest_1samp(each, 0).confidence_interval(0.95)
    assert effect.verdict == verdict
    assert effect.estimate == pytest.approx((each.mean(), *interval))
    few = sweep._replace(arms=sweep.arms[:2])
    assert find_effects(about, [few]) == []


@pytest.mark.parametrize("shift, verdict", [(-0.1, SUPPORTED), (0.1, CONTRADICTED)])
def test_the_generalization_gap_is_compared_by_seed(tmp_path, shift, verdict):
    about = CLAIMS[24]
    assert about.sentence == "More heads overfit less."
    losses = {1: 2 + NOISE, 8: 2 - NOISE}
    assert find_effects(about, [write_sweep(tmp_path / "heads_x", losses)]) == []
    gaps = {1: 0.3 + NOISE, 8: 0.3 + shift - NOISE[::-1]}
    sweep = write_sweep(tmp_path / "heads_y", losses)
    arms = [
        arm._replace(gap=dict(enumerate(gap)))
        for arm, gap in zip(sweep.arms, gaps.values(), strict=True)
    ]
    (effect,) = find_effects(about, [sweep._replace(arms=arms)])
    low, high = stats.ttest_1samp(gaps[8] - gaps[1], 0).confidence_interval(0.95)
    assert effect.verdict == verdict and effect.seeds == 6
    assert f"({signed(low, '.4f')} to {signed(high, '.4f')})" in effect.text


def test_rates_and_spikes_are_compared_at_the_highest_rate(tmp_path):
    """Averaging loses less by a higher rate here, but has larger spikes.

    It learns best at the rate in the middle, and concatenation at the lowest one.
    """
    about = CLAIMS[11]
    assert "tolerates higher learning rates" in about.sentence
    rules = [(r, rule) for r in (0.1, 0.8, 0.3) for rule in ("concat", "mean")]
    overrides = {
        key: json.dumps({"model.merge": rule, "optimizer.learning_rate": rate})
        for key, (rate, rule) in enumerate(rules, 1)
    }
    losses = {1: 2 + NOISE, 2: 9.1 - NOISE, 3: 3 - NOISE[::-1], 4: 2.5 + NOISE}
    losses |= {5: 2.1 + NOISE, 6: 2.1 - NOISE}
    norms = {1: 9.0, 2: 9.0, 3: 2.0, 4: 4.0, 5: 9.0, 6: 9.0}
    sweep = write_sweep(
        tmp_path / "merge_rates_x",
        losses,
        overrides=overrides,
        gradient_norm=dict.fromkeys(norms, 1.0),
        largest_gradient_norm=norms,
    )
    arms = [
        arm._replace(spike={seed: x + NOISE[seed] for seed, x in arm.spike.items()})
        for arm in sweep.arms
    ]
    arms[3] = sweep.arms[3]
    sweep = sweep._replace(arms=arms)
    rate, spike = find_effects(about, [sweep])
    each = losses[4] - losses[6] - (losses[3] - losses[1])
    assert rate.verdict == SUPPORTED
    assert rate.estimate[0] == pytest.approx(each.mean())
    assert (
        spike.verdict == CONTRADICTED
        and f": {signed(np.log(2), '.2f')} (" in spike.text
    )


@pytest.mark.parametrize("lost, verdict", [(3, UNDECIDED), (6, SUPPORTED)])
def test_divergence_at_high_rates_counts_and_is_left_out_of_the_losses(
    tmp_path, lost, verdict
):
    """The reference loses seeds at the highest rate; rates below are compared."""
    about = CLAIMS[11]
    rules = [(r, rule) for r in (0.1, 0.2, 0.8) for rule in ("concat", "mean")]
    overrides = {
        key: json.dumps({"model.merge": rule, "optimizer.learning_rate": rate})
        for key, (rate, rule) in enumerate(rules, 1)
    }
    losses = {key: 2 + key**2 * NOISE + key / 100 for key in overrides}
    sweep = write_sweep(tmp_path / "merge_rates_x", losses, overrides=overrides)
    arms = list(sweep.arms)
    kept = {seed: x for seed, x in arms[4].loss.items() if seed >= lost}
    arms[4] = arms[4]._replace(loss=kept, lost=lost, diverged=frozenset(range(lost)))
    rate, divergence = find_effects(about, [sweep._replace(arms=arms)])
    assert "N=4 − N=2) − (N=3 − N=1" in rate.text and "N=6" not in rate.text
    p = stats.binomtest(lost, lost).pvalue
    assert divergence.text == f"diverged: 0 of 18, instead of {lost}, p = {p:.2g}"
    assert divergence.verdict == verdict
    # a seed that only one side was trained with tells nothing
    other = arms[5]._replace(loss=dict.fromkeys(range(lost, 6), 2.0))
    found = find_effects(about, [sweep._replace(arms=[*arms[:5], other])])
    assert [each.text for each in found if "diverged" in each.text] == []
    swapped = about._replace(arms=about.reference, reference=about.arms)
    opposite = find_effects(swapped, [sweep._replace(arms=arms)])[1]
    assert opposite.text.startswith(f"diverged: {lost} of 18, instead of 0")
    assert opposite.verdict == (UNDECIDED if verdict == UNDECIDED else CONTRADICTED)


def test_heads_of_64_are_compared_at_every_width_that_has_them(tmp_path):
    about = CLAIMS[3]
    assert "64" in about.sentence
    arms = [(64, 32), (128, 64), (128, 32), (256, 128), (256, 64)]
    overrides = {
        key: json.dumps({"model.width": width, "model.attention.head_dim": size})
        for key, (width, size) in enumerate(arms, 1)
    }
    shifts = {1: -1.0, 2: 0.0, 3: 0.1, 4: -0.1, 5: 0.0}
    losses = {key: 2 + x + key**2 * NOISE / 9 for key, x in shifts.items()}
    sweep = write_sweep(tmp_path / "width_heads_x", losses, overrides=overrides)
    effects = find_effects(about, [sweep])
    assert [(x.text.split(":")[0], x.verdict) for x in effects] == [
        ("loss of N=3 − N=2", SUPPORTED),
        ("loss of N=4 − N=5", CONTRADICTED),
    ]
    each = losses[3] - losses[2]  # both comparisons share the error rate
    interval = stats.ttest_1samp(each, 0).confidence_interval(0.975)
    assert effects[0].estimate == pytest.approx((each.mean(), *interval))


def test_exact_settings_choose_one_arm():
    chooses = claim_tests.exactly(gate="sigmoid")
    assert chooses({"gate": "sigmoid"}, {})
    assert not chooses({"gate": "sigmoid", "match": "parameters"}, {})
    assert not chooses({"gate": "sigmoid", "gate_on": "values"}, {})
    assert claim_tests.exactly()({}, {}) and not claim_tests.exactly()({"N": 1}, {})


def test_a_spread_needs_more_evidence_with_planned_looks(tmp_path):
    losses = {1: 2 + NOISE[::-1] / 3, 8: 1 - NOISE}
    sweep = write_sweep(tmp_path / "heads_x", losses)
    (once,) = find_effects(claim(claim_tests.less_spread), [sweep])
    planned = sweep._replace(looks=(4, 6))
    (twice,) = find_effects(claim(claim_tests.less_spread), [planned])
    value, low, high = once.estimate
    assert twice.estimate[0] == value
    assert twice.estimate[1] < low and twice.estimate[2] > high


def test_the_heads_of_the_test_split_count_if_there_are_several(tmp_path):
    for split, sink in (("test", 0.1), ("val", 0.9)):
        path = tmp_path / f"heads-describe-{split}.json"
        path.write_text(json.dumps([{"sink": sink}]))
    folder = tmp_path.rename(tmp_path.with_name("roles_x"))
    assert read_analyses(folder).rows["describe"] == [{"sink": 0.1}]


def test_a_page_without_marks_is_an_error_before_anything_is_written(
    tmp_path, monkeypatch, capsys
):
    page = tmp_path / "page.md"
    results = tmp_path / "results"
    results.mkdir()
    monkeypatch.setattr("sys.argv", ["x", f"--results={results}", f"--page={page}"])
    contents = "no marks", "\n".join(claims.MARKS), ""
    errors = "is not a file", "must have the lines", "has no results for any claim"
    for content, words in zip(contents, errors, strict=True):
        with pytest.raises(SystemExit) as stopped:
            claims.main()
        assert stopped.value.code == 2 and words in capsys.readouterr().err
        assert list(results.iterdir()) == []
        page.write_text(content)


def cut_in_half(path):
    path.write_text(path.read_text()[: path.stat().st_size // 2])


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


DAMAGES = {  # of heads_x, which has planned looks, and of roles_x
    "heads_x/sweep.csv has no column dev_loss": (
        lambda folder: replace(folder / "heads_x/sweep.csv", "dev_loss", "dev")
    ),
    "heads_x/sweep.csv has no column test_loss": (
        lambda folder: replace(folder / "heads_x/sweep.csv", "test_loss", "test")
    ),
    "heads_x/sweep.csv has an incomplete row (arm N=": (
        lambda folder: cut_in_half(folder / "heads_x/sweep.csv")
    ),
    "heads_x/sweep.csv can't be read (test_loss of N=1, seed 2, is nan)": (
        lambda folder: replace(folder / "heads_x/sweep.csv", ",1.999,", ",nan,")
    ),
    "heads_x/sweep.csv can't be read (could not convert string to float: 'x')": (
        lambda folder: replace(folder / "heads_x/sweep.csv", ",1.999,", ",x,")
    ),
    "heads_x/verdicts.csv is missing": (
        lambda folder: (folder / "heads_x/verdicts.csv").unlink()
    ),
    "heads_x/verdicts.csv can't be read (no 'looks')": (
        lambda folder: replace(folder / "heads_x/verdicts.csv", "looks", "look")
    ),
    "heads_x/verdicts.csv can't be read (no verdicts)": (
        lambda folder: (folder / "heads_x/verdicts.csv").write_text("arm,looks\n")
    ),
    "heads_x/sweep.csv can't be read ('list' object has no attribute": (
        lambda folder: replace(
            folder / "heads_x/sweep.csv", '"{""model.attention.num_heads"": 8}"', "[]"
        )
    ),
    "roles_x/heads-roles-val.json can't be read (its rows are not objects)": (
        lambda folder: (folder / "roles_x/heads-roles-val.json").write_text("[1]")
    ),
    "heads_x/verdicts.csv can't be read (invalid literal": (
        lambda folder: replace(folder / "heads_x/verdicts.csv", "2,6", "2;6")
    ),
    "roles_x/heads-roles-val.json can't be read (": (
        lambda folder: cut_in_half(folder / "roles_x/heads-roles-val.json")
    ),
    "roles_x has no 'layer'": (
        lambda folder: replace(folder / "roles_x/heads-roles-val.json", "layer", "lair")
    ),
    "head_dim_x has no 'value_dim'": (
        lambda folder: (folder / "heads_x").rename(folder / "head_dim_x")
    ),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_damaged_results_are_named(words, tmp_path, monkeypatch, capsys):
    losses = {1: 2 + NOISE, 8: 2 - NOISE}
    verdict = {1: "baseline", 8: "better"}
    write_sweep(tmp_path / "heads_x", losses, looks="2,6", verdict=verdict)
    row = {"trial": 0, "site": "decoder", "layer": 0, "head": 0}
    write_analyses(
        tmp_path / "roles_x", roles=[row | {"role": "induction", "has_role": True}]
    )
    page = tmp_path / "page.md"
    page.write_text("\n".join(claims.MARKS))
    monkeypatch.setattr("sys.argv", ["x", f"--results={tmp_path}", f"--page={page}"])
    claims.main()
    DAMAGES[words](tmp_path)
    with pytest.raises(SystemExit) as stopped:
        claims.main()
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_claims_without_an_estimate_have_an_empty_picture(tmp_path):
    """As those of a sweep of one seed."""
    sweep = write_sweep(tmp_path / "heads_x", {1: [2.0], 8: [1.9]})
    found = [(claim(same_parameters), find_effects(claim(same_parameters), [sweep]))]
    assert found[0][1]
    claims.draw(found, tmp_path / "claims.png")
    assert (tmp_path / "claims.png").read_bytes().startswith(b"\x89PNG")


def test_an_untested_claim_is_said_to_be_untested(tmp_path):
    rows = make_rows([(claim("lower"), [])])
    assert rows[0][-1] == UNTESTED and "needs: heads" in rows[0][-2]
    for each in CLAIMS:
        assert find_effects(each, []) == []


def test_claims_name_ablations_that_exist_or_will():
    for each in CLAIMS:
        if each.test is not None and each.ablation != "roles":
            names = ablations_of(each)
            assert names and all(hasattr(ablations, name) for name in names)


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


def test_the_roles_that_count_are_those_that_are_measured():
    ids, words = np.arange(4), ["a"] * 4
    found = {"induction"}  # on tokens of its own, which repeat
    for site in ("encoder", "decoder"):
        found |= roles.by_token(site, ids, ids, words, (1, 2)).keys()
    assert found == set(claims.ROLES)


def test_relations_but_those_of_punctuation_are_syntax():
    links = [("nsubj", 1, 0), ("punct", 2, 1), ("subject", 1, 0), ("antecedent", 1, 0)]
    found = {role for role, *_ in roles.name_links(links) if claims.is_syntax(role)}
    assert found == {"nsubj → head", "head → nsubj", "verb → its subject"}
    assert claims.is_syntax("before the verb → its subject")


BY_ARMS = [
    pytest.param(each, name, id=f"{each.sentence} {name}")
    for each in CLAIMS
    if each.arms and each.ablation != "roles"
    for name in ablations_of(each)
]


@pytest.mark.parametrize("claim, ablation", BY_ARMS)
def test_the_sweep_that_a_claim_waits_for_has_its_arms(claim, ablation):
    """Otherwise no results would ever test it."""
    arms = [
        {key.rsplit(".")[-1]: value for key, value in overrides.items()}
        for overrides in getattr(ablations, ablation)(get_config())
    ]
    assert any(claim.arms(x, base) for x in arms for base in arms)
    assert claim.reference is None or any(claim.reference(x, arms[0]) for x in arms)
