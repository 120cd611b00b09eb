"""The parts of a Transformer: attention, feed-forward, dropout."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key, UInt32

import attention
from attention.api import IMPLEMENTATIONS

xavier = nnx.initializers.variance_scaling
Dropout = tuple[Float[Array, ""] | float, Key[Array, ""]]  # rate, key


def dropout(x: Array, rate_and_key: Dropout | None, index: int) -> Array:
    """Zero each element with probability rate, scale the rest by 1 / (1 - rate).

    The rate is data, not part of the program, so that trials may differ in it. None
    leaves x as it is. `index` tells the places of a layer apart.
    """
    if rate_and_key is None:
        return x
    rate, key = rate_and_key
    bits = random_bits(jax.random.fold_in(key, index), x.shape)
    keep = bits >= jnp.uint32(rate * 2.0**32)
    return jnp.where(keep, x * (1 / (1.0 - rate)), 0.0)


def random_bits(key: Key[Array, ""], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """A hash of each element's index: enough for dropout, cheap enough to do again.

    It fuses into what reads it, where `jax.random.bits` is a pass of 20 rounds. The
    key gives each call a stride and a start of its own; the mixing is the 32-bit
    finaliser "lowbias32" (Wellons 2018, Prospecting for hash functions).
    """
    start, stride = jax.random.key_data(key)[-2:]
    x = jax.lax.iota(jnp.uint32, math.prod(shape)) * (stride | 1) + start
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return (x ^ (x >> 16)).reshape(shape)


def choose(name: str, value: str, choices) -> None:
    """Raise a ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")


class Attention(nnx.Module):
    """Multi-head attention with free head shapes and a choice of merge rule.

    Args:
        width: D, the size of its input and output.
        num_heads: N.
        num_kv_heads: K, a divisor of N; None: N.
        head_dim: H, the size of a query and a key; None: D / N.
        value_dim: V, the size of a value; None: D / N.
        merge: a name in `attention.MERGE_RULES`.
        use_bias: in all four projections.
        implementation: a name in `attention.IMPLEMENTATIONS`; None chooses.

    Raises:
        ValueError: a head count that does not divide, or an unknown merge rule.
    """

    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        merge: str = "concat",
        use_bias: bool = True,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        num_kv_heads, head_dim, value_dim = head_shape(
            width, num_heads, num_kv_heads, head_dim, value_dim
        )
        choose("model.attention.merge", merge, attention.MERGE_RULES)
        if implementation is not None:
            choose("model.attention.implementation", implementation, IMPLEMENTATIONS)
        self.merge_rule = merge
        self.implementation = implementation

        def projection(heads, size):
            init = xavier(1.0, "fan_avg", "uniform", in_axis=0, out_axis=(1, 2))
            kernel = nnx.Param(init(rngs.params(), (width, heads, size)))
            bias = nnx.Param(jnp.zeros((heads, size))) if use_bias else None
            return kernel, bias

        self.query, self.query_bias = projection(num_heads, head_dim)
        self.key, self.key_bias = projection(num_kv_heads, head_dim)
        self.value, self.value_bias = projection(num_kv_heads, value_dim)
        init = xavier(1.0, "fan_avg", "uniform", in_axis=(0, 1), out_axis=2)
        self.merge = nnx.Param(init(rngs.params(), (num_heads, value_dim, width)))
        self.merge_bias = nnx.Param(jnp.zeros(width)) if use_bias else None

    def queries(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        """Project to queries."""
        return project(x, self.query, self.query_bias)

    def keys_values(
        self, x: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
        """Project to keys and values."""
        key = project(x, self.key, self.key_bias)
        return key, project(x, self.value, self.value_bias)

    def merged(self, heads: Float[Array, "B T N V"]) -> Float[Array, "B T D"]:
        """Merge the heads' outputs by the layer's rule."""
        out = attention.MERGE_RULES[self.merge_rule](heads, self.merge[...])
        return out if self.merge_bias is None else out + self.merge_bias[...]

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"] | None = None,
        *,
        maps: list | None = None,
        **masks,
    ) -> Float[Array, "B T D"]:
        """Attend from x to the memory, or to x itself.

        `masks` are those of `attention.dot_product_attention`. The full map of every
        head, B N T S, is appended to `maps` where a list is given.
        """
        key, value = self.keys_values(x if memory is None else memory)
        if maps is not None:
            maps.append(attention.attention_weights(self.queries(x), key, **masks))
        return self.attend(x, key, value, **masks)

    def attend(
        self,
        x: Float[Array, "B T D"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K V"],
        **masks,
    ) -> Float[Array, "B T D"]:
        """Attend from x to keys and values that are projected already."""
        heads = attention.dot_product_attention(
            self.queries(x), key, value, **masks, implementation=self.implementation
        )
        return self.merged(heads)


def head_shape(
    width: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    value_dim: int | None,
) -> tuple[int, int, int]:
    """Resolve K, H and V, which default to N, D / N and D / N."""
    if num_heads < 1:
        raise ValueError(
            f"model.attention.num_heads must be at least 1, got {num_heads}."
        )
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"model.attention.num_heads must be a multiple of num_kv_heads, "
            f"got {num_heads} and {num_kv_heads}."
        )
    sizes = {"head_dim": head_dim, "value_dim": value_dim}
    for name, size in sizes.items():
        if size is None and width % num_heads:
            raise ValueError(
                f"model.attention.num_heads must divide model.width when {name} is "
                f"None, got {num_heads} and {width}; set model.attention.{name}."
            )
        if size is not None and size < 1:
            raise ValueError(f"model.attention.{name} must be at least 1, got {size}.")
    default = width // num_heads
    return num_kv_heads, head_dim or default, value_dim or default


def project(
    x: Float[Array, "B T D"], kernel: nnx.Param, bias: nnx.Param | None
) -> Float[Array, "B T N H"]:
    """Project to heads."""
    width, num_heads, size = kernel.shape
    bias = None if bias is None else bias.reshape(-1)
    flat = linear(x, kernel.reshape(width, -1), bias)
    return flat.reshape(*x.shape[:-1], num_heads, size)


def linear(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "D F"],
    bias: Float[Array, "F"] | None = None,
) -> Float[Array, "B T F"]:
    """x times kernel plus bias, as a product of two matrices.

    With the axes B and T apart, an MLP trains a third slower on CPU.
    """
    B, T, D = x.shape
    out = x.reshape(B * T, D) @ kernel
    return (out if bias is None else out + bias).reshape(B, T, -1)


