"""Parameters and multiply-adds of a config's model, and configs of equal cost."""

import functools
import json

from flax import nnx
from ml_collections import ConfigDict

from headcount.configs.validation import choose
from headcount.models import cost
from headcount.models.cost import LENGTH
from headcount.tasks import make_task

TOLERANCE = 0.005  # allowed relative deviation from the budget
MULTIPLES = (128, 64, 32, 16, 8, 4, 2, 1)  # of mlp_dim, most hardware-friendly first


def of_model(function):
    """Cache a function of a config, keyed by the settings that its model depends on."""
    cache = {}

    @functools.wraps(function)
    def cached(config: dict):
        # no corpus is read, and dropout changes neither sizes nor products
        relevant = {
            "task": config["task"],
            "data": config["data"] | {"directory": None},
        }
        relevant["model"] = config["model"] | {"dropout": 0.0}
        key = json.dumps(relevant, sort_keys=True)
        if key not in cache:
            cache[key] = function(config | relevant)
        return cache[key]

    return cached


@of_model
def abstract_model(config: dict) -> nnx.Module:
    """Return the abstract model of a config, with shapes instead of values."""
    return cost.abstract(make_task(ConfigDict(config)).build)


@of_model
def parameters(config: dict) -> int:
    """Count the parameters of a config's model.

    This assumes the full `data.vocab_size`; a small corpus may give fewer tokens.

    Args:
        config: nested, as from `ConfigDict.to_dict`.

    Raises:
        ValueError: the model can't be built.
    """
    return cost.parameters(abstract_model(config))


@of_model
def flops(config: dict) -> int:
    """Count the multiply-adds of matrix products in a forward pass, per token.

    If a batch has two fields, the count is per pair of tokens. Sequences are taken to
    have `models.cost.LENGTH` tokens.
    """
    spec = make_task(ConfigDict(config)).spec(1, LENGTH)
    return round(cost.multiply_adds(abstract_model(config), spec) / LENGTH)


BUDGETS = {"parameters": parameters, "flops": flops}


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
    choose("match", budget, BUDGETS)

    def count(of, F):
        return BUDGETS[budget](of | {"model": of["model"] | {"mlp_dim": F}})

    near = baseline["model"]["mlp_dim"]
    goal, current = count(baseline, near), count(config, near)
    if goal == current:
        return near
    slope = count(config, near + 1) - current  # cost is linear in F
    exact = near + (goal - current) / slope
    for multiple in MULTIPLES:
        F = multiple * round(exact / multiple)
        if F > 0 and abs(slope * (F - exact)) <= TOLERANCE * goal:
            return F
    raise ValueError(
        f"model.mlp_dim can't give this arm the baseline's {goal:,} {budget} within "
        f"{TOLERANCE:.1%}: it would have to be {exact:,.0f}."
    )
