"""Expand a base config and the arms of an ablation into trials and groups of trials.

Everything here is a pure function of its arguments, so a sweep can be expanded again at
any time, even with more seeds. `sweeps.search` decides which trials exist at a given
moment.
"""

import contextlib
import copy
import hashlib
import json
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from typing import NamedTuple

import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from headcount.analysis.budget import abstract_model, flops, parameters, solve_mlp_dim
from headcount.configs.ablations import grid
from headcount.configs.commandline import describe
from headcount.configs.sites import SITES, at_site
from headcount.configs.validation import flat, near_miss
from headcount.sweeps.labels import MATCH, name_arms
from headcount.tasks import make_task
from headcount.training.checks import check_config
from headcount.training.trials import check_numbers, trial_keys

# Results don't depend on these.
IGNORED = "data.directory", "train.log_every_steps", "train.eval_train"


class Arm(NamedTuple):
    """One of the models that a sweep compares.

    Its trials differ only in seed and nuisance settings.
    """

    name: str
    overrides: dict  # of the base config, as the ablation yields them
    config: dict  # resolved and nested, with the solved model.mlp_dim
    is_baseline: bool
    parameters: int
    candidates: list[dict]  # nuisance settings to choose from; no choice if only one
    seeds: list[int]  # of the reported trials

    @property
    def flops(self) -> int:
        """Multiply-adds of a forward pass per token; see `analysis.budget.flops`."""
        return flops(self.config)

    @property
    def training_flops(self) -> float:
        """FLOPs of training one trial: 3 passes, 2 FLOPs per multiply-add."""
        tokens = self.config["data"]["batch_tokens"] * self.config["train"]["num_steps"]
        return 6.0 * self.flops * tokens


class Trial(NamedTuple):
    """One model to train: an arm with nuisance settings and a seed."""

    id: str  # a hash of the resolved config
    arm: str
    nuisance: dict
    seed: int
    config: dict  # resolved, nested
    attempt: int = 0  # index of the setting in a search, from 1; 0: reported trial

    @property
    def is_search(self) -> bool:
        """Whether the trial only serves to choose settings, and is never tested."""
        return self.attempt > 0


class Group(NamedTuple):
    """Trials that train as one program in one process."""

    name: str  # of its folder
    trials: list[Trial]


class Shard(NamedTuple):
    """A part of a growing sweep: every count-th group, starting from index."""

    index: int  # below count
    count: int


class Plan(NamedTuple):
    """An expanded sweep."""

    arms: list[Arm]
    trials: list[Trial]  # known so far
    axis: str | None  # the config key that the arms vary, if it is single and numeric

    @property
    def baseline(self) -> Arm:
        """The arm that the others are compared with."""
        return next(arm for arm in self.arms if arm.is_baseline)

    def arm(self, name: str) -> Arm:
        """Return the arm of this name."""
        return next(arm for arm in self.arms if arm.name == name)


