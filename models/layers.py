"""A layer of a Transformer, and what BERT has between the last one and its output."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from headcount.models.attention import Attention
from headcount.models.checks import choose
from headcount.models.dropout import Dropout, dropout
from headcount.models.linear import linear

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


def layer_norm(width: int, epsilon: float, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """A layer norm with a scale and a bias."""
    return nnx.LayerNorm(width, epsilon=epsilon, rngs=rngs)


class MLP(nnx.Module):
    """Two linear maps with an activation between them: D to F to D."""

    def __init__(self, width: int, mlp_dim: int, activation: str, *, rngs: nnx.Rngs):
        choose("model.activation", activation, ACTIVATIONS)
        self.activation = activation
        init = nnx.initializers.xavier_uniform()
        self.up = nnx.Linear(width, mlp_dim, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(mlp_dim, width, kernel_init=init, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = linear(x, self.up.kernel[...], self.up.bias[...])
        x = ACTIVATIONS[self.activation](x)
        return linear(x, self.down.kernel[...], self.down.bias[...])


class Layer(nnx.Module):
    """Self-attention, cross-attention where it is a decoder's, and feed-forward.

    Each is followed by dropout and a residual sum, with the layer norm after the sum
    ("post", Vaswani et al. 2017) or before the sublayer ("pre").

    Args:
        width: D.
        mlp_dim: F.
        norm: "post" or "pre".
        norm_epsilon: added to the variance.
        activation: a name in `ACTIVATIONS`.
        self_attention: arguments of `Attention`.
        cross_attention: likewise; None: no cross-attention.
    """

    def __init__(
        self,
        width: int,
        mlp_dim: int,
        *,
        norm: str,
        norm_epsilon: float,
        activation: str,
        self_attention: dict,
        cross_attention: dict | None,
        rngs: nnx.Rngs,
    ):
        cross = cross_attention is not None
        self.pre = norm == "pre"
        self.self_attention = Attention(width, **self_attention, rngs=rngs)
        self.self_norm = layer_norm(width, norm_epsilon, rngs)
        self.cross_attention = (
            Attention(width, **cross_attention, rngs=rngs) if cross else None
        )
        self.cross_norm = layer_norm(width, norm_epsilon, rngs) if cross else None
        self.mlp = MLP(width, mlp_dim, activation, rngs=rngs)
        self.mlp_norm = layer_norm(width, norm_epsilon, rngs)

    def sublayer(self, function, norm, x, drop=None, index=0):
        """Apply a sublayer with its dropout, residual sum and norm."""
        if self.pre:
            return x + dropout(function(norm(x)), drop, index)
        return norm(x + dropout(function(x), drop, index))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"] | None = None,
        *,
        segments: Int[Array, "B T"],
        memory_segments: Int[Array, "B S"] | None = None,
        is_causal: bool = False,
        where: dict | None = None,
        gates: dict | None = None,
        drop: Dropout | None = None,
        watch: dict | None = None,
    ) -> Float[Array, "B T D"]:
        """Encode x, or decode it with a look at the memory.

        Args:
            x, memory: the layer's input, and what cross-attention looks at.
            segments, memory_segments: they keep the packed sentences of a row apart; 0
                is padding.
            is_causal: see no later token.
            where: what self-attention knows of positions: `positions` or a `bias`.
            gates: numbers by head, `self` and `cross`, `N` or `B N` each; or some of
                them, the others are 1.
            drop: of this layer.
            watch: functions of `Attention`, `self` and `cross`, or some of them.
        """
        gates, watch = gates or {}, watch or {}

        def to_self(x):
            return self.self_attention(
                x,
                is_causal=is_causal,
                query_segment_ids=segments,
                key_value_segment_ids=segments,
                gate=gates.get("self"),
                watch=watch.get("self"),
                **(where or {}),
            )

        def to_memory(x):
            return self.cross_attention(
                x,
                memory,
                query_segment_ids=segments,
                key_value_segment_ids=memory_segments,
                gate=gates.get("cross"),
                watch=watch.get("cross"),
            )

        x = self.sublayer(to_self, self.self_norm, x, drop, 0)
        if self.cross_attention is not None:
            x = self.sublayer(to_memory, self.cross_norm, x, drop, 1)
        return self.sublayer(self.mlp, self.mlp_norm, x, drop, 2)


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
