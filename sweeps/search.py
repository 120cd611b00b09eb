"""Hyperparameter search: choose each arm's nuisance settings by dev scores.

An arm with several candidate settings first tries them, with seeds that are never
reported, and is scored on dev. Only then are its reported trials trained, with the best
setting; the other settings are never scored on test. The settings to try come from
--tune, from the ablation itself, or from Optuna (--search=optuna:30). The next trials
are a pure function of what is on disk, so a killed search resumes where it stopped.
"""

import ast
import importlib
import math
import re
import zlib
from types import ModuleType
from typing import NamedTuple

import numpy as np

from headcount.configs.ablations import grid, over
from headcount.configs.validation import flat, near_miss
from headcount.sweeps.plan import Arm, Trial, make_trials
from headcount.tasks.base import LOSS, Metric
from headcount.training.trials import check_value, trial_keys

FIRST_SEED = 1_000_000  # offset from the config's seed, away from the reported seeds
ROUNDS = 5  # of proposals by Optuna; the settings of a round train as one program
DEFAULT_RANGES = {  # if --tune names no range; functions of the config's value
    "optimizer.learning_rate": lambda value: (value / 4, value * 4),
    "optimizer.label_smoothing": lambda value: (0.0, 0.3),
    "model.dropout": lambda value: (0.0, 0.4),
}


DevScore = tuple[float, float]  # to rank by: the metric, then -loss for ties
DIVERGED = (-math.inf, -math.inf)


def dev_score(row: dict, metric: Metric) -> DevScore:
    """Return the score of a row of result-val.json.

    Args:
        row: values by metric name; None where they are not finite.
    """
    if row["diverged_at"] is not None:
        return DIVERGED

    def rising(metric: Metric, value: float | None) -> float:  # the better, the higher
        if value is None or not math.isfinite(value):
            return -math.inf
        return value if metric.higher_is_better else -value

    return rising(metric, row[metric.name]), rising(LOSS, row.get(LOSS.name))


class Search(NamedTuple):
    """How the nuisance settings of every arm are found."""

    count: int | None  # settings per arm from Optuna; None: all candidates of the arm
    space: dict[str, list | tuple]  # for Optuna: values, or the ends of a range
    seeds: list[int]  # to try each setting with

    def has_choice(self, arm: Arm) -> bool:
        """Return whether the arm has more than one setting to choose from."""
        return self.count is not None or len(arm.candidates) > 1

    def max_trials(self, arm: Arm) -> int:
        """Return the maximum number of trials that the search takes for an arm."""
        if not self.has_choice(arm):
            return 0
        return len(self.seeds) * (self.count or len(arm.candidates))


