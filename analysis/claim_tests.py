"""Tests of claims about heads: functions of a claim and of the files in results/.

A sweep is a folder named ABLATION_CORPUS that contains its sweep.csv. Arms are compared
by test loss, paired by seed, with intervals that hold simultaneously for all arms of a
claim and for all planned looks. An analysis of the heads of trained models is a folder
named roles_CORPUS with the files that heads.py writes, with one trial per seed.
"""

import contextlib
import csv
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy

from headcount.analysis.budget import TOLERANCE
from headcount.analysis.formatting import grouped, interval, number, signed
from headcount.analysis.heads import output_file
from headcount.analysis.sequential import Verdict, judge_at_last
from headcount.analysis.significance import CONFIDENCE, summary
from headcount.analysis.tables import means_by_seed
from headcount.configs import ablations
from headcount.tasks.base import LOSS

SUPPORTED, CONTRADICTED, UNDECIDED = "supported", "contradicted", "undecided"
SLOWER = 0.95  # an arm below this fraction of the reference's speed is slower
SPEED = "ratio of training speeds"
NATS = "difference in loss, nats per token"
COLUMNS = {  # that a sweep.csv needs
    *("arm", "is_baseline", "stage", "status", "seed", "overrides", "parameters"),
    *("flops", "tokens_per_second", "dev_loss", "test_loss", "test_split"),
}


class Arm(NamedTuple):
    """The finished trials of an arm, from a sweep.csv."""

    name: str
    settings: dict  # overrides, by the last part of their key
    is_baseline: bool
    parameters: int
    flops: float
    speed: dict[int, float]  # training tokens per second of its program, by seed
    loss: dict[int, float]  # on test, by seed
    dev: float  # mean loss on dev
    lost: int  # trials that diverged or failed
    diverged: frozenset[int]  # seeds, part of `lost`
    gap: dict[int, float]  # generalization gap, by seed
    spike: dict[int, float]  # logarithm of the largest / median gradient norm
    context_gain: dict[int, float]  # on test, by seed


class Results(NamedTuple):
    """A sweep under results/."""

    ablation: str
    corpus: str
    arms: list[Arm]
    looks: tuple[int, ...] | None  # numbers of seeds at planned looks; None: no looks
    heads: dict[str, list[dict]]  # rows by verb of heads.py, of all arms

    @property
    def baseline(self) -> Arm | None:
        """The arm that equals the base config."""
        return next((arm for arm in self.arms if arm.is_baseline), None)


class Analyses(NamedTuple):
    """Analyses of a run's heads: rows by verb of heads.py, with one trial per seed."""

    corpus: str
    rows: dict[str, list[dict]]
    ablation: str = "roles"


class Effect(NamedTuple):
    """The evidence of one sweep or analysis about a claim."""

    corpus: str
    text: str  # the measured numbers
    verdict: str
    seeds: int
    estimate: tuple[float, float, float] | None = None  # value, low, high
    unit: str = NATS  # of the estimate


class Quantity(NamedTuple):
    """A number per trial by which arms are compared."""

    name: str
    format: str
    unit: str  # of differences
    margin: float = 0.0  # below which differences are negligible


TEST_LOSS = Quantity("loss", LOSS.format, NATS, LOSS.margin)


# Whether to choose an arm, given its settings and those of the baseline.
Chooses = Callable[[dict, dict], bool]


class Claim(NamedTuple):
    """A claim about heads, and how to test it."""

    sentence: str
    who: str
    published: str
    ablation: str | tuple[str, ...]  # of configs/ablations.py, one of several; "roles"
    test: Callable
    arms: Chooses | None = None  # None: all but the reference
    reference: Chooses | None = None  # None: the baseline


def has(match: str | None = None, **wanted) -> Chooses:
    """Choose the arms with these settings and this `match` (None: unmatched arms)."""

    def chooses(settings: dict, baseline: dict) -> bool:
        del baseline
        if settings.get("match") != match:
            return False
        return all(settings.get(key, "") == value for key, value in wanted.items())

    return chooses


def exactly(**wanted) -> Chooses:
    """Choose the arm that differs from the base config in these settings alone."""
    return lambda settings, baseline: settings == wanted


