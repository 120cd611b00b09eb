"""Multi-head attention as a module: projections, head shapes and the merge."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from headcount import attention
from headcount.attention import variants
from headcount.attention.api import IMPLEMENTATIONS
from headcount.attention.cached import cached_attention
from headcount.configs.validation import choose
from headcount.models.linear import linear, project
from headcount.models.positions import rotate
from headcount.models.validation import check_variants
from headcount.models.variants import (
    GATE_PLACES,
    KNOCKING,
    Difference,
    Gate,
    Knocking,
    Latent,
    rms_norm,
)

INITS = {"xavier": "fan_avg", "fan_in": "fan_in"}  # modes of variance_scaling


class Attention(nnx.Module):
    """Multi-head attention with free head shapes and a choice of merge rules.

    Args:
        width: D, the size of input and output.
        num_heads: N.
        num_kv_heads: K, a divisor of N. Defaults to N.
        head_dim: H, the size of a query and a key. Defaults to D / N.
        value_dim: V, the size of a value. Defaults to D / N.
        merge: a name in `attention.MERGE_RULES`.
        merge_gain: factor on the initial values of the merge rule's kernel.
        init: initial distribution of the kernels. "xavier" (Glorot & Bengio 2010) is
            uniform with variance 2 / (fan_in + fan_out), "fan_in" (LeCun et al. 1998)
            is uniform with variance 1 / fan_in. With "fan_in", the initial scale of
            logits and of the outputs of "concat" does not depend on N, K, H and V.
        mixture_heads: number of heads that the rules "mixture" and "shared_mixture"
            choose per token, at most N.
        talking_heads: mix the heads' maps before and after the softmax; see
            `attention.talking_heads_attention`.
        sink: learn a logit per head to attend to nothing, initially 0; see
            `attention.dot_product_attention`. Not supported with talking heads.
        qk_norm: RMS-normalise queries and keys, with learned scales of size H, like
            Henry et al. 2020 (L2 norm) and Dehghani et al. 2023 (layer norm).
        dropout: rate of dropout on the weights, applied if a call passes a key.
        scale: factor on query · key. Defaults to 1 / sqrt(H). Tensor Programs V (Yang
            et al. 2022) uses a constant / H. With 0, weights are uniform.
        use_bias: whether all four projections have biases; with a latent, keys and
            values have none.
        implementation: a name in `attention.IMPLEMENTATIONS`; None picks one.
        gate: "none", or the activation of a gate; see `attention.variants.gate`.
            "hard_concrete" is one gate per head that can close permanently.
        gate_size: "head", "element", or "shared" by all heads.
        gate_features: number of input features that the gate reads; None means all, 0
            means none.
        gate_on: "output" of the heads, or "values".
        gate_penalty: penalty of "hard_concrete" for each head that is expected to be
            open, added to the loss, in nats per token.
        exclusive: remove the component of a head's output along the token's own value;
            see `attention.variants.exclusive`. Self-attention only.
        differential: subtract a second map from the first. The N heads form N / 2 pairs
            with values of size 2 V; see `models.variants.Difference`.
        value_residual: mix values with those of the stack's first layer; see
            `attention.variants.residual_value`.
        knocking: "none", "linear" or "mlp"; see `models.variants.Knocking`.
        knocking_all: apply knocking to queries and keys, too.
        knocking_shared: for `Transformer`, which gives all layers the first one's maps.
        mixture_shared: number of heads of the rule "shared_mixture" that are always on.
        mixture_balance: factor on the load-balancing loss of a mixture.
        rotary_dim: number of elements of queries and keys that rotary positions rotate.
            Defaults to all.
        latent_dim: size of the latent vector from which keys and values are computed.
            With None, they are computed from the input. See `models.variants.Latent`.
        latent_rotary_dim: size of the rotated key part that all heads of latent
            attention share. Defaults to H / 2 with rotary positions, else 0.
        latent_norm: RMS-normalise the latent.
        qk_clip: threshold for logits. If a head's largest logit exceeds it in an
            update, its query and key kernels are scaled down. See `Attention.clip`.
        rotary: whether the model uses rotary positions here.
        is_cross: whether this is cross-attention.
        norm_epsilon: added to the mean square in `qk_norm` and `latent_norm`.
        layer: index of the layer in its stack, from 0.
        path: the config section, for error messages.

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
        dropout: float = 0.0,
        scale: float | None = None,
        use_bias: bool = True,
        implementation: str | None = None,
        gate: str = "none",
        gate_size: str = "head",
        gate_features: int | None = None,
        gate_on: str = "output",
        gate_penalty: float = 0.0,
        exclusive: bool = False,
        differential: bool = False,
        value_residual: bool = False,
        knocking: str = "none",
        knocking_all: bool = False,
        knocking_shared: bool = False,
        mixture_shared: int = 1,
        mixture_balance: float = 0.0,
        rotary_dim: int | None = None,
        latent_dim: int | None = None,
        latent_rotary_dim: int | None = None,
        latent_norm: bool = True,
        qk_clip: float | None = None,
        rotary: bool = False,
        is_cross: bool = False,
        norm_epsilon: float = 1e-6,
        layer: int = 0,
        path: str = "model.attention",
        rngs: nnx.Rngs,
    ):
        arguments = dict(locals())  # all arguments, for `check_variants`
        num_kv_heads, head_dim, value_dim = head_shape(
            width, num_heads, num_kv_heads, head_dim, value_dim, path=path
        )
        hint = "; add a rule of your own with --task_file=FILE.py"
        choose(f"{path}.merge", merge, attention.MERGE_RULES, hint)
        choose(f"{path}.init", init, INITS)
        if implementation is not None:
            choose(f"{path}.implementation", implementation, IMPLEMENTATIONS)
            if talking_heads and implementation != "reference":
                raise ValueError(
                    f"{path}.implementation must be None or 'reference' with "
                    f"talking_heads, which needs the whole map, got {implementation!r}."
                )
        choose(f"{path}.gate", gate, ("none", *variants.GATES, variants.LEARNED))
        choose(f"{path}.gate_size", gate_size, variants.GATE_SIZES)
        choose(f"{path}.gate_on", gate_on, GATE_PLACES)
        choose(f"{path}.knocking", knocking, KNOCKING)
        check_variants(arguments | {"num_kv_heads": num_kv_heads, "head_dim": head_dim})
        self.merge_rule = merge
        self.mixture_heads = mixture_heads
        self.mixture_shared = mixture_shared
        self.mixture_balance = mixture_balance
        self.gate_penalty = gate_penalty
        self.implementation = implementation
        self.dropout = dropout
        self.exclusive, self.value_residual = exclusive, value_residual
        self.rotary_dim, self.qk_clip = rotary_dim, qk_clip
        initial = partial(initializer, init)
        rotary_size = 0  # of the key part that all heads of latent attention share
        if latent_dim is not None and rotary:
            rotary_size = latent_rotary_dim
            if rotary_size is None:
                rotary_size = head_dim // 2

        key = rngs.params()
        # separate keys, so that variants don't change other initial values
        variant_rngs = nnx.Rngs(jax.random.fold_in(key, 1))

        def projection(heads, size, axes, key=None):
            key = rngs.params() if key is None else key
            values = initial(1, 3)(key, (width, heads, size))
            kernel = nnx.Param(values, axes=f"D {axes}")
            zeros = jnp.zeros((heads, size))
            return kernel, nnx.Param(zeros, axes=axes) if use_bias else None

        query_dim = head_dim + rotary_size
        self.query, self.query_bias = projection(num_heads, query_dim, "N H", key)
        if latent_dim is None:
            self.key, self.key_bias = projection(num_kv_heads, head_dim, "K H")
            self.value, self.value_bias = projection(num_kv_heads, value_dim, "K V")
            self.latent = None
        else:
            self.key = self.key_bias = self.value = self.value_bias = None
            sizes = num_heads, head_dim, value_dim
            epsilon = norm_epsilon if latent_norm else None
            settings = {
                "norm_epsilon": epsilon,
                "initial": initial,
                "rngs": variant_rngs,
            }
            self.latent = Latent(width, latent_dim, rotary_size, *sizes, **settings)
            # skip the keys that plain heads would draw, to keep later initial values
            rngs.params(), rngs.params()

        pairs = 2 if differential else 1
        merged = num_heads // pairs, value_dim * pairs
        self.num_merged_heads = merged[0]
        sizes = {"N": merged[0], "V": merged[1], "D": width}

        def parameter(name, axes):
            shape = tuple(sizes[letter] for letter in axes.split())
            if len(shape) == 1:  # vectors are zero, which has no effect at first
                return nnx.Param(jnp.zeros(shape), axes=axes)
            num_inputs = 1 if axes.startswith("D") else len(shape) - 1
            gain, keys = (merge_gain, rngs) if name == "kernel" else (1.0, variant_rngs)
            values = initial(num_inputs, len(shape), gain)(keys.params(), shape)
            return nnx.Param(values, axes=axes)

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

        norm = partial(rms_norm, head_dim, "H", epsilon=norm_epsilon, rngs=variant_rngs)
        self.query_norm, self.key_norm = (norm(), norm()) if qk_norm else (None, None)
        # Attention divides logits by sqrt(H): this factor gives another scale.
        self.query_factor = None if scale is None else scale * query_dim**0.5

        def gated(place, sizes):
            if gate == "none" or gate_on != place:
                return None
            return Gate(
                sizes, gate, gate_size, gate_features, initial, rngs=variant_rngs
            )

        of_values = {"N": num_kv_heads, "V": value_dim, "D": width}
        self.value_gate = gated("values", of_values)
        self.output_gate = gated("output", sizes)
        self.difference = (
            Difference(head_dim, merged[1], layer, rngs=variant_rngs)
            if differential
            else None
        )
        self.knocking = (
            None
            if knocking == "none"
            else Knocking(knocking, head_dim if knocking_all else None, value_dim)
        )
        # the first layer has no share: the other layers mix in its values
        self.value_share = (
            nnx.Param(jnp.full((), 0.5), axes="") if value_residual and layer else None
        )

    def queries(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T N H"]:
        """Project to queries, then normalise, rotate and scale them."""
        query = project(x, self.query, self.query_bias)
        return self.transform_queries(query, positions)

    def transform_queries(self, query: Float[Array, "B T N H"], positions):
        """Turn projections into queries, for logits divided by sqrt(H)."""
        query = self.apply_knocking(query, "query")
        query = self.rotated(query, self.query_norm, positions)
        return query if self.query_factor is None else query * self.query_factor

    def keys_values(
        self,
        x: Float[Array, "B S D"],
        positions: Int[Array, "B S"] | None = None,
        first: Float[Array, "B S K V"] | None = None,
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
        """Project to keys, which are normalised and rotated, and to values.

        Args:
            x: the input.
            positions: positions of x, by which to rotate keys.
            first: values of the stack's first layer, for `value_residual`.
        """
        if self.latent is not None:
            return self.latent.keys_values(self.latent.compressed(x, positions))
        key = project(x, self.key, self.key_bias)
        value = project(x, self.value, self.value_bias)
        key = self.transform_keys(key, positions)
        return key, self.transform_values(value, x, first)

    def transform_keys(self, key: Float[Array, "B S K H"], positions):
        """Turn projections into keys: apply knocking, normalise and rotate."""
        return self.rotated(self.apply_knocking(key, "key"), self.key_norm, positions)

    def transform_values(self, value: Float[Array, "B S K V"], x, first):
        """Turn projections into values: apply knocking, gates, the value residual."""
        value = self.apply_knocking(value, "value")
        if self.value_gate is not None:
            value = self.value_gate(value, x)
        if self.value_share is None or first is None:
            return value
        return variants.residual_value(value, first, self.value_share[...])

    def apply_knocking(self, heads: Float[Array, "B T N H"], kind: str):
        """Apply knocking, if configured, to heads of a kind: query, key or value."""
        return heads if self.knocking is None else self.knocking(heads, kind)

    def rotated(
        self,
        heads: Float[Array, "B T N H"],
        norm: nnx.RMSNorm | None,
        positions: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T N H"]:
        """Normalise queries or keys, and rotate their rotary part."""
        heads = heads if norm is None else norm(heads)
        if positions is None:
            return heads
        if self.latent is not None:  # its rotary part comes last
            plain, rotary = jnp.split(heads, [self.latent.key.shape[2]], axis=-1)
            return jnp.concatenate([plain, rotate(rotary, positions)], axis=-1)
        if self.rotary_dim is None:
            return rotate(heads, positions)
        rotary, plain = jnp.split(heads, [self.rotary_dim], axis=-1)
        return jnp.concatenate([rotate(rotary, positions), plain], axis=-1)

    def queries_keys_values(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None,
        first: Float[Array, "B T K V"] | None = None,
    ) -> tuple[
        Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K V"]
    ]:
        """Compute `queries` and `keys_values` of one input by a single matrix product.

        Used in decoding, where kernels are large and inputs have few rows. Not used in
        training: heads may be sharded, and concatenating kernels would move them.
        """
        if self.latent is not None:
            return self.queries(x, positions), *self.keys_values(x, positions)
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
            self.transform_queries(query, positions),
            self.transform_keys(key, positions),
            self.transform_values(value, x, first),
        )

    def cache(
        self,
        x: Float[Array, "B S D"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K V"],
        positions: Int[Array, "B S"] | None = None,
    ) -> tuple[Float[Array, "B _ ..."], ...]:
        """Convert keys and values of tokens to the layout of the decoding cache.

        Each head is contiguous.

        Returns:
            Keys B K H S and values B K S V, or latents B 1 latent+rotary S.
        """
        if self.latent is not None:
            return (self.latent.compressed(x, positions)[:, None].swapaxes(2, 3),)
        return key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)

    def attend_cached(
        self, query: Float[Array, "B W N H"], parts: list[tuple], mask, bias=None
    ) -> Float[Array, "B W N V"]:
        """Attend to what calls of `cache` returned; see `cached_attention`."""
        parameters = self.softmax_parameters()
        if self.latent is not None:
            return self.latent.attend_cached(query, parts, mask, bias, **parameters)
        if self.difference is not None:
            parts = [
                (key, variants.paired(value.swapaxes(1, 2)).swapaxes(1, 2))
                for key, value in parts
            ]
        return cached_attention(query, parts, mask, bias, **parameters)

    def transform_heads(
        self,
        heads: Float[Array, "B T N V"],
        x: Float[Array, "B T D"],
        value: Float[Array, "B T K U"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T M V"]:
        """Apply the variants that act on the heads' outputs before the merge.

        Args:
            heads: the outputs; both heads of each pair if differential.
            x: the layer's input.
            value: the query tokens' own values; None in cross-attention.
            key: for the noise of learned gates; None for no noise.
        """
        if self.difference is not None:
            heads = self.difference(heads)
        if self.exclusive:
            if self.difference is not None:
                value = variants.paired(value)[:, :, : value.shape[2] // 2]
            heads = variants.exclusive(heads, value)
        return heads if self.output_gate is None else self.output_gate(heads, x, key)

    def sizes(self) -> tuple[int, int, int, int]:
        """Return N, K, H and V as the attention function sees them."""
        _, N, H = self.query.shape
        value = self.value if self.latent is None else self.latent.value
        _, K, V = value.shape
        return N, K, H, V if self.difference is None else 2 * V

    def resolve(
        self, B: int, T: int, S: int, *, dtype: str, positions: str | None
    ) -> str:
        """Return the implementation that runs in training with these sizes.

        Args:
            B, T, S: batch size, number of queries and number of keys.
            dtype: dtype of queries, keys and values.
            positions: see `models.positions`; None in cross-attention.
        """
        if self.talking_heads is not None:
            return "talking_heads_attention"
        if self.implementation is not None:
            return self.implementation

        def like(*shape):
            return jax.ShapeDtypeStruct(shape, dtype)

        N, K, H, V = self.sizes()
        bias = like(1, N, T, S) if positions == "relative" else None
        arrays = like(B, T, N, H), like(B, S, K, H), like(B, S, K, V)
        return attention.resolve_implementation(*arrays, bias)

    def softmax_parameters(self) -> dict[str, Float[Array, "N ..."]]:
        """Return the mixes of talking heads, or the sink, by argument name."""
        parameters = dict(self.talking_heads or {})
        if self.sink is not None:
            parameters["sink"] = self.sink
        return {name: param[...] for name, param in parameters.items()}

    def dropout_arguments(self, key: Key[Array, ""] | None) -> dict:
        """Return arguments for dropout of weights; empty without a key or a rate."""
        if key is None or not self.dropout:
            return {}
        seed = jax.random.bits(key, dtype=jnp.uint32)
        return {"dropout_rate": self.dropout, "dropout_seed": seed}

    def merged(
        self,
        heads: Float[Array, "B T N V"],
        x: Float[Array, "B T D"],
        gate: Float[Array, "*B N"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Multiply the heads by their gates, and apply the merge rule."""
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
        first: Float[Array, "B S K V"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
        **masks,
    ) -> Float[Array, "B T D"]:
        """Attend from x to the memory, or to x itself.

        Args:
            x: the layer's input.
            memory: the input of keys and values. Defaults to x.
            positions: positions by which to rotate queries and keys.
            gate: factor on each head's output, `N` or `B N`.
            observe: function that is called with `Intermediates`.
            first: values of the stack's first layer, for `value_residual`.
            dropout_key: key for dropout of weights and noise of learned gates. With
                None, there is neither.
            masks: bias and masks; see `attention.dot_product_attention`.
        """
        query = self.queries(x, positions)
        key, value = self.keys_values(x if memory is None else memory, positions, first)
        parameters = self.softmax_parameters()
        arguments = masks | parameters | self.dropout_arguments(dropout_key)
        attended = value if self.difference is None else variants.paired(value)
        largest = None
        arguments["implementation"] = self.implementation
        if self.talking_heads is not None:
            heads = attention.talking_heads_attention(query, key, attended, **arguments)
        else:
            arguments["return_statistics"] = self.qk_clip is not None
            heads = attention.dot_product_attention(query, key, attended, **arguments)
            if self.qk_clip is not None:
                heads, statistics = heads
                largest = statistics.max_logit.max(0)
        own_value = value if memory is None else None
        noise = None if dropout_key is None else jax.random.fold_in(dropout_key, 1)
        heads = self.transform_heads(heads, x, own_value, noise)
        if observe is not None:
            gated = attention.head_gated(heads, gate)
            factor = None if self.difference is None else self.difference.factor()
            rule, rule_arguments = self.rule()
            intermediates = Intermediates(
                query=query,
                key=key,
                masks=masks,
                parameters=parameters,
                heads=gated,
                x=x,
                rule=rule,
                arguments=rule_arguments,
                value=value,
                difference=factor,
                largest=largest,
                factors=self.element_factors(),
            )
            observe(intermediates)
        return self.merged(heads, x, gate)

    def element_factors(self) -> Float[Array, "*V"] | float:
        """Return the factors on a head's elements between attention and merge kernel.

        Factors on whole heads are left out. NaN with exclusive heads and with gates on
        elements, which may change the elements of different tokens differently.
        """
        gate = self.output_gate
        if (
            self.exclusive
            or (gate is not None and gate.size != "head")
            or self.merge_rule == "gated_elementwise"
        ):
            return float("nan")
        return 1.0 if self.difference is None else self.difference.norm.scale[...]

    @property
    def has_auxiliary(self) -> bool:
        """Whether `auxiliary` returns a nonempty dict."""
        is_value_source = self.value_residual and self.value_share is None
        return is_value_source or self.needs_penalty_or_logits

    @property
    def needs_penalty_or_logits(self) -> bool:
        """Whether training needs the layer's penalty or largest logits."""
        penalty = self.mixture_balance or self.gate_penalty
        return bool(penalty) or self.qk_clip is not None

    def auxiliary(self, intermediates: "Intermediates") -> dict:
        """Return what training needs from a layer in addition to its output.

        Returns:
            A dict with those of these keys that the layer's settings need. value: the
            first layer's values, for `value_residual` in the others. penalty: the
            load-balancing loss and the expected number of open gates, times their
            factors. largest: each head's largest logit.
        """
        results = {}
        if self.value_residual and self.value_share is None:
            results["value"] = intermediates.value
        if self.mixture_balance:
            arguments = {
                k: v for k, v in intermediates.arguments.items() if k != "kernel"
            }
            shares, chosen = intermediates.rule.routes(intermediates.x, **arguments)
            real = intermediates.masks["query_segment_ids"]
            loss = variants.balance_loss(shares, chosen, real)
            results["penalty"] = self.mixture_balance * loss
        if self.gate_penalty:
            count = variants.expected_heads(self.output_gate.kernel[...])
            results["penalty"] = results.get("penalty", 0) + self.gate_penalty * count
        if self.qk_clip is not None:
            results["largest"] = intermediates.largest
        return results

    def learned_gates(self) -> Float[Array, "N"] | None:
        """Return the values of "hard_concrete" gates, or None if there are none."""
        gate = self.output_gate
        if gate is None or gate.activation != variants.LEARNED:
            return None
        return variants.hard_concrete(gate.kernel[...])

    def clip(self, largest: Float[Array, "N"]) -> None:
        """Scale down heads whose largest logit exceeds `qk_clip` (QK clip, Kimi K2).

        A head's query and key kernels are each multiplied by the square root of
        `variants.clip_factor`. If several heads share a key, or its rotary part, the
        whole factor is applied to the query.
        """
        factor = variants.clip_factor(largest, self.qk_clip)
        key = self.key if self.latent is None else self.latent.key
        N, H, shared = self.query.shape[1], key.shape[2], key.shape[1] < len(factor)
        content_factor = factor if shared else jnp.sqrt(factor)
        # with a latent, only the first H elements of a query meet the head's own key
        is_content = jnp.arange(self.query.shape[2]) < H
        of_query = jnp.where(is_content, content_factor[:, None], factor[:, None])
        changes = [(self.query, of_query), (self.query_bias, of_query)]
        if not shared:
            of_key = jnp.broadcast_to(content_factor[:, None], (N, H))
            changes += [(key, of_key), (self.key_bias, of_key)]
        for param, scale in changes:
            if param is not None:
                param[...] = (param[...] * scale).astype(param.dtype)


def initializer(name: str, num_inputs: int, rank: int, gain: float = 1.0):
    """Return an initializer for arrays whose first `num_inputs` axes are inputs."""
    axes = tuple(range(rank))
    return nnx.initializers.variance_scaling(
        gain**2,
        INITS[name],
        "uniform",
        in_axis=axes[:num_inputs],
        out_axis=axes[num_inputs:],
    )


class Intermediates(NamedTuple):
    """Intermediate values of attention, for observing functions."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    masks: dict  # masks and bias; see `attention.dot_product_attention`
    parameters: dict  # see `Attention.softmax_parameters`
    heads: Float[Array, "B T N V"]  # inputs of the merge, times their gates
    x: Float[Array, "B T D"]  # the layer's input
    rule: attention.MergeRule
    arguments: dict  # of the rule: its parameters and settings
    value: Float[Array, "B S K V"] | None = None
    difference: Float[Array, ""] | None = None  # λ of differential attention
    largest: Float[Array, "N"] | None = None  # largest logits, with `qk_clip`
    factors: Float[Array, "*V"] | float = 1.0  # see `Attention.element_factors`

    @property
    def is_talking(self) -> bool:
        """Whether the maps of heads are mixed (`model.attention.talking_heads`)."""
        return "logits_mix" in self.parameters

    @property
    def is_distribution(self) -> bool:
        """Whether a head averages values: not with talking or differential heads."""
        return self.difference is None and not self.is_talking


def head_shape(
    width: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    value_dim: int | None,
    path: str,
) -> tuple[int, int, int]:
    """Return K, H and V, which default to N, D / N and D / N.

    Raises:
        ValueError: a size is invalid.
    """
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