def optional_package(name: str) -> ModuleType:
    """Import a package of requirements-sweeps.txt.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(
            f"The package {name} is needed: pip install -r requirements-sweeps.txt"
        ) from None


def make_search(
    text: str | None, tune: list[str], num_seeds: int, base, nuisance: list[str]
) -> tuple[Search, list[dict]]:
    """Parse the flags of a search; return it, and the candidate settings of every arm.

    Args:
        text: --search: "optuna:30"; None: try every combination of the `tune` values.
        tune: --tune: KEY=VALUE,VALUE or, with Optuna, KEY=LOW:HIGH.
        num_seeds: --search_seeds: seeds per setting.
        base: the base config.
        nuisance: keys that may be tuned, according to the ablation.

    Raises:
        ValueError: a flag can't be parsed, or names another key.
    """
    seeds = [base.seed + FIRST_SEED + i for i in range(num_seeds)]
    values = flat(base.to_dict())
    space = dict(parse_tune(flag, values, nuisance) for flag in tune)
    if len(space) < len(tune):
        raise ValueError("--tune names a key twice; list all its values in one flag.")
    if text is None:
        ranges = [key for key, values in space.items() if isinstance(values, tuple)]
        if ranges:
            raise ValueError(
                f"--tune gives a range for {ranges[0]}, which needs a search, as with "
                f"--search=optuna:30; otherwise list values separated by commas."
            )
        return Search(None, {}, seeds), grid(*(over(k, *v) for k, v in space.items()))
    match = re.fullmatch(r"optuna:(\d+)", text)
    if match is None or int(match.group(1)) < 1:
        raise ValueError(
            f"--search must be optuna:N for N settings per arm, as in optuna:30; got "
            f"{text!r}."
        )
    missing = [key for key in nuisance if key not in DEFAULT_RANGES]
    if not space and not nuisance:
        raise ValueError("--search: the ablation names no nuisance settings.")
    if not space and missing:
        raise ValueError(
            f"--search has no default range for {missing[0]}; give one with "
            f"--tune={missing[0]}=LOW:HIGH."
        )
    space = space or {key: DEFAULT_RANGES[key](values[key]) for key in nuisance}
    return Search(int(match.group(1)), space, seeds), [{}]


def parse_tune(text: str, base: dict, nuisance: list[str]) -> tuple:
    """Parse a --tune: return its key, and a list of values or the ends of a range.

    Raises:
        ValueError: the ablation does not list the key as nuisance, or a value is not a
            number in the key's range.
    """
    key, _, values = text.partition("=")
    if key not in base:
        raise ValueError(f"--tune: there is no config key {key}.{near_miss(key)}")
    if key not in nuisance or key not in trial_keys(base):
        raise ValueError(
            f"--tune={key}: only what the ablation lists as nuisance can be tuned: "
            f"{', '.join(nuisance) or 'nothing'}."
        )
    kind, separator = (tuple, ":") if ":" in values else (list, ",")
    try:
        parsed = kind(map(ast.literal_eval, values.split(separator)))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise ValueError(
            f"--tune={text} needs numbers separated by commas, as in "
            f"--tune={key}=0.002,0.005, or for a search a range, as in "
            f"--tune={key}=0.001:0.01"
        ) from None
    for value in parsed:
        check_value(f"--tune={text}: {key}", key, value)
    if kind is tuple and (len(parsed) != 2 or not parsed[0] < parsed[1]):
        raise ValueError(f"--tune={text}: a range is LOW:HIGH, with LOW below HIGH.")
    return key, parsed


def next_trials(
    arms: list[Arm],
    search: Search,
    existing: list[tuple[Trial, DevScore | None]],
    propose: bool,
) -> list[Trial]:
    """Return all trials that the sweep has so far, in order.

    Args:
        arms: the arms of the plan.
        search: how their nuisance settings are found.
        existing: the trials on disk with their dev scores, or None for trials that
            have none yet.
        propose: whether Optuna may start another round.
    """
    trials = []
    for arm in arms:
        if search.has_choice(arm):
            trials += search_trials(arm, search, existing, propose)
        else:
            trials += make_trials(arm, arm.candidates, arm.seeds)
    return trials


def search_trials(arm: Arm, search: Search, existing, propose: bool) -> list[Trial]:
    """Return the trials so far of an arm with several candidate settings."""
    scores = {trial.id: score for trial, score in existing}
    settings = arm.candidates
    if search.count is not None:
        attempted = [t for t, _ in existing if t.is_search]
        attempted.sort(key=lambda trial: trial.attempt)
        settings = unique(
            [
                trial.nuisance
                for trial in attempted
                if make_trials(arm, [trial.nuisance], [trial.seed])[0].id == trial.id
            ]
        )
    tried = attempts(arm, settings, search.seeds)
    if any(scores.get(trial.id) is None for trial in tried):
        return tried
    means = [
        mean_score([scores[t.id] for t in tried if t.nuisance == setting])
        for setting in settings
    ]
    best = max(means, default=DIVERGED)
    chosen = []
    if best > DIVERGED:
        chosen = make_trials(arm, [settings[means.index(best)]], arm.seeds)
    # if the chosen trials are on disk, an earlier call exhausted the search space
    is_over = any(trial.id in scores for trial in chosen)
    if search.count is not None and len(settings) < search.count and not is_over:
        proposals = propose_settings(arm, search, settings, means) if propose else []
        if proposals or not propose:
            return attempts(arm, settings + proposals, search.seeds)
    return tried + chosen


def attempts(arm: Arm, settings: list[dict], seeds: list[int]) -> list[Trial]:
    """Return the search trials of settings, which are numbered from 1."""
    return [
        trial._replace(attempt=number)
        for number, setting in enumerate(settings, start=1)
        for trial in make_trials(arm, [setting], seeds)
    ]


def mean_score(scores: list[DevScore]) -> DevScore:
    """Average over the seeds of a setting; return DIVERGED if any of them diverged."""
    return tuple(np.mean(scores, axis=0).tolist())


def propose_settings(
    arm: Arm, search: Search, settings: list[dict], scores: list[DevScore]
) -> list[dict]:
    """Return the next round of new settings from Optuna's TPE sampler.

    The first round starts with the config's own setting; the rest of it is random.
    Numbers in a range are rounded to three significant digits, and drawn on a log scale
    if the range starts above 0. When the space is exhausted, fewer settings or none are
    returned.
    """
    optuna = optional_package("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    size = min(math.ceil(search.count / ROUNDS), search.count - len(settings))
    space = {
        key: optuna.distributions.CategoricalDistribution(values)
        if isinstance(values, list)
        else optuna.distributions.FloatDistribution(*values, log=values[0] > 0)
        for key, values in search.space.items()
    }
    seed = zlib.crc32(f"{arm.name} {len(settings)}".encode())
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=size)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    # TPE uses only the order of the values, so ranks let the loss break ties
    order = sorted(set(scores))
    for setting, score in zip(settings, scores, strict=True):
        study.add_trial(
            optuna.trial.create_trial(
                params=setting, distributions=space, value=float(order.index(score))
            )
        )
    config = flat(arm.config)
    default = {key: config[key] for key in space}
    in_space = all(
        is_inside(value, search.space[key]) for key, value in default.items()
    )
    candidates = [default] if in_space else []
    for _ in range(20 * size):  # TPE may propose the same setting repeatedly
        if len(fresh := [s for s in unique(candidates) if s not in settings]) >= size:
            break
        params = study.ask(space).params
        candidates.append(
            {
                key: round_like(value, search.space[key], config[key])
                for key, value in params.items()
            }
        )
    return fresh[:size]


def unique(settings: list[dict]) -> list[dict]:
    """Drop repeated settings, and keep the order."""
    return [
        setting for i, setting in enumerate(settings) if setting not in settings[:i]
    ]


def is_inside(value, values: list | tuple) -> bool:
    """Return whether a value is one of a list, or within a range."""
    if isinstance(values, list):
        return value in values
    return values[0] <= value <= values[1]


def round_like(value, values: list | tuple, like):
    """Round a number to three significant digits, or to an integer if `like` is one.

    The result stays within the range `values`. If `values` is a list, return the value
    unchanged.
    """
    if isinstance(values, list):
        return value
    value = round(value) if isinstance(like, int) else float(f"{value:.3g}")
    return min(max(value, values[0]), values[1])
