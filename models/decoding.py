"""Decoding on the device: greedy, beam search and sampling with a key-value cache.

    decode(model, source, segments, positions, max_length=L, ...) -> Decoded
    translate(graph, params, sentences, ...) -> tokens, scores

`decode` is a pure function of one model (one trial) and a batch of sentences, to be
jitted and vmapped over trials. `translate` is what scripts call: any number of lists
of token ids in, lists out. Both are made of the same parts: `start` encodes sentences,
`run` decodes them token by token.
"""

from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from models import precision
from models.checks import check_gates
from models.decoding_search import complete
from models.decoding_step import State, empty, run, start
from models.transformer import Transformer


class Decoded(NamedTuple):
    """The best hypothesis of every sentence."""

    tokens: Int[Array, "B L"]  # up to EOS and including it, then 0
    scores: Float[Array, "B"]  # log-probability (nats) over the length penalty
    finished: Bool[Array, "B"]  # False: longer than L, see `limits`


def decode(
    model: Transformer,
    source: Int[Array, "B S"],
    segments: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    keys: Key[Array, "B"] | None = None,
    limits: Int[Array, "B"] | None = None,
    head_gates: dict | None = None,
    *,
    max_length: int,
    **options: int | float,
) -> Decoded:
    """Translate a batch of sentences, one a row (not packed).

    A hypothesis of log-probability p and n tokens (EOS included) is worth
    p / ((5 + n) / 6)^length_penalty (Wu et al. 2016, section 7). The search keeps
    beam_size live hypotheses; one ends when its EOS is among the beam_size best
    continuations of the step. A sentence is finished when beam_size hypotheses have
    ended and no live one is worth more than the best of them at its present length, or
    none can be at any length. At its limit only EOS is allowed; padding and BOS never
    are. With beam_size 1 this is greedy decoding.

    Args:
        keys: one a sentence, for sampling: what a sentence samples depends on its own
            key only, not on the batch.
        limits: tokens that each sentence's translation may have, EOS included; None:
            max_length. A sentence with a higher limit than max_length may come back
            unfinished.
        head_gates: see `models.Transformer.__call__`, of a number a layer and head.
        max_length: L, static: slots of the cache.
        options: of
            beam_size: W; 1 if not given.
            length_penalty: the exponent, at least 0; 0 if not given.
            temperature: 0, if not given, searches for the best; above it samples from
                softmax(logits / temperature).
            top_k: sample among the k best pieces; 0, if not given: all.
            top_p: sample among the fewest best pieces whose probabilities sum to at
                least top_p (Holtzman et al. 2020); 1 if not given.

    Raises:
        ValueError: an option out of its range, or sampling with a beam.
    """
    options = complete(**options)
    beam_size = options["beam_size"]
    check_gates(head_gates, model.head_gates())
    B, L = source.shape[0], max_length
    if keys is None:
        keys = jnp.broadcast_to(jax.random.key(0), (B,))
    if limits is None:
        limits = jnp.full(B, L)
    state = empty(model, source, keys, max_length=L, beam_size=beam_size)
    sentences = source, segments, positions, keys, limits
    rows = start(model, *sentences, 0, head_gates, max_length=L, beam_size=beam_size)
    state = state._replace(rows=rows)
    return decoded(run(model, state, B, head_gates=head_gates, **options))


def decoded(state: State) -> Decoded:
    """The best hypotheses that have ended, from the order of the slots to their own."""
    rows = state.rows
    L = rows.best_tokens.shape[1]
    place = jnp.arange(L)
    tokens = jnp.take_along_axis(
        rows.best_tokens, (rows.begin[:, None] + place) % L, axis=1
    )
    tokens = jnp.where(place < rows.best_length[:, None], tokens, 0)
    return Decoded(tokens, rows.best_score, rows.best_length > 0)


@partial(jax.jit, static_argnames=("graph", "shape", "max_length", "beam_size"))
def idle(graph, params, *, shape, max_length, beam_size) -> State:
    """`empty`, compiled; `shape` is B S."""
    model = precision.merge(graph, params)
    keys = jnp.broadcast_to(jax.random.key(0), shape[:1])
    source = jnp.zeros(shape, jnp.int32)
    return empty(model, source, keys, max_length=max_length, beam_size=beam_size)


@lru_cache(maxsize=64)
def program(graph, structure, options):
    """`serve` of a model, compiled for every shape it meets.

    Looked up once a translation: to hash a graph takes a millisecond, a step two.
    """

    def run_model(leaves, state, head_gates, *arguments):
        model = precision.merge(graph, jax.tree.unflatten(structure, leaves))
        check_gates(head_gates, model.head_gates())
        return serve(model, state, head_gates, *arguments, **dict(options))

    return jax.jit(run_model, donate_argnums=1)