def one_of(*choices: Chooses) -> Chooses:
    """Choose the arms that any of several functions chooses."""
    return lambda settings, baseline: any(x(settings, baseline) for x in choices)


def smaller_keys(settings: dict, baseline: dict) -> bool:
    """Choose arms with the baseline's value size, but smaller keys."""
    same_values = settings["value_dim"] == baseline["value_dim"]
    return same_values and settings["head_dim"] < baseline["head_dim"]


def smaller_start(settings: dict, baseline: dict) -> bool:
    """Choose arms with the baseline's merge rule that start at a smaller scale."""
    same_rule = settings["merge"] == baseline["merge"]
    return same_rule and settings["merge_gain"] < baseline["merge_gain"]


# Tests: functions from a claim and a sweep to effects.


def chosen(claim: Claim, sweep: Results) -> tuple[list[Arm], Arm | None]:
    """Return the arms of a claim in a sweep, and the arm to compare them with."""
    reference = sweep.baseline
    base = {} if reference is None else reference.settings
    if claim.reference is not None:
        matching = [arm for arm in sweep.arms if claim.reference(arm.settings, base)]
        if not matching:
            return [], None
        reference = matching[0]
    if reference is None:
        return [], None
    arms = [arm for arm in sweep.arms if arm is not reference]
    if claim.arms is not None:
        arms = [arm for arm in arms if claim.arms(arm.settings, base)]
    return arms, reference


# By rule: from the interval of the difference and the margin to whether a claim is
# supported and whether it is contradicted.
VERDICTS = {
    "lower": lambda low, high, margin: (high < 0, low > -margin),
    "higher": lambda low, high, margin: (low > 0, high < margin),
    "no lower": lambda low, high, margin: (low > -margin, high < -margin),
    "little higher": lambda low, high, margin: (high < margin, low > margin),
}


def compare(
    rule: str,
    values: Callable[[Arm], dict[int, float]],
    quantity: Quantity,
    claim: Claim,
    sweep: Results,
    comparisons: int | None = None,
) -> list[Effect]:
    """Compare a number of the arms' trials with the reference's.

    Args:
        rule: a key of `VERDICTS`.
        values: returns an arm's numbers by seed.
        quantity: what the number is.
        comparisons: how many share the error rate; default: the chosen arms.
    """
    arms, reference = chosen(claim, sweep)
    effects = []
    for arm in arms:
        arm_values, base = values(arm), values(reference)
        differences = [
            arm_values[seed] - base[seed]
            for seed in sorted(arm_values.keys() & base.keys())
        ]
        result = judge_at_last(differences, sweep.looks, comparisons or len(arms))
        if math.isnan(result.low):
            continue
        text = f"{quantity.name} of {arm.name} − {reference.name}: "
        text += shown(result, quantity.format)
        is_so, is_not = VERDICTS[rule](result.low, result.high, quantity.margin)
        verdict = verdict_of(is_so, is_not, arm, reference)
        estimate, seeds = (result.mean, result.low, result.high), result.num_seeds
        effect = Effect(sweep.corpus, text, verdict, seeds, estimate, quantity.unit)
        effects.append(effect)
    return effects


def loses_less(
    setting: str, from_best: bool, claim: Claim, sweep: Results
) -> list[Effect]:
    """Test whether raising a setting costs an arm less loss than the reference.

    The claim chooses one arm per value of the setting, and a reference for each. The
    highest value at which no trial was lost is compared with the lowest or, with
    `from_best`, with that of each rule's lowest loss on dev.
    """
    pairs = {
        value: pair
        for value, pair in by_setting(setting, claim, sweep).items()
        if not any(arm.lost for arm in pair)
    }
    if len(pairs) < 2:
        return []
    highest, lowest = pairs[max(pairs)], pairs[min(pairs)]
    if from_best:
        sides = zip(*pairs.values(), strict=True)
        lowest = [min(side, key=lambda arm: arm.dev) for side in sides]
    four = [highest[0], lowest[0], highest[1], lowest[1]]
    seeds = sorted(set.intersection(*(set(arm.loss) for arm in four)))
    losses = ([arm.loss[seed] for seed in seeds] for arm in four)
    differences = [x - y - (z - w) for x, y, z, w in zip(*losses, strict=True)]
    result = judge_at_last(differences, sweep.looks, 1)
    if math.isnan(result.low):
        return []
    verdict = verdict_of(result.high < 0, result.low > -LOSS.margin, *four)
    text = f"loss of ({four[0].name} − {four[1].name}) − ({four[2].name} − "
    text += f"{four[3].name}): {shown(result, LOSS.format)}"
    estimate = (result.mean, result.low, result.high)
    return [Effect(sweep.corpus, text, verdict, result.num_seeds, estimate)]


