"""Cost of a model: parameters, and multiply-adds of its matrix products.

Parameters are counted in the model's (abstract) arrays, multiply-adds in its jaxpr. No
formulas are involved, so all merge rules and head shapes are covered. XLA's
`cost_analysis` also counts element-wise operations and counts a loop's body only once,
so it can't compare the budgets of a sweep's arms exactly.
"""

import math

import jax
import numpy as np
from flax import nnx
from jax.extend.core import jaxprs_in_params

from headcount.models.attention import Attention

LENGTH = 32  # default number of tokens per field of an example


class SameKey(nnx.Rngs):
    """Rngs with the same key for all arrays: faster, and enough for shapes."""

    def params(self):
        """Return the key."""
        return jax.random.key(0)


def abstract(build):
    """Return the model that `build(rngs=...)` returns, with shapes for values."""
    return nnx.eval_shape(lambda: build(rngs=SameKey(0)))


def parameters(params) -> int:
    """Count the parameters of a model or a tree of (abstract) arrays."""
    params = nnx.state(params) if isinstance(params, nnx.Module) else params
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))


def multiply_adds(model, spec: dict) -> int:
    """Count the multiply-adds of a forward pass's matrix products for a batch spec.

    The forward pass ends with the logits of classes if the model has a classifier, else
    with those of tokens.
    """
    batch = {
        name: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
        for name, x in spec.items()
    }
    rows = next(iter(spec.values())).shape[0]
    logits = type(model).class_logits if model.classifier else None
    return rows * products_of(plain(model), batch, method=logits)


def update_flops(model, spec: dict) -> float:
    """Estimate an update's floating-point operations: backward is twice forward."""
    return 6.0 * multiply_adds(model, spec)


def plain(model):
    """Return the model with reference attention, whose products can be counted.

    Penalties and largest logits, which only training computes, are turned off.
    """
    model = nnx.merge(*nnx.split(model))
    for _, module in nnx.iter_graph(model):
        if isinstance(module, Attention):
            module.implementation = "reference"
            module.mixture_balance, module.gate_penalty = 0.0, 0.0
            module.qk_clip = None
    return model


def products_of(module, *arguments, method=None) -> int:
    """Count multiply-adds of a module's call, or of `method(module, *arguments)`."""
    graph, params = nnx.split(module)
    method = method or type(module).__call__

    def call(params, *arguments):
        return method(nnx.merge(graph, params), *arguments)

    return products(jax.make_jaxpr(call)(params, *arguments).jaxpr)


def products(jaxpr) -> int:
    """Count multiply-adds of all matrix products in a jaxpr, those of every branch.

    Raises:
        ValueError: it has a loop, whose iterations are not counted.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left_shape = equation.invars[0].aval.shape
            size = math.prod(left_shape[axis] for axis in contracted)
            total += size * math.prod(equation.outvars[0].aval.shape)
        for inner in jaxprs_in_params(equation.params):
            inner_total = products(inner)
            if inner_total and equation.primitive.name in ("scan", "while"):
                raise ValueError("Matrix products in a loop can't be counted.")
            total += inner_total
    return total
