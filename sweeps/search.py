"""Which trials follow from those there are: first the search, then what is reported.

An arm with a choice of nuisance settings first tries them, with seeds that are not
among those reported, and scores them on dev. What is best becomes the arm's, and only
then are its trials of the report trained; the others are never tested. The settings are
those of --tune and of the ablation itself, or --search=optuna:30 proposes them. All
state is in the groups' folders, so a search that is killed goes on as it was.
"""

import ast
import math
import re
import zlib
from typing import NamedTuple

import numpy as np

from headcount.configs.ablations import grid, over
from headcount.configs.commandline import flat, near_miss
from headcount.sweeps.optional import package
from headcount.sweeps.plan import Arm, Trial, trials_of
from headcount.training.trials import check, variable

FIRST_SEED = 1_000_000  # after the config's seed: far from those that are reported
ROUNDS = 5  # that Optuna proposes its settings in; a round trains as one program
LOST = -1.0  # the score of a trial that diverged: below every other
SPACES = {  # from the config's own value, where --tune names none
    "optimizer.learning_rate": lambda value: (value / 4, value * 4),
    "optimizer.label_smoothing": lambda value: (0.0, 0.3),
    "model.dropout": lambda value: (0.0, 0.4),
}


class Search(NamedTuple):
    """How every arm's nuisance settings are found."""

    count: int | None  # settings of an arm, by Optuna; None: the arm's candidates, all
    space: dict[str, list | tuple]  # of Optuna: values, or the ends of a range
    seeds: list[int]  # that each is tried with

    def is_for(self, arm: Arm) -> bool:
        """Whether the arm has a choice."""
        return self.count is not None or len(arm.candidates) > 1

    def size(self, arm: Arm) -> int:
        """Trials that the arm's search takes, at most."""
        if not self.is_for(arm):
            return 0
        return len(self.seeds) * (self.count or len(arm.candidates))


def make_search(text: str | None, tune: list[str], seeds: int, base, nuisance):
    """The search that the flags ask for, and the settings that an arm may have.

    Args:
        text: "optuna:30", or None: every combination of the values of `tune`.
        tune: KEY=VALUE,VALUE or, for Optuna, KEY=LOW:HIGH.
        seeds: that each setting is tried with.
        base: the config.
        nuisance: keys that the ablation names.

    Raises:
        ValueError: a flag says nothing sensible.
    """
    tried = [base.seed + FIRST_SEED + i for i in range(seeds)]
    space = dict(assigned(each, flat(base.to_dict()), nuisance) for each in tune)
    if text is None:
        ranges = [key for key, values in space.items() if isinstance(values, tuple)]
        if ranges:
            raise ValueError(
                f"--tune gives a range for {ranges[0]}, which only a search takes, as "
                f"with --search=optuna:30; else list values with commas between them."
            )
        return Search(None, {}, tried), grid(*(over(k, *v) for k, v in space.items()))
    found = re.fullmatch(r"optuna:(\d+)", text)
    if found is None or int(found.group(1)) < 1:
        raise ValueError(
            f"--search must be optuna:N, N settings for every arm, as in optuna:30; "
            f"got {text!r}."
        )
    missing = [key for key in nuisance if key not in SPACES]
    if not space and (missing or not nuisance):
        raise ValueError(
            f"--search needs to know where to look for "
            f"{missing[0] if missing else 'settings: the ablation names no nuisance'}; "
            f"say it with --tune=KEY=LOW:HIGH, where KEY stands after the ablation's "
            f'"Nuisance:".'
        )
    values = flat(base.to_dict())
    space = space or {key: SPACES[key](values[key]) for key in nuisance}
    return Search(int(found.group(1)), space, tried), [{}]


def assigned(text: str, base: dict, nuisance: list[str]) -> tuple:
    """The key of a --tune, and its values or the ends of its range.

    Raises:
        ValueError: a key that the ablation does not name, or no number.
    """
    key, _, values = text.partition("=")
    if key not in base:
        raise ValueError(f"--tune: there is no config key {key}.{near_miss(key)}")
    if key not in nuisance or key not in variable(base):
        raise ValueError(
            f"--tune may set what the ablation names as nuisance, "
            f"{', '.join(nuisance) or 'which is nothing'}; got {key}."
        )
    kind, sign = (tuple, ":") if ":" in values else (list, ",")
    try:
        found = kind(map(ast.literal_eval, values.split(sign)))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise ValueError(
            f"--tune={text} needs numbers with commas between them, as in "
            f"--tune={key}=0.002,0.005, or for a search a range, as in "
            f"--tune={key}=0.001:0.01"
        ) from None
    for value in found:
        check(f"--tune={text}: {key}", key, value)
    if kind is tuple and (len(found) != 2 or not found[0] < found[1]):
        raise ValueError(f"--tune={text}: a range is LOW:HIGH, with LOW below HIGH.")
    return key, found


