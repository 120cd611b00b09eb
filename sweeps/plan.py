"""From a base config and an ablation to arms, trials and groups of them.

Which trials there are, and when, is `sweeps.search`'s.
"""

import contextlib
import copy
import hashlib
import json
import re
from functools import reduce
from operator import getitem
from typing import NamedTuple

from ml_collections import ConfigDict

from headcount.analysis.budget import flops, parameters, solve_mlp_dim
from headcount.configs.ablations import grid
from headcount.configs.base import get_config
from headcount.configs.commandline import describe, flat, near_miss
from headcount.models.transformer import attention_arguments as at_site
from headcount.runtime.workdir import completed
from headcount.training.checks import check_config
from headcount.training.trials import SITES, check_numbers, variable

DEFAULTS = get_config().to_dict()
NO_RESULT_DEPENDS_ON = ("data.directory", "train.log_every_steps")
CORPUS = ("name", "source", "target", "directory")  # keys of data: whose sentences
MATCH = "match"  # the key of an arm that says what budget it shares with the baseline
LETTERS = {
    "width": "D",
    "mlp_dim": "F",
    "num_heads": "N",
    "num_kv_heads": "K",
    "head_dim": "H",
    "value_dim": "V",
    "mixture_heads": "k",
}


class Arm(NamedTuple):
    """What is compared; its variants differ in nuisance settings alone."""

    name: str
    overrides: dict  # of the base config, as the ablation has them
    config: dict  # resolved and nested, with model.mlp_dim as solved
    is_baseline: bool
    parameters: int
    candidates: list[dict]  # nuisance settings that it may have; one: no choice
    seeds: list[int]  # of the trials that are reported

    @property
    def flops(self) -> int:
        """Of analysis.budget.flops, counted when asked for."""
        return flops(self.config)

    @property
    def training_flops(self) -> float:
        """Floating-point operations of a training: 3 passes of 2 a multiply-add."""
        tokens = self.config["data"]["batch_tokens"] * self.config["train"]["num_steps"]
        return 6.0 * self.flops * tokens


class Trial(NamedTuple):
    """One training: an arm, its nuisance settings, a seed."""

    id: str  # a hash of the resolved config
    arm: str
    nuisance: dict
    seed: int
    config: dict  # resolved, nested
    attempt: int = 0  # from 1: of a search for the nuisance settings; 0: reported

    @property
    def is_search(self) -> bool:
        """Whether it only helps to choose, and is never tested."""
        return self.attempt > 0


class Group(NamedTuple):
    """Trials of one program, which train as one process."""

    name: str  # of its folder
    trials: list[Trial]


class Plan(NamedTuple):
    """A sweep, expanded."""

    arms: list[Arm]
    trials: list[Trial]  # as far as they are known
    axis: str | None  # the one setting that the arms' names hold, if it is a number

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)


def nuisance_keys(docstring: str) -> list[str]:
    """The config keys after "Nuisance:" in an ablation's docstring."""
    end = r"Fixed:|Scientific:|\n\s*\n|$"
    found = re.search(f"Nuisance:(.*?)(?:{end})", docstring, re.DOTALL)
    return re.findall(r"\b[a-z]\w*(?:\.\w+)+", found.group(1)) if found else []


def expand(
    base: ConfigDict,
    arms: list[dict],
    num_seeds: int,
    *,
    nuisance: list[str],
    tuned: list[dict],
    match: str | None,
) -> Plan:
    """Resolve every arm of a sweep, and build its model abstractly; no trials yet.

    Args:
        base: locked.
        arms: what an ablation yields.
        num_seeds: the base config's seed and those after it, for every arm.
        nuisance: keys that tell variants of an arm apart, not arms.
        tuned: nuisance settings that an arm may have; [{}] for none.
        match: a budget for every arm that names none.

    Raises:
        ValueError: it is empty, or an arm can't be built; the sentence names it.
    """
    arms = list(arms)
    if not arms or num_seeds < 1:
        raise ValueError(
            f"The sweep is empty: it has {len(arms)} arms and {num_seeds} seeds; each "
            f"must be at least 1."
        )
    scientific, candidates, own_seeds = [], [], []
    for each in grid(arms, tuned):
        varied = {k: v for k, v in each.items() if k == "seed" or k in nuisance}
        of_arm = {k: v for k, v in each.items() if k not in varied}
        if of_arm not in scientific:
            scientific.append(of_arm)
            candidates.append([])
            own_seeds.append([])
        index = scientific.index(of_arm)
        seed = varied.pop("seed", base.seed)
        for values, value in ((candidates, varied), (own_seeds, seed)):
            if value not in values[index]:
                values[index].append(value)
    if not any("seed" in each for each in arms):
        own_seeds = [[base.seed + i for i in range(num_seeds)]] * len(scientific)
    names, axis = name_arms(scientific)
    resolved = [
        arm._replace(candidates=unlike(arm, settings, seeds[0]), seeds=seeds)
        for arm, settings, seeds in zip(
            resolve_arms(base, scientific, names, match),
            candidates,
            own_seeds,
            strict=True,
        )
    ]
    kept, there = [], set()
    for arm in sorted(resolved, key=lambda arm: not arm.is_baseline):
        ids = {trial.id for trial in trials_of(arm, arm.candidates, arm.seeds)}
        # An arm that is matched by changing nothing is the same as the one that isn't.
        if not ids <= there:
            kept.append(arm.name)
        there |= ids
    return Plan([arm for arm in resolved if arm.name in kept], [], axis)


