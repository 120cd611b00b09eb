"""Decoding on the device: greedy, beam search and sampling with a key-value cache.

    decode(model, source, segments, positions, max_length=L, ...) -> Decoded
    translate(graph, params, sentences, ...) -> tokens, scores

`decode` is a pure function of one model (one trial), to be jitted and vmapped over
trials. `translate` is what scripts call: lists of token ids in, lists out.

The beams of a sentence stand on the query axis of attention, so that they share its
keys and values: those of the source are held once a sentence, and those of the
target where they were written. A beam that goes on from another's hypothesis copies
no cache; it notes which beam wrote each step (`ancestors`), and the mask of the
self-attention follows the note.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from models.transformer import BOS, Transformer

EOS = 2  # ends every sentence, see data/tokenizer.py
NEVER = -1e9  # log-probability of what is ruled out; finite, so that 0 · it is 0


class Decoded(NamedTuple):
    """The best hypothesis of every sentence."""

    tokens: Int[Array, "B L"]  # up to EOS and including it, then 0
    scores: Float[Array, "B"]  # log-probability (nats) over the length penalty
    finished: Bool[Array, "B"]  # False: longer than L, see `limits`


class State(NamedTuple):
    """A batch of sentences on the way. `slot` s holds step `start + s` of each."""

    step: Int[Array, ""]
    limits: Int[Array, "B"]  # tokens that a hypothesis may have, EOS included
    keys: Key[Array, "B"]  # of the sentence's samples
    done: Bool[Array, "B"]
    tokens: Int[Array, "B W L"]  # of the live hypotheses
    ancestors: Int[Array, "B W L"]  # the beam that wrote each step of a hypothesis
    log_probs: Float[Array, "B W"]
    num_ended: Int[Array, "B"]
    best_tokens: Int[Array, "B L"]  # of the hypotheses that have ended
    best_scores: Float[Array, "B"]
    cache: list  # of (key, value) of each layer, B L·W K H and B L·W K V
    memory: list  # of (key, value) of each layer, B S K H and B S K V
    memory_segments: Int[Array, "B S"]


def decode(
    model: Transformer,
    source: Int[Array, "B S"],
    segments: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    keys: Key[Array, "B"] | None = None,
    limits: Int[Array, "B"] | None = None,
    *,
    max_length: int,
    beam_size: int = 1,
    length_penalty: float = 0.0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Decoded:
    """Translate a batch of sentences, one a row (not packed).

    A hypothesis of log-probability p and n tokens (EOS included) is worth
    p / ((5 + n) / 6)^length_penalty (Wu et al. 2016, section 7). The search keeps
    beam_size live hypotheses; one ends when its EOS is among the beam_size best
    continuations of the step. A sentence is finished when beam_size hypotheses have
    ended or no live one can be worth more than the best of them. At its limit only EOS
    is allowed; padding and BOS never are. With beam_size 1 this is greedy decoding.

    Args:
        keys: one a sentence, for sampling: what a sentence samples depends on its own
            key only, not on the batch.
        limits: tokens that each sentence's translation may have, EOS included; None:
            max_length. A sentence with a higher limit than max_length may come back
            unfinished.
        max_length: L, static: slots of the cache.
        beam_size: W.
        length_penalty: the exponent, at least 0.
        temperature: 0 searches for the best; above it samples from
            softmax(logits / temperature).
        top_k: sample among the k best pieces; 0: all.
        top_p: sample among the fewest best pieces whose probabilities sum to at least
            top_p (Holtzman et al. 2020).

    Raises:
        ValueError: an option out of its range, or sampling with a beam.
    """
    options = dict(
        beam_size=beam_size,
        length_penalty=length_penalty,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    check(**options)
    state = start(
        model, source, segments, positions, keys, limits, max_length, beam_size
    )
    state = jax.lax.while_loop(
        lambda state: (state.step < max_length) & ~state.done.all(),
        lambda state: advance(model, state, **options),
        state,
    )
    return result(state)


def check(*, beam_size, length_penalty, temperature, top_k, top_p):
    """Raise a ValueError for an option out of its range."""
    for name, value, valid, range_ in (
        ("beam_size", beam_size, beam_size >= 1, "at least 1"),
        ("length_penalty", length_penalty, length_penalty >= 0, "at least 0"),
        ("temperature", temperature, temperature >= 0, "at least 0"),
        ("top_k", top_k, top_k >= 0, "at least 0"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
    ):
        if not valid:
            raise ValueError(f"{name} must be {range_}, got {value}.")
    if temperature and beam_size > 1:
        raise ValueError(f"sampling needs beam_size 1, got {beam_size}.")


def start(
    model, source, segments, positions, keys, limits, max_length, beam_size
) -> State:
    """Encode the sentences; no token is decoded yet."""
    B, L, W = source.shape[0], max_length, beam_size
    encoded = model.encode(source, segments, positions)
    memory = [layer.cross_attention.keys_values(encoded) for layer in model.decoder]

    def empty(layer):
        pair = jax.eval_shape(layer.self_attention.keys_values, encoded)
        return tuple(jnp.zeros((B, L * W, *x.shape[2:]), x.dtype) for x in pair)

    if keys is None:
        keys = jnp.broadcast_to(jax.random.key(0), (B,))
    return State(
        step=jnp.zeros((), jnp.int32),
        limits=jnp.full(B, L) if limits is None else limits,
        keys=keys,
        done=(segments == 0).all(1),
        tokens=jnp.zeros((B, W, L), jnp.int32),
        ancestors=jnp.zeros((B, W, L), jnp.int32),
        # The beams are alike at first: only one may have continuations.
        log_probs=jnp.where(jnp.arange(W) == 0, 0.0, NEVER) * jnp.ones((B, 1)),
        num_ended=jnp.zeros(B, jnp.int32),
        best_tokens=jnp.zeros((B, L), jnp.int32),
        best_scores=jnp.full(B, -jnp.inf),
        cache=[empty(layer) for layer in model.decoder],
        memory=memory,
        memory_segments=segments,
    )


def advance(model, state, *, beam_size, length_penalty, **sampling) -> State:
    """Decode one token of every live hypothesis."""
    B, W, L = state.tokens.shape
    step = state.step
    hidden, cache = next_hidden(model, state)
    logits = model.logits(hidden).astype(jnp.float32)
    log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    eos = state.log_probs + (logits[..., EOS] - log_total[..., 0])  # B W
    last = (step + 1 >= state.limits)[:, None]
    if sampling["temperature"]:
        raise NotImplementedError
    allowed = jnp.arange(logits.shape[-1]) > EOS
    ranked, pieces = jax.lax.top_k(jnp.where(allowed, logits, -jnp.inf), W)
    others = jnp.maximum(state.log_probs[..., None] + (ranked - log_total), NEVER)
    others = jnp.where(last[..., None], NEVER, others)
    log_probs, choice = jax.lax.top_k(others.reshape(B, W * W), W)
    parents = choice // W
    pieces = jnp.take_along_axis(pieces.reshape(B, W * W), choice, axis=1)

    # An EOS counts if fewer than W continuations of any kind are better.
    better = (log_probs[:, None] > eos[..., None]).sum(-1)
    better += (eos[:, None] > eos[..., None]).sum(-1)
    ends = (better < W) & (eos > NEVER / 2) & ~state.done[:, None]
    scores = jnp.where(ends, eos / penalty(step + 1, length_penalty), -jnp.inf)
    winner = scores.argmax(1)
    score = scores.max(1)
    improved = score > state.best_scores
    slot = jnp.arange(L) == step
    ended = jnp.where(slot[None], EOS, pick(state.tokens, winner[:, None])[:, 0])
    best_tokens = jnp.where(improved[:, None], ended, state.best_tokens)
    best_scores = jnp.where(improved, score, state.best_scores)
    num_ended = state.num_ended + ends.sum(1)

    hope = log_probs.max(1) / penalty(state.limits, length_penalty)
    done = state.done | (num_ended >= W) | (hope <= best_scores)
    return state._replace(
        step=step + 1,
        done=done,
        tokens=jnp.where(slot, pieces[..., None], pick(state.tokens, parents)),
        ancestors=jnp.where(slot, parents[..., None], pick(state.ancestors, parents)),
        log_probs=log_probs,
        num_ended=num_ended,
        best_tokens=best_tokens,
        best_scores=best_scores,
        cache=cache,
    )


def next_hidden(model, state) -> tuple[Float[Array, "B W D"], list]:
    """What is known before the next token of every hypothesis, and the grown cache."""
    B, W, L = state.tokens.shape
    step = state.step
    before = state.tokens[:, :, jnp.maximum(step - 1, 0)]
    x = model.embed(
        jnp.where(step == 0, BOS, before), jnp.broadcast_to(step, (B, W)), L
    )
    beams = jnp.arange(W)
    slots = jnp.arange(L)[:, None]
    own = (slots == step) & (beams[:, None, None] == beams)
    seen = (slots < step) & (state.ancestors[..., None] == beams)
    past = (seen | own).reshape(B, 1, W, L * W)
    sentence = (state.memory_segments > 0)[:, None, None]
    cache = []
    for layer, grown, memory in zip(
        model.decoder, state.cache, state.memory, strict=True
    ):

        def to_self(x, layer=layer, grown=grown):
            new = layer.self_attention.keys_values(x)
            cache.append(
                tuple(
                    jax.lax.dynamic_update_slice_in_dim(old, x, step * W, axis=1)
                    for old, x in zip(grown, new, strict=True)
                )
            )
            return layer.self_attention.attend(x, *cache[-1], mask=past)

        def to_memory(x, layer=layer, memory=memory):
            return layer.cross_attention.attend(x, *memory, mask=sentence)

        x = layer.sublayer(to_self, layer.self_norm, x)
        x = layer.sublayer(to_memory, layer.cross_norm, x)
        x = layer.sublayer(layer.mlp, layer.mlp_norm, x)
    return x if model.decoder_norm is None else model.decoder_norm(x), cache


def pick(x: Int[Array, "B W L"], beams: Int[Array, "B X"]) -> Int[Array, "B X L"]:
    """The given beams of each sentence."""
    return jnp.take_along_axis(x, beams[..., None], axis=1)


def penalty(length, exponent: float):
    """((5 + length) / 6)^exponent: Wu et al. 2016, equation 14."""
    return ((5 + length) / 6) ** exponent


def result(state: State) -> Decoded:
    """The best hypotheses that have ended."""
    return Decoded(state.best_tokens, state.best_scores, state.done)


run = jax.jit(
    lambda graph, params, arrays, options: decode(
        nnx.merge(graph, params), *arrays, **dict(options)
    ),
    static_argnums=(0, 3),
)


def translate(
    graph: nnx.GraphDef,
    params: nnx.State,
    sentences: list[list[int]],
    *,
    batch_size: int = 64,
    max_length_factor: float = 2.0,
    max_length_extra: int = 16,
    seed: int = 0,
    **options,
) -> tuple[list[list[int]], list[float]]:
    """Translate sentences of token ids, in any number and of any length.

    Sorted by length and batched inside; the result is in the order of the input, and
    no sentence's translation depends on the others. Programs are compiled for a few
    round sizes and kept.

    Args:
        graph, params: a model as `nnx.split` gives it, of one trial.
        sentences: token ids, each ending in EOS.
        batch_size: sentences decoded at a time.
        max_length_factor, max_length_extra: a translation has at most
            factor · source length + extra tokens, EOS included.
        seed: of the samples.
        options: beam_size, length_penalty, temperature, top_k, top_p: see `decode`.

    Returns:
        The token ids of each translation without EOS, and the scores.
    """
    tokens, scores = [None] * len(sentences), [None] * len(sentences)
    order = sorted(range(len(sentences)), key=lambda i: -len(sentences[i]))
    keys = jax.random.split(jax.random.key(seed), max(1, len(sentences)))
    for begin in range(0, len(order), batch_size):
        rows = order[begin : begin + batch_size]
        B = batch_size if len(order) > 1 else 1
        S = bucket(max(len(sentences[i]) for i in rows))
        source = np.zeros((B, S), np.int32)
        limits = np.ones(B, np.int32)
        for row, i in enumerate(rows):
            source[row, : len(sentences[i])] = sentences[i]
            limits[row] = int(max_length_factor * len(sentences[i])) + max_length_extra
        segments = (source > 0).astype(np.int32)
        positions = np.broadcast_to(np.arange(S, dtype=np.int32), (B, S))
        padded = np.array(rows + rows[:1] * (B - len(rows)))
        arrays = source, segments, positions, keys[padded], limits
        L = bucket(int(max_length_factor * S) + max_length_extra)
        out = run(graph, params, arrays, tuple({**options, "max_length": L}.items()))
        out = jax.device_get(out)
        for row, i in enumerate(rows):
            length = int((out.tokens[row] > 0).sum())
            tokens[i] = out.tokens[row, : length - 1].tolist()
            scores[i] = float(out.scores[row])
    return tokens, scores


def bucket(length: int) -> int:
    """The next power of two, at least 16."""
    return max(16, 1 << (length - 1).bit_length())
