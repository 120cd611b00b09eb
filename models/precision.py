"""The dtype that a model computes in, lookups, and rematerialization.

Parameters are float32 during training. Softmax, the statistics of norms, the loss and
the optimizer also compute in float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from headcount.attention.platform import compute_capability, platform
from headcount.configs.validation import choose

DTYPES = ("bfloat16", "float32")


def compute_dtype(name: str | None) -> str:
    """Return the dtype's name; None chooses bfloat16 if the hardware supports it.

    TPUs do, and NVIDIA GPUs from compute capability 8.

    Raises:
        ValueError: the name is not in `DTYPES`.
    """
    if name is not None:
        choose("model.dtype", name, DTYPES)
        return name
    if (capability := compute_capability()) is not None:
        return "bfloat16" if capability >= 8 else "float32"
    return "float32" if platform() == "cpu" else "bfloat16"


def model_of(graph: nnx.GraphDef, params):
    """Build a model with its parameters cast to the dtype that it computes in."""
    return nnx.merge(graph, rounded(graph, params))


def rounded(graph: nnx.GraphDef, params):
    """Cast parameters to the dtype that the model computes in."""
    dtype = nnx.merge(graph, params).dtype

    def one(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(one, params)


@jax.custom_vjp
def lookup(
    table: Float[Array, "rows D"], indices: Int[Array, "*X"]
) -> Float[Array, "*X D"]:
    """Look up rows of a table, and sum gradients of each row in float32.

    The gradient of a frequent token is a sum of many terms, and in bfloat16 256 + 1 is
    256.
    """
    return table[indices]


def _lookup_forward(table, indices):
    return table[indices], (table, indices)


def _lookup_backward(residuals, gradient):
    table, indices = residuals
    wide = jnp.promote_types(table.dtype, jnp.float32)
    total = jnp.zeros(table.shape, wide).at[indices].add(gradient.astype(wide))
    return total.astype(table.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)


SAVED = {
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
REMAT = ("none", *SAVED)


def rematerialize(remat: str, function, *arrays, **fixed):
    """Call a function whose intermediate values the backward pass may recompute.

    Args:
        remat: "none" saves all intermediate values, "block" saves none of them, and
            "dots" saves the results of products with parameters.
        function: the function to call.
        arrays, fixed: its arguments.
    """
    function = partial(function, **fixed)
    if remat != "none":
        function = jax.checkpoint(function, policy=SAVED[remat])
    return function(*arrays)
