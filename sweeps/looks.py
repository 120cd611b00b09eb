"""Planned looks: add seeds in stages, only to arms that they may well decide.

--seeds=4:32 looks at every arm after 4, 6, 8, 12, 16, 24 and 32 seeds. Looks use the
sweep's metric on dev; test scores decide nothing. The sequential tests in
`analysis.sequential` keep their error rates in spite of the repeated looks.
"""

import math
import re

from headcount.analysis.report import verdict_sentence
from headcount.analysis.sequential import (
    Looks,
    Verdict,
    check_looks,
    default_looks,
    judge,
    unplanned_looks,
)
from headcount.analysis.significance import MAX_SEEDS
from headcount.sweeps.plan import Plan, Trial
from headcount.sweeps.search import DevScore, Search, next_trials
from headcount.tasks import Metric

# A margin that differs from the metric's own by more than this factor must be in the
# wrong unit: a fraction instead of per cent, or points although the metric is the loss.
UNLIKELY = 20


def parse_seeds(
    seeds: str | None, looks: list[str]
) -> tuple[int | None, list[int] | None]:
    """Parse --seeds and --looks.

    Returns:
        The (largest) number of seeds per arm, and the numbers of seeds after which to
        look at the arms; None for what is not given.

    Raises:
        ValueError: they can't be parsed, or contradict each other.
    """
    if looks and ":" not in (seeds or ""):
        numbers = sorted({int(x) for x in looks if x.isdecimal()})
        example = f"{numbers[0]}:{numbers[-1]}" if len(numbers) > 1 else "4:32"
        raise ValueError(f"--looks needs the range of seeds, as in --seeds={example}.")
    if seeds is None:
        return None, None
    match = re.fullmatch(r"(\d+)(?::(\d+))?", seeds)
    if match is None or (match.group(2) is None and int(match.group(1)) < 1):
        raise ValueError(
            f"--seeds must be a number, or the first and last number of seeds to look "
            f"at, as in --seeds=4:32; got {seeds}."
        )
    first, last = (int(x) if x else None for x in match.groups())
    if max(first, last or 0) > MAX_SEEDS:
        raise ValueError(f"--seeds must be at most {MAX_SEEDS:,}, got {seeds}.")
    if last is None:
        return first, None
    if last <= first:
        raise ValueError(f"--seeds={seeds} must be FIRST:LAST, with FIRST below LAST.")
    planned = default_looks(first, last)
    if looks:
        if not all(re.fullmatch(r"\d+", x) for x in looks):
            raise ValueError(f"--looks must be numbers, got {','.join(looks)}.")
        planned = tuple(map(int, looks))
    check_looks(planned)
    if (planned[0], planned[-1]) != (first, last):
        raise ValueError(
            f"--looks={','.join(looks)} must start and end like --seeds={seeds}."
        )
    return last, list(planned)


def parse_margin(text: str, metric: Metric) -> float:
    """Parse --margin; return it in the unit in which the metric is shown.

    Raises:
        ValueError: it is not a positive number, has another unit, or is implausible.
    """
    match = re.fullmatch(r"\s*([-+.\deE]*\d\.?)\s*(\S.*)?", text)
    try:
        margin = float(match.group(1)) if match else math.nan
    except ValueError:
        margin = math.nan
    unit = metric.unit or metric.label
    example = f"--margin={metric.margin or 1:g}"
    if not 0 < margin < math.inf:
        raise ValueError(
            f"--margin={text} must be a positive number of {unit}, as in {example}."
        )
    units = {"", metric.unit, metric.unit.split(" ")[0], metric.label}
    units.add(metric.unit.replace("%", "percentage points"))  # as margins are shown
    units |= {re.sub(r"s\b", "", unit, count=1) for unit in units}  # 1 point
    units |= {f"{unit} of {metric.label}" for unit in units}
    if (match.group(2) or "").casefold() not in {name.casefold() for name in units}:
        raise ValueError(
            f"--margin={text} must be in the unit of {metric.label}, {unit}, as in "
            f"{example}."
        )
    least, most = 0.0, math.inf
    if metric.margin is not None:
        least, most = metric.margin / UNLIKELY, metric.margin * UNLIKELY
    if None not in metric.bounds:
        most = min(most, metric.bounds[1] - metric.bounds[0])
    if not least <= margin <= most:
        raise ValueError(
            f"--margin={text} can't be meant: it is in {unit} of {metric.label}, where "
            f"{least:g} to {most:g} is sensible, as in {example}."
        )
    return margin


def make_looks(settings: dict, plan: Plan, metric: Metric) -> Looks | None:
    """Return the planned looks of a sweep's settings, or None if it has none."""
    if settings["looks"] is None:
        return None
    return Looks(tuple(settings["looks"]), margin_of(settings, metric), others(plan))


def margin_of(settings: dict, metric: Metric) -> float | None:
    """Return the equivalence margin, in the unit in which scores are shown."""
    return metric.margin if settings["margin"] is None else settings["margin"]


def others(plan: Plan) -> int:
    """Return the number of arms that are compared with the baseline, at least 1."""
    return max(1, len(plan.arms) - 1)


