"""The Transformer (Vaswani et al. 2017): encoder, decoder, or both, in one module."""

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from headcount.configs.sites import SITES, at_site
from headcount.configs.validation import choose
from headcount.models.attention import Attention
from headcount.models.dropout import Dropout, dropout, fold
from headcount.models.layers import MLPS, NORM_TYPES, Layer, make_norm
from headcount.models.output_heads import Classifier, OutputTransform, Pooler
from headcount.models.positions import (
    BUCKETS,
    POSITIONS,
    SINUSOIDAL,
    alibi_bias,
    alibi_slopes,
    relative_bias,
    sinusoidal,
)
from headcount.models.precision import compute_dtype, lookup, rematerialize
from headcount.models.validation import check_clip, check_gates, check_layers

FEATURE = re.compile(r"source_features_\d+")  # a batch also has their segments


class Site(NamedTuple):
    """One kind of attention in the model, in all layers."""

    attentions: list[Attention]  # by layer
    queries: str  # field of the queries, "source" or "target"
    keys: str  # field of the keys and values
    is_causal: bool


class Transformer(nnx.Module):
    """Transformer with an encoder, a decoder, or both, and shared embeddings.

    Without decoder layers, it is an encoder-only model such as BERT, whose output is
    for source tokens. Without encoder layers, it is a decoder-only model such as GPT-2,
    without cross-attention.

    Args:
        vocab_size: size of the target or joint vocabulary.
        source_vocab_size: size of the source vocabulary; None if it is joint.
        width: D.
        num_encoder_layers, num_decoder_layers: numbers of layers.
        mlp_dim: F.
        mlp: "plain" or "gated"; see `models.layers.MLP`.
        dropout: default rate, if a call does not pass one.
        positions: a name in `models.positions.POSITIONS`.
        max_positions: number of "learned" positions. Later tokens use the last one.
        norm: "post" or "pre".
        norm_type: "layer_norm" or "rms_norm".
        norm_epsilon: added to the variance in norms over the model width, and of
            queries, keys and latents.
        use_bias: whether feed-forwards and norms have biases. Attention has its own
            `use_bias`.
        activation: a name in `models.layers.ACTIVATIONS`.
        scale_embeddings: whether to multiply token embeddings by sqrt(D).
        tie_embeddings: whether to use the embedding as the output table, too.
        embedding_norm: whether to apply a norm to the sum of the embeddings.
        token_types: number of types of source tokens, each with an embedding; see
            `source_types` in `__call__`. 0 for none. Encoder-only.
        pooler: whether to add the map of `pooled`. Encoder-only.
        output_transform: whether to apply a linear map, the activation and a norm
            before the output.
        output_bias: whether to add a bias to the logits.
        bos: id of the token that precedes the first target token.
        attention: arguments of `models.attention.Attention`.
        encoder_attention, decoder_attention, cross_attention: arguments that differ at
            one site; None where they don't.
        dtype: dtype that the model computes in; None chooses by the device. See
            `models.precision`.
        num_classes: C, the number of classes of a classifier; None for no classifier.
            Encoder-only.
        pooling: pooling of the classifier; see `models.output_heads.Classifier`.

    Raises:
        ValueError: a setting is unknown or does not fit. The error names the config
            key. Signs of sizes are checked by `configs.validation.check_values`.
    """

    def __init__(
        self,
        vocab_size: int,
        source_vocab_size: int | None = None,
        *,
        width: int,
        num_encoder_layers: int,
        num_decoder_layers: int,
        mlp_dim: int,
        mlp: str = "plain",
        dropout: float,
        positions: str,
        max_positions: int = 512,
        norm: str,
        norm_type: str = "layer_norm",
        norm_epsilon: float = 1e-6,
        use_bias: bool = True,
        activation: str = "relu",
        scale_embeddings: bool = True,
        tie_embeddings: bool = True,
        embedding_norm: bool = False,
        token_types: int = 0,
        pooler: bool = False,
        output_transform: bool = False,
        output_bias: bool = False,
        bos: int = 1,
        attention: dict,
        encoder_attention: dict | None = None,
        decoder_attention: dict | None = None,
        cross_attention: dict | None = None,
        dtype: str | None = None,
        num_classes: int | None = None,
        pooling: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.dtype = compute_dtype(dtype)
        choose("model.positions", positions, POSITIONS)
        choose("model.norm", norm, ("post", "pre"))
        choose("model.norm_type", norm_type, NORM_TYPES)
        choose("model.mlp", mlp, MLPS)
        if not 0 <= dropout < 1:
            raise ValueError(f"model.dropout must be from 0 to below 1, got {dropout}.")
        encoder_only = {"token_types": token_types, "pooler": pooler}
        overrides = {
            "encoder": encoder_attention,
            "decoder": decoder_attention,
            "cross": cross_attention,
        }
        check_layers(num_encoder_layers, num_decoder_layers, encoder_only, overrides)
        self.dropout = dropout
        self.width = width
        self.bos = bos
        self.scale = width**0.5 if scale_embeddings else 1.0
        self.positions = positions
        self.max_positions = max_positions
        init = nnx.initializers.normal(width**-0.5)

        def table(rows, axes):
            return nnx.Param(init(rngs.params(), (rows, width)), axes=axes)

        self.embedding = table(vocab_size, "vocab D")
        self.source_embedding = (
            None if source_vocab_size is None else table(source_vocab_size, "vocab D")
        )

        arguments = {
            site: attention_arguments(site, attention, overrides[site])
            | {"rotary": positions == "rotary" and site != "cross"}
            | {"is_cross": site == "cross", "norm_epsilon": norm_epsilon}
            for site in SITES
        }
        stacks = {"encoder": num_encoder_layers, "decoder": num_decoder_layers}
        check_clip(positions, {x: arguments[x] for x, count in stacks.items() if count})
        a_norm = partial(make_norm, width, norm_type, norm_epsilon, use_bias)

        def layers(site, cross):
            return nnx.List(
                Layer(
                    width,
                    mlp_dim,
                    norm=norm,
                    make_norm=a_norm,
                    activation=activation,
                    gated=mlp == "gated",
                    use_bias=use_bias,
                    self_attention=arguments[site] | {"layer": number},
                    cross_attention=cross and cross | {"layer": number},
                    rngs=rngs,
                )
                for number in range(stacks[site])
            )

        self.encoder = layers("encoder", None)
        self.decoder = layers("decoder", arguments["cross"] if self.encoder else None)
        for site, attention_site in self.sites().items():
            if arguments[site].get("knocking_shared"):
                for later in attention_site.attentions[1:]:
                    later.knocking = attention_site.attentions[0].knocking

        def position_table(site):
            if positions == "learned":
                return table(max_positions, "positions D")
            if positions == "relative":
                shape = BUCKETS, arguments[site]["num_heads"]
                return nnx.Param(jnp.zeros(shape), axes="buckets heads")
            return None

        def norms(enabled):
            return [
                a_norm(rngs=rngs) if enabled and count else None
                for count in stacks.values()
            ]

        self.encoder_positions, self.decoder_positions = (
            position_table(site) if count else None for site, count in stacks.items()
        )
        # a pre-norm stack needs a final norm, because its layers end with a sum
        self.encoder_norm, self.decoder_norm = norms(norm == "pre")
        self.encoder_embedding_norm, self.decoder_embedding_norm = norms(embedding_norm)
        self.types = table(token_types, "types D") if token_types else None
        self.pooler = Pooler(width, rngs=rngs) if pooler else None
        self.output_transform = (
            OutputTransform(width, activation, a_norm, rngs=rngs)
            if output_transform
            else None
        )
        self.output_bias = (
            nnx.Param(jnp.zeros(vocab_size), axes="vocab") if output_bias else None
        )
        self.output_table = None if tie_embeddings else table(vocab_size, "vocab D")
        self.classifier = (
            Classifier(width, num_classes, pooling, rngs=rngs) if num_classes else None
        )

    def sites(self) -> dict[str, Site]:
        """Return the model's attention sites by name."""
        sites = {}
        if self.encoder:
            layers = [layer.self_attention for layer in self.encoder]
            sites["encoder"] = Site(layers, "source", "source", False)
        if self.decoder:
            layers = [layer.self_attention for layer in self.decoder]
            sites["decoder"] = Site(layers, "target", "target", True)
        if self.encoder and self.decoder:
            layers = [layer.cross_attention for layer in self.decoder]
            sites["cross"] = Site(layers, "target", "source", False)
        return sites

    def embed(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        num_positions: int,
        *,
        is_source: bool = False,
        types: Int[Array, "B T"] | None = None,
        features: tuple[Int[Array, "B T"], ...] = (),
    ) -> Float[Array, "B T D"]:
        """Compute scaled token embeddings plus position encodings.

        Args:
            tokens: ids of the tokens.
            positions: positions of the tokens, below `num_positions`.
            num_positions: size of the table of sinusoidal positions.
            is_source: whether to embed for the encoder.
            types: types of the tokens, if the model has types. Defaults to 0.
            features: further ids of each token. The embeddings of all ids of a token
                are summed, and divided by the square root of their number.
        """
        embedding = self.source_embedding if is_source else None
        embedding = self.embedding if embedding is None else embedding
        table = embedding[...]
        if is_source:
            # otherwise, XLA concatenates the gradients for source and target tokens,
            # which moves tokens between devices
            table = jax.lax.optimization_barrier(table)
        if features:
            ids = jnp.stack((tokens, *features), axis=-1)
            x = lookup(table, ids).sum(-2) * (self.scale / ids.shape[-1] ** 0.5)
        else:
            x = lookup(table, tokens) * self.scale
        if self.positions in SINUSOIDAL:
            table = sinusoidal(num_positions, self.width, self.positions)
            x = x + jnp.asarray(table, x.dtype)[positions]
        if self.positions == "learned":
            table = self.encoder_positions if is_source else self.decoder_positions
            x = x + lookup(table[...], jnp.minimum(positions, self.max_positions - 1))
        if self.types is not None:
            types = jnp.zeros_like(tokens) if types is None else types
            x = x + lookup(self.types[...], types)
        norms = self.encoder_embedding_norm, self.decoder_embedding_norm
        norm = norms[0 if is_source else 1]
        return x if norm is None else norm(x)

    def position_arguments(
        self, positions: Int[Array, "B T"], *, is_source: bool
    ) -> dict:
        """Return the arguments of self-attention that encode positions.

        Depending on the model, these are `positions`, `bias` (1 N T T), `alibi_slopes`
        (N), or none.
        """
        if self.positions == "rotary":
            return {"positions": positions}
        # within a segment, differences of indices equal those of positions
        if self.positions == "alibi":
            slopes = alibi_slopes(self.num_heads(is_source=is_source))
            return {"alibi_slopes": jnp.asarray(slopes)}
        if self.positions == "relative":
            index = jnp.arange(positions.shape[1])
            distance = index - index[:, None]
            return {"bias": self.position_bias(distance, is_source=is_source)[None]}
        return {}

    @property
    def has_auxiliary(self) -> bool:
        """Whether `hidden` adds anything to `auxiliary`."""
        layers = [x for site in self.sites().values() for x in site.attentions]
        return any(attention.needs_penalty_or_logits for attention in layers)

    def num_heads(self, *, is_source: bool) -> int:
        """Return the number of heads N of self-attention."""
        layer = (self.encoder if is_source else self.decoder)[0]
        return layer.self_attention.query.shape[1]

    def position_bias(
        self, distance: Int[Array, "*X"], *, is_source: bool
    ) -> Float[Array, "N *X"]:
        """Return self-attention's bias for distances between key and query."""
        if self.positions == "alibi":
            return alibi_bias(self.num_heads(is_source=is_source), distance)
        table = self.encoder_positions if is_source else self.decoder_positions
        return relative_bias(table[...], distance, is_causal=not is_source)

    def encode(self, batch: dict, **options) -> Float[Array, "B S D"]:
        """Return the encoder's output.

        Args:
            batch: see `__call__`.
            options: dropout, and other arguments of `stack`.
        """
        x = self.embed(
            batch["source"],
            batch["source_positions"],
            batch["source"].shape[1],
            is_source=True,
            types=batch.get("source_types"),
            features=tuple(batch[k] for k in sorted(batch) if FEATURE.fullmatch(k)),
        )
        return self.stack(x, None, batch, is_source=True, **options)

    def decode(
        self, memory: Float[Array, "B S D"] | None, batch: dict, **options
    ) -> Float[Array, "B T D"]:
        """Return the decoder's output for each target token, given earlier tokens.

        Args:
            memory: the encoder's output; None without an encoder.
            batch, options: see `encode`.
        """
        inputs, positions = batch.get("target_inputs"), batch["target_positions"]
        if inputs is None:
            inputs = shift_right(batch["target"], positions, self.bos)
        x = self.embed(inputs, positions, inputs.shape[1])
        return self.stack(x, memory, batch, is_source=False, **options)

    def stack(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"] | None,
        batch: dict,
        *,
        is_source: bool,
        drop: Dropout | None = None,
        head_gates: dict | None = None,
        observe: dict | None = None,
        remat: str = "none",
        auxiliary: dict | None = None,
    ) -> Float[Array, "B T D"]:
        """Apply the layers of the encoder or the decoder to embedded tokens.

        Args:
            x: the embedded tokens.
            memory: see `decode`.
            batch: see `__call__`.
            is_source: whether to apply the encoder.
            drop: dropout of this stack.
            head_gates, observe, remat, auxiliary: see `hidden`.
        """
        if is_source:
            layers, norm, side = self.encoder, self.encoder_norm, "source"
            sites = {"self": "encoder"}
        else:
            layers, norm, side = self.decoder, self.decoder_norm, "target"
            sites = {"self": "decoder", "cross": "cross"}
        x = dropout(x, drop, 0)
        positions = batch[f"{side}_positions"]
        arguments = self.position_arguments(positions, is_source=is_source)
        first = {}
        for index, layer in enumerate(layers):
            x, layer_auxiliary = rematerialize(
                remat,
                layer,
                x,
                memory,
                segments=batch[f"{side}_segments"],
                memory_segments=batch.get("source_segments"),
                is_causal=not is_source,
                position_arguments=arguments,
                gates=layer_gates(head_gates, index, **sites),
                drop=fold(drop, 1 + index),
                observe=select(observe, **sites),
                first=first,
            )
            first = first or first_values(layer_auxiliary)
            collect(auxiliary, layer_auxiliary, **sites)
        return x if norm is None else norm(x)

    def output(
        self, hidden: Float[Array, "*B D"]
    ) -> tuple[Float[Array, "*B features"], Float[Array, "vocab features"]]:
        """Return features and a table whose product are the logits.

        A bias is appended to the table as a column, with 1 as its feature.
        """
        table = self.embedding if self.output_table is None else self.output_table
        table = table[...]
        if self.output_transform is not None:
            hidden = self.output_transform(hidden)
        if self.output_bias is not None:
            ones = jnp.ones_like(hidden[..., :1])
            hidden = jnp.concatenate([hidden, ones], axis=-1)
            table = jnp.concatenate([table, self.output_bias[...][:, None]], axis=1)
        return hidden, table

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B vocab"]:
        """Compute the logits of all tokens of the vocabulary, in float32."""
        features, table = self.output(hidden)
        return jnp.matmul(features, table.T, preferred_element_type=jnp.float32)

    def class_logits(self, batch: dict, **options) -> Float[Array, "B S C"]:
        """Compute the logits of classes, for an encoder with `num_classes`.

        Dropout precedes the classifier, as in BERT. If the classifier reads the first
        token of each segment, that token passes through the `pooler`, if there is one.

        Args:
            batch, options: see `hidden`.
        """
        rate, key = options.get("rate"), options.get("key")
        rate = self.dropout if rate is None else rate
        drop = fold(None if key is None else (rate, key), 2)
        hidden = self.hidden(batch, **options)
        return self.classes(hidden, batch["source_segments"], drop)

    def classes(
        self, hidden: Float[Array, "B S D"], segments: Int[Array, "B S"], drop=None
    ) -> Float[Array, "B S C"]:
        """Compute the logits of classes from the encoder's output."""
        vectors = self.classifier.pool(hidden, segments)
        if self.pooler is not None and self.classifier.pooling == "first":
            vectors = self.pooler(vectors)
        return self.classifier.logits(dropout(vectors, drop, 0))

    def head_gates(self) -> dict[str, Float[Array, "L N"]]:
        """Return a gate of 1 for every head of every layer, by site."""
        return {
            name: jnp.ones((len(site.attentions), site.attentions[0].num_merged_heads))
            for name, site in self.sites().items()
        }

    def hidden(
        self,
        batch: dict,
        *,
        rate: Float[Array, ""] | float | None = None,
        key=None,
        head_gates: dict | None = None,
        observe: dict | None = None,
        remat: str = "none",
        auxiliary: dict | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the last layer's output for the target, or the source if encoder-only.

        Args:
            batch, rate, key, head_gates: see `__call__`.
            observe: functions by site, called for each layer in turn with its
                `Intermediates`; see `Attention`.
            remat: what the backward pass recomputes; see `models.precision`.
            auxiliary: a dict to which to add nonempty results of `Attention.auxiliary`,
                as lists over layers, by site.
        """
        check_gates(head_gates, self.head_gates())
        rate = self.dropout if rate is None else rate
        drop = None if key is None else (rate, key)
        options = {"head_gates": head_gates, "observe": observe}
        options |= {"remat": remat, "auxiliary": auxiliary}
        memory = None
        if self.encoder:
            memory = self.encode(batch, drop=fold(drop, 0), **options)
        if not self.decoder:
            return memory
        return self.decode(memory, batch, drop=fold(drop, 1), **options)

    def __call__(
        self,
        batch: dict,
        *,
        rate: Float[Array, ""] | float | None = None,
        key=None,
        head_gates: dict | None = None,
    ) -> Float[Array, "B T vocab"]:
        """Compute the logits of every target token of a batch of (packed) rows.

        For an encoder-only model, compute those of every source token.

        Args:
            batch: int arrays `source`, `source_segments`, `source_positions` (B S) and
                `target`, `target_segments`, `target_positions` (B T), where `target`
                holds the labels and segment 0 is padding. Encoder-only and decoder-only
                models need only their own three arrays. Optional: `source_types` (B S);
                `source_features_0`, ... (B S), see `embed`; and `target_inputs` (B T),
                which the decoder reads instead of the target shifted by one.
            rate: dropout rate. Defaults to the model's own.
            key: key for dropout; None for no dropout.
            head_gates: factors on each head's output, as arrays by site: one per layer
                and head, L N, or also per row of the batch, L B N. Missing sites have
                gates of 1; 0 removes a head. `head_gates()` returns ones.
        """
        return self.logits(
            self.hidden(batch, rate=rate, key=key, head_gates=head_gates)
        )


def attention_arguments(site: str, attention: dict, overrides: dict | None) -> dict:
    """Return a site's arguments of `Attention`; its own override the shared ones."""
    has_own = any(value is not None for value in (overrides or {}).values())
    path = f"model.{site}_attention" if has_own else "model.attention"
    return at_site(attention, overrides) | {"path": path}


def layer_gates(head_gates: dict | None, layer: int, **sites: str) -> dict:
    """Return a layer's gates by `self` and `cross`, given gates by site."""
    return {k: gates[layer] for k, gates in select(head_gates, **sites).items()}


def select(by_site: dict | None, **sites: str) -> dict:
    """Rename the entries that exist by site, as in select(x, self="encoder")."""
    by_site = by_site or {}
    return {name: by_site[site] for name, site in sites.items() if site in by_site}


def first_values(by_place: dict) -> dict:
    """Return the first layer's values by place, from its auxiliary results."""
    return {
        place: results["value"]
        for place, results in by_place.items()
        if "value" in results
    }


def collect(auxiliary: dict | None, by_place: dict, **sites: str) -> None:
    """Append a layer's auxiliary results by place to lists by site, except values."""
    for place, results in by_place.items():
        results = {name: value for name, value in results.items() if name != "value"}
        if auxiliary is not None and results:
            auxiliary.setdefault(sites[place], []).append(results)


def implementations(model: Transformer, spec: dict) -> dict[str, str]:
    """Return the attention implementation that each site runs for a batch spec."""
    chosen = {}
    for name, site in model.sites().items():
        B, T = spec[site.queries].shape
        S = spec[site.keys].shape[1]
        positions = None if name == "cross" else model.positions
        chosen[name] = site.attentions[0].resolve(
            B, T, S, dtype=model.dtype, positions=positions
        )
    return chosen


def shift_right(
    target: Int[Array, "B T"], positions: Int[Array, "B T"], bos: int
) -> Int[Array, "B T"]:
    """Return the decoder's input: the previous token, and `bos` at position 0."""
    return jnp.where(positions == 0, bos, jnp.roll(target, 1, axis=1))
