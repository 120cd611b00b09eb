"""Many sentences through few rows: which are decoded when, decided on the host."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from headcount.attention.platform import cores
from headcount.decoding.queue import Queue
from headcount.decoding.step import Encoded, State, of_width, with_own

OF_TRIALS = State(clock=None, rows=0, cache=0)  # which leaves have the trial axis R


def on_each(function):
    """Let every device call it for the trials that it holds, on its own.

    All arrays have the trial axis R in front, but the clock of a `State`: one a device.
    Where the devices can't share the trials out, as of a single one, each does all.
    """
    size = dict(jax.sharding.get_abstract_mesh().shape).get("trial", 1)
    if size == 1:
        return function
    parts = PartitionSpec("trial")
    shared = jax.shard_map(function, in_specs=parts, out_specs=parts, check_vma=False)

    def call(*arrays):
        num_trials = len(jax.tree.leaves(arrays)[0])
        return (function if num_trials % size else shared)(*arrays)

    return call


def over_trials(function, over=jax.vmap):
    """Map over trials; one alone without its axis, of which XLA makes slower programs.

    `over` is how several are mapped: `jax.vmap`, or nothing if the function does it.
    """

    def call(*arrays):
        if len(jax.tree.leaves(arrays)[0]) > 1:
            return over(function)(*arrays)
        arrays = jax.tree.map(lambda x: x[0] if x.ndim else x, arrays)
        return jax.tree.map(lambda x: x[None] if x.ndim else x, function(*arrays))

    return call


def lanes(programs, sentences, limits, waiting, sizes, room, most) -> list[dict]:
    """`stream` for every core of a CPU at once, where there are enough sentences.

    What one does on a single core, another's products fill the other cores with: on two
    cores two lanes decode 1.4 to 1.6 times as fast.
    """
    one = partial(
        stream, programs, sentences, limits, sizes=sizes, room=room, most=most
    )
    count = min(num_lanes(len(waiting)), -(-len(waiting[0]) // sizes[-1]))
    if count == 1:
        return one(waiting)
    mesh = jax.sharding.get_mesh()  # a thread knows of none
    shares = [waiting[0][k::count] for k in range(count)]

    def lane(share):
        with jax.set_mesh(mesh):
            return one([share])[0]

    with ThreadPoolExecutor(count) as pool:
        try:
            return [{n: x for some in pool.map(lane, shares) for n, x in some.items()}]
        except BaseException:  # Ctrl-C too: the others finish what is on the device
            for share in shares:
                share.clear()
            raise


def num_lanes(num_trials: int) -> int:
    """How many decode at a time: on a CPU, of one trial, one on every usable core."""
    if jax.default_backend() != "cpu" or num_trials > 1:
        return 1
    return cores()


def stream(programs, sentences, limits, waiting, *, sizes, room, most) -> list[dict]:
    """The (tokens, score) by number of each trial's sentences; of the n best a list.

    They are taken from the end of those waiting, the longest; those that do not fit the
    cache are left out. The sizes say how many rows there may be; at most so many wait
    for a row on the device.
    """
    idle, encode, go_on = programs
    R, longest = len(waiting), max(map(len, waiting))
    B, Q = at_least(longest, sizes), at_least(longest, [*sizes, most])
    width = columns if longest > most else bucket  # the former's programs are more
    S = bucket(longest_of(sentences, waiting))
    state = idle(shape=(B, S), max_length=room(S))
    running: list[dict[int, int]] = [{} for _ in range(R)]  # numbers by row
    finished: list[dict] = [{} for _ in range(R)]
    age, encoded, told = np.zeros((R, B), int), None, ()  # of the last queue
    num_longer = 0  # than there is room for
    while any(waiting) or any(running):
        narrower = S
        # Another program is compiled for many sentences only, and takes the place of
        # this one when all that run have room in it. Those that are too old for their
        # own lengths don't keep it waiting: they are left out too.
        if max(map(len, waiting)) >= B:
            fitting = [
                {
                    row: number
                    for row, number in rows.items()
                    if age[r, row] < room(bucket(len(sentences[number])))
                }
                for r, rows in enumerate(running)
            ]
            of_running = [list(rows.values()) for rows in fitting]
            of_waiting = [last(w, 1) for w in waiting]
            narrower = bucket(longest_of(sentences, [*of_running, *of_waiting]))
            if narrower < S:
                running = fitting
        left = [len(w) + len(r) for w, r in zip(waiting, running, strict=True)]
        fewer = at_least(max(left), sizes)
        if fewer < B or narrower < S:
            kept = [[*r, *(row for row in range(B) if row not in r)] for r in running]
            kept = np.array(kept, np.int32)[:, :fewer]
            running = [
                {new: r[old] for new, old in enumerate(rows) if old in r}
                for r, rows in zip(running, kept.tolist(), strict=True)
            ]
            B, S = fewer, narrower
            count = np.array([len(rows) for rows in running], np.int32)
            state = keep(state, kept, count, shape=(S, room(S)))

        new = [last(w, Q) for w in waiting]
        for numbers, sent in zip(waiting, new, strict=True):
            del numbers[len(numbers) - len(sent) :]
        if any(new):
            shape = R, Q, width(longest_of(sentences, new))
            source, *told = arrays_of(new, sentences, limits, shape)
            encoded = encode(source)
            if shape[2] < S:
                encoded = widened(encoded, S)
        count = np.array([len(numbers) for numbers in new], np.int32)
        # The last go on until fewer rows will do.
        smaller = max((size for size in sizes if size < B), default=0)
        enough = np.full(R, 0 if any(waiting) else B - smaller, np.int32)
        state, *out = go_on(state, Queue(encoded, *told, count), enough)
        (tokens, scores, ended), done, places, age = jax.device_get(out)
        for r in range(R):
            held = running[r] | {B + place: n for place, n in enumerate(new[r])}
            for place, number in held.items():
                if not done[r, place]:
                    continue
                if ended[r, place]:
                    found = as_lists(tokens[r, place], scores[r, place])
                    finished[r][number] = found
                elif limits[number] <= room(S):
                    lost = [], float("nan")
                    finished[r][number] = lost if tokens.ndim == 3 else [lost]
                else:
                    num_longer += 1
            running[r] = {
                row: held[place]
                for row, place in enumerate(places[r].tolist())
                if not done[r, place]
            }
        if num_longer > R * B + sum(map(len, finished)):
            break  # most are: all that are left do better with more room
    return finished


def as_lists(tokens: np.ndarray, score: np.ndarray | np.floating):
    """Token ids without EOS, and the score; of several hypotheses a list of both."""
    if tokens.ndim == 2:
        some = zip(tokens, score, strict=True)
        return [as_lists(*each) for each in some if each[0].any()]
    return tokens[: (tokens > 0).sum() - 1].tolist(), float(score)


def arrays_of(numbers, sentences, limits, shape) -> tuple[np.ndarray, ...]:
    """The sentences of each trial, their numbers and their limits, padded to R Q S."""
    R, Q, S = shape
    source = np.zeros((R, Q, S), np.int32)
    known, bounds = np.zeros((R, Q), np.int32), np.ones((R, Q), np.int32)
    for r, each in enumerate(numbers):
        for place, number in enumerate(each):
            source[r, place, : len(sentences[number])] = sentences[number]
            known[r, place], bounds[r, place] = number, limits[number]
    return source, known, bounds


def last(numbers: list[int], count: int) -> list[int]:
    """The last so many, from the end on."""
    return numbers[: -count - 1 : -1]


def longest_of(sentences, numbers: list[list[int]]) -> int:
    """Tokens of the longest sentence among those of the numbers."""
    return max(len(sentences[i]) for i in itertools.chain(*numbers))


def slots(S: int, *, factor: int, longest: int) -> int:
    """L for sources of up to S tokens; a factor of 1 has room for a third more."""
    return min(factor * bucket(4 * S // 3), longest)


def at_least(count, sizes):
    """The smallest of the sizes that holds so many, or the largest."""
    return min((size for size in sizes if size >= count), default=sizes[-1])


@partial(jax.jit, static_argnames="S")
def widened(encoded: Encoded, S: int) -> Encoded:
    """The same of every trial, in S columns."""
    return on_each(jax.vmap(partial(of_width, S=S)))(encoded)


@partial(jax.jit, static_argnames="shape")
def keep(
    state: State,
    rows: Int[Array, "R B"],
    count: Int[Array, "R"],
    *,
    shape: tuple[int, int],
) -> State:
    """The given rows of every trial, in fewer and narrower; `shape` is S L.

    So many of them go on; the rest are done.
    """

    def keep_here(state, rows, count):
        state = state._replace(clock=state.clock[0])
        one = partial(keep_of_one, shape=shape)
        state = jax.vmap(one, (OF_TRIALS, 0, 0), OF_TRIALS)(state, rows, count)
        return state._replace(clock=state.clock[None])

    return on_each(keep_here)(state, rows, count)


def keep_of_one(state, rows, count, *, shape):
    """The same of one trial."""
    S, L = shape
    goes_on = jnp.arange(len(rows)) < count
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
        done=rows.done | ~goes_on,
        tokens=rows.tokens[..., latest],
        sees=with_own(rows.sees[:, :, latest], clock),
        best=rows.best._replace(tokens=rows.best.tokens[..., latest]),
        source=of_width(rows.source, S),
    )
    cache = [(moved(key, 3), moved(value, 2)) for key, value in cache]
    return State(clock, rows, cache)


def bucket(length: int) -> int:
    """The next of 16, 24, 32, 48, 64, 96, ..."""
    power = power_of_two(length)
    return power * 3 // 4 if power > 16 and length <= power * 3 // 4 else power


def columns(length: int) -> int:
    """The next of 8, 12, 16, 20, 24, 28, 32, 40, 48, ...: many are encoded in so many.

    They are closer than those of `bucket`, since a quarter of the time goes into
    encoding, whose program is compiled soon.
    """
    step = max(4, power_of_two(length) // 8)
    return max(8, -(-length // step) * step)


def power_of_two(length: int) -> int:
    """The next one, at least 16."""
    return max(16, 1 << (length - 1).bit_length())
