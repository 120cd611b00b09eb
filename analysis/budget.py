"""What a config costs in parameters and multiply-adds, and configs of equal cost."""

import json
from functools import cache, partial

from headcount.models import cost as counting
from headcount.models.cost import LENGTH, abstract, multiply_adds
from headcount.models.transformer import Transformer

WITHIN = 0.005  # of the budget
MULTIPLES = (128, 64, 32, 16, 8, 4, 2, 1)  # of mlp_dim, friendliest to hardware first


def parameters(config: dict) -> int:
    """Parameters of a config's model (nested, as of `ConfigDict.to_dict`).

    The vocabulary is taken to have `data.vocab_size` pieces; a corpus may give fewer.

    Raises:
        ValueError: the model can't be built.
    """
    return count_parameters(*what_counts(config))


def flops(config: dict) -> int:
    """Multiply-adds of the matrix products, forward, for a source and a target token.

    Of one pair of LENGTH tokens each, see `models.cost.multiply_adds`.
    """
    return count_flops(*what_counts(config))


BUDGETS = {"parameters": parameters, "flops": flops}


def what_counts(config: dict) -> tuple[tuple[int, ...], str]:
    """The vocabularies, and the model's settings without those that cost nothing."""
    sizes = (config["data"]["vocab_size"],) * (2 - config["data"]["joint_vocabulary"])
    return sizes, json.dumps(config["model"] | {"dropout": 0.0}, sort_keys=True)


@cache
def count_parameters(vocab_sizes: tuple[int, ...], model: str) -> int:
    """Build the model abstractly and count."""
    return counting.parameters(built(vocab_sizes, model))


@cache
def count_flops(vocab_sizes: tuple[int, ...], model: str) -> int:
    """Trace the model abstractly and count."""
    return round(multiply_adds(built(vocab_sizes, model), LENGTH, LENGTH) / LENGTH)


def built(vocab_sizes: tuple[int, ...], model: str) -> Transformer:
    """The model, without numbers."""
    return abstract(partial(Transformer, *vocab_sizes, **json.loads(model)))


def solve_mlp_dim(config: dict, baseline: dict, budget: str) -> int:
    """The feed-forward width F that gives a config the baseline's budget.

    The baseline's own where that has it exactly, else of those within 0.5 % of it the
    one that is a multiple of the highest power of two.

    Args:
        config: nested; its own `model.mlp_dim` does not matter.
        baseline: nested.
        budget: "parameters" or "flops".

    Raises:
        ValueError: no F comes that near, or there is no such budget.
    """
    if budget not in BUDGETS:
        raise ValueError(f"match must be one of {', '.join(BUDGETS)}, got {budget!r}.")

    def cost(of, F):
        return BUDGETS[budget](of | {"model": of["model"] | {"mlp_dim": F}})

    near = baseline["model"]["mlp_dim"]
    goal, here = cost(baseline, near), cost(config, near)
    if goal == here:
        return near
    slope = cost(config, near + 1) - here  # of its own layers and width
    exact = near + (goal - here) / slope
    for multiple in MULTIPLES:
        F = multiple * round(exact / multiple)
        if F > 0 and abs(slope * (F - exact)) <= WITHIN * goal:
            return F
    raise ValueError(
        f"model.mlp_dim can't give it the baseline's {goal:,} {budget} within "
        f"{WITHIN:.1%}: it would have to be {exact:,.0f}."
    )
