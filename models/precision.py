"""The type that a model computes in; its parameters are float32 wherever it is trained.

Softmax, the statistics of norms, the loss and the optimizer stay in float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from headcount.attention.platform import compute_capability, platform
from headcount.models.checks import choose

DTYPES = ("bfloat16", "float32")


def compute_dtype(name: str | None) -> str:
    """The type by name; None: bfloat16 where the device multiplies it, else float32.

    TPUs do, and NVIDIA's GPUs from compute capability 8 on.

    Raises:
        ValueError: there is no such type here.
    """
    if name is not None:
        choose("model.dtype", name, DTYPES)
        return name
    if (capability := compute_capability()) is not None:
        return "bfloat16" if capability >= 8 else "float32"
    return "float32" if platform() == "cpu" else "bfloat16"


def merge(graph: nnx.GraphDef, params):
    """The model of a graph, with its parameters rounded to the type it computes in."""
    return nnx.merge(graph, rounded(graph, params))


def rounded(graph: nnx.GraphDef, params):
    """Parameters in the type that the model of the graph computes in."""
    dtype = nnx.merge(graph, params).dtype

    def one(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(one, params)


@jax.custom_vjp
def lookup(
    table: Float[Array, "rows D"], indices: Int[Array, "*X"]
) -> Float[Array, "*X D"]:
    """Rows of a table, whose gradients are added up in float32 for each row.

    A piece that stands in a batch a thousand times has as many to add, and in bfloat16
    256 + 1 is 256.
    """
    return table[indices]


def _lookup_forward(table, indices):
    return table[indices], (table, indices)


def _lookup_backward(kept, gradient):
    table, indices = kept
    wide = jnp.promote_types(table.dtype, jnp.float32)
    total = jnp.zeros(table.shape, wide).at[indices].add(gradient.astype(wide))
    return total.astype(table.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)


SAVED = {
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
REMAT = ("none", *SAVED)


def apply(remat: str, function, *arrays, **fixed):
    """Call a function, whose inner values the gradient may compute again.

    Args:
        remat: "none" saves them all, "block" none of them, "dots" the results of
            products with parameters.
        function, arrays, fixed: what is called, and with what.
    """
    function = partial(function, **fixed)
    if remat != "none":
        function = jax.checkpoint(function, policy=SAVED[remat])
    return function(*arrays)
