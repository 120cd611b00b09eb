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
) -> tuple[State, Decoded, Bool[Array, "B"], Int[Array, "B"]]:
    """Begin new sentences in rows that are done; decode until enough rows are.

    Gives the state, its best hypotheses, what rows are done, and their tokens so far.
    """
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
    rows = state.rows
    return state, decoded(state), rows.done, state.clock - rows.begin


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
    sentences (a sample: on its place in the list). The longest are begun first, and a
    sentence that is finished makes room for the next. Programs are compiled for 16 or
    all rows, of few sentences also for 1, and for lengths of 16, 24, 32, 48, 64, ...

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
    limits = [int(max_length_factor * len(x)) + max_length_extra for x in sentences]
    most = max(1, batch_size // beam_size)
    # At the end of many, one row alone saves less than it takes to compile.
    smallest = 1 if len(sentences) <= 16 else 16
    sizes = sorted({min(size, most) for size in (smallest, 16, most)})
    leaves, structure = jax.tree.flatten(params)
    step = partial(program(graph, structure, tuple(options.items())), leaves)

    def begin(B, S, L):
        return idle(graph, params, shape=(B, S), max_length=L, beam_size=beam_size)

    def go_on(state, *arrays):
        return step(state, head_gates, *arrays, seed)

    found = {}
    # A translation is seldom longer than twice its source. Those that are come back
    # unfinished, and are begun again with more room.
    factor = 2
    while len(found) < len(sentences):
        waiting = [i for i in range(len(sentences)) if i not in found]
        waiting.sort(key=lambda i: len(sentences[i]))
        longest = power_of_two(max(limits[i] for i in waiting))
        room = partial(slots, factor=factor, longest=longest)
        found |= stream(begin, go_on, sentences, limits, waiting, sizes, room)
        factor *= 2
    pairs = [found[i] for i in range(len(sentences))]
    return [tokens for tokens, _ in pairs], [score for _, score in pairs]


def stream(begin, step, sentences, limits, waiting, sizes, room):
    """The (tokens, score) by number of sentences, taken from the end of those waiting.

    Those that do not fit the cache are left out.
    """
    B = at_least(len(waiting), sizes)
    S = bucket(len(sentences[waiting[-1]]))
    state, free, running, finished = begin(B, S, room(S)), list(range(B)), {}, {}
    age = np.zeros(B, int)
    while waiting or running:
        source_lengths = [len(sentences[i]) for i in (*running.values(), *waiting[-1:])]
        fewer = at_least(len(waiting) + len(running), sizes)
        narrower = bucket(max(source_lengths))
        # Another program is compiled for many sentences only, and takes the place of
        # this one when all that run have room in it.
        if len(waiting) < B or age[[*running]].max(initial=0) >= room(narrower):
            narrower = S
        if fewer < B or narrower < S:
            kept = [*running, *free][:fewer]
            running = {kept.index(row): number for row, number in running.items()}
            free = [row for row in range(fewer) if row not in running]
            B, S = fewer, narrower
            state = keep(state, np.array(kept, np.int32), shape=(S, room(S)))
        E = B if B <= 16 else B // 8  # sentences encoded at a time, rows waited for
        source, places = np.zeros((E, S), np.int32), np.full(E, B, np.int32)
        numbers, bounds = np.zeros(E, np.int32), np.ones(E, np.int32)
        for n in range(min(E, len(free), len(waiting))):
            number, row = waiting.pop(), free.pop()
            source[n, : len(sentences[number])] = sentences[number]
            places[n], numbers[n], bounds[n] = row, number, limits[number]
            running[row] = number
        # Fill all rows first; then wait for a few; at last until fewer rows will do.
        smaller = max((size for size in sizes if size < B), default=0)
        enough = (len(free) or E) if waiting else B - smaller
        state, *out = step(state, source, numbers, bounds, places, np.int32(enough))
        (tokens, scores, ended), done, age = jax.device_get(out)
        for row in [row for row in running if done[row]]:
            free.append(row)
            number = running.pop(row)
            length = int((tokens[row] > 0).sum()) - 1  # without EOS
            if ended[row]:
                finished[number] = tokens[row, :length].tolist(), float(scores[row])
            elif limits[number] <= room(S):
                finished[number] = [], float("nan")
    return finished


def slots(S: int, *, factor: int, longest: int) -> int:
    """L for sources of up to S tokens."""
    return min(factor * S, longest)


def at_least(count, sizes):
    """The smallest of the sizes that holds so many, or the largest."""
    return min((size for size in sizes if size >= count), default=sizes[-1])


@partial(jax.jit, static_argnames="shape")
def keep(state: State, rows: Int[Array, "B"], *, shape: tuple[int, int]) -> State:
    """The given rows, in fewer and narrower; `shape` is S L."""
    S, L = shape
    clock, rows, cache = jax.tree.map(lambda x: x[rows] if x.ndim else x, state)
    old = rows.tokens.shape[2]
    # slot j of the new ones holds what the latest clock that is j modulo L has written
    latest = (clock - 1 - (clock - 1 - jnp.arange(L)) % L) % old

    def moved(x, axis):
        apart = x.reshape(*x.shape[:axis], old, -1, *x.shape[axis + 1 :])
        return apart[(slice(None),) * axis + (latest,)].reshape(
            *x.shape[:axis], -1, *x.shape[axis + 1 :]
        )

    rows = rows._replace(
        tokens=rows.tokens[..., latest],
        ancestors=rows.ancestors[..., latest],
        best_tokens=rows.best_tokens[..., latest],
        memory=[(key[..., :S], value[:, :, :S]) for key, value in rows.memory],
        memory_mask=rows.memory_mask[..., :S],
    )
    cache = [(moved(key, 3), moved(value, 2)) for key, value in cache]
    return State(clock, rows, cache)


def bucket(length: int) -> int:
    """The next of 16, 24, 32, 48, 64, 96, ..."""
    power = power_of_two(length)
    return power * 3 // 4 if power > 16 and length <= power * 3 // 4 else power


def power_of_two(length: int) -> int:
    """The next one, at least 16."""
    return max(16, 1 << (length - 1).bit_length())
