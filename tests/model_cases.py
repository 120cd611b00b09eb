"""Small models, and batches of distinct tokens, packed and not."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import nnx

from headcount.configs.base import get_config
from headcount.data.batches import batch_spec
from headcount.models.transformer import Transformer
from headcount.tasks.translation import Translation

VOCAB = 40
LOSS = Translation(get_config()).loss
SPEC = batch_spec(("source", "target"), 2, {"source": 5, "target": 6})


def tiny(**changes):
    """Return what builds a model of two layers per stack and two heads."""
    config = get_config().model
    config.width, config.mlp_dim, config.dropout = 16, 24, 0.0
    config.attention.num_heads = 2
    for key, value in changes.items():
        config[key] = value
    return partial(Transformer, VOCAB, **config.to_dict())


def config_of(positions="sinusoidal", norm="post", attention=None, **sites):
    """Return settings of one layer per stack and four heads."""
    config = get_config().model
    config.width, config.mlp_dim, config.dropout = 16, 24, 0.0
    config.num_encoder_layers = config.num_decoder_layers = 1
    config.positions, config.norm, config.max_positions = positions, norm, 8
    config.attention.num_heads = 4
    config.attention.mixture_heads = 3
    config.attention.update(attention or {})
    for site, own in sites.items():
        config[site].update(own)
    return config.to_dict()


def build_of(*settings, **sites):
    """Return what builds a model of `config_of`."""
    return partial(Transformer, VOCAB, **config_of(*settings, **sites))


def made(*settings, **sites):
    """Return a model of `config_of`."""
    return build_of(*settings, **sites)(rngs=nnx.Rngs(0))


# Every merge rule and every kind of positions at least once: arguments of `config_of`.
SETTINGS = {
    "concat, talking": ("sinusoidal", "post", {"talking_heads": True}),
    "scaled, gated values": (
        *("rotary", "pre"),
        {"merge": "scaled", "gate": "sigmoid", "gate_on": "values"},
    ),
    "mean": ("rotary", "post", {"merge": "mean"}),
    "weighted": ("relative", "post", {"merge": "weighted", "num_kv_heads": 1}),
    "scale": ("rotary", "post", {"scale": 0.9, "qk_norm": True}),
    "dynamic, value residual": (
        *("learned", "pre"),
        {"merge": "dynamic", "value_residual": True},
    ),
    "gated, sink": ("none", "post", {"merge": "gated", "head_dim": 3, "sink": True}),
    "gated_elementwise": ("sinusoidal_paper", "pre", {"merge": "gated_elementwise"}),
    "mixture": ("rotary", "post", {"merge": "mixture", "qk_norm": True}),
    "shared_mixture": (
        *("alibi", "post"),
        {"merge": "shared_mixture", "mixture_balance": 0.01, "knocking": "mlp"},
    ),
    "differential": (
        *("rotary", "pre"),
        {"differential": True, "gate": "sigmoid", "gate_size": "element"},
    ),
    "latent": ("rotary", "pre", {"latent_dim": 6, "gate": "double_sigmoid"}),
    "clipped": (
        *("rotary", "post"),
        {"qk_clip": 30.0, "rotary_dim": 2, "knocking": "linear", "knocking_all": True},
    ),
}


def rows(*lengths, start=4):
    """Return rows of distinct tokens: for each row the lengths of its segments."""
    longest = max(sum(row) for row in lengths) + 1  # one position of padding at least
    tokens, segments, positions = np.zeros((3, len(lengths), longest), np.int32)
    token = start
    for row, sizes in enumerate(lengths):
        at = 0
        for segment, size in enumerate(sizes, start=1):
            span = slice(at, at + size)
            tokens[row, span] = np.arange(token, token + size)
            segments[row, span] = segment
            positions[row, span] = np.arange(size)
            at, token = at + size, token + size
    return tokens, segments, positions


def batch_of(source, target):
    """Return a batch of two results of `rows`."""
    named = {}
    for side, (tokens, segments, positions) in (("source", source), ("target", target)):
        named |= {
            side: jnp.asarray(tokens),
            f"{side}_segments": jnp.asarray(segments),
            f"{side}_positions": jnp.asarray(positions),
        }
    return named


PACKED = batch_of(rows((3, 5), (4,)), rows((4, 2), (5,), start=20))
# the same three pairs, one per row
ALONE = batch_of(rows((3,), (5,), (4,)), rows((4,), (2,), (5,), start=20))


def side(batch, name):
    """Return the arrays of one side of a batch."""
    return {key: value for key, value in batch.items() if key.startswith(name)}