def by_setting(setting: str, claim: Claim, sweep: Results) -> dict[Any, tuple]:
    """Return a claim's arm and its reference, by the value of a setting of both."""
    arms, references = (
        {x.settings[setting]: x for x in sweep.arms if chooses(x.settings, {})}
        for chooses in (claim.arms, claim.reference)
    )
    return {
        value: (arm, references[value])
        for value, arm in arms.items()
        if value in references
    }


def diverges_less(setting: str, claim: Claim, sweep: Results) -> list[Effect]:
    """Test whether fewer trials of the arms diverge, over all values of a setting.

    Seeds that both were trained with are paired, and compared by a sign test of the
    number of values at which they diverged, with an equal share of the error rate for
    each look. Without any divergence there is no effect.
    """
    pairs = by_setting(setting, claim, sweep).values()
    diverged, reference_diverged, total = [], [], 0
    for arm, reference in pairs:
        shared = {*arm.loss, *arm.diverged} & {*reference.loss, *reference.diverged}
        diverged += shared & arm.diverged
        reference_diverged += shared & reference.diverged
        total += len(shared)
    if not diverged and not reference_diverged:
        return []
    excess = [
        diverged.count(seed) - reference_diverged.count(seed)
        for seed in {*diverged, *reference_diverged}
    ]
    fewer, decided = sum(x < 0 for x in excess), sum(x != 0 for x in excess)
    p = scipy.stats.binomtest(fewer, decided).pvalue if decided else 1.0
    text = f"diverged: {len(diverged)} of {total}, instead of "
    text += f"{len(reference_diverged)}, p = {p:.2g}"
    is_clear = p <= (1 - CONFIDENCE) / len(sweep.looks or (1,))
    verdict = verdict_of(is_clear and 2 * fewer > decided, is_clear)
    return [Effect(sweep.corpus, text, verdict, max(len(x.loss) for x, _ in pairs))]


def heads_lower(
    verb: str,
    column: str,
    site: str | None,
    quantity: Quantity,
    claim: Claim,
    sweep: Results,
) -> list[Effect]:
    """Test whether a statistic, averaged over heads, is lower than the reference's.

    Args:
        verb, column: where the statistic is in the output of heads.py.
        site: site of the heads; None: all.
        quantity: what the statistic is.
    """
    rows = [row for row in sweep.heads.get(verb, []) if site in (None, row["site"])]

    def values(arm):
        return means_by_seed(rows, arm.name, column)

    return compare("lower", values, quantity, claim, sweep)


def same_parameters(claim: Claim, sweep: Results) -> list[Effect]:
    """Test whether all arms have as many parameters as the reference.

    Differences within the tolerance of matched arms, such as those of position biases
    per head, do not count.
    """
    arms, reference = chosen(claim, sweep)
    if not arms:
        return []
    counts = sorted({arm.parameters for arm in [*arms, reference]})
    ends = dict.fromkeys((counts[0], counts[-1]))
    text = f"{len(arms) + 1} arms: {' to '.join(f'{c:,}' for c in ends)} parameters"
    is_same = counts[-1] <= counts[0] * (1 + TOLERANCE)
    verdict = SUPPORTED if is_same else CONTRADICTED
    return [Effect(sweep.corpus, text, verdict, len(reference.loss))]


def cheaper(claim: Claim, sweep: Results) -> list[Effect]:
    """Test whether an arm has fewer parameters, and needs no more operations."""
    arms, reference = chosen(claim, sweep)
    effects = []
    for arm in arms:
        parameters = arm.parameters / reference.parameters
        flops = arm.flops / reference.flops
        text = f"{arm.name} / {reference.name}: parameters {parameters:.3f}, FLOP "
        text += f"{flops:.3f}"
        is_so = parameters < 1 and flops <= 1
        verdict = SUPPORTED if is_so else CONTRADICTED
        effects.append(Effect(sweep.corpus, text, verdict, len(arm.loss)))
    return effects