def staged_trials(
    plan: Plan,
    search: Search,
    existing: list[tuple[Trial, DevScore | None]],
    propose: bool,
    looks: Looks | None,
    scale: float,
) -> list[Trial]:
    """Return all trials that a sweep has so far, with seeds up to the current look.

    A look is complete when every trial of its seeds has a dev score. Then the undecided
    arms and the baseline get the seeds of the next look.

    Args:
        plan: the arms with all their seeds.
        search, existing, propose: see `next_trials`.
        looks: the planned looks; None runs all seeds at once.
        scale: factor from stored scores to scores as shown.
    """
    if looks is None:
        return next_trials(plan.arms, search, existing, propose)
    scores = {trial.id: score for trial, score in existing}
    started = {(t.arm, t.seed) for t, _ in existing if not t.is_search}
    stages = dict.fromkeys([arm.name for arm in plan.arms], 0)
    while True:
        limited = [
            arm._replace(seeds=arm.seeds[: looks.seeds[stages[arm.name]]])
            for arm in plan.arms
        ]
        trials = next_trials(limited, search, existing, propose)
        reported = {arm.name: {} for arm in plan.arms}
        for trial in trials:
            if not trial.is_search:
                reported[trial.arm][trial.seed] = scores.get(trial.id)
        searching = {t.arm for t in trials if t.is_search and scores.get(t.id) is None}
        if searching or any(None in of.values() for of in reported.values()):
            return trials
        base = plan.baseline.name
        unfinished = [
            arm
            for arm in plan.arms
            if not arm.is_baseline and stages[arm.name] + 1 < len(looks.seeds)
        ]
        continued = []
        for arm in unfinished:
            name, count = arm.name, looks.seeds[stages[arm.name]]
            has_more = (name, arm.seeds[count]) in started
            if needs_seeds(reported[name], reported[base], looks, scale, has_more):
                continued.append(name)
        if not continued:
            return trials
        for name in (base, *continued):
            stages[name] += 1


def needs_seeds(
    arm_scores: dict, baseline_scores: dict, looks: Looks, scale: float, has_more: bool
) -> bool:
    """Return whether an arm gets the seeds of the next look.

    It gets none if a trial has diverged or the arm is decided. It also gets none if a
    verdict is unlikely, unless it already has trials of the next look.
    """
    pairs = [
        (arm_scores[seed], baseline_scores[seed])
        for seed in arm_scores
        if seed in baseline_scores
    ]
    differences = [scale * (x[0] - y[0]) for x, y in pairs]
    if not differences or not all(map(math.isfinite, differences)):
        return False
    verdict = judge(differences, looks)
    return verdict.is_open or (has_more and verdict.kind == "undecided")


def verdict_rows(
    plan: Plan, settings: dict, metric: Metric, rows: list[dict]
) -> list[dict]:
    """Return the verdict on every arm but the baseline.

    With planned looks, verdicts are based on dev scores, otherwise on test scores of
    the seeds available. Numbers are in the unit in which scores are shown. An arm that
    lost a trial is undecided, because the remaining seeds are a biased sample. What was
    decided at an earlier planned look stays so. If seeds were added without a plan, the
    intervals are those of looks at the numbers of seeds before, and at the last.

    Args:
        rows: rows of the sweep's table.
    """
    looks, earlier = make_looks(settings, plan, metric), settings["earlier_seeds"] or []
    side = "test" if looks is None else "dev"
    scores: dict[str, dict] = {arm.name: {} for arm in plan.arms}
    lost: dict[str, set] = {arm.name: set() for arm in plan.arms}
    for row in rows:
        value = row[f"{side}_{metric.name}"]
        if row["stage"] != "report":
            continue
        if row["status"] == "done" and value is not None:
            scores[row["arm"]][row["seed"]] = metric.scale * value
        if row["status"] in ("diverged", "failed"):
            lost[row["arm"]].add(row["seed"])
    baseline = plan.baseline.name
    base, verdicts = scores[baseline], []
    for arm in plan.arms:
        if arm.is_baseline:
            continue
        arm_scores = scores[arm.name]
        common = [seed for seed in arm.seeds if seed in arm_scores and seed in base]
        differences = [arm_scores[seed] - base[seed] for seed in common]
        planned = looks
        if planned is None:
            seeds = unplanned_looks(earlier, len(differences))
            planned = Looks(seeds, margin_of(settings, metric), others(plan))
        verdict = judge(differences, planned, metric.higher_is_better, looks is None)
        seeds = set(arm.seeds)
        if looks is not None and not verdict.is_open:
            seeds = set(arm.seeds[: verdict.num_seeds])
        missing = len(seeds & lost[arm.name]) + len(seeds & lost[baseline])
        if missing:
            mean, seeds_so_far = verdict.mean, verdict.num_seeds
            verdict = Verdict("undecided", mean, math.nan, math.nan, seeds_so_far)
        unknown = verdict.kind != "undecided" or math.isnan(verdict.chance)
        row = {
            "arm": arm.name,
            "verdict": verdict.kind,
            "metric": metric.name,
            "split": side,
            "difference": verdict.mean,
            "low": verdict.low,
            "high": verdict.high,
            "margin": planned.margin,
            "bound": None if math.isnan(verdict.bound) else verdict.bound,
            "seeds": verdict.num_seeds,
            "looks": ",".join(map(str, planned.seeds)) if looks or earlier else "",
            "lost": missing,
            "chance": None if unknown else verdict.chance,
        }
        verdicts.append(row | {"sentence": verdict_sentence(row, metric, baseline)})
    return verdicts
