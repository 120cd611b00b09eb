"""Small encoder-decoders to decode with, and decoding without a cache to compare to."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from headcount.decoding.scheduling import power_of_two
from headcount.decoding.search import check_options
from headcount.decoding.step import (
    Decoded,
    advance,
    decoded,
    empty_state,
    prefill,
    run_until,
    start,
)
from headcount.models.transformer import Transformer

EOS, FIRST = 2, 3  # and the first token that a translation may have

SHAPES = {
    "post": {},
    "pre": {"norm": "pre"},
    "grouped": {"num_kv_heads": 2, "head_dim": 6, "value_dim": 5},
}
# Every merge rule, kind of positions and option of the model at least once.
SETTINGS = SHAPES | {
    "scaled": {"merge": "scaled"},
    "mean, rotary": {"merge": "mean", "positions": "rotary", "qk_norm": True},
    "weighted, relative": {
        "merge": "weighted",
        "positions": "relative",
        "scale": 0.7,
    },
    "dynamic, none": {"merge": "dynamic", "positions": "none", "num_kv_heads": 1},
    "gated, learned": {"merge": "gated", "positions": "learned"},
    "elementwise, relative": {
        "merge": "gated_elementwise",
        "positions": "relative",
        "num_kv_heads": 2,
        "sink": True,
    },
    "mixture, rotary": {"merge": "mixture", "mixture_heads": 2, "positions": "rotary"},
    "differential, alibi": {
        "differential": True,
        "value_residual": True,
        "num_kv_heads": 2,
        "positions": "alibi",
    },
    "latent, rotary": {"latent_dim": 5, "positions": "rotary", "sink": True},
    "gated values, knocking": {
        "gate": "sigmoid",
        "gate_size": "element",
        "gate_on": "values",
        "knocking": "mlp",
        "rotary_dim": 2,
        "positions": "rotary",
        "merge": "shared_mixture",
    },
    "exclusive": {
        "settings": {
            "decoder_attention": {"exclusive": True, "value_residual": True},
            "cross_attention": {"value_residual": True},
        },
        "knocking": "linear",
        "knocking_all": True,
    },
    "gates of elements": {
        "gate": "sigmoid",
        "gate_size": "element",
        "gate_features": 12,
        "qk_clip": 5.0,
    },
    "shared gates": {"gate": "sigmoid", "gate_size": "shared", "gate_features": 0},
    "talking": {"talking_heads": True, "num_kv_heads": 2, "positions": "relative"},
    "rms, gated feed-forward, untied": {
        "settings": {
            "norm": "pre",
            "norm_type": "rms_norm",
            "mlp": "gated",
            "activation": "silu",
            "use_bias": False,
            "tie_embeddings": False,
        }
    },
}


def make(
    vocab_size=30,
    norm="post",
    seed=2,
    positions="sinusoidal",
    layers=2,
    settings=None,
    **attention,
):
    """Return a small model whose predictions vary: random ones repeat one token.

    Its queries tell keys apart, its embeddings count beside the layers' biases, and its
    last norm keeps a token's own embedding from being what it predicts.
    """
    chosen = {"positions": positions, "norm": norm} | (settings or {})
    model = Transformer(
        vocab_size,
        width=16,
        num_encoder_layers=1,
        num_decoder_layers=layers,
        mlp_dim=24,
        dropout=0.0,
        **chosen,
        attention={"num_heads": 4, "implementation": "reference"} | attention,
        rngs=nnx.Rngs(seed),
    )
    random = np.random.default_rng(seed)
    for layer in model.decoder:
        for part in (layer.self_attention, layer.cross_attention):
            part.query[...] *= 8.0
            move_neutral(part, random)
    for table in (model.embedding, model.output_table):
        if table is not None:
            table[...] *= 4.0
    last = model.decoder_norm or model.decoder[-1].mlp_norm
    last.scale[...] = 3.0 * random.normal(size=16)
    if positions == "relative":  # at first 0
        for table in (model.encoder_positions, model.decoder_positions):
            table[...] += random.normal(size=table.shape)
    return nnx.split(model)


def move_neutral(module, random):
    """Move all parameters that start without effect, constants and identities.

    Biases stay, or all texts would be translated alike.
    """
    for path, node in nnx.iter_graph(module):
        if not isinstance(node, nnx.Param) or str(path[-1]).endswith("bias"):
            continue
        value = np.asarray(node[...])
        is_identity = value.ndim > 1 and (value == np.eye(*value.shape[-2:])).all()
        if is_identity or np.ptp(value) == 0:
            node[...] = value + random.normal(size=value.shape) / 2


def scale_eos(params, factor: float) -> None:
    """Multiply EOS's embedding, by which its logit is made; 0: it never wins."""
    table = params["embedding"]
    table[...] = table[...].at[EOS].multiply(factor)


def sentences(*lengths, vocab_size=30, seed=0):
    """Return sources of these lengths, each ending in EOS."""
    random = np.random.default_rng(seed)
    return [[*random.integers(FIRST, vocab_size, n - 1).tolist(), EOS] for n in lengths]


def short(texts):
    """Return limits for which the first cache has room."""
    return [len(text) + 7 for text in texts]