def no_slower(claim: Claim, sweep: Results) -> list[Effect]:
    """Test whether arms train as fast as the reference, by the slowest.

    Speeds are paired by seed, with an interval of their ratio, if every seed was timed
    by itself. The seeds of a group have one speed, so their ratio has no interval.
    """
    arms, reference = chosen(claim, sweep)
    arms = [arm for arm in arms if arm.speed and reference.speed]
    if not arms:
        return []
    slowest = min(arms, key=lambda arm: np.mean([*arm.speed.values()]))
    seeds = sorted(slowest.speed.keys() & reference.speed.keys())
    pairs = [(slowest.speed[seed], reference.speed[seed]) for seed in seeds]
    text = f"tokens/s of {slowest.name} / {reference.name}: "
    if len(set(pairs)) < max(2, len(seeds)):
        ratio = np.mean([*slowest.speed.values()]) / np.mean(
            [*reference.speed.values()]
        )
        verdict = SUPPORTED if ratio >= SLOWER else CONTRADICTED
        text += f"{ratio:.2f}, once each"
        return [Effect(sweep.corpus, text, verdict, len(slowest.loss))]
    logs = [math.log(x / y) for x, y in pairs]
    result = judge_at_last(logs, sweep.looks, len(arms))
    if math.isnan(result.low):
        return []
    ratio, low, high = map(math.exp, (result.mean, result.low, result.high))
    verdict = verdict_of(low >= SLOWER, high < SLOWER, slowest, reference)
    text += f"{ratio:.2f} ({interval(low, high)})"
    return [Effect(sweep.corpus, text, verdict, len(seeds), (ratio, low, high), SPEED)]


def less_spread(claim: Claim, sweep: Results) -> list[Effect]:
    """Test whether an arm's loss varies less over (paired) seeds than the reference's.

    This uses the interval of Pitman (1939) and Morgan (1939) for the ratio of two
    correlated variances, with an equal share of the error rate for each arm and look.
    """
    arms, reference = chosen(claim, sweep)
    comparisons = len(arms) * len(sweep.looks or (1,))
    level, effects = (1 - CONFIDENCE) / max(1, comparisons), []
    for arm in arms:
        seeds = sorted(arm.loss.keys() & reference.loss.keys())
        if len(seeds) < 4:
            continue
        x, y = ([of.loss[seed] for seed in seeds] for of in (arm, reference))
        if not np.std(x) or not np.std(y):
            continue
        ratio, low, high = ratio_of_spreads(np.array(x), np.array(y), comparisons)
        # the interval assumes normal scores, so ranks have to agree
        agree = rank_p_value(np.add(x, y), np.subtract(x, y)) <= level
        verdict = verdict_of(agree and high < 1, agree and low > 1, arm, reference)
        text = f"sd of {arm.name} / {reference.name}: {number(ratio)} "
        text += f"({interval(low, high)})"
        estimate, unit = (ratio, low, high), "ratio of standard deviations"
        effect = Effect(sweep.corpus, text, verdict, len(seeds), estimate, unit)
        effects.append(effect)
    return effects


def ratio_of_spreads(
    x: np.ndarray, y: np.ndarray, comparisons: int = 1
) -> tuple[float, float, float]:
    """Return the ratio of standard deviations of paired samples, and its interval.

    The interval is one of several that hold at the same time (Bonferroni).
    """
    count, ratio = len(x), float(x.std(ddof=1) / y.std(ddof=1))
    correlation = np.corrcoef(x, y)[0, 1]
    t = scipy.stats.t.isf((1 - CONFIDENCE) / 2 / comparisons, count - 2)
    K = 1 + 2 * (1 - correlation**2) * t**2 / (count - 2)
    root = math.sqrt(K**2 - 1)
    return ratio, ratio * math.sqrt(K - root), ratio * math.sqrt(K + root)


