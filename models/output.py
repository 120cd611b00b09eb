"""What stands between the last layer and what is asked of the model."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.layers import ACTIVATIONS, layer_norm


class Pooler(nnx.Module):
    """One vector a row from its first token, as BERT: tanh of a linear map."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        init = nnx.initializers.xavier_uniform()
        self.linear = nnx.Linear(width, width, kernel_init=init, rngs=rngs)

    def __call__(self, hidden: Float[Array, "B S D"]) -> Float[Array, "B D"]:
        return jnp.tanh(self.linear(hidden[:, 0]))


class OutputTransform(nnx.Module):
    """A linear map, an activation and a norm before the output, as BERT."""

    def __init__(
        self, width: int, activation: str, norm_epsilon: float, *, rngs: nnx.Rngs
    ):
        self.activation = activation
        init = nnx.initializers.xavier_uniform()
        self.linear = nnx.Linear(width, width, kernel_init=init, rngs=rngs)
        self.norm = layer_norm(width, norm_epsilon, rngs)

    def __call__(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return self.norm(ACTIVATIONS[self.activation](self.linear(hidden)))