def known_trials(
    arms: list[Arm],
    search: Search,
    there: list[tuple[Trial, float | None]],
    propose: bool,
) -> list[Trial]:
    """All trials that a sweep has by now, in order.

    Args:
        arms: of the plan.
        search: how their nuisance settings are found.
        there: the trials on disk, those of searches with their dev score once they
            have one (`LOST` where they diverged), else None.
        propose: whether Optuna may be asked for more.
    """
    found = []
    for arm in arms:
        if search.is_for(arm):
            found += searched(arm, search, there, propose)
        else:
            found += trials_of(arm, arm.candidates, arm.seeds)
    return found


def searched(arm: Arm, search: Search, there, propose: bool) -> list[Trial]:
    """The trials of an arm that has a choice."""
    scores = {trial.id: score for trial, score in there}
    settings = arm.candidates
    if search.count is not None:
        mine = [t for t, _ in there if t.is_search and t.arm == arm.name]
        mine.sort(key=lambda trial: trial.attempt)
        settings = unique(
            [
                trial.nuisance
                for trial in mine
                if trials_of(arm, [trial.nuisance], [trial.seed])[0].id == trial.id
            ]
        )
    tries = tries_of(arm, settings, search.seeds)
    if any(scores.get(trial.id) is None for trial in tries):
        return tries
    means = [
        mean([scores[t.id] for t in tries if t.nuisance == each]) for each in settings
    ]
    chosen = []
    if max(means, default=LOST) > LOST:
        chosen = trials_of(arm, [settings[int(np.argmax(means))]], arm.seeds)
    # an earlier call found no more to propose, where what is chosen is on disk
    is_over = any(trial.id in scores for trial in chosen)
    if search.count is not None and len(settings) < search.count and not is_over:
        new = proposals(arm, search, settings, means) if propose else []
        if new or not propose:
            return tries_of(arm, settings + new, search.seeds)
    return tries + chosen


def tries_of(arm: Arm, settings: list[dict], seeds: list[int]) -> list[Trial]:
    """The trials that try settings."""
    return [
        trial._replace(attempt=number)
        for number, each in enumerate(settings, start=1)
        for trial in trials_of(arm, [each], seeds)
    ]


def mean(scores: list[float]) -> float:
    """Of a setting's seeds; it is lost if one is."""
    return LOST if LOST in scores else float(np.mean(scores))


def proposals(
    arm: Arm, search: Search, settings: list[dict], scores: list[float]
) -> list[dict]:
    """The next round of settings, new ones: by Optuna's TPE, the config's own first.

    The first round is drawn at random. Numbers of a range have three digits, on a log
    scale where the range begins above 0. Fewer are proposed, or none, where the space
    has no more.
    """
    optuna = package("optuna")
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
    for each, score in zip(settings, scores, strict=True):
        study.add_trial(
            optuna.trial.create_trial(params=each, distributions=space, value=score)
        )
    config = flat(arm.config)
    own = {key: config[key] for key in space}
    found = [own] if all(inside(v, search.space[k]) for k, v in own.items()) else []
    for _ in range(20 * size):  # it may ask for the same again
        if len(new := [s for s in unique(found) if s not in settings]) >= size:
            break
        asked = study.ask(space).params
        found.append(
            {k: rounded(v, search.space[k], config[k]) for k, v in asked.items()}
        )
    return new[:size]


def unique(settings: list[dict]) -> list[dict]:
    """Each once, in order."""
    return [each for i, each in enumerate(settings) if each not in settings[:i]]


def inside(value, values: list | tuple) -> bool:
    """Whether a search could come upon the value."""
    if isinstance(values, list):
        return value in values
    return values[0] <= value <= values[1]


def rounded(value, values: list | tuple, like):
    """A number of a range with three digits, still in the range; whole like another."""
    if isinstance(values, list):
        return value
    value = round(value) if isinstance(like, int) else float(f"{value:.3g}")
    return min(max(value, values[0]), values[1])