def rank_p_value(x: np.ndarray, y: np.ndarray) -> float:
    """Return the p-value of Spearman's rank correlation, by permutations of the pairs.

    It is exact for up to eight pairs; with more, random permutations are tried.
    """
    centred = scipy.stats.rankdata(y) - (len(y) + 1) / 2
    return scipy.stats.permutation_test(
        (scipy.stats.rankdata(x),),
        lambda ranks, axis: ranks @ centred,  # rises with the correlation
        permutation_type="pairings",
        vectorized=True,
        n_resamples=50_000,
        rng=np.random.default_rng(0),
    ).pvalue


def heads_have(
    counts: Callable[[str], bool], claim: Claim, analyses: Analyses
) -> list[Effect]:
    """Test whether most trials have a head with a role; see `analysis.roles`.

    Args:
        counts: whether a role counts, given its name.
    """
    rows = [row for row in analyses.rows.get("roles", ()) if counts(row["role"])]
    if not rows:
        return []
    trials = grouped(rows, "trial").values()
    having = [any(row["has_role"] for row in trial_rows) for trial_rows in trials]
    share = scipy.stats.binomtest(sum(having), len(having)).proportion_ci(CONFIDENCE)
    heads = [
        {head_of(row) for row in trial_rows if row["has_role"]} for trial_rows in trials
    ]
    count, total = np.mean([len(x) for x in heads]), len({head_of(x) for x in rows})
    text = f"{sum(having)} of {len(having)} seeds have such a head "
    text += f"({interval(100 * share.low, 100 * share.high)}%), on average "
    text += f"{count:.1f} of {total} heads"
    verdict = verdict_of(share.low > 0.5, share.high < 0.5)
    estimate, unit = (np.mean(having), share.low, share.high), "share of seeds"
    return [Effect(analyses.corpus, text, verdict, len(having), estimate, unit)]


def deeper_is_wider(claim: Claim, analyses: Analyses) -> list[Effect]:
    """Test whether heads of the last layer attend further than those of the first."""
    effects, rows = [], analyses.rows.get("describe", ())
    sites = dict.fromkeys(row["site"] for row in rows if row["site"] != "cross")
    for site in sites:
        site_rows = [row for row in rows if row["site"] == site]
        last = max(row["layer"] for row in site_rows)
        first_and_last = [
            [
                np.mean([x["distance"] for x in trial_rows if x["layer"] == layer])
                for layer in (0, last)
            ]
            for trial_rows in grouped(site_rows, "trial").values()
        ]
        if last:
            name = f"distance in layer {last + 1} − layer 1, {site}, tokens"
            quantity = Quantity(name, "+.2f", "difference in distance, tokens")
            differences = np.diff(first_and_last)[:, 0]
            effects += mean_is("above", 0, differences, quantity, analyses, len(sites))
    return effects


def most_can_go(claim: Claim, analyses: Analyses) -> list[Effect]:
    """Test whether removing more than half the heads keeps the loss within the margin.

    Heads are removed in ascending order of their added loss.
    """
    rows = analyses.rows.get("prune", ())
    rows = [row for row in rows if row["order"] == "added_loss"]
    added, shares = [], set()
    for trial_rows in grouped(rows, "trial").values():
        all_heads = next(row for row in trial_rows if not row["removed"])
        half = min(
            (row for row in trial_rows if row["removed"] > row["heads"] / 2),
            key=lambda row: row["removed"],
        )
        added.append(half["loss"] - all_heads["loss"])
        shares.add(f"{half['removed']} of {half['heads']}")
    name = f"loss without {', '.join(sorted(shares))} heads − with all"
    quantity = Quantity(name, f"+{LOSS.format}", NATS)
    return mean_is("below", LOSS.margin, added, quantity, analyses)


def heads_differ(claim: Claim, analyses: Analyses) -> list[Effect]:
    """Test whether outputs of two heads of a layer have a linear CKA below 0.5.

    CKA (Kornblith et al. 2019) is 0 for outputs that share nothing, and 1 for outputs
    that are equal up to a rotation.
    """
    rows = analyses.rows.get("similarity", ())
    rows = [row for row in rows if row["layer"] == row["other_layer"]]
    trials = grouped(rows, "trial").values()
    means = [np.mean([row["cka"] for row in trial_rows]) for trial_rows in trials]
    quantity = Quantity("CKA of two heads of a layer", ".2f", "linear CKA")
    return mean_is("below", 0.5, means, quantity, analyses)


