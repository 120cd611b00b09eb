"""Parameters and multiply-adds of a config's model, and configs of equal cost."""

import json

from flax import nnx
from ml_collections import ConfigDict

from headcount.models import cost
from headcount.models.cost import LENGTH
from headcount.tasks import make_task

TOLERANCE = 0.005  # of the budget
MULTIPLES = (128, 64, 32, 16, 8, 4, 2, 1)  # of mlp_dim, friendliest to hardware first
_counts: dict[tuple, int] = {}  # by budget and config


def parameters(config: dict) -> int:
    """Count the parameters of a config's model.

    The vocabulary is taken to have its full `data.vocab_size`; a corpus may give fewer.

    Args:
        config: nested, as from `ConfigDict.to_dict`.

    Raises:
        ValueError: the model can't be built.
    """
    return _cached("parameters", config)


def flops(config: dict) -> int:
    """Count the multiply-adds of matrix products in a forward pass, per token.

    Per token of each field of the batch (per pair of tokens, if it has two fields), for
    sequences of `models.cost.LENGTH` tokens.
    """
    return _cached("flops", config)


def _cached(budget: str, config: dict) -> int:
    sections = {k: config[k] for k in ("task", "data", "model")}
    sections["model"] = sections["model"] | {"dropout": 0.0}
    # no corpus is read, so where it lies changes nothing
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
    """Return the model of a config with shapes instead of values."""
    return cost.abstract(make_task(ConfigDict(config)).build)


def solve_mlp_dim(config: dict, baseline: dict, budget: str) -> int:
    """Return the feed-forward width F that gives a config the baseline's budget.

    The baseline's own F if that has exactly the budget. Else, of those within 0.5 % of
    it, the one that is a multiple of the highest power of two.

    Args:
        config: nested; its own `model.mlp_dim` does not matter.
        baseline: nested.
        budget: "parameters" or "flops".

    Raises:
        ValueError: no F comes that near, or there is no such budget.
    """
    if budget not in BUDGETS:
        raise ValueError(f"match must be one of {', '.join(BUDGETS)}, got {budget!r}.")

    def count(of, F):
        return _cached(budget, of | {"model": of["model"] | {"mlp_dim": F}})

    near = baseline["model"]["mlp_dim"]
    goal, here = count(baseline, near), count(config, near)
    if goal == here:
        return near
    slope = count(config, near + 1) - here  # depends on its own layers and width
    exact = near + (goal - here) / slope
    for multiple in MULTIPLES:
        F = multiple * round(exact / multiple)
        if F > 0 and abs(slope * (F - exact)) <= TOLERANCE * goal:
            return F
    raise ValueError(
        f"model.mlp_dim can't give it the baseline's {goal:,} {budget} within "
        f"{TOLERANCE:.1%}: it would have to be {exact:,.0f}."
    )
