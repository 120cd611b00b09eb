"""Decoding on the device: greedy, beam search and sampling with a key-value cache.

    decode(model, source, segments, positions, max_length=L, ...) -> Decoded
    translate(graph, params, sentences, ...) -> tokens, scores; or lists of the n best
    translate_trials(graph, params, sentences, ...) -> the same of every trial

`decode` is a pure function of one model (one trial) and a batch of sentences, to be
jitted and vmapped over trials. The others are what scripts call: any number of lists
of token ids in, lists out. All are made of the same parts: `encode` reads sentences,
`start` begins them, `run` decodes them token by token.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, Key

from headcount.decoding.queue import Queue, serve
from headcount.decoding.scheduling import (
    OF_TRIALS,
    lanes,
    num_lanes,
    on_each,
    over_trials,
    power_of_two,
    slots,
)
from headcount.decoding.search import check_n_best, complete
from headcount.decoding.step import (
    Decoded,
    Encoded,
    State,
    advance,
    decoded,
    empty,
    encode,
    run,
    start,
)
from headcount.models import precision
from headcount.models.checks import check_gates
from headcount.models.transformer import Transformer


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
    n_best: int | None = None,
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
            unfinished, also if a shorter hypothesis has ended but may not be best.
        head_gates: see `models.Transformer.__call__`, of a number a layer and head.
        max_length: L, static: slots of the cache.
        n_best: N, of how many hypotheses that have ended to give lists, in the order
            of their scores; None: the best alone. The search then goes on until no
            live one can be among them, or ends as it would without; so the first of
            them is the best alone.
        options: of
            beam_size: W; 1 if not given.
            length_penalty: the exponent, at least 0; 0 if not given.
            temperature: 0, if not given, searches for the best; above it samples from
                softmax(logits / temperature).
            top_k: sample among the k best pieces; 0, if not given: all.
            top_p: sample among the fewest best pieces whose probabilities sum to at
                least top_p (Holtzman et al. 2020); 1 if not given.
            return_scores: False leaves out the softmax where the search needs none,
                with beam_size 1; the scores then mean nothing. True if not given.

    Raises:
        ValueError: an option out of its range, or sampling with a beam.
    """
    options = complete(**options)
    beam_size = options["beam_size"]
    check_n_best(n_best, beam_size)
    check_gates(head_gates, model.head_gates())
    B, L = source.shape[0], max_length
    if keys is None:
        keys = jnp.broadcast_to(jax.random.key(0), (B,))
    if limits is None:
        limits = jnp.full(B, L)
    sizes = {"max_length": L, "beam_size": beam_size, "n_best": n_best}
    state = empty(model, source, keys, **sizes)
    encoded = encode(model, source, segments, positions, head_gates)
    rows = start(encoded, keys, limits, 0, **sizes)
    state = state._replace(rows=rows)
    step = partial(advance, model, head_gates=head_gates, **options)
    return decoded(run(step, state, B).rows)


class Programs(NamedTuple):
    """How a model decodes many sentences; compiled for every shape they meet."""

    idle: Callable  # (leaves, shape=(B, S), max_length=L, n_best=N) -> State
    encode: Callable  # (leaves, head_gates, source) -> Encoded
    go_on: Callable  # (state, leaves, head_gates, queue, seeds, enough), see `serve`


@lru_cache(maxsize=64)
def programs(graph, structure, options) -> Programs:
    """Those of a model of any parameters, for the options of a search.

    Looked up once a translation: to hash a graph takes a millisecond, a step two.
    """
    fixed = {"graph": graph, "structure": structure}
    options = dict(options)

    @partial(jax.jit, static_argnames=("shape", "max_length", "n_best"))
    def begin(leaves, **sizes):
        sizes["beam_size"] = options["beam_size"]
        return on_each(partial(idle, **fixed, **sizes))(leaves)

    @jax.jit
    def encode_all(*arrays):
        return on_each(partial(read, **fixed))(*arrays)

    @partial(jax.jit, donate_argnums=0)
    def continued(*arrays):
        return on_each(partial(go_on, **fixed, options=options))(*arrays)

    return Programs(begin, encode_all, continued)


def idle(leaves, *, graph, structure, shape, **sizes) -> State:
    """`empty` of every trial, for B and S of `shape`."""

    def one(leaves):
        model = precision.merge(graph, jax.tree.unflatten(structure, leaves))
        keys = jnp.broadcast_to(jax.random.key(0), shape[:1])
        return empty(model, jnp.zeros(shape, jnp.int32), keys, **sizes)

    state = jax.vmap(one, out_axes=OF_TRIALS)(leaves)
    return state._replace(clock=state.clock[None])


def read(
    leaves, head_gates, source: Int[Array, "R Q S"], *, graph, structure
) -> Encoded:
    """`encode` of every trial's sentences."""
    params = precision.rounded(graph, jax.tree.unflatten(structure, leaves))

    def one(params, source, head_gates):
        model = nnx.merge(graph, params)
        check_gates(head_gates, model.head_gates())
        segments = (source > 0).astype(jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(source.shape[1]), source.shape)
        return encode(model, source, segments, positions, head_gates)

    return over_trials(one)(params, source, head_gates)