def unlike(arm: Arm, settings: list[dict], seed: int) -> list[dict]:
    """Nuisance settings without those that come to the same trial as one before."""
    found = {}
    for trial in trials_of(arm, settings, [seed]):
        if not trial.nuisance.keys() <= set(variable(flat(trial.config))):
            with naming(arm.name):
                check_trainable(trial.config)
        found.setdefault(trial.id, trial.nuisance)
    return list(found.values())


def trials_of(arm: Arm, settings: list[dict], seeds: list[int]) -> list[Trial]:
    """The trials of an arm with each of some nuisance settings and each seed."""
    found = []
    for nuisance in settings:
        for seed in seeds:
            changes = nuisance | {"seed": seed, "seeds": 1}
            config = applied(ConfigDict(arm.config), changes, arm.name)
            with naming(arm.name):
                check_numbers(flat(config))
            found.append(Trial(identity(config), arm.name, nuisance, seed, config))
    return found


def resolve_arms(base, scientific: list[dict], names: list[str], match) -> list[Arm]:
    """Apply the overrides of every arm, find the baseline, solve the matched."""
    configs = []
    for overrides, name in zip(scientific, names, strict=True):
        settings = {k: v for k, v in overrides.items() if k != MATCH}
        configs.append(applied(base, settings, name))
        with naming(name):
            check_trainable(configs[-1])
            parameters(configs[-1])
    plain = applied(base, {}, "the base config")
    exact = [i for i, config in enumerate(configs) if config == plain]
    same = [i for i, config in enumerate(configs) if is_same(config, plain)]
    baseline = (exact or same or [0])[0]
    arms = []
    for i, (overrides, name) in enumerate(zip(scientific, names, strict=True)):
        config, budget = configs[i], overrides.get(MATCH, match)
        with naming(name):
            if budget is not None and i != baseline:
                F = solve_mlp_dim(config, configs[baseline], budget)
                config = config | {"model": config["model"] | {"mlp_dim": F}}
            count = parameters(config)
        arms.append(Arm(name, overrides, config, i == baseline, count, [], []))
    return arms


def check_trainable(config: dict) -> None:
    """Raise a ValueError for a config that train.py would refuse."""
    # a sweep may be of before a key existed
    check_config(ConfigDict(completed(config, DEFAULTS)))