def heads_interact(claim: Claim, analyses: Analyses) -> list[Effect]:
    """Test whether removing two heads costs more or less than the sum of each alone.

    The sizes of the interactions are averaged: with their signs they would cancel.
    """
    rows = analyses.rows.get("interactions", ())
    means = [
        np.mean([abs(row["interaction"]) for row in trial_rows])
        for trial_rows in grouped(rows, "trial").values()
    ]
    name = "size of (added loss without two heads − the sum of each alone), mean over "
    quantity = Quantity(name + "pairs", LOSS.format, NATS)
    return mean_is("above", LOSS.margin, means, quantity, analyses)


def mean_is(
    side: str,
    limit: float,
    values,
    quantity: Quantity,
    analyses: Analyses,
    comparisons=1,
) -> list[Effect]:
    """Test whether the mean of the trials' values is "above" or "below" a limit."""
    if len(values) < 2:
        return []
    mean, _, low, high = map(float, summary(values, comparisons))
    spread = interval(low, high, quantity.format)
    text = f"{quantity.name}: {number(mean, quantity.format)} ({spread})"
    is_above, is_below = low > limit, high < limit
    is_so, is_not = (is_above, is_below) if side == "above" else (is_below, is_above)
    verdict = verdict_of(is_so, is_not)
    estimate, unit = (mean, low, high), quantity.unit
    return [Effect(analyses.corpus, text, verdict, len(values), estimate, unit)]


def shown(result: Verdict, spec: str) -> str:
    """Format a difference with its interval."""
    spread = interval(result.low, result.high, spec, signed)
    return f"{signed(result.mean, spec)} ({spread})"


def ablations_of(claim: Claim) -> tuple[str, ...]:
    """Return the ablations that can test a claim."""
    names = claim.ablation
    return (names,) if isinstance(names, str) else names


def head_of(row: dict) -> tuple:
    """Return a row's head: site, layer, head."""
    return row["site"], row["layer"], row["head"]


def verdict_of(is_so: bool, is_not: bool, *arms: Arm) -> str:
    """Return the verdict of an interval on one side of a limit, the other, or both.

    It is undecided if arms lost trials: the remaining seeds are a biased sample.
    """
    if any(arm.lost for arm in arms):
        return UNDECIDED
    return SUPPORTED if is_so else CONTRADICTED if is_not else UNDECIDED


def read_analyses(folder: Path) -> Analyses | None:
    """Read the output of heads.py; return None if the folder is not a roles_CORPUS."""
    if not folder.name.startswith("roles_"):
        return None
    patterns = "heads-*-*.json", "heads-*-test*.json"  # the test split counts if there
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    return Analyses(folder.name.removeprefix("roles_"), read_heads(paths))


def read_heads(paths: list[Path]) -> dict[str, list[dict]]:
    """Read files that heads.py wrote: rows by verb, of its last file."""
    rows = {}
    for path in paths:
        with damaged_file(path):
            content = json.loads(path.read_text())
            if not all(isinstance(row, dict) for row in content):
                raise ValueError("its rows are not objects")
            rows[path.name.split("-")[1]] = content
    return rows


DAMAGES = ArithmeticError, AttributeError, KeyError, TypeError, ValueError, csv.Error


@contextlib.contextmanager
def damaged_file(path: Path) -> Iterator[None]:
    """Turn what a damaged file raises into a ValueError with the file's path."""
    try:
        yield
    except DAMAGES as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path} can't be read ({reason}); rerun sweep.py report or heads.py."
        ) from None


def read_results(folder: Path) -> Results | None:
    """Read a folder's sweep; return None without a sweep.csv or a known ablation.

    Raises:
        ValueError: the table is damaged, or a file that belongs to it.
    """
    table = folder / "sweep.csv"
    candidates = [
        name
        for name in dir(ablations)
        if folder.name.startswith(f"{name}_") and callable(getattr(ablations, name))
    ]
    if not table.exists() or not candidates:
        return None
    ablation = max(candidates, key=len)
    rows = read_rows(table)
    names = dict.fromkeys(row["arm"] for row in rows)
    with damaged_file(table):
        arms = [read_arm(x, [row for row in rows if row["arm"] == x]) for x in names]
    corpus = folder.name.removeprefix(f"{ablation}_")
    # of the checkpoint that has the scores; older tables don't name it
    which = next((row["checkpoint"] for row in rows if row.get("checkpoint")), "best")
    paths = [
        output_file(folder, verb, row["test_split"], which=which)
        for row in rows[:1]
        for verb in ("describe", "importance")
    ]
    heads = read_heads([path for path in paths if path.exists()])
    looks = read_looks(folder, any("verdict" in row for row in rows), len(arms))
    return Results(ablation, corpus, arms, looks, heads)