class MLP(nnx.Module):
    """Two linear maps with a ReLU between them: D to F to D."""

    def __init__(self, width: int, mlp_dim: int, *, rngs: nnx.Rngs):
        init = xavier(1.0, "fan_avg", "uniform")
        self.up = nnx.Linear(width, mlp_dim, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(mlp_dim, width, kernel_init=init, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = jax.nn.relu(linear(x, self.up.kernel[...], self.up.bias[...]))
        return linear(x, self.down.kernel[...], self.down.bias[...])


class Layer(nnx.Module):
    """Self-attention, cross-attention where it is a decoder's, and feed-forward.

    Each is followed by dropout and a residual sum, with the layer norm after the sum
    ("post", Vaswani et al. 2017) or before the sublayer ("pre").
    """

    def __init__(
        self,
        width: int,
        mlp_dim: int,
        *,
        norm: str,
        attention: dict,
        cross: bool,
        rngs: nnx.Rngs,
    ):
        self.pre = norm == "pre"
        self.self_attention = Attention(width, **attention, rngs=rngs)
        self.self_norm = nnx.LayerNorm(width, rngs=rngs)
        self.cross_attention = (
            Attention(width, **attention, rngs=rngs) if cross else None
        )
        self.cross_norm = nnx.LayerNorm(width, rngs=rngs) if cross else None
        self.mlp = MLP(width, mlp_dim, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)

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
        drop: Dropout | None = None,
        maps: list | None = None,
    ) -> Float[Array, "B T D"]:
        """Encode x, or decode it: causal, with a look at the memory.

        Segment ids keep the packed sentences of a row apart; 0 is padding.
        """

        def to_self(x):
            return self.self_attention(
                x,
                is_causal=self.cross_attention is not None,
                query_segment_ids=segments,
                key_value_segment_ids=segments,
            )

        def to_memory(x):
            return self.cross_attention(
                x,
                memory,
                query_segment_ids=segments,
                key_value_segment_ids=memory_segments,
                maps=maps,
            )

        x = self.sublayer(to_self, self.self_norm, x, drop, 0)
        if self.cross_attention is not None:
            x = self.sublayer(to_memory, self.cross_norm, x, drop, 1)
        return self.sublayer(self.mlp, self.mlp_norm, x, drop, 2)
