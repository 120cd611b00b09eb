"""Multi-head attention: projections, head shapes and the merge."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from headcount import attention
from headcount.attention.api import IMPLEMENTATIONS
from headcount.models.checks import choose
from headcount.models.linear import linear, project
from headcount.models.positions import rotate

INITS = {"xavier": "fan_avg", "fan_in": "fan_in"}  # as JAX calls their variance


class Attention(nnx.Module):
    """Multi-head attention with free head shapes and a choice of merge rule.

    Args:
        width: D, the size of its input and output.
        num_heads: N.
        num_kv_heads: K, a divisor of N; None: N.
        head_dim: H, the size of a query and a key; None: D / N.
        value_dim: V, the size of a value; None: D / N.
        merge: a name in `attention.MERGE_RULES`.
        merge_gain: what the merge's kernel, no other parameter, begins times.
        init: the kernels begin uniform with the variance 2 / (into + out of), "xavier"
            (Glorot & Bengio 2010), or 1 / into, "fan_in" (LeCun et al. 1998), by which
            logits, and outputs of "concat", begin at one scale whatever N, K, H, V are.
        mixture_heads: k of the rule "mixture", at most N.
        talking_heads: mix the heads' maps before and after the softmax, see
            `attention.talking_heads_attention`.
        sink: learn a logit for each head to attend to nothing, at first 0, see
            `attention.dot_product_attention`; not with talking heads.
        qk_norm: RMS-normalise queries and keys, with learned scales of size H; of the
            kind of Henry et al. 2020 (L2 norm) and Dehghani et al. 2023 (layer norm).
        scale: what query · key is multiplied by; None: 1 / sqrt(H). Tensor Programs V
            (Yang et al. 2022) has a constant / H. At 0 a head averages what it may see.
        use_bias: in all four projections.
        implementation: a name in `attention.IMPLEMENTATIONS`; None chooses.
        path: the config keys above, to name them in errors.

    Raises:
        ValueError: a head count that does not divide, an unknown merge rule, or a
            number out of its range.
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
        if not 1e-18 <= merge_gain <= 1e18:  # its square must be a float32
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
                f"{path}.sink must be False with talking_heads, whose mixed maps are "
                f"no one head's, got {sink}."
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

        def projection(heads, size):
            initial = initializer(init, 1, 3)
            kernel = nnx.Param(initial(rngs.params(), (width, heads, size)))
            bias = nnx.Param(jnp.zeros((heads, size))) if use_bias else None
            return kernel, bias

        self.query, self.query_bias = projection(num_heads, head_dim)
        self.key, self.key_bias = projection(num_kv_heads, head_dim)
        self.value, self.value_bias = projection(num_kv_heads, value_dim)

        sizes = {"N": num_heads, "V": value_dim, "D": width}

        def parameter(name, letters):  # of the merge: vectors start neutral
            shape = tuple(sizes[letter] for letter in letters.split())
            if len(shape) == 1:
                return nnx.Param(jnp.zeros(shape))
            into = 1 if letters.startswith("D") else len(shape) - 1
            gain = merge_gain if name == "kernel" else 1.0
            initial = initializer(init, into, len(shape), gain)
            return nnx.Param(initial(rngs.params(), shape))

        shapes = attention.MERGE_RULES[merge].shapes
        self.merge = nnx.Dict({name: parameter(name, shapes[name]) for name in shapes})
        self.merge_bias = nnx.Param(jnp.zeros(width)) if use_bias else None
        self.talking_heads = (
            nnx.Dict(
                logits_mix=nnx.Param(jnp.eye(num_heads)),
                weights_mix=nnx.Param(jnp.eye(num_heads)),
            )
            if talking_heads
            else None
        )
        self.sink = nnx.Param(jnp.zeros(num_heads)) if sink else None
        self.query_norm = nnx.RMSNorm(head_dim, rngs=rngs) if qk_norm else None
        self.key_norm = nnx.RMSNorm(head_dim, rngs=rngs) if qk_norm else None
        # Queries are longer by this, so that whatever reads them need not know of it.
        self.stretch = None if scale is None else scale * head_dim**0.5

    def queries(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T N H"]:
        """Project to queries, scaled; with positions, rotated by them."""
        query = project(x, self.query, self.query_bias)
        return self.stretched(turned(query, self.query_norm, positions))

    def stretched(self, query: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Queries whose logits have the layer's scale, times those of 1 / sqrt(H)."""
        return query if self.stretch is None else query * self.stretch

    def keys_values(
        self, x: Float[Array, "B S D"], positions: Int[Array, "B S"] | None = None
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
        """Project to keys, with positions rotated by them, and to values."""
        key = turned(project(x, self.key, self.key_bias), self.key_norm, positions)
        return key, project(x, self.value, self.value_bias)

    def queries_keys_values(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"] | None
    ) -> tuple[
        Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K V"]
    ]:
        """`queries` and `keys_values` of one input, by one product with all kernels.

        For decoding, where kernels are many and rows few. In training the kernels'
        heads are sharded, and would have to be moved to stand side by side.
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
            self.stretched(turned(query, self.query_norm, positions)),
            turned(key, self.key_norm, positions),
            value,
        )

    def resolve(
        self, B: int, T: int, S: int, *, dtype="float32", has_bias: bool = False
    ) -> str:
        """The implementation that runs on such a batch; see docs/attention.md.

        Raises:
            NotImplementedError: the one that was named can't.
        """
        if self.talking_heads is not None:
            return "talking_heads_attention"

        def like(length, kernel):
            shape = (B, length, *kernel.shape[1:])
            return jax.ShapeDtypeStruct(shape, dtype)

        arrays = like(T, self.query), like(S, self.key), like(S, self.value)
        if self.implementation is not None:
            learnt, N = {}, self.query.shape[1]
            if has_bias:
                learnt["bias"] = jax.ShapeDtypeStruct((1, N, T, S), dtype)
            if self.sink is not None:
                learnt["sink"] = jax.ShapeDtypeStruct((N,), dtype)

            def total(arrays, learnt):
                named = {"implementation": self.implementation}
                return attention.dot_product_attention(*arrays, **learnt, **named).sum()

            run = jax.grad(total, (0, 1)) if learnt else total
            jax.eval_shape(run, arrays, learnt)
            return self.implementation
        bias = jnp.float32 if has_bias else None
        return attention.resolve_implementation(*arrays, bias)

    def softmax_parameters(self) -> dict[str, Float[Array, "N ..."]]:
        """The two mixes of talking heads, or the sink, by name; empty without."""
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
        """Merge the heads' outputs, each times its gate, by the layer's rule."""
        rule, arguments = self.rule()
        out = rule.function(attention.head_gated(heads, gate), x, **arguments)
        return out if self.merge_bias is None else out + self.merge_bias[...]

    def rule(self) -> tuple[attention.MergeRule, dict]:
        """The merge rule, and its parameters and settings by name."""
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
        watch: Callable | None = None,
        **masks,
    ) -> Float[Array, "B T D"]:
        """Attend from x to the memory, or to x itself.

        Args:
            x, memory: the layer's input; what keys and values are made of.
            positions: to rotate queries and keys by.
            gate: a number a head, `N` or `B N`, times its output.
            watch: called with what it has `Seen`.
            masks: bias and masks as `attention.dot_product_attention` takes them.
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
        if watch is not None:
            gated = attention.head_gated(heads, gate)
            watch(Seen(query, key, masks, parameters, gated, x, *self.rule()))
        return self.merged(heads, x, gate)


def initializer(name: str, into: int, rank: int, gain: float = 1.0):
    """The initializer of that name, of an array whose first `into` axes go in."""
    axes = tuple(range(rank))
    return nnx.initializers.variance_scaling(
        gain**2, INITS[name], "uniform", in_axis=axes[:into], out_axis=axes[into:]
    )


class Seen(NamedTuple):
    """What attention computed, for the function that watches it."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    masks: dict  # and bias, as `attention.dot_product_attention` takes them
    parameters: dict  # of the softmax: the mixes of talking heads, or a sink, or none
    heads: Float[Array, "B T N V"]  # times their gates
    x: Float[Array, "B T D"]  # the layer's input
    rule: attention.MergeRule
    arguments: dict  # of the rule: its parameters and settings


def full_map(seen: Seen) -> Float[Array, "B N T S"]:
    """The weights of every head."""
    talk = "logits_mix" in seen.parameters
    weights = attention.talking_heads_weights if talk else attention.attention_weights
    return weights(seen.query, seen.key, **seen.masks, **seen.parameters)


def turned(
    heads: Float[Array, "B T N H"],
    norm: nnx.RMSNorm | None,
    positions: Int[Array, "B T"] | None,
) -> Float[Array, "B T N H"]:
    """Queries or keys, normalised and rotated where the model does so."""
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
    """Resolve K, H and V, which default to N, D / N and D / N."""
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
