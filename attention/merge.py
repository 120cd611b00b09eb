"""From N head outputs to one: the merge rules."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def concat(
    heads: Float[Array, "B T N V"], kernel: Float[Array, "N V D"]
) -> Float[Array, "B T D"]:
    """Project each head by its own kernel and add them up.

    The same as concatenating the heads and projecting once (Vaswani et al. 2017).
    """
    return jnp.einsum("BTNV,NVD->BTD", heads, kernel)


MERGE_RULES = {"concat": concat}