def expand(
    base: ConfigDict,
    arms: list[dict],
    num_seeds: int,
    *,
    nuisance: list[str],
    tuned: list[dict],
    match: str | None,
) -> Plan:
    """Resolve every arm of a sweep and build its model abstractly; make no trials yet.

    Args:
        base: locked.
        arms: overrides, as an ablation yields them.
        num_seeds: number of seeds per arm, counting up from the base config's seed;
            ignored if the arms set their seeds.
        nuisance: keys that are tuned per arm instead of compared.
        tuned: nuisance settings that every arm may choose from; [{}] for none.
        match: budget for every arm that names none; None leaves such arms unmatched.

    Raises:
        ValueError: the sweep is empty, or an arm can't be built; the message names it.
    """
    arms = list(arms)
    if not arms or num_seeds < 1:
        raise ValueError(
            f"The sweep is empty: it has {len(arms)} arms and {num_seeds} seeds; each "
            f"must be at least 1."
        )
    scientific, candidates, own_seeds = [], [], []
    for combination in grid(arms, tuned):
        varied = {k: v for k, v in combination.items() if k == "seed" or k in nuisance}
        compared = {k: v for k, v in combination.items() if k not in varied}
        if compared not in scientific:
            scientific.append(compared)
            candidates.append([])
            own_seeds.append([])
        index = scientific.index(compared)
        seed = varied.pop("seed", base.seed)
        for values, value in ((candidates, varied), (own_seeds, seed)):
            if value not in values[index]:
                values[index].append(value)
    if not any("seed" in combination for combination in arms):
        own_seeds = [[base.seed + i for i in range(num_seeds)]] * len(scientific)
    names, axis = name_arms(scientific)
    resolved = [
        arm._replace(candidates=distinct(arm, settings, seeds[0]), seeds=seeds)
        for arm, settings, seeds in zip(
            resolve_arms(base, scientific, names, match),
            candidates,
            own_seeds,
            strict=True,
        )
    ]
    kept_names, ids, in_float32 = [], set(), {}
    for arm in sorted(resolved, key=lambda arm: not arm.is_baseline):
        trials = make_trials(arm, arm.candidates, arm.seeds)
        trial_ids = {trial.id for trial in trials}
        for trial in trials:
            twin = in_float32.setdefault(float32_id(trial.config), trial)
            if twin.id != trial.id:
                raise ValueError(
                    f"Arm {twin.arm} with {twin.nuisance} and arm {trial.arm} with "
                    f"{trial.nuisance} are the same in float32, in which trials are "
                    f"trained; leave one of them out."
                )
        # an arm whose mlp_dim needed no change to match repeats its unmatched version
        if not trial_ids <= ids:
            kept_names.append(arm.name)
        ids |= trial_ids
    return Plan([arm for arm in resolved if arm.name in kept_names], [], axis)


def distinct(arm: Arm, settings: list[dict], seed: int) -> list[dict]:
    """Drop nuisance settings that resolve to the same config as an earlier one."""
    by_id = {}
    for trial in make_trials(arm, settings, [seed]):
        if not trial.nuisance.keys() <= set(trial_keys(flat(trial.config))):
            with name_arm_in_errors(arm.name):
                check_config(ConfigDict(trial.config))
        by_id.setdefault(trial.id, trial.nuisance)
    return list(by_id.values())


def make_trials(arm: Arm, settings: list[dict], seeds: list[int]) -> list[Trial]:
    """Return an arm's trials, one per combination of nuisance setting and seed."""
    trials = []
    for nuisance in settings:
        changes = nuisance | {"seeds": 1}
        settled = apply_overrides(ConfigDict(arm.config), changes, arm.name)
        for seed in seeds:
            config = settled | {"seed": seed}
            with name_arm_in_errors(arm.name):
                check_numbers(flat(config))
            trials.append(Trial(trial_id(config), arm.name, nuisance, seed, config))
    return trials


def resolve_arms(base, scientific: list[dict], names: list[str], match) -> list[Arm]:
    """Apply the overrides of every arm, find the baseline, solve the matched arms."""
    configs = []
    for overrides, name in zip(scientific, names, strict=True):
        settings = {k: v for k, v in overrides.items() if k != MATCH}
        configs.append(apply_overrides(base, settings, name))
        with name_arm_in_errors(name):
            check_config(ConfigDict(configs[-1]))
            parameters(configs[-1])
    baseline = find_baseline(apply_overrides(base, {}, "the base config"), configs)
    arms = []
    for i, (overrides, name) in enumerate(zip(scientific, names, strict=True)):
        config, budget = configs[i], overrides.get(MATCH, match)
        with name_arm_in_errors(name):
            if budget is not None and i != baseline:
                F = solve_mlp_dim(config, configs[baseline], budget)
                config = config | {"model": config["model"] | {"mlp_dim": F}}
            count = parameters(config)
        arms.append(Arm(name, overrides, config, i == baseline, count, [], []))
    return arms


def find_baseline(base: dict, configs: list[dict]) -> int:
    """Return the index of the config that equals the base config, else 0.

    A config that only spells out defaults of the base config counts as equal.
    """
    for same in (dict.__eq__, is_same_model):
        for index, config in enumerate(configs):
            if same(config, base):
                return index
    return 0


