"""Modules with the parameters of head variants; see `attention.variants`."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from headcount.attention import cached, variants
from headcount.models.linear import linear
from headcount.models.positions import rotate

KNOCKING = ("none", "linear", "mlp")
GATE_PLACES = ("output", "values")


class Gate(nnx.Module):
    """Gates on heads, computed from the layer's input; see `attention.variants.gate`.

    Args:
        sizes: sizes of the axes D, N and V.
        activation: "sigmoid", whose kernel is initialized like the layer's other
            kernels; "double_sigmoid", whose kernel starts at 0, so that gates start at
            1; or "hard_concrete", whose gates start at 1.
        size: "head", "element" or "shared".
        features: number of features of x that the gate reads; None means all, 0 means
            none.
        initial: function from the number of input axes and the rank to an initializer.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        activation: str,
        size: str,
        features: int | None,
        initial,
        *,
        rngs: nnx.Rngs,
    ):
        self.activation, self.size = activation, size
        axes = variants.GATE_SIZES[size]
        shape = [sizes[letter] for letter in axes.split()]
        if features == 0:  # no matrix, so exclude it from weight decay and Muon
            axes = axes.replace("N", "heads")
        else:
            axes = f"D {axes}" if features is None else f"features {axes}"
            shape = [sizes["D"] if features is None else features, *shape]
        start = variants.OPEN / variants.STEP if activation == variants.LEARNED else 0.0
        values = jnp.full(shape, start)
        if features != 0 and activation == "sigmoid":
            values = initial(1, len(shape))(rngs.params(), shape)
        self.kernel = nnx.Param(values, axes=axes)

    def __call__(
        self,
        heads: Float[Array, "B T N V"],
        x: Float[Array, "B T D"],
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T N V"]:
        """Multiply heads by their gates; a key adds noise to "hard_concrete" gates."""
        gates = variants.gate(x, self.kernel[...], self.activation, self.size, key)
        return heads * gates.astype(heads.dtype)


def rms_norm(size: int, axes: str, *, epsilon: float, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """Make a norm over the last axis."""
    metadata = {"axes": axes}
    return nnx.RMSNorm(size, epsilon=epsilon, scale_metadata=metadata, rngs=rngs)


class Difference(nnx.Module):
    """Differential attention's λ and norm (Ye et al. 2024).

    λ = exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + λ_init, where the vectors have size H. The
    heads are RMS-normalised and multiplied by 1 - λ_init, which gives them the initial
    scale of plain attention.

    Args:
        head_dim: H.
        value_dim: size of a pair's joint value, 2 V.
        layer: index of the layer, from 0.
    """

    def __init__(self, head_dim: int, value_dim: int, layer: int, *, rngs: nnx.Rngs):
        values = 0.1 * jax.random.normal(rngs.params(), (4, head_dim))
        names = "query1", "key1", "query2", "key2"
        self.vectors = nnx.Dict(
            {
                name: nnx.Param(value, axes="H")
                for name, value in zip(names, values, strict=True)
            }
        )
        self.initial = variants.initial_difference(layer)
        self.norm = rms_norm(value_dim, "V", epsilon=1e-5, rngs=rngs)

    def factor(self) -> Float[Array, ""]:
        """Return λ."""
        of = {name: jnp.float32(param[...]) for name, param in self.vectors.items()}
        first, second = (jnp.exp(of[f"query{i}"] @ of[f"key{i}"]) for i in (1, 2))
        return first - second + self.initial

    def __call__(self, heads: Float[Array, "B T N V"]) -> Float[Array, "B T M V"]:
        """Compute normalised differences of pairs of heads."""
        heads = variants.difference(heads, self.factor())
        return self.norm(heads) * (1 - self.initial)


class Knocking(nnx.Module):
    """Knocking heads (2510.23052): maps that all heads share, initially the identity.

    Args:
        kind: "linear" or "mlp". The MLP is used for values only.
        head_dim: H; None leaves queries and keys unchanged.
        value_dim: V.
    """

    def __init__(self, kind: str, head_dim: int | None, value_dim: int):
        def matrix(size, values=jnp.eye):
            array = jnp.zeros((size, size)) if values is None else values(size)
            return nnx.Param(array, axes="features features")

        self.value = matrix(value_dim)
        self.gate = matrix(value_dim, None) if kind == "mlp" else None
        self.down = matrix(value_dim) if kind == "mlp" else None
        self.query = None if head_dim is None else matrix(head_dim)
        self.key = None if head_dim is None else matrix(head_dim)

    def __call__(self, heads: Float[Array, "B S N V"], of: str):
        """Map heads; `of` is "query", "key" or "value"."""
        kernel = getattr(self, of)
        if kernel is None:
            return heads
        if of == "value" and self.gate is not None:
            gate_and_down = self.gate[...], self.down[...]
            return variants.knock_gated(heads, kernel[...], *gate_and_down)
        return variants.knock(heads, kernel[...])


class Latent(nnx.Module):
    """Multi-head latent attention (DeepSeek-V2, 2405.04434).

    Keys and values of all heads are computed from one small vector per token:
    c = x W_down, key_n = [c W_n, r], value_n = c U_n, where all heads share the key
    part r = rotate(x W_rotary). A cache only holds c and r, because W_n can be absorbed
    into the query.

    Args:
        width: D.
        latent_dim: size of c.
        rotary_dim: size of r; 0 without rotary positions.
        num_heads, head_dim, value_dim: N, H (without the rotary part), V.
        norm_epsilon: of the RMS norm of c that DeepSeek has; None for no norm.
        initial: function from the number of input axes and the rank to an initializer.
    """

    def __init__(
        self,
        width: int,
        latent_dim: int,
        rotary_dim: int,
        num_heads: int,
        head_dim: int,
        value_dim: int,
        *,
        norm_epsilon: float | None,
        initial,
        rngs: nnx.Rngs,
    ):
        self.latent_dim, self.rotary_dim = latent_dim, rotary_dim

        def kernel(*sizes, axes):
            values = initial(1, len(sizes))(rngs.params(), sizes)
            return nnx.Param(values, axes=axes)

        self.down = kernel(width, latent_dim + rotary_dim, axes="D latent")
        self.key = kernel(latent_dim, num_heads, head_dim, axes="latent N H")
        self.value = kernel(latent_dim, num_heads, value_dim, axes="latent N V")
        self.norm = (
            None
            if norm_epsilon is None
            else rms_norm(latent_dim, "latent", epsilon=norm_epsilon, rngs=rngs)
        )

    def compressed(
        self, x: Float[Array, "B S D"], positions: Int[Array, "B S"] | None
    ) -> Float[Array, "B S C"]:
        """Compute each token's latent and rotated shared key part, concatenated."""
        projected = linear(x, self.down[...])
        latent, shared = jnp.split(projected, [self.latent_dim], axis=-1)
        latent = latent if self.norm is None else self.norm(latent)
        if positions is not None:
            shared = rotate(shared[:, :, None], positions)[:, :, 0]
        return jnp.concatenate([latent, shared], axis=-1)

    def keys_values(self, compressed: Float[Array, "B S C"]):
        """Compute keys, B S N H+rotary, and values, B S N V, of all heads."""
        latent, shared = jnp.split(compressed, [self.latent_dim], axis=-1)
        key = jnp.einsum("BSC,CNH->BSNH", latent, self.key[...])
        shape = (*key.shape[:3], self.rotary_dim)
        shared = jnp.broadcast_to(shared[:, :, None], shape)
        value = jnp.einsum("BSC,CNV->BSNV", latent, self.value[...])
        return jnp.concatenate([key, shared], axis=-1), value

    def attend_cached(
        self,
        query: Float[Array, "B W N E"],
        parts: list[tuple[Float[Array, "B 1 C _"]]],
        mask,
        bias=None,
        **arguments,
    ) -> Float[Array, "B W N V"]:
        """Attend to a cache of latents; see `attention.cached.cached_attention`."""
        plain, rotated = jnp.split(query, [self.key.shape[2]], axis=-1)
        absorbed = jnp.einsum("BWNH,CNH->BWNC", plain, self.key[...])
        # undo that `cached_attention` divides by the root of the absorbed query's size
        scale = ((self.latent_dim + self.rotary_dim) / query.shape[-1]) ** 0.5
        query = cached.scaled(jnp.concatenate([absorbed, rotated], axis=-1), scale)
        parts = [
            (compressed, compressed[:, :, : self.latent_dim].swapaxes(2, 3))
            for (compressed,) in parts
        ]
        out = cached.cached_attention(query, parts, mask, bias, **arguments)
        return jnp.einsum("BWNC,CNV->BWNV", out, self.value[...])
