"""What a model costs: parameters and multiply-adds, counted in the model itself."""

import json
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
from flax import nnx

from models.transformer import Transformer, num_parameters

LENGTH = 32  # tokens of the source and of the target that multiply-adds are counted at
WITHIN = 0.005  # of the budget
MULTIPLES = (128, 64, 32, 16, 8, 4, 2, 1)  # of mlp_dim, friendliest to hardware first


def parameters(config: dict) -> int:
    """Parameters of a config's model (nested, as of `ConfigDict.to_dict`).

    The vocabulary is taken to have `data.vocab_size` pieces, as trained ones do.

    Raises:
        ValueError: the model can't be built.
    """
    return count_parameters(*what_counts(config))


def flops(config: dict) -> int:
    """Multiply-adds of the matrix products, forward, for a source and a target token.

    Counted in the program of the model with plain einsums ("reference"), which are the
    products that every implementation has to do, of one pair of LENGTH tokens each.
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
    return num_parameters(built(vocab_sizes, json.loads(model))[1])


@cache
def count_flops(vocab_sizes: tuple[int, ...], model: str) -> int:
    """Trace the model abstractly and count."""
    shape = 1, LENGTH, LENGTH
    return round(products(vocab_sizes, json.loads(model), *shape) / LENGTH)


def update_flops(vocab_sizes, settings: dict, B: int, S: int, T: int) -> float:
    """Of the products of one update of one trial, backward twice forward.

    Padding counts, and so do keys that the mask rules out; what is computed again
    (`train.remat`) does not: the model's operations, as PaLM counts them.

    Args:
        vocab_sizes: of the target and, where it has its own, the source.
        settings: config.model.
        B, S, T: rows of a batch and their tokens.
    """
    return 6.0 * products(vocab_sizes, settings, B, S, T)


def products(vocab_sizes, settings: dict, B: int, S: int, T: int) -> int:
    """Multiply-adds of the products of a forward pass."""
    for part in settings.values():
        if isinstance(part, dict) and "implementation" in part:
            part["implementation"] = "reference"
    graph, params = built(vocab_sizes, settings)
    batch = {
        side + suffix: jax.ShapeDtypeStruct((B, length), jnp.int32)
        for side, length in (("source", S), ("target", T))
        for suffix in ("", "_segments", "_positions")
    }
    forward = jax.make_jaxpr(lambda params, batch: nnx.merge(graph, params)(batch))
    return multiply_adds(forward(params, batch).jaxpr)


class SameKey(nnx.Rngs):
    """One key for every array: shapes don't depend on it, and counting takes time."""

    def params(self):
        """The key."""
        return jax.random.key(0)


def built(vocab_sizes: tuple[int, ...], settings: dict):
    """The graph and the abstract parameters of a model."""
    build = partial(Transformer, *vocab_sizes, **settings)
    return nnx.split(nnx.eval_shape(lambda: build(rngs=SameKey(0))))


def multiply_adds(jaxpr) -> int:
    """Multiply-adds of all matrix products in a program without loops."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            size = math.prod(left[axis] for axis in contracted)
            total += size * math.prod(equation.outvars[0].aval.shape)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += multiply_adds(inner)
    return total


def solve_mlp_dim(config: dict, baseline: dict, budget: str) -> int:
    """The feed-forward width F that gives a config the baseline's budget.

    Of those within 0.5 % of it, the one that is a multiple of the highest power of two.

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
    goal = cost(baseline, near)
    slope = cost(baseline, near + 1) - goal  # the same whatever the heads
    exact = near + (goal - cost(config, near)) / slope
    for multiple in MULTIPLES:
        F = multiple * round(exact / multiple)
        if F > 0 and abs(slope * (F - exact)) <= WITHIN * goal:
            return F
    raise ValueError(
        f"model.mlp_dim can't give it the baseline's {goal:,} {budget} within "
        f"{WITHIN:.1%}: it would have to be {exact:,.0f}."
    )