def serve(
    model,
    state: State,
    head_gates,
    source,
    numbers,
    limits,
    places,
    enough,
    seed,
    **options,
) -> tuple[State, Decoded, Bool[Array, "B"]]:
    """Begin new sentences in rows that are done; decode until enough rows are."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers)
    segments = (source > 0).astype(jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(source.shape[1]), source.shape)
    _, W, L = state.rows.tokens.shape
    sentences = source, segments, positions, keys, limits, state.clock, head_gates
    fresh = start(model, *sentences, max_length=L, beam_size=W)
    rows = jax.tree.map(
        lambda old, new: old.at[places].set(new, mode="drop"), state.rows, fresh
    )
    state = state._replace(rows=rows)
    state = run(model, state, enough, head_gates=head_gates, **options)
    return state, decoded(state), state.rows.done


def translate(
    graph: nnx.GraphDef,
    params,
    sentences: list[list[int]],
    *,
    batch_size: int = 128,
    max_length_factor: float = 2.0,
    max_length_extra: int = 16,
    seed: int = 0,
    head_gates: dict | None = None,
    **options: int | float,
) -> tuple[list[list[int]], list[float]]:
    """Translate sentences of token ids, in any number and of any length.

    The result is in the order of the input, and no translation depends on the other
    sentences (a sample: on its place in the list). Sentences are decoded in the order
    of their length, and one that is finished makes room for the next. Programs are
    compiled for 16 or all rows, of few sentences also for 1, and for lengths of 16, 32,
    64, ...

    Args:
        graph, params: a model as `nnx.split` gives it, of one trial.
        sentences: token ids, each ending in EOS.
        batch_size: hypotheses decoded at a time, beam_size a sentence.
        max_length_factor, max_length_extra: a translation has at most
            factor · source length + extra tokens, EOS included.
        seed: of the samples.
        head_gates: see `decode`.
        options: see `decode`.

    Returns:
        The token ids of each translation without EOS, and the scores.
    """
    options = complete(**options)
    beam_size = options["beam_size"]
    found = {}
    limits = [int(max_length_factor * len(x)) + max_length_extra for x in sentences]
    most = max(1, batch_size // beam_size)
    # At the end of many, one row alone saves less than it takes to compile.
    smallest = 1 if len(sentences) <= 16 else 16
    sizes = sorted({min(size, most) for size in (smallest, 16, most)})
    leaves, structure = jax.tree.flatten(params)
    step = partial(program(graph, structure, tuple(options.items())), leaves)

    def serve_more(state, *arrays):
        return step(state, head_gates, *arrays)

    for S in sorted({bucket(len(x)) for x in sentences}):
        waiting = [i for i, x in enumerate(sentences) if bucket(len(x)) == S]
        # A translation is seldom longer than twice its source. Those that are come
        # back unfinished, and are begun again with more room.
        longest = bucket(max(limits[i] for i in waiting))
        L = min(2 * S, longest)
        while waiting:
            waiting.sort(key=lambda i: -len(sentences[i]))
            B = min(size for size in sizes if size >= min(len(waiting), most))
            state = idle(graph, params, shape=(B, S), max_length=L, beam_size=beam_size)
            for i, result in stream(
                serve_more, state, sizes, sentences, limits, waiting, seed
            ):
                if result is not None or longest == L:
                    found[i] = result or ([], float("nan"))
            waiting = [i for i in waiting if i not in found]
            L = min(2 * L, longest)
    pairs = [found[i] for i in range(len(sentences))]
    return [tokens for tokens, _ in pairs], [score for _, score in pairs]


def stream(step, state, sizes, sentences, limits, waiting, seed):
    """Yield the number and the (tokens, score) of sentences as they are finished.

    None instead of a pair: the translation does not fit the state's cache.
    """
    B, S = state.rows.memory_mask.shape[::2]
    waiting, free, running = list(waiting), list(range(B)), {}
    while waiting or running:
        smaller = smaller_than(B, sizes)
        if not waiting and len(running) <= smaller:
            kept = [*running, *free][:smaller]
            state = keep(state, np.array(kept, np.int32))
            running = {kept.index(row): number for row, number in running.items()}
            B, free = smaller, [row for row in range(smaller) if row not in running]
        E = B if B <= 16 else B // 8  # sentences encoded at a time, rows waited for
        count = min(E, len(free))
        new, waiting = waiting[:count], waiting[count:]
        source, places = np.zeros((E, S), np.int32), np.full(E, B, np.int32)
        numbers, bounds = np.zeros(E, np.int32), np.ones(E, np.int32)
        for n, number in enumerate(new):
            source[n, : len(sentences[number])] = sentences[number]
            places[n], numbers[n] = free.pop(), number
            bounds[n] = limits[number]
            running[int(places[n])] = number
        # Fill all rows first; then wait for a few; at last until fewer rows will do.
        enough = (len(free) or E) if waiting else B - smaller_than(B, sizes)
        arrays = source, numbers, bounds, places, np.int32(enough)
        state, *out = step(state, *arrays, seed)
        (tokens, scores, finished), done = jax.device_get(out)
        for row in [row for row in running if done[row]]:
            free.append(row)
            number = running.pop(row)
            length = int((tokens[row] > 0).sum()) - 1  # without EOS
            pair = tokens[row, :length].tolist(), float(scores[row])
            yield number, pair if finished[row] else None


def smaller_than(size, sizes):
    """The next smaller of the sizes, or 0."""
    return max((other for other in sizes if other < size), default=0)


@jax.jit
def keep(state: State, rows: Int[Array, "B"]) -> State:
    """The given rows, in fewer."""
    rows, cache = jax.tree.map(lambda x: x[rows], (state.rows, state.cache))
    return State(state.clock, rows, cache)


def bucket(length: int) -> int:
    """The next power of two, at least 16."""
    return max(16, 1 << (length - 1).bit_length())