@contextlib.contextmanager
def naming(arm: str):
    """Put the name of an arm before what is wrong with it."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(f"Arm {arm} can't be built: {describe(error)}") from error


def applied(base: ConfigDict, overrides: dict, name: str) -> dict:
    """The base config with overrides, nested.

    Raises:
        ValueError: there is no such key, or its type is another, or it is of the
            sentences.
    """
    config = copy.deepcopy(base)
    known = flat(config.to_dict())
    for key, value in overrides.items():
        if key not in known:
            raise ValueError(
                f"Arm {name} sets {key}, which is no config key.{near_miss(key)}"
            )
        try:
            config.update_from_flattened_dict({key: value})
        except (TypeError, ValueError):
            *path, last = key.split(".")
            kind = reduce(getitem, path, config).get_type(last).__name__
            raise ValueError(
                f"Arm {name} sets {key} to {value!r}; it must be of type {kind}."
            ) from None
    for key in CORPUS:
        if config.data[key] != base.data[key]:
            raise ValueError(
                f"Arm {name} sets data.{key}, and scores of other sentences can't be "
                f"compared with the baseline's; make a sweep of each."
            )
    return config.to_dict()


def is_same(config: dict, other: dict) -> bool:
    """Whether two configs are of one model: where they differ, one has a default."""
    a, b = spelt_out(config), spelt_out(other)
    free = ("seed", "seeds")
    differing = [key for key in a if a[key] != b[key] and key not in free]
    defaults = all(
        key.startswith(("model.", "mesh.")) and None in (a[key], b[key])
        for key in differing
    )
    return defaults and parameters(config) == parameters(other)


def spelt_out(config: dict) -> dict:
    """A config, flat, with the heads of every site as they are, not as defaults."""
    model = dict(config["model"])
    attention = model.pop("attention")
    for site in SITES:
        heads = at_site(site, attention, model[f"{site}_attention"])
        del heads["path"]
        size = model["width"] // heads["num_heads"]
        usual = {"num_kv_heads": heads["num_heads"], "head_dim": size}
        usual |= {"value_dim": size}
        model[f"{site}_attention"] = {
            key: usual.get(key) if value is None else value
            for key, value in heads.items()
        }
    return flat(config | {"model": model})


def identity(config: dict) -> str:
    """The id of a trial: of all in its config that a result depends on."""
    kept = {k: v for k, v in flat(config).items() if k not in NO_RESULT_DEPENDS_ON}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def name_arms(arms: list[dict]) -> tuple[list[str], str | None]:
    """Short names that tell the arms apart, and the one number they tell, if one.

    A setting that is not needed to tell them apart is left out, the last one first.
    """
    keys = list(dict.fromkeys(key for arm in arms for key in arm))

    def told(keys, form=label):
        return [", ".join(form(k, arm[k]) for k in keys if k in arm) for arm in arms]

    if len(set(told(keys))) < len(arms):  # short names would be taken for each other
        return told(keys, "{}={}".format), None
    for key in reversed(keys):
        fewer = [k for k in keys if k != key]
        names = told(fewer)
        nameless = any(arm and not name for arm, name in zip(arms, names, strict=True))
        if fewer and len(set(names)) == len(arms) and not nameless:
            keys = fewer
    values = [arm[keys[0]] for arm in arms if keys[0] in arm] if len(keys) == 1 else []
    numbers = all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in values
    )
    axis = keys[0] if numbers and len(values) == len(arms) else None
    return [name or "baseline" for name in told(keys)], axis


def label(key: str, value) -> str:
    """A setting as a table shows it: N=8, encoder N=8, mean, equal parameters."""
    if key == MATCH:
        return f"equal {value}"
    if isinstance(value, str):
        return f"{site(key)}{value}"
    number = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{letter(key)}={number}"


def letter(key: str) -> str:
    """A setting's letter, or its name, after the site that it is of alone."""
    last = key.rsplit(".", 1)[-1]
    return site(key) + LETTERS.get(last, last)


def site(key: str) -> str:
    """The site of attention that a setting is of alone, and a space; else nothing."""
    found = re.search(r"\b(encoder|decoder|cross)_attention\.", key)
    return f"{found.group(1)} " if found else ""


def program(trial: Trial) -> str:
    """What trials of one group have in common."""
    config = flat(trial.config)
    free = (*variable(config), *NO_RESULT_DEPENDS_ON)
    kept = {k: v for k, v in config.items() if k not in free}
    return json.dumps([trial.is_search, kept], sort_keys=True)


def grouped(trials: list[Trial], most: int) -> list[list[Trial]]:
    """Trials of one program together, at most so many, in order."""
    programs: dict[str, list[Trial]] = {}
    for trial in trials:
        programs.setdefault(program(trial), []).append(trial)
    return [
        of_program[start : start + most]
        for of_program in programs.values()
        for start in range(0, len(of_program), most)
    ]


def differences(group: list[Trial], base: dict) -> tuple[dict, list[dict]]:
    """What a group changes in the base config: its program, and each trial's numbers.

    Both are flat; the second is what `train.py --trials` takes.
    """
    base = flat(base)
    changes = [
        {k: v for k, v in flat(trial.config).items() if base[k] != v} for trial in group
    ]
    free = variable(base)
    of_program = {k: v for k, v in changes[0].items() if k not in free}
    numbers = [
        {"seed": trial.seed} | {k: v for k, v in change.items() if k in free}
        for trial, change in zip(group, changes, strict=True)
    ]
    return of_program, numbers
