"""The encoder-decoder Transformer of Vaswani et al. 2017, one module."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from models.dropout import Dropout, dropout, fold
from models.layers import Layer, choose
from models.positions import BUCKETS, POSITIONS, relative_bias, sinusoidal

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
        max_positions: rows of the table of "learned" positions; later tokens have the
            last.
        norm: "post" or "pre".
        attention: arguments of `models.layers.Attention`.
        encoder_attention, decoder_attention, cross_attention: those in which the
            encoder's self-, the decoder's self- or its cross-attention differs; None
            where it doesn't.

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
        max_positions: int = 512,
        norm: str,
        attention: dict,
        encoder_attention: dict | None = None,
        decoder_attention: dict | None = None,
        cross_attention: dict | None = None,
        rngs: nnx.Rngs,
    ):
        choose("model.positions", positions, POSITIONS)
        choose("model.norm", norm, ("post", "pre"))
        if not 0 <= dropout < 1:
            raise ValueError(f"model.dropout must be from 0 to below 1, got {dropout}.")
        self.dropout = dropout
        self.width = width
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

        def layers(count, site, cross):
            return nnx.List(
                Layer(
                    width,
                    mlp_dim,
                    norm=norm,
                    self_attention=heads[site],
                    cross_attention=cross,
                    rngs=rngs,
                )
                for _ in range(count)
            )

        self.encoder = layers(num_encoder_layers, "encoder", None)
        self.decoder = layers(num_decoder_layers, "decoder", heads["cross"])
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

        self.encoder_positions, self.decoder_positions = map(
            table, ("encoder", "decoder")
        )

        def final_norm():  # a pre-norm stack ends without a norm of its own
            return nnx.LayerNorm(width, rngs=rngs) if norm == "pre" else None

        self.encoder_norm, self.decoder_norm = final_norm(), final_norm()

    def embed(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        num_positions: int,
        *,
        is_source: bool = False,
    ) -> Float[Array, "B T D"]:
        """Scaled token embeddings plus positions, which are below num_positions."""
        embedding = self.source_embedding if is_source else None
        embedding = self.embedding if embedding is None else embedding
        x = embedding[...][tokens] * self.width**0.5
        if self.positions == "sinusoidal":
            x = x + jnp.asarray(sinusoidal(num_positions, self.width))[positions]
        if self.positions == "learned":
            table = self.encoder_positions if is_source else self.decoder_positions
            x = x + table[...][jnp.minimum(positions, self.max_positions - 1)]
        return x

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
    ) -> Float[Array, "B S D"]:
        """The memory that the decoder looks at."""
        x = self.embed(source, positions, source.shape[1], is_source=True)
        x = dropout(x, drop, 0)
        where = self.where(positions, is_source=True)
        for index, layer in enumerate(self.encoder):
            x = layer(
                x,
                segments=segments,
                where=where,
                gates=gates_of(head_gates, index, self="encoder"),
                drop=fold(drop, 1 + index),
            )
        return x if self.encoder_norm is None else self.encoder_norm(x)

    def decode(
        self,
        memory: Float[Array, "B S D"],
        memory_segments: Int[Array, "B S"],
        target: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        drop: Dropout | None = None,
        head_gates: dict | None = None,
        maps: list | None = None,
    ) -> Float[Array, "B T D"]:
        """What is known before each target token: causal in the tokens before it.

        The cross-attention of every layer, B N T S, is appended to `maps` if given.
        """
        inputs = shift_right(target, positions)
        x = self.embed(inputs, positions, target.shape[1])
        x = dropout(x, drop, 0)
        where = self.where(positions, is_source=False)
        for index, layer in enumerate(self.decoder):
            x = layer(
                x,
                memory,
                segments=segments,
                memory_segments=memory_segments,
                is_causal=True,
                where=where,
                gates=gates_of(head_gates, index, self="decoder", cross="cross"),
                drop=fold(drop, 1 + index),
                maps=maps,
            )
        return x if self.decoder_norm is None else self.decoder_norm(x)

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B vocab"]:
        """Scores of every piece; the embedding serves as the output kernel."""
        return hidden @ self.embedding[...].T

    def head_gates(self) -> dict[str, Float[Array, "L N"]]:
        """A gate of 1 for every head of every layer, by site."""
        sites = {
            "encoder": [layer.self_attention for layer in self.encoder],
            "decoder": [layer.self_attention for layer in self.decoder],
            "cross": [layer.cross_attention for layer in self.decoder],
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
    ) -> Float[Array, "B T D"]:
        """Encode and decode a batch; with a key, with dropout."""
        check_gates(head_gates, self.head_gates())
        rate = self.dropout if rate is None else rate
        drop = None if key is None else (rate, key)
        memory = self.encode(
            batch["source"],
            batch["source_segments"],
            batch["source_positions"],
            fold(drop, 0),
            head_gates,
        )
        return self.decode(
            memory,
            batch["source_segments"],
            batch["target"],
            batch["target_segments"],
            batch["target_positions"],
            fold(drop, 1),
            head_gates,
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

        Args:
            batch: int arrays `source`, `source_segments`, `source_positions` (B S) and
                `target`, `target_segments`, `target_positions` (B T), where `target`
                holds the labels and segment 0 is padding.
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


def at_site(site: str, attention: dict, own: dict | None) -> dict:
    """The attention arguments of a site: its own where set, else those of all."""
    own = {key: value for key, value in (own or {}).items() if value is not None}
    path = f"model.{site}_attention" if own else "model.attention"
    return attention | own | {"path": path}


def check_rotary(layers, path: str) -> None:
    """Raise a ValueError where a head of self-attention has no halves to rotate."""
    for layer in layers:
        size = layer.self_attention.query.shape[-1]
        if size % 2:
            raise ValueError(
                f"{path}.head_dim must be even with model.positions='rotary', got "
                f"{size}."
            )


def check_gates(head_gates: dict | None, like: dict) -> None:
    """Raise a ValueError unless the gates have the sites, layers and heads of like."""
    for site, gates in (head_gates or {}).items():
        if site not in like:
            raise ValueError(f"head_gates may have {', '.join(like)}, got {site!r}.")
        L, N = like[site].shape
        if gates.ndim not in (2, 3) or (gates.shape[0], gates.shape[-1]) != (L, N):
            raise ValueError(
                f"head_gates[{site!r}] must be {L} layers by {N} heads, or layers by "
                f"rows by heads, got {gates.shape}."
            )


def gates_of(head_gates: dict | None, layer: int, **sites: str) -> dict | None:
    """The gates of a layer, by its own names of the sites."""
    if head_gates is None:
        return None
    return {
        name: head_gates[site][layer] if site in head_gates else None
        for name, site in {"cross": "", **sites}.items()
    }


def shift_right(
    target: Int[Array, "B T"], positions: Int[Array, "B T"]
) -> Int[Array, "B T"]:
    """The decoder's input: the token before, at a sentence's first position BOS."""
    return jnp.where(positions == 0, BOS, jnp.roll(target, 1, axis=1))


def num_parameters(params) -> int:
    """Count the numbers in a tree of (abstract) arrays."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))


def implementations(model: Transformer, B: int, S: int, T: int) -> dict[str, str]:
    """Which attention implementation each site of a (abstract) model runs, by size."""
    relative = model.positions == "relative"
    sites = {
        "encoder": (model.encoder, "self_attention", S, S, relative),
        "decoder": (model.decoder, "self_attention", T, T, relative),
        "cross": (model.decoder, "cross_attention", T, S, False),
    }
    return {
        site: getattr(layers[0], name).resolve(B, *lengths, has_bias=has_bias)
        for site, (layers, name, *lengths, has_bias) in sites.items()
        if layers
    }
