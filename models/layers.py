"""Layers of a Transformer: linear maps, norms, feed-forward, and the layer itself."""

from functools import partial

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from headcount.configs.validation import choose
from headcount.models.attention import Attention
from headcount.models.dropout import Dropout, dropout, key_of
from headcount.models.linear import linear
from headcount.models.variants import rms_norm

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}
NORM_TYPES = ("layer_norm", "rms_norm")
MLPS = ("plain", "gated")


def make_norm(
    width: int, kind: str, epsilon: float, use_bias: bool, rngs: nnx.Rngs
) -> nnx.LayerNorm | nnx.RMSNorm:
    """Return a norm over the model width, with a learned scale."""
    axes = {"axes": "D"}
    if kind == "rms_norm":
        return rms_norm(width, "D", epsilon=epsilon, rngs=rngs)
    return nnx.LayerNorm(
        width,
        epsilon=epsilon,
        use_bias=use_bias,
        scale_metadata=axes,
        bias_metadata=axes,
        rngs=rngs,
    )


def make_linear(
    size_in: int, size_out: int, axes: str, rngs: nnx.Rngs, use_bias: bool = True
) -> nnx.Linear:
    """Return a linear layer with Xavier uniform initialization."""
    return nnx.Linear(
        size_in,
        size_out,
        use_bias=use_bias,
        kernel_init=nnx.initializers.xavier_uniform(),
        kernel_metadata={"axes": axes},
        bias_metadata={"axes": axes.split()[-1]},
        rngs=rngs,
    )


class MLP(nnx.Module):
    """Feed-forward layer: linear map from D to F, activation, linear map back to D.

    With `gated`, the activated hidden units are multiplied by another linear map of the
    input (GLU variants, Shazeer 2020). With silu, this is SwiGLU.
    """

    def __init__(
        self,
        width: int,
        mlp_dim: int,
        activation: str,
        *,
        gated: bool = False,
        use_bias: bool = True,
        rngs: nnx.Rngs,
    ):
        choose("model.activation", activation, ACTIVATIONS)
        self.activation = activation
        self.up = make_linear(width, mlp_dim, "D F", rngs, use_bias)
        self.gate = (
            make_linear(width, mlp_dim, "D F", rngs, use_bias) if gated else None
        )
        self.down = make_linear(mlp_dim, width, "F D", rngs, use_bias)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Apply the feed-forward to every token."""
        activate = ACTIVATIONS[self.activation]
        hidden = apply_linear(self.up, x)
        if self.gate is None:
            hidden = activate(hidden)
        else:
            hidden = activate(apply_linear(self.gate, x)) * hidden
        return apply_linear(self.down, hidden)


def apply_linear(layer: nnx.Linear, x: Float[Array, "B T D"]):
    """Apply a linear layer as a product of two matrices; see `linear`."""
    bias = None if layer.bias is None else layer.bias[...]
    return linear(x, layer.kernel[...], bias)


class Layer(nnx.Module):
    """Transformer layer: self-attention, optional cross-attention, and feed-forward.

    Each sublayer is followed by dropout and a residual sum. The norm comes after the
    sum ("post", Vaswani et al. 2017) or before the sublayer ("pre").

    Args:
        width: D.
        mlp_dim: F.
        norm: "post" or "pre".
        make_norm: returns a norm of the width.
        activation: a name in `ACTIVATIONS`.
        gated: whether the feed-forward is gated; see `MLP`.
        use_bias: whether the feed-forward has biases.
        self_attention: arguments of `Attention`.
        cross_attention: arguments of `Attention`; None for no cross-attention.
    """

    def __init__(
        self,
        width: int,
        mlp_dim: int,
        *,
        norm: str,
        make_norm,
        activation: str,
        gated: bool,
        use_bias: bool,
        self_attention: dict,
        cross_attention: dict | None,
        rngs: nnx.Rngs,
    ):
        cross = cross_attention is not None
        self.pre = norm == "pre"
        self.self_attention = Attention(width, **self_attention, rngs=rngs)
        self.self_norm = make_norm(rngs=rngs)
        self.cross_attention = (
            Attention(width, **cross_attention, rngs=rngs) if cross else None
        )
        self.cross_norm = make_norm(rngs=rngs) if cross else None
        self.mlp = MLP(
            width, mlp_dim, activation, gated=gated, use_bias=use_bias, rngs=rngs
        )
        self.mlp_norm = make_norm(rngs=rngs)

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
        position_arguments: dict | None = None,
        gates: dict | None = None,
        drop: Dropout | None = None,
        observe: dict | None = None,
        first: dict | None = None,
    ) -> tuple[Float[Array, "B T D"], dict]:
        """Apply the layer.

        Arguments by place are dicts with the keys `self` and `cross`.

        Args:
            x: the input.
            memory: the encoder's output, which cross-attention attends to.
            segments, memory_segments: ids of packed examples; 0 is padding.
            is_causal: whether to prevent attention to later tokens.
            position_arguments: arguments of self-attention, from
                `Transformer.position_arguments`.
            gates: head gates by place, `N` or `B N` each. Defaults to 1.
            drop: dropout of this layer.
            observe: functions by place; see `Attention`.
            first: values of the stack's first layer by place, if needed.

        Returns:
            The output, and `Attention.auxiliary` by place.
        """
        gates, observe, first = gates or {}, observe or {}, first or {}
        auxiliary = {}

        def observer_of(place, attention):
            if place not in observe and not attention.has_auxiliary:
                return None

            def record(intermediates):
                auxiliary[place] = attention.auxiliary(intermediates)
                if place in observe:
                    observe[place](intermediates)

            return record

        def to_self(x):
            return self.self_attention(
                x,
                is_causal=is_causal,
                query_segment_ids=segments,
                key_value_segment_ids=segments,
                gate=gates.get("self"),
                observe=observer_of("self", self.self_attention),
                first=first.get("self"),
                dropout_key=key_of(drop, 3),
                **(position_arguments or {}),
            )

        def to_memory(x):
            return self.cross_attention(
                x,
                memory,
                query_segment_ids=segments,
                key_value_segment_ids=memory_segments,
                gate=gates.get("cross"),
                observe=observer_of("cross", self.cross_attention),
                first=first.get("cross"),
                dropout_key=key_of(drop, 4),
            )

        x = self.sublayer(to_self, self.self_norm, x, drop, 0)
        if self.cross_attention is not None:
            x = self.sublayer(to_memory, self.cross_norm, x, drop, 1)
        return self.sublayer(self.mlp, self.mlp_norm, x, drop, 2), auxiliary