def batch(texts, S=None):
    """Return token ids padded to S columns, and their numbers."""
    S = S or max(map(len, texts))
    tokens = np.array([text + [0] * (S - len(text)) for text in texts], np.int32)
    return jnp.asarray(tokens), jnp.asarray([len(text) for text in texts])


@partial(jax.jit, static_argnums=0)
def uncached(graph, params, inputs):
    """Return the log-probabilities of every token at every place."""
    return jax.nn.log_softmax(nnx.merge(graph, params)(inputs))


def inputs_of(text, targets):
    """Return a batch of one source and each of the targets."""
    found = {}
    for side, texts in {"source": [text] * len(targets), "target": targets}.items():
        # few widths, so that the model is compiled seldom
        tokens, lengths = batch(texts, power_of_two(max(map(len, texts))))
        place = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        segments = (place < lengths[:, None]).astype(jnp.int32)
        found |= {
            side: tokens,
            f"{side}_segments": segments,
            f"{side}_positions": place,
        }
    return found


def log_probs(graph, params, text, targets):
    """Return that of each whole target (with EOS), by the uncached model."""
    inputs = inputs_of(text, targets)
    each = np.take_along_axis(
        np.asarray(uncached(graph, params, inputs)),
        np.asarray(inputs["target"])[..., None],
        axis=-1,
    )[..., 0]
    return (each * inputs["target_segments"]).sum(1)


def greedy_uncached(graph, params, text, limit):
    """Repeat the whole forward pass for every token."""
    out = []
    while len(out) < limit - 1:
        # after what is there, any token: no earlier place sees it
        scores = uncached(graph, params, inputs_of(text, [[*out, EOS]]))
        token = EOS + int(scores[0, len(out), EOS:].argmax())
        if token == EOS:
            break
        out.append(token)
    return [*out, EOS]


def exhaustive(graph, params, text, limit, length_penalty):
    """Return all translations in a vocabulary of 6, and their uncached scores."""
    every = [
        [*middle, EOS]
        for length in range(limit)
        for middle in itertools.product((3, 4, 5), repeat=length)
    ]
    scores = np.array(log_probs(graph, params, text, every))
    lengths = np.array([len(target) for target in every])
    return every, scores / ((5 + lengths) / 6) ** length_penalty


def beam_by_hand(graph, params, text, limit, beam_size, length_penalty, n_best=1):
    """Search as `generate_trials` does, by whole passes of the uncached model.

    Returns the scores and the tokens that it ends with; and those of two searches that
    end too soon: with as many hypotheses as beam_size, or where the best live one is
    worth no more as it is, however much longer it may get.
    """

    def worth(log_prob, length):
        return log_prob / ((5 + length) / 6) ** length_penalty

    live, ended, count, present = [(0.0, [])], [], None, None
    for length in range(1, limit + 1):
        targets = [[*tokens, EOS] for _, tokens in live]
        targets += [[EOS]] * (beam_size - len(live))  # of one shape
        scores = np.asarray(uncached(graph, params, inputs_of(text, targets)))
        tokens_now = range(EOS, FIRST if length == limit else scores.shape[-1])
        every = [
            (log_prob + scores[row, length - 1, token], [*tokens, token])
            for row, (log_prob, tokens) in enumerate(live)
            for token in tokens_now
        ]
        every.sort(reverse=True)
        ended += [(worth(p, length), t) for p, t in every[:beam_size] if t[-1] == EOS]
        live = [(p, t) for p, t in every if t[-1] != EOS][:beam_size]
        if not live:
            break
        best, hope = max(ended, default=(-np.inf, None)), live[0][0]
        last = (
            sorted(ended, reverse=True)[n_best - 1][0]
            if ended[n_best - 1 :]
            else -np.inf
        )
        if len(ended) >= beam_size:
            count = count or best
        if worth(hope, length) <= best[0]:
            present = present or best
        if count and worth(hope, length) <= best[0] or worth(hope, limit) <= last:
            break
    return sorted(ended, reverse=True)[:n_best], [
        count or max(ended),
        present or max(ended),
    ]


def decode(
    model,
    prompts,
    lengths,
    keys=None,
    limits=None,
    head_gates=None,
    *,
    max_length,
    n_best=None,
    **options,
) -> Decoded:
    """Continue a batch of prompts, one per row, without refilling rows.

    `max_length` is the cache's number of slots, and the default of the limits. The
    other arguments are those of `generate_trials`.
    """
    options = check_options(**options)
    B, beam_size = len(prompts), options["beam_size"]
    keys = jnp.broadcast_to(jax.random.key(0), (B,)) if keys is None else keys
    limits = jnp.full(B, max_length) if limits is None else limits
    sizes = {"max_length": max_length, "beam_size": beam_size, "n_best": n_best}
    state = empty_state(model, prompts, keys, **sizes)
    rows = start(prefill(model, prompts, lengths, head_gates), keys, limits, 0, **sizes)
    step = partial(advance, model, head_gates=head_gates, **options)
    return decoded(run_until(step, state._replace(rows=rows), B).rows)


def jitted(graph, **options):
    """Return `decode` of parameters and arrays, with these options."""
    return jax.jit(
        lambda params, *arrays: decode(nnx.merge(graph, params), *arrays, **options)
    )


def trimmed(tokens):
    """Return each row up to EOS."""
    return [row[row > 0].tolist() for row in np.asarray(tokens)]
