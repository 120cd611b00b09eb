"""The Transformer (Vaswani et al. 2017): both stacks, or one of them; one module."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from headcount.models.checks import check_gates, check_layers, check_rotary, choose
from headcount.models.dropout import Dropout, dropout, fold
from headcount.models.layers import Layer, OutputTransform, Pooler, layer_norm
from headcount.models.output_heads import Classifier
from headcount.models.positions import (
    BUCKETS,
    POSITIONS,
    SINUSOIDAL,
    relative_bias,
    sinusoidal,
)
from headcount.models.precision import apply, compute_dtype, lookup
from headcount.models.sites import at_site, gates_of, watch_of


class Transformer(nnx.Module):
    """Encoder, decoder, and one embedding for both of them and for the output.

    Without decoder layers it is an encoder alone, as BERT, whose output is of the
    source; without encoder layers a decoder without cross-attention, as GPT-2.

    Args:
        vocab_size: pieces of the target's vocabulary, or of the joint one.
        source_vocab_size: pieces of the source's where it has its own; None: joint.
        width: D.
        num_encoder_layers, num_decoder_layers: how many of each.
        mlp_dim: F.
        dropout: rate, where the call names none.
        positions: a name in `models.positions.POSITIONS`.
        max_positions: rows of the table of "learned" positions; later tokens have the
            last.
        norm: "post" or "pre".
        norm_epsilon: of every layer norm, added to the variance.
        activation: a name in `models.layers.ACTIVATIONS`.
        scale_embeddings: multiply the token embeddings by sqrt(D).
        embedding_norm: a layer norm after the sum of the embeddings.
        token_types: kinds of source tokens that have an embedding each, see
            `source_types` of a batch; 0: none. Encoder-only.
        pooler: the map from the first token of `pooled`. Encoder-only.
        output_transform: a linear map, the activation and a norm before the output.
        output_bias: a number a piece, added to the logits.
        bos: id of the token that stands before the first of the target.
        attention: arguments of `models.attention.Attention`.
        encoder_attention, decoder_attention, cross_attention: those in which the
            encoder's self-, the decoder's self- or its cross-attention differs; None
            where it doesn't.
        num_classes: C, of an output head for classes; None: none. Encoder-only.
        pooling: of that head; see `models.output_heads.Classifier`.
        dtype: that `models.precision.merge` has it compute in; None: by the device.

    Raises:
        ValueError: a setting that is unknown or does not fit, by its config key. That
            sizes are positive is left to `models.checks.check_counts`.
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
        dropout: float,
        positions: str,
        max_positions: int = 512,
        norm: str,
        norm_epsilon: float = 1e-6,
        activation: str = "relu",
        scale_embeddings: bool = True,
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
        if not 0 <= dropout < 1:
            raise ValueError(f"model.dropout must be from 0 to below 1, got {dropout}.")
        encoder_only = {"token_types": token_types, "pooler": pooler}
        check_layers(num_encoder_layers, num_decoder_layers, encoder_only)
        self.dropout = dropout
        self.width = width
        self.bos = bos
        self.scale = width**0.5 if scale_embeddings else 1.0
        self.positions = positions
        self.max_positions = max_positions
        init = nnx.initializers.normal(width**-0.5)
        self.embedding = nnx.Param(init(rngs.params(), (vocab_size, width)))
        if source_vocab_size is None:
            self.source_embedding = None
        else:
            shape = (source_vocab_size, width)
            self.source_embedding = nnx.Param(init(rngs.params(), shape))

        own = {
            "encoder": encoder_attention,
            "decoder": decoder_attention,
            "cross": cross_attention,
        }
        heads = {site: at_site(site, attention, own[site]) for site in own}
        stacks = {"encoder": num_encoder_layers, "decoder": num_decoder_layers}

        def layers(site, cross):
            return nnx.List(
                Layer(
                    width,
                    mlp_dim,
                    norm=norm,
                    norm_epsilon=norm_epsilon,
                    activation=activation,
                    self_attention=heads[site],
                    cross_attention=cross,
                    rngs=rngs,
                )
                for _ in range(stacks[site])
            )

        self.encoder = layers("encoder", None)
        self.decoder = layers("decoder", heads["cross"] if self.encoder else None)
        if positions == "rotary":
            check_rotary(self.encoder, heads["encoder"]["path"])
            check_rotary(self.decoder, heads["decoder"]["path"])

        def table(site):
            """What a stack learns about positions."""
            if positions == "learned":
                return nnx.Param(init(rngs.params(), (max_positions, width)))
            if positions == "relative":
                return nnx.Param(jnp.zeros((BUCKETS, heads[site]["num_heads"])))
            return None

        def norms(wanted):
            return [
                layer_norm(width, norm_epsilon, rngs) if wanted and count else None
                for count in stacks.values()
            ]

        self.encoder_positions, self.decoder_positions = (
            table(site) if count else None for site, count in stacks.items()
        )
        # a pre-norm stack ends without a norm of its own
        self.encoder_norm, self.decoder_norm = norms(norm == "pre")
        self.encoder_embedding_norm, self.decoder_embedding_norm = norms(embedding_norm)
        shape = (token_types, width)
        self.types = nnx.Param(init(rngs.params(), shape)) if token_types else None
        self.pooler = Pooler(width, rngs=rngs) if pooler else None
        made = partial(OutputTransform, width, activation, norm_epsilon, rngs=rngs)
        self.output_transform = made() if output_transform else None
        self.output_bias = nnx.Param(jnp.zeros(vocab_size)) if output_bias else None
        self.classifier = (
            Classifier(width, num_classes, pooling, rngs=rngs) if num_classes else None
        )

    def embed(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        num_positions: int,
        *,
        is_source: bool = False,
        types: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Scaled token embeddings plus positions, which are below num_positions.

        `types` are the tokens', where the model knows types; None: all are of type 0.
        """
        embedding = self.source_embedding if is_source else None
        embedding = self.embedding if embedding is None else embedding
        table = embedding[...]
        if is_source:
            # or XLA makes one list of the gradients of both sides' tokens, and moves
            # tokens between devices for it
            table = jax.lax.optimization_barrier(table)
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

    def where(self, positions: Int[Array, "B T"], *, is_source: bool) -> dict:
        """What self-attention knows of positions: to rotate by, or a bias `1 N T T`."""
        if self.positions == "rotary":
            return {"positions": positions}
        if self.positions == "relative":
            table = self.encoder_positions if is_source else self.decoder_positions
            # Within a sentence the distance of indices is that of positions.
            index = jnp.arange(positions.shape[1])
            distance = index - index[:, None]
            bias = relative_bias(table[...], distance, is_causal=not is_source)
            return {"bias": bias[None]}
        return {}

    def encode(
        self,
        source: Int[Array, "B S"],
        segments: Int[Array, "B S"],
        positions: Int[Array, "B S"],
        drop: Dropout | None = None,
        head_gates: dict | None = None,
        watch: dict | None = None,
        types: Int[Array, "B S"] | None = None,
        remat: str = "none",
    ) -> Float[Array, "B S D"]:
        """The memory that the decoder looks at; see `hidden`."""
        x = self.embed(source, positions, source.shape[1], is_source=True, types=types)
        x = dropout(x, drop, 0)
        where = self.where(positions, is_source=True)
        for index, layer in enumerate(self.encoder):
            x = apply(
                remat,
                layer,
                x,
                segments=segments,
                where=where,
                gates=gates_of(head_gates, index, self="encoder"),
                drop=fold(drop, 1 + index),
                watch=watch_of(watch, self="encoder"),
            )
        return x if self.encoder_norm is None else self.encoder_norm(x)

    def decode(
        self,
        memory: Float[Array, "B S D"] | None,
        memory_segments: Int[Array, "B S"] | None,
        target: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        drop: Dropout | None = None,
        head_gates: dict | None = None,
        watch: dict | None = None,
        remat: str = "none",
        inputs: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """What is known before each target token: causal in the tokens before it.

        Without an encoder there is no memory; see `hidden`. The inputs are by default
        the target shifted by one, with BOS at the start of each segment.
        """
        if inputs is None:
            inputs = shift_right(target, positions, self.bos)
        x = self.embed(inputs, positions, target.shape[1])
        x = dropout(x, drop, 0)
        where = self.where(positions, is_source=False)
        for index, layer in enumerate(self.decoder):
            x = apply(
                remat,
                layer,
                x,
                memory,
                segments=segments,
                memory_segments=memory_segments,
                is_causal=True,
                where=where,
                gates=gates_of(head_gates, index, self="decoder", cross="cross"),
                drop=fold(drop, 1 + index),
                watch=watch_of(watch, self="decoder", cross="cross"),
            )
        return x if self.decoder_norm is None else self.decoder_norm(x)

    def output(
        self, hidden: Float[Array, "*B D"]
    ) -> tuple[Float[Array, "*B features"], Float[Array, "vocab features"]]:
        """Features and table whose products are the logits; the table is the embedding.

        A bias is a column of the table, whose feature is 1.
        """
        table = self.embedding[...]
        if self.output_transform is not None:
            hidden = self.output_transform(hidden)
        if self.output_bias is not None:
            one = jnp.ones_like(hidden[..., :1])
            hidden = jnp.concatenate([hidden, one], axis=-1)
            table = jnp.concatenate([table, self.output_bias[...][:, None]], axis=1)
        return hidden, table

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B vocab"]:
        """Scores of every piece, float32; the embedding serves as the output kernel."""
        features, table = self.output(hidden)
        return jnp.matmul(features, table.T, preferred_element_type=jnp.float32)

    def class_logits(self, batch: dict, **options) -> Float[Array, "B S C"]:
        """Return the logits of classes of an encoder with `num_classes`.

        Args:
            batch, options: see `hidden`.
        """
        return self.classifier(self.hidden(batch, **options), batch["source_segments"])

    def pooled(self, hidden: Float[Array, "B S D"]) -> Float[Array, "B D"]:
        """tanh of a linear map of each row's first token, as BERT.

        Raises:
            ValueError: the model has no pooler.
        """
        if self.pooler is None:
            raise ValueError("pooled needs a model with model.pooler=True.")
        return self.pooler(hidden)

    def head_gates(self) -> dict[str, Float[Array, "L N"]]:
        """A gate of 1 for every head of every layer, by site."""
        sites = {
            "encoder": [layer.self_attention for layer in self.encoder],
            "decoder": [layer.self_attention for layer in self.decoder],
            "cross": [layer.cross_attention for layer in self.decoder if self.encoder],
        }
        return {
            site: jnp.ones((len(layers), layers[0].query.shape[1]))
            for site, layers in sites.items()
            if layers
        }

    def hidden(
        self,
        batch: dict,
        *,
        rate: Float[Array, ""] | float | None = None,
        key=None,
        head_gates: dict | None = None,
        watch: dict | None = None,
        remat: str = "none",
    ) -> Float[Array, "B T D"]:
        """The last layer's output: the target's, or without a decoder the source's.

        Args:
            batch, rate, key, head_gates: see `__call__`.
            watch: functions by site, `encoder`, `decoder` and `cross`, or some of them,
                called for each layer in turn: see `Attention`.
            remat: what the gradient computes again, see `models.precision`.
        """
        check_gates(head_gates, self.head_gates())
        rate = self.dropout if rate is None else rate
        drop = None if key is None else (rate, key)
        memory = None
        if self.encoder:
            memory = self.encode(
                batch["source"],
                batch["source_segments"],
                batch["source_positions"],
                fold(drop, 0),
                head_gates,
                watch,
                batch.get("source_types"),
                remat,
            )
        if not self.decoder:
            return memory
        return self.decode(
            memory,
            batch["source_segments"] if self.encoder else None,
            batch["target"],
            batch["target_segments"],
            batch["target_positions"],
            fold(drop, 1),
            head_gates,
            watch,
            remat,
            batch.get("target_inputs"),
        )

    def __call__(
        self,
        batch: dict,
        *,
        rate: Float[Array, ""] | float | None = None,
        key=None,
        head_gates: dict | None = None,
    ) -> Float[Array, "B T vocab"]:
        """Logits of every target token of a batch of (packed) rows.

        Without a decoder they are of every source token.

        Args:
            batch: int arrays `source`, `source_segments`, `source_positions` (B S) and
                `target`, `target_segments`, `target_positions` (B T), where `target`
                holds the labels and segment 0 is padding. One stack needs its own
                three alone. `source_types` (B S) may be added with token types.
            rate: dropout rate; None: the model's own.
            key: of dropout; None: no dropout.
            head_gates: what each head's output is multiplied by: arrays `encoder`,
                `decoder` and `cross`, of a number a layer and head, L N, or for each
                row of the batch, L B N; 1 for sites that are left out. Zero removes
                a head. `head_gates()` gives ones.
        """
        return self.logits(
            self.hidden(batch, rate=rate, key=key, head_gates=head_gates)
        )


def shift_right(
    target: Int[Array, "B T"], positions: Int[Array, "B T"], bos: int
) -> Int[Array, "B T"]:
    """The decoder's input: the token before, at a sentence's first position `bos`."""
    return jnp.where(positions == 0, bos, jnp.roll(target, 1, axis=1))
