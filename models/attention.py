"""Multi-head attention as a module: projections, head shapes and the merge."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from headcount import attention
from headcount.attention.api import IMPLEMENTATIONS
from headcount.configs.validation import choose
from headcount.models.linear import linear, project
from headcount.models.positions import rotate

INITS = {"xavier": "fan_avg", "fan_in": "fan_in"}  # modes of variance_scaling


class Attention(nnx.Module):
    """Multi-head attention with free head shapes and a choice of merge rules.

    Args:
        width: D, the size of input and output.
        num_heads: N.
        num_kv_heads: K, a divisor of N; None: N.
        head_dim: H, the size of a query and a key; None: D / N.
        value_dim: V, the size of a value; None: D / N.
        merge: a name in `attention.MERGE_RULES`.
        merge_gain: factor on the initial values of the merge's kernel.
        init: initial distribution of the kernels, uniform with variance
            2 / (fan_in + fan_out), "xavier" (Glorot & Bengio 2010), or 1 / fan_in,
            "fan_in" (LeCun et al. 1998). With the latter, logits and outputs of
            "concat" start at one scale whatever N, K, H and V are.
        mixture_heads: k of the rule "mixture", at most N.
        talking_heads: mix the heads' maps before and after the softmax; see
            `attention.talking_heads_attention`.
        sink: learn a logit per head to attend to nothing, initially 0; see
            `attention.dot_product_attention`. Not with talking heads.
        qk_norm: RMS-normalise queries and keys, with learned scales of size H, like
            Henry et al. 2020 (L2 norm) and Dehghani et al. 2023 (layer norm).
        scale: factor on query · key; None: 1 / sqrt(H). Tensor Programs V (Yang et al.
            2022) uses a constant / H. At 0 a head averages what it may attend to.
        use_bias: in all four projections.
        implementation: a name in `attention.IMPLEMENTATIONS`; None chooses.
        path: the section of the config, to name keys in errors.

    Raises:
        ValueError: a head count does not divide, a merge rule is unknown, or a number
            is out of range.
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
        merge_gain: float = 1.0,
        init: str = "xavier",
        mixture_heads: int = 2,
        talking_heads: bool = False,
        sink: bool = False,
        qk_norm: bool = False,
        scale: float | None = None,
        use_bias: bool = True,
        implementation: str | None = None,
        path: str = "model.attention",
        rngs: nnx.Rngs,
    ):
        num_kv_heads, head_dim, value_dim = head_shape(
            width, num_heads, num_kv_heads, head_dim, value_dim, path=path
        )
        choose(f"{path}.merge", merge, attention.MERGE_RULES)
        if not 1e-18 <= merge_gain <= 1e18:  # its square must fit into float32
            raise ValueError(
                f"{path}.merge_gain must be from 1e-18 to 1e18, got {merge_gain}."
            )
        choose(f"{path}.init", init, INITS)
        if scale is not None and not 0 <= scale <= 1e6:
            raise ValueError(f"{path}.scale must be from 0 to 1e6, got {scale}.")
        if merge == "mixture" and not 1 <= mixture_heads <= num_heads:
            raise ValueError(
                f"{path}.mixture_heads must be from 1 to num_heads = {num_heads}, "
                f"got {mixture_heads}."
            )
        if sink and talking_heads:
            raise ValueError(
                f"{path}.sink must be False with talking_heads, whose mixed maps do "
                f"not belong to single heads, got {sink}."
            )
        if implementation is not None:
            choose(f"{path}.implementation", implementation, IMPLEMENTATIONS)
            if talking_heads and implementation != "reference":
                raise ValueError(
                    f"{path}.implementation must be None or 'reference' with "
                    f"talking_heads, which needs the whole map, got {implementation!r}."
                )
        self.merge_rule = merge
        self.mixture_heads = mixture_heads
        self.implementation = implementation

        def projection(heads, size, axes):
            initial = initializer(init, 1, 3)
            values = initial(rngs.params(), (width, heads, size))
            kernel = nnx.Param(values, axes=f"D {axes}")
            zeros = jnp.zeros((heads, size))
            return kernel, nnx.Param(zeros, axes=axes) if use_bias else None

        self.query, self.query_bias = projection(num_heads, head_dim, "N H")
        self.key, self.key_bias = projection(num_kv_heads, head_dim, "K H")
        self.value, self.value_bias = projection(num_kv_heads, value_dim, "K V")

        sizes = {"N": num_heads, "V": value_dim, "D": width}

        def parameter(name, axes):
            shape = tuple(sizes[letter] for letter in axes.split())
            if len(shape) == 1:  # vectors start neutral
                return nnx.Param(jnp.zeros(shape), axes=axes)
            num_inputs = 1 if axes.startswith("D") else len(shape) - 1
            gain = merge_gain if name == "kernel" else 1.0
            initial = initializer(init, num_inputs, len(shape), gain)
            return nnx.Param(initial(rngs.params(), shape), axes=axes)

        shapes = attention.MERGE_RULES[merge].shapes
        self.merge = nnx.Dict({name: parameter(name, shapes[name]) for name in shapes})
        self.merge_bias = nnx.Param(jnp.zeros(width), axes="D") if use_bias else None
        self.talking_heads = (
            nnx.Dict(
                logits_mix=nnx.Param(jnp.eye(num_heads), axes="heads heads"),
                weights_mix=nnx.Param(jnp.eye(num_heads), axes="heads heads"),
            )
            if talking_heads
            else None
        )
        self.sink = nnx.Param(jnp.zeros(num_heads), axes="N") if sink else None

        def norm():
            return nnx.RMSNorm(head_dim, scale_metadata={"axes": "H"}, rngs=rngs)

        self.query_norm = norm() if qk_norm else None
        self.key_norm = norm() if qk_norm else None
        # Every reader of queries divides by sqrt(H): a different scale is applied here.
        self.query_factor = None if scale is None else scale * head_dim**0.5

    def queries(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T N H"]:
        """Project to queries, normalise them, rotate them by positions, scale them."""
        query = project(x, self.query, self.query_bias)
        return self.scaled(normalize_and_rotate(query, self.query_norm, positions))

    def scaled(self, query: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Scale queries so that logits / sqrt(H) have the layer's own scale."""
        return query if self.query_factor is None else query * self.query_factor

    def keys_values(
        self, x: Float[Array, "B S D"], positions: Int[Array, "B S"] | None = None
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
        """Project to keys (normalised, rotated by positions) and to values."""
        key = project(x, self.key, self.key_bias)
        key = normalize_and_rotate(key, self.key_norm, positions)
        return key, project(x, self.value, self.value_bias)

    def queries_keys_values(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"] | None
    ) -> tuple[
        Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K V"]
    ]:
        """Return `queries` and `keys_values` of one input by a single matrix product.

        For decoding, where there are many kernels and few rows. In training heads may
        be sharded, and joining the kernels would move them.
        """
        kernels = [param[...] for param in (self.query, self.key, self.value)]
        biases = [self.query_bias, self.key_bias, self.value_bias]
        flat = linear(
            x,
            jnp.concatenate([kernel.reshape(x.shape[-1], -1) for kernel in kernels], 1),
            None
            if self.query_bias is None
            else jnp.concatenate([bias[...].reshape(-1) for bias in biases]),
        )
        sizes = np.cumsum([kernel[0].size for kernel in kernels])
        query, key, value = (
            part.reshape(*x.shape[:2], *kernel.shape[1:])
            for part, kernel in zip(
                jnp.split(flat, sizes[:-1], -1), kernels, strict=True
            )
        )
        return (
            self.scaled(normalize_and_rotate(query, self.query_norm, positions)),
            normalize_and_rotate(key, self.key_norm, positions),
            value,
        )

    def resolve(
        self, B: int, T: int, S: int, *, dtype="float32", has_bias: bool = False
    ) -> str:
        """Return the implementation that runs for these sizes.

        Raises:
            NotImplementedError: the named implementation can't.
        """
        if self.talking_heads is not None:
            return "talking_heads_attention"

        def like(length, kernel):
            shape = (B, length, *kernel.shape[1:])
            return jax.ShapeDtypeStruct(shape, dtype)

        arrays = like(T, self.query), like(S, self.key), like(S, self.value)
        if self.implementation is not None:
            learned, N = {}, self.query.shape[1]
            if has_bias:
                learned["bias"] = jax.ShapeDtypeStruct((1, N, T, S), dtype)
            if self.sink is not None:
                learned["sink"] = jax.ShapeDtypeStruct((N,), dtype)

            def total(arrays, learned):
                name = self.implementation
                return attention.dot_product_attention(
                    *arrays, **learned, implementation=name
                ).sum()

            run = jax.grad(total, (0, 1)) if learned else total
            jax.eval_shape(run, arrays, learned)
            return self.implementation
        bias = jnp.float32 if has_bias else None
        return attention.resolve_implementation(*arrays, bias)

    def softmax_parameters(self) -> dict[str, Float[Array, "N ..."]]:
        """Return the mixes of talking heads or the sink, by argument name."""
        given = dict(self.talking_heads or {})
        if self.sink is not None:
            given["sink"] = self.sink
        return {name: param[...] for name, param in given.items()}

    def merged(
        self,
        heads: Float[Array, "B T N V"],
        x: Float[Array, "B T D"],
        gate: Float[Array, "*B N"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Merge the heads' outputs, times their gates, by the layer's rule."""
        rule, arguments = self.rule()
        out = rule.function(attention.head_gated(heads, gate), x, **arguments)
        return out if self.merge_bias is None else out + self.merge_bias[...]

    def rule(self) -> tuple[attention.MergeRule, dict]:
        """Return the merge rule, and its parameters and settings by name."""
        rule = attention.MERGE_RULES[self.merge_rule]
        arguments = {name: param[...] for name, param in self.merge.items()}
        return rule, arguments | {name: getattr(self, name) for name in rule.settings}

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"] | None = None,
        *,
        positions: Int[Array, "B T"] | None = None,
        gate: Float[Array, "*B N"] | None = None,
        observe: Callable | None = None,
        **masks,
    ) -> Float[Array, "B T D"]:
        """Attend from x to the memory, or to x itself.

        Args:
            x: the layer's input.
            memory: what keys and values are computed from; None: x.
            positions: to rotate queries and keys by.
            gate: factor on each head's output, `N` or `B N`.
            observe: called with `Intermediates`.
            masks: bias and masks; see `attention.dot_product_attention`.
        """
        query = self.queries(x, positions)
        key, value = self.keys_values(x if memory is None else memory, positions)
        parameters = self.softmax_parameters()
        arguments = masks | parameters
        if self.talking_heads is not None:
            heads = attention.talking_heads_attention(query, key, value, **arguments)
        else:
            heads = attention.dot_product_attention(
                query, key, value, **arguments, implementation=self.implementation
            )
        if observe is not None:
            gated = attention.head_gated(heads, gate)
            observe(
                Intermediates(
                    *(query, key, masks, parameters, gated, x, *self.rule(), value)
                )
            )
        return self.merged(heads, x, gate)


def initializer(name: str, num_inputs: int, rank: int, gain: float = 1.0):
    """Return an initializer of arrays whose first `num_inputs` axes are inputs."""
    axes = tuple(range(rank))
    return nnx.initializers.variance_scaling(
        gain**2,
        INITS[name],
        "uniform",
        in_axis=axes[:num_inputs],
        out_axis=axes[num_inputs:],
    )


class Intermediates(NamedTuple):
    """What attention computed, for functions that observe it."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    masks: dict  # and bias; see `attention.dot_product_attention`
    parameters: dict  # see `Attention.softmax_parameters`
    heads: Float[Array, "B T N V"]  # outputs times their gates
    x: Float[Array, "B T D"]  # the layer's input
    rule: attention.MergeRule
    arguments: dict  # of the rule: its parameters and settings
    value: Float[Array, "B S K V"] | None = None


def attention_map(layer: Intermediates) -> Float[Array, "B N T S"]:
    """Return the attention weights of every head."""
    talking = "logits_mix" in layer.parameters
    weights = attention.attention_weights
    if talking:
        weights = attention.talking_heads_weights
    return weights(layer.query, layer.key, **layer.masks, **layer.parameters)


def norm_weighted_map(layer: Intermediates) -> Float[Array, "B N T S"]:
    """Return each key's share of the norms that a head adds, ‖α f(x)‖.

    f(x) is the key's value times the head's merge kernel (Kobayashi et al. 2020). Rows
    sum to 1; factors of a merge rule on the whole head cancel. A token that a head
    looks at without taking anything from it counts little here.
    """
    kernel, weights = layer.arguments["kernel"], attention_map(layer)
    value = jnp.repeat(layer.value, weights.shape[1] // layer.value.shape[2], axis=2)
    kernel = jnp.broadcast_to(kernel, (*value.shape[2:], kernel.shape[-1]))
    added = jnp.einsum("BSNV,NVD->BSND", value, kernel).astype(jnp.float32)
    norms = jnp.linalg.norm(added, axis=-1).transpose(0, 2, 1)[:, :, None]
    shares = jnp.abs(weights) * norms
    total = shares.sum(-1, keepdims=True)
    return shares / jnp.where(total > 0, total, 1.0)


def normalize_and_rotate(
    heads: Float[Array, "B T N H"],
    norm: nnx.RMSNorm | None,
    positions: Int[Array, "B T"] | None,
) -> Float[Array, "B T N H"]:
    """Normalise and rotate queries or keys, if the model does so."""
    heads = heads if norm is None else norm(heads)
    return heads if positions is None else rotate(heads, positions)


def head_shape(
    width: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    value_dim: int | None,
    path: str,
) -> tuple[int, int, int]:
    """Return K, H and V, which default to N, D / N and D / N."""
    if num_heads < 1:
        raise ValueError(f"{path}.num_heads must be at least 1, got {num_heads}.")
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{path}.num_heads must be a multiple of num_kv_heads, "
            f"got {num_heads} and {num_kv_heads}."
        )
    sizes = {"head_dim": head_dim, "value_dim": value_dim}
    for name, size in sizes.items():
        if size is None and width % num_heads:
            raise ValueError(
                f"{path}.num_heads must divide model.width when {name} is "
                f"None, got {num_heads} and {width}; set {path}.{name}."
            )
        if size is not None and size < 1:
            raise ValueError(f"{path}.{name} must be at least 1, got {size}.")
    default = width // num_heads
    return num_kv_heads, head_dim or default, value_dim or default