def go_on(
    state: State,
    leaves,
    head_gates,
    queue: Queue,
    seeds: Int[Array, "R"],
    enough: Int[Array, "R"],
    *,
    graph,
    structure,
    options,
) -> tuple[State, Decoded, Array, Array, Array]:
    """`serve` of every trial. All trials of a device decode in step."""
    params = precision.rounded(graph, jax.tree.unflatten(structure, leaves))

    def step(params, head_gates, state):
        model = nnx.merge(graph, params)
        return advance(model, state, head_gates=head_gates, **options)

    def all_steps(params, head_gates, state, queue, seeds, enough):
        each = jax.vmap if enough.ndim else lambda function, *_: function
        steps = each(step, (0, 0, OF_TRIALS), OF_TRIALS)
        steps = partial(steps, params, head_gates)
        return serve(steps, each, state, queue, seeds, enough)

    state = state._replace(clock=state.clock[0])
    arrays = params, head_gates, state, queue, seeds, enough
    state, *found = over_trials(all_steps, lambda function: function)(*arrays)
    return state._replace(clock=state.clock[None]), *found


def translate(
    graph: nnx.GraphDef,
    params,
    sentences: list[list[int]],
    *,
    head_gates: dict | None = None,
    sample_numbers: Sequence[int] | None = None,
    n_best: int | None = None,
    **options: int | float,
) -> tuple[list[list[int]], list[float]] | list[list[tuple[list[int], float]]]:
    """Translate sentences of token ids with one model.

    Args:
        graph, params: a model as `nnx.split` gives it, of one trial.
        sentences: token ids, each ending in EOS.
        head_gates: see `decode`.
        sample_numbers, n_best, options: see `translate_trials`.

    Returns:
        The token ids of each translation without EOS, and the scores; with n_best
        instead, for each sentence, a list of (token ids, score), the best first.
    """
    params, head_gates = jax.tree.map(lambda x: x[None], (params, head_gates))
    options |= {"head_gates": head_gates, "sample_numbers": sample_numbers}
    return translate_trials(graph, params, sentences, n_best=n_best, **options)[0]


def translate_trials(
    graph: nnx.GraphDef,
    params,
    sentences: list[list[int]],
    chosen: list[list[int]] | None = None,
    *,
    batch_size: int = 128,
    max_length_factor: float = 2.0,
    max_length_extra: int = 16,
    seed: int = 0,
    sample_numbers: Sequence[int] | None = None,
    head_gates: dict | None = None,
    n_best: int | None = None,
    **options: int | float,
) -> list:
    """Translate sentences of token ids with every trial, all trials at once.

    The sentences may be of any number and length. No translation depends on the other
    sentences or trials (a sample: on its number). The longest are begun
    first, and a sentence that is finished makes room for the next, which waits on the
    device. On a CPU the cores decode sentences of their own, batch_size hypotheses
    each. Programs are compiled for all rows and an eighth of them, of up to 16
    sentences for 16 and 1, and for lengths of 16, 24, 32, 48, 64, ...; to encode many,
    for closer ones.

    Args:
        graph, params: a model as `nnx.split` gives it, the leaves with the trial axis R
            in front.
        sentences: token ids, each ending in EOS.
        chosen: of every trial, the numbers of the sentences that it is to translate;
            default: all.
        batch_size: hypotheses of a trial decoded at a time, beam_size a sentence; and
            sentences of a trial that are sent to the device at a time.
        max_length_factor, max_length_extra: a translation has at most
            factor · source length + extra tokens, EOS included.
        seed: of the samples.
        sample_numbers: of the sentences, which make the samples of equal ones differ;
            default: their places in the list.
        head_gates: see `decode`, but R L N.
        n_best, options: see `decode`.

    Returns:
        Of every trial what `translate` returns, in the order of `chosen`.
    """
    options = complete(**options)
    beam_size = options["beam_size"]
    check_n_best(n_best, beam_size)
    limits = [int(max_length_factor * len(x)) + max_length_extra for x in sentences]
    leaves, structure = jax.tree.flatten(params)
    if chosen is None:
        chosen = [list(range(len(sentences)))] * len(leaves[0])
    most = max(1, batch_size // beam_size)
    few = max(map(len, chosen)) <= 16
    # At the end of many, one row alone saves less than it takes to compile.
    sizes = sorted({1, min(16, most)} if few else {max(1, most // 8), most})
    seeds = np.full(len(chosen), seed, np.int32)
    if sample_numbers is None:
        sample_numbers = range(len(sentences))
    known = np.array(sample_numbers, np.int32)
    idle, encode, go_on = programs(graph, structure, tuple(options.items()))
    parts = (
        partial(idle, leaves, n_best=n_best),
        partial(encode, leaves, head_gates),
        lambda state, queue, enough: go_on(
            state,
            leaves,
            head_gates,
            queue._replace(numbers=known[queue.numbers]),
            seeds,
            enough,
        ),
    )
    found: list[dict] = [{} for _ in chosen]
    # A translation is seldom longer than its source by a third. Those that are come
    # back unfinished, and are begun again with more room.
    factor = 1
    while True:
        waiting = [
            sorted(set(numbers) - done.keys(), key=lambda i: len(sentences[i]))
            for numbers, done in zip(chosen, found, strict=True)
        ]
        if not any(waiting):
            break
        count = max(map(len, waiting))
        longest = power_of_two(max(limits[i] for i in itertools.chain(*waiting)))
        if factor > 1:  # few, as a rule: as many rows as they need, with all the room
            a_lane = -(-count // num_lanes(len(chosen)))
            sizes = [min(most, 1 << (a_lane - 1).bit_length())]
            factor = longest if count <= most else factor
        room = partial(slots, factor=factor, longest=longest)
        finished = lanes(parts, sentences, limits, waiting, sizes, room, batch_size)
        for done, new in zip(found, finished, strict=True):
            done |= new
        factor *= 3
    each = [
        [done[i] for i in numbers] for numbers, done in zip(chosen, found, strict=True)
    ]
    if n_best is not None:
        return each
    return [([ids for ids, _ in some], [score for _, score in some]) for some in each]