def read_rows(table: Path) -> list[dict]:
    """Read the rows of a sweep.csv that are reported, rather than of a search."""
    with damaged_file(table), table.open(newline="") as file:
        reader = csv.DictReader(file)
        rows, columns = list(reader), set(reader.fieldnames or ())
    if missing := COLUMNS - columns:
        raise ValueError(
            f"{table} has no column {min(missing)}; it must be the table that "
            f"sweep.py report writes."
        )
    for row in rows:
        if None in row or None in row.values():
            raise ValueError(f"{table} has an incomplete row (arm {row['arm']}).")
    return [row for row in rows if row["stage"] == "report"]


def read_arm(name: str, rows: list[dict]) -> Arm:
    """Build an arm from its rows of a sweep.csv."""
    done = [row for row in rows if row["status"] == "done"]
    settings = json.loads(rows[0]["overrides"])

    def by_seed(column: str) -> dict[int, float]:
        numbers = {int(x["seed"]): float(x[column]) for x in done if x.get(column)}
        for seed, value in numbers.items():
            if not math.isfinite(value):
                raise ValueError(f"{column} of {name}, seed {seed}, is {value}")
        return numbers

    dev = list(by_seed("dev_loss").values())
    peaks, usual = by_seed("largest_gradient_norm"), by_seed("gradient_norm")
    return Arm(
        name=name,
        settings={key.rsplit(".")[-1]: value for key, value in settings.items()},
        is_baseline=rows[0]["is_baseline"] == "1",
        parameters=int(rows[0]["parameters"]),
        flops=float(rows[0]["flops"]),
        speed=by_seed("tokens_per_second"),
        loss=by_seed("test_loss"),
        dev=float(np.mean(dev)) if dev else math.nan,
        lost=sum(row["status"] in ("diverged", "failed") for row in rows),
        diverged=frozenset(
            int(row["seed"]) for row in rows if row["status"] == "diverged"
        ),
        gap=by_seed("generalization_gap"),
        spike={x: math.log(peaks[x] / usual[x]) for x in peaks.keys() & usual.keys()},
        context_gain=by_seed("test_context_gain"),
    )


def read_looks(
    folder: Path, has_verdicts: bool, num_arms: int
) -> tuple[int, ...] | None:
    """Read the planned looks of a sweep from its verdicts.csv; None if it has none.

    Raises:
        ValueError: a sweep whose table has verdicts is without this file, so that
            intervals would be as narrow as without looks.
    """
    path = folder / "verdicts.csv"
    if not path.exists():
        if has_verdicts:
            raise ValueError(f"{path} is missing; sweep.py report writes it.")
        return None
    with damaged_file(path), path.open(newline="") as file:
        rows = list(csv.DictReader(file))
        if not rows and num_arms > 1:
            raise ValueError("no verdicts")
        looks = rows[0]["looks"] if rows else ""
        return tuple(map(int, looks.split(","))) if looks else None


def find_effects(claim: Claim, sweeps: list[Results | Analyses]) -> list[Effect]:
    """Return the evidence of all sweeps and analyses about a claim.

    Raises:
        ValueError: a folder's arms or rows are not what its name says.
    """
    effects = []
    for sweep in sweeps:
        if sweep.ablation in ablations_of(claim):
            try:
                effects += claim.test(claim, sweep)
            except KeyError as error:
                raise ValueError(
                    f"{sweep.ablation}_{sweep.corpus} has no {error}, which results of "
                    f"{sweep.ablation} have; rename the folder, or rerun sweep.py "
                    f"report or heads.py."
                ) from None
    return list(dict.fromkeys(effects))  # several ablations may share their arms
