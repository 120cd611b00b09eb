"""Parameters and multiply-adds of a config's model, and configs of equal cost."""

import json

from flax import nnx
from ml_collections import ConfigDict

from headcount.models import cost
from headcount.models.cost import LENGTH
from headcount.tasks import make_task

TOLERANCE = 0.005  # allowed relative deviation from the budget
MULTIPLES = (128, 64, 32, 16, 8, 4, 2, 1)  # of mlp_dim, most hardware-friendly first
_counts: dict[tuple, int] = {}  # cache, by budget and config
_models: dict[str, nnx.Module] = {}  # cache, by config


def parameters(config: dict) -> int:
    """Count the parameters of a config's model.

    This assumes the full `data.vocab_size`; a small corpus may give fewer tokens.

    Args:
        config: nested, as from `ConfigDict.to_dict`.

    Raises:
        ValueError: the model can't be built.
    """
    return _cached("parameters", config)


def flops(config: dict) -> int:
    """Count the multiply-adds of matrix products in a forward pass, per token.

    If a batch has two fields, the count is per pair of tokens. Sequences are taken to
    have `models.cost.LENGTH` tokens.
    """
    return _cached("flops", config)


def _cached(budget: str, config: dict) -> int:
    sections = {k: config[k] for k in ("task", "data", "model")}
    sections["model"] = sections["model"] | {"dropout": 0.0}
    # no corpus is read, so its location does not matter
    sections["data"] = sections["data"] | {"directory": None}
    key = (budget, json.dumps(sections, sort_keys=True))
    if key not in _counts:
        _counts[key] = BUDGETS[budget](config)
    return _counts[key]


def _count_parameters(config: dict) -> int:
    return cost.parameters(abstract_model(config))


def _count_flops(config: dict) -> int:
    spec = make_task(ConfigDict(config)).spec(1, LENGTH)
    return round(cost.multiply_adds(abstract_model(config), spec) / LENGTH)


BUDGETS = {"parameters": _count_parameters, "flops": _count_flops}


def abstract_model(config: dict) -> nnx.Module:
    """Return the abstract model of a config, with shapes instead of values."""
    sections = {k: config[k] for k in ("task", "data", "model")}
    sections["data"] = sections["data"] | {"directory": None}  # not read here
    key = json.dumps(sections, sort_keys=True)
    if key not in _models:
        _models[key] = cost.abstract(make_task(ConfigDict(config)).build)
    return _models[key]


def solve_mlp_dim(config: dict, baseline: dict, budget: str) -> int:
    """Return the feed-forward width F that gives a config the baseline's budget.

    This is the baseline's own F if it matches the budget exactly. Otherwise it is a
    width within 0.5% of the budget that is a multiple of the largest possible power
    of two, up to 128.

    Args:
        config: nested; its own `model.mlp_dim` does not matter.
        baseline: nested.
        budget: "parameters" or "flops".

    Raises:
        ValueError: no F is within the tolerance, or the budget is unknown.
    """
    if budget not in BUDGETS:
        raise ValueError(f"match must be one of {', '.join(BUDGETS)}, got {budget!r}.")

    def count(of, F):
        return _cached(budget, of | {"model": of["model"] | {"mlp_dim": F}})

    near = baseline["model"]["mlp_dim"]
    goal, here = count(baseline, near), count(config, near)
    if goal == here:
        return near
    slope = count(config, near + 1) - here  # cost is linear in F
    exact = near + (goal - here) / slope
    for multiple in MULTIPLES:
        F = multiple * round(exact / multiple)
        if F > 0 and abs(slope * (F - exact)) <= TOLERANCE * goal:
            return F
    raise ValueError(
        f"model.mlp_dim can't give it the baseline's {goal:,} {budget} within "
        f"{TOLERANCE:.1%}: it would have to be {exact:,.0f}."
    )
