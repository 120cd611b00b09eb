"""The encoder-decoder Transformer of Vaswani et al. 2017, one module."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from models.layers import Dropout, Layer, choose, dropout
from models.positions import POSITIONS

BOS = 1  # the token before the first, see data/tokenizer.py


class Transformer(nnx.Module):
    """Encoder, decoder, and one embedding for both of them and for the output.

    Args:
        vocab_size: pieces of the target's vocabulary, or of the joint one.
        source_vocab_size: pieces of the source's where it has its own; None: joint.
        width: D.
        num_encoder_layers, num_decoder_layers: how many of each.
        mlp_dim: F.
        dropout: rate, where the call names none.
        positions: a name in `models.positions.POSITIONS`.
        norm: "post" or "pre".
        attention: arguments of `models.layers.Attention`.

    Raises:
        ValueError: a setting that is unknown or does not fit, by its config key.
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
        norm: str,
        attention: dict,
        rngs: nnx.Rngs,
    ):
        choose("model.positions", positions, POSITIONS)
        choose("model.norm", norm, ("post", "pre"))
        if not 0 <= dropout < 1:
            raise ValueError(f"model.dropout must be from 0 to below 1, got {dropout}.")
        self.dropout = dropout
        self.width = width
        self.position_table = POSITIONS[positions]
        init = nnx.initializers.normal(width**-0.5)
        self.embedding = nnx.Param(init(rngs.params(), (vocab_size, width)))
        if source_vocab_size is None:
            self.source_embedding = None
        else:
            shape = (source_vocab_size, width)
            self.source_embedding = nnx.Param(init(rngs.params(), shape))

        def layers(count, cross):
            return nnx.List(
                Layer(
                    width,
                    mlp_dim,
                    norm=norm,
                    attention=dict(attention),
                    cross=cross,
                    rngs=rngs,
                )
                for _ in range(count)
            )

        self.encoder = layers(num_encoder_layers, False)
        self.decoder = layers(num_decoder_layers, True)

        def final_norm():  # a pre-norm stack ends without a norm of its own
            return nnx.LayerNorm(width, rngs=rngs) if norm == "pre" else None

        self.encoder_norm, self.decoder_norm = final_norm(), final_norm()

    def embed(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        num_positions: int,
        embedding: nnx.Param | None = None,
    ) -> Float[Array, "B T D"]:
        """Scaled token embeddings plus positions, which are below num_positions.

        `embedding` is the target's unless given.
        """
        table = jnp.asarray(self.position_table(num_positions, self.width))
        embedding = self.embedding if embedding is None else embedding
        return embedding[...][tokens] * self.width**0.5 + table[positions]

    def encode(
        self,
        source: Int[Array, "B S"],
        segments: Int[Array, "B S"],
        positions: Int[Array, "B S"],
        drop: Dropout | None = None,
    ) -> Float[Array, "B S D"]:
        """The memory that the decoder looks at."""
        x = self.embed(source, positions, source.shape[1], self.source_embedding)
        x = dropout(x, drop, 0)
        for index, layer in enumerate(self.encoder):
            x = layer(x, segments=segments, drop=fold(drop, 1 + index))
        return x if self.encoder_norm is None else self.encoder_norm(x)

    def decode(
        self,
        memory: Float[Array, "B S D"],
        memory_segments: Int[Array, "B S"],
        target: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        drop: Dropout | None = None,
        maps: list | None = None,
    ) -> Float[Array, "B T D"]:
        """What is known before each target token: causal in the tokens before it.

        The cross-attention of every layer, B N T S, is appended to `maps` if given.
        """
        inputs = shift_right(target, positions)
        x = self.embed(inputs, positions, target.shape[1])
        x = dropout(x, drop, 0)
        for index, layer in enumerate(self.decoder):
            x = layer(
                x,
                memory,
                segments=segments,
                memory_segments=memory_segments,
                drop=fold(drop, 1 + index),
                maps=maps,
            )
        return x if self.decoder_norm is None else self.decoder_norm(x)

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B vocab"]:
        """Scores of every piece; the embedding serves as the output kernel."""
        return hidden @ self.embedding[...].T

    def hidden(
        self, batch: dict, *, rate: Float[Array, ""] | float | None = None, key=None
    ) -> Float[Array, "B T D"]:
        """Encode and decode a batch; with a key, with dropout."""
        rate = self.dropout if rate is None else rate
        drop = None if key is None else (rate, key)
        memory = self.encode(
            batch["source"],
            batch["source_segments"],
            batch["source_positions"],
            fold(drop, 0),
        )
        return self.decode(
            memory,
            batch["source_segments"],
            batch["target"],
            batch["target_segments"],
            batch["target_positions"],
            fold(drop, 1),
        )

    def __call__(
        self, batch: dict, *, rate: Float[Array, ""] | float | None = None, key=None
    ) -> Float[Array, "B T vocab"]:
        """Logits of every target token of a batch of (packed) rows.

        Args:
            batch: int arrays `source`, `source_segments`, `source_positions` (B S) and
                `target`, `target_segments`, `target_positions` (B T), where `target`
                holds the labels and segment 0 is padding.
            rate: dropout rate; None: the model's own.
            key: of dropout; None: no dropout.
        """
        return self.logits(self.hidden(batch, rate=rate, key=key))


def shift_right(
    target: Int[Array, "B T"], positions: Int[Array, "B T"]
) -> Int[Array, "B T"]:
    """The decoder's input: the token before, at a sentence's first position BOS."""
    return jnp.where(positions == 0, BOS, jnp.roll(target, 1, axis=1))


def fold(drop: Dropout | None, index: int) -> Dropout | None:
    """Dropout for a part of the model, independent of the other parts'."""
    return None if drop is None else (drop[0], jax.random.fold_in(drop[1], index))


def num_parameters(params) -> int:
    """Count the numbers in a tree of (abstract) arrays."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
