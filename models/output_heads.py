"""Output heads: classifier, and BERT's pooler and output transform."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from headcount.configs.validation import choose
from headcount.models.layers import ACTIVATIONS, make_linear

POOLING = ("first", "mean", "attention")


class Classifier(nnx.Module):
    """Classifier of tokens or segments: apply `linear` to the result of `pool`.

    Args:
        width: D.
        num_classes: C.
        pooling: None classifies every token. "first" classifies each segment by its
            first token, "mean" by the mean of its tokens, "attention" by a mean with
            learned weights.
    """

    def __init__(
        self, width: int, num_classes: int, pooling: str | None, *, rngs: nnx.Rngs
    ):
        if pooling is not None:
            choose("task.pooling", pooling, POOLING)
        self.pooling = pooling
        self.linear = make_linear(width, num_classes, "D C", rngs)
        init = nnx.initializers.zeros_init()
        self.scores = (
            nnx.Linear(width, 1, use_bias=False, kernel_init=init, rngs=rngs)
            if pooling == "attention"
            else None
        )

    def pool(
        self, hidden: Float[Array, "B T D"], segments: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Replace every token's vector by the pooled vector of its segment."""
        if self.pooling is None:
            return hidden
        same_segment = segments[:, :, None] == segments[:, None, :]
        if self.pooling == "first":
            weights = jax.nn.one_hot(same_segment.argmax(-1), same_segment.shape[-1])
        else:
            scores = jnp.zeros(hidden.shape[:2])
            if self.scores is not None:
                scores = self.scores(hidden)[..., 0].astype(jnp.float32)
            scores = jnp.where(same_segment, scores[:, None, :], -jnp.inf)
            weights = jax.nn.softmax(scores, axis=-1)
        return jnp.einsum("BTS,BSD->BTD", weights.astype(hidden.dtype), hidden)

    def logits(self, vectors: Float[Array, "*B D"]) -> Float[Array, "*B C"]:
        """Apply `linear`; in float32 at least, so that 16 bits do not cause ties."""
        dtype = jnp.promote_types(vectors.dtype, jnp.float32)
        kernel, bias = self.linear.kernel[...], self.linear.bias[...]
        return jnp.matmul(vectors, kernel, preferred_element_type=dtype) + bias


class Pooler(nnx.Module):
    """BERT's pooler: tanh of a linear map of pooled vectors."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.linear = make_linear(width, width, "D features", rngs)

    def __call__(self, vectors: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Apply the linear map, then tanh."""
        return jnp.tanh(self.linear(vectors))


class OutputTransform(nnx.Module):
    """BERT's transform before the output: linear map, activation and norm."""

    def __init__(self, width: int, activation: str, make_norm, *, rngs: nnx.Rngs):
        self.activation = activation
        self.linear = make_linear(width, width, "D features", rngs)
        self.norm = make_norm(rngs=rngs)

    def __call__(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Transform every token."""
        return self.norm(ACTIVATIONS[self.activation](self.linear(hidden)))