def is_same_model(config: dict, other: dict) -> bool:
    """Return whether two configs differ only where one spells out the other's default.

    A default is None in a config. Whether a value equals the default shows in the
    abstract models.
    """
    a, b = with_site_defaults(config), with_site_defaults(other)
    differing = [key for key in a if a[key] != b[key] and key not in ("seed", "seeds")]
    if not all(
        key.startswith(("model.", "mesh.")) and None in (a[key], b[key])
        for key in differing
    ):
        return False
    (graph, params), (other_graph, other_params) = (
        nnx.split(abstract_model(tree)) for tree in (config, other)
    )
    shapes, other_shapes = (
        [leaf.shape for _, leaf in nnx.to_flat_state(state)]
        for state in (params, other_params)
    )
    return graph == other_graph and shapes == other_shapes


def with_site_defaults(config: dict) -> dict:
    """Flatten a config; fill in unset keys of attention sites from model.attention."""
    model, sections = config["model"], [f"{site}_attention" for site in SITES]
    filled = {name: at_site(model["attention"], model[name]) for name in sections}
    return flat(config | {"model": model | filled})


@contextlib.contextmanager
def name_arm_in_errors(arm: str) -> Iterator[None]:
    """Prefix errors with the name of the arm that can't be built."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(f"Arm {arm} can't be built: {describe(error)}") from error


def apply_overrides(base: ConfigDict, overrides: dict, name: str) -> dict:
    """Return the base config with overrides, nested.

    Raises:
        ValueError: a key does not exist, a value has the wrong type, or a key selects
            another task or corpus: scores on different examples can't be compared.
    """
    config = copy.deepcopy(base)
    keys = flat(config.to_dict())
    for key, value in overrides.items():
        if key not in keys:
            raise ValueError(
                f"Arm {name} sets {key}, which is not a config key.{near_miss(key)}"
            )
        try:
            config.update_from_flattened_dict({key: value})
        except (TypeError, ValueError):
            *path, last = key.split(".")
            kind = reduce(getitem, path, config).get_type(last).__name__
            raise ValueError(
                f"Arm {name} sets {key} to {value!r}; it must be of type {kind}."
            ) from None
    fixed = ["task.name"]
    if config.task.name == base.task.name:
        fixed += [f"data.{key}" for key in make_task(base).corpus_keys]
    after, before = flat(config.to_dict()), flat(base.to_dict())
    for key in fixed:
        if after[key] != before[key]:
            raise ValueError(
                f"Arm {name} sets {key}, but scores on different examples can't be "
                f"compared; run a sweep for each."
            )
    return config.to_dict()


def trial_id(config: dict) -> str:
    """Hash everything in a trial's config that its result depends on."""
    relevant = {k: v for k, v in flat(config).items() if k not in IGNORED}
    text = json.dumps(relevant, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def float32_id(config: dict) -> str:
    """Hash a trial's config with its hyperparameters rounded to float32."""
    values = flat(config)
    for key in set(trial_keys(values)) - {"seed"}:
        values[key] = float(np.float32(values[key]))
    return trial_id(values)


def group_trials(trials: list[Trial], size: int) -> list[list[Trial]]:
    """Group trials that share a program, in order, at most `size` per group."""
    programs: dict[str, list[Trial]] = {}
    for trial in trials:
        config = flat(trial.config)
        free = (*trial_keys(config), *IGNORED)
        fixed = {k: v for k, v in config.items() if k not in free}
        key = json.dumps([trial.is_search, fixed], sort_keys=True)
        programs.setdefault(key, []).append(trial)
    return [
        members[start : start + size]
        for members in programs.values()
        for start in range(0, len(members), size)
    ]


def program_and_trials(group: list[Trial], base: dict) -> tuple[dict, list[dict]]:
    """Return how a group differs from the base config, flat, except in `IGNORED`.

    Returns:
        The overrides that all trials share, for the command line; and the
        hyperparameters of each trial, as `train.py --trials` reads them.
    """
    base = flat(base)
    compared = base.keys() - set(IGNORED)
    changes = [
        {k: v for k, v in flat(trial.config).items() if k in compared and v != base[k]}
        for trial in group
    ]
    free = trial_keys(base)
    program = {k: v for k, v in changes[0].items() if k not in free}
    trials = [
        {"seed": trial.seed} | {k: v for k, v in change.items() if k in free}
        for trial, change in zip(group, changes, strict=True)
    ]
    return program, trials
