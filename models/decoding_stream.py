"""Many sentences through few rows: which are decoded when, decided on the host."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from models.decoding_step import Encoded, State, of_width, start

OF_TRIALS = State(clock=None, rows=0, cache=0)  # which leaves have the trial axis R


def on_each(function):
    """Let every device call it for the trials that it holds, on its own.

    All arrays have the trial axis R in front, but the clock of a `State`: one a device.
    """
    if dict(jax.sharding.get_abstract_mesh().shape).get("trial", 1) == 1:
        return function
    parts = PartitionSpec("trial")
    return jax.shard_map(function, in_specs=parts, out_specs=parts, check_vma=False)


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


def lanes(programs, sentences, limits, waiting, sizes, room) -> list[dict]:
    """`stream` for every core of a CPU at once, where there are enough sentences.

    What one does on a single core, another's products fill the other cores with: on two
    cores two lanes decode 1.4 to 1.6 times as fast.
    """
    count = -(-len(waiting[0]) // sizes[-1])
    if jax.default_backend() != "cpu" or len(waiting) > 1 or count == 1:
        return stream(programs, sentences, limits, waiting, sizes, room)
    count = min(count, cores())
    mesh = jax.sharding.get_mesh()  # a thread knows of none
    shares = [waiting[0][k::count] for k in range(count)]

    def lane(share):
        with jax.set_mesh(mesh):
            return stream(programs, sentences, limits, [share], sizes, room)[0]

    with ThreadPoolExecutor(count) as pool:
        try:
            return [{n: x for some in pool.map(lane, shares) for n, x in some.items()}]
        except BaseException:  # Ctrl-C too: let the others end soon
            for share in shares:
                share.clear()
            raise


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def stream(programs, sentences, limits, waiting, sizes, room) -> list[dict]:
    """The (tokens, score) by number of each trial's sentences.

    They are taken from the end of those waiting, the longest; those that do not fit the
    cache are left out. Many are encoded at a time, and wait until a row is free.
    """
    idle, encode, fill, go_on = programs
    R = len(waiting)
    B = at_least(max(map(len, waiting)), sizes)
    S = bucket(longest_of(sentences, waiting))
    state = idle(shape=(B, S), max_length=room(S))
    free = [list(range(B)) for _ in range(R)]
    encoded, ready = None, [{} for _ in range(R)]  # places of numbers in the encoded
    running: list[dict[int, int]] = [{} for _ in range(R)]  # numbers by row
    finished: list[dict] = [{} for _ in range(R)]
    age = np.zeros((R, B), int)
    while any(waiting) or any(running):
        left = [len(w) + len(r) for w, r in zip(waiting, running, strict=True)]
        fewer = at_least(max(left), sizes)
        of_running = [list(rows.values()) for rows in running]
        of_waiting = [last(w, 1) for w in waiting]
        narrower = bucket(longest_of(sentences, [*of_running, *of_waiting]))
        oldest = max(age[r, [*rows]].max(initial=0) for r, rows in enumerate(running))
        # Another program is compiled for many sentences only, and takes the place of
        # this one when all that run have room in it.
        if max(map(len, waiting)) < B or oldest >= room(narrower):
            narrower = S
        if fewer < B or narrower < S:
            kept = [[*running[r], *free[r]][:fewer] for r in range(R)]
            for r, rows in enumerate(kept):
                running[r] = {rows.index(row): n for row, n in running[r].items()}
                free[r] = [row for row in range(fewer) if row not in running[r]]
            B, S = fewer, narrower
            state = keep(state, np.array(kept, np.int32), shape=(S, room(S)))

        new = [last(w, len(f)) for w, f in zip(waiting, free, strict=True)]
        if any(set(new[r]) - ready[r].keys() for r in range(R)):
            upcoming = [last(w, sizes[-1]) for w in waiting]
            ready = [{n: place for place, n in enumerate(u)} for u in upcoming]
            Q = at_least(max(map(len, upcoming)), sizes)
            source = np.zeros((R, Q, bucket(longest_of(sentences, upcoming))), np.int32)
            for r, numbers in enumerate(upcoming):
                for place, number in enumerate(numbers):
                    source[r, place, : len(sentences[number])] = sentences[number]
            encoded = encode(source)
        if any(new):
            E = at_least(max(map(len, new)), sizes)
            origins, places = np.zeros((R, E), np.int32), np.full((R, E), B, np.int32)
            numbers, bounds = np.zeros((R, E), np.int32), np.ones((R, E), np.int32)
            for r in range(R):
                for n, number in enumerate(new[r]):
                    row = free[r].pop()
                    origins[r, n], places[r, n] = ready[r][number], row
                    numbers[r, n], bounds[r, n] = number, limits[number]
                    running[r][row] = number
                del waiting[r][len(waiting[r]) - len(new[r]) :]
            state = fill(state, encoded, origins, numbers, bounds, places)

        # Where some wait, wait for a few rows; else until fewer rows will do.
        few = B if B <= 16 else B // 8
        smaller = max((size for size in sizes if size < B), default=0)
        enough = [few if w else B - smaller for w in waiting]
        state, *out = go_on(state, np.array(enough, np.int32))
        (tokens, scores, ended), done, age = jax.device_get(out)
        for r in range(R):
            for row in [row for row in running[r] if done[r, row]]:
                free[r].append(row)
                number = running[r].pop(row)
                length = int((tokens[r, row] > 0).sum()) - 1  # without EOS
                if ended[r, row]:
                    found = tokens[r, row, :length].tolist(), float(scores[r, row])
                    finished[r][number] = found
                elif limits[number] <= room(S):
                    finished[r][number] = [], float("nan")
    return finished


def last(numbers: list[int], count: int) -> list[int]:
    """The last so many, from the end on."""
    return numbers[: -count - 1 : -1]


def longest_of(sentences, numbers: list[list[int]]) -> int:
    """Tokens of the longest sentence among those of the numbers."""
    return max(len(sentences[i]) for i in itertools.chain(*numbers))


def slots(S: int, *, factor: int, longest: int) -> int:
    """L for sources of up to S tokens."""
    return min(factor * S, longest)


def at_least(count, sizes):
    """The smallest of the sizes that holds so many, or the largest."""
    return min((size for size in sizes if size >= count), default=sizes[-1])


@partial(jax.jit, donate_argnames="state")
def fill(
    state: State,
    encoded: Encoded,
    origins: Int[Array, "R E"],
    numbers: Int[Array, "R E"],
    limits: Int[Array, "R E"],
    places: Int[Array, "R E"],
    *,
    seeds: Int[Array, "R"],
) -> State:
    """Begin encoded sentences, which lie at the origins, in rows at the places.

    A place that is no row is left out. `numbers` and `seeds` tell the random keys.
    """

    def fill_here(state, *arrays):
        begin = partial(begun, clock=state.clock[0])
        return state._replace(rows=over_trials(begin)(state.rows, *arrays))

    return on_each(fill_here)(state, encoded, origins, numbers, limits, places, seeds)


def begun(rows, encoded, origins, numbers, limits, places, seed, *, clock):
    """The rows of one trial."""
    _, W, L = rows.tokens.shape
    chosen = of_width(
        jax.tree.map(lambda x: x[origins], encoded), rows.source.mask.shape[2]
    )
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers)
    fresh = start(chosen, keys, limits, clock, max_length=L, beam_size=W)
    return jax.tree.map(
        lambda old, new: old.at[places].set(new, mode="drop"), rows, fresh
    )


@partial(jax.jit, static_argnames="shape")
def keep(state: State, rows: Int[Array, "R B"], *, shape: tuple[int, int]) -> State:
    """The given rows of every trial, in fewer and narrower; `shape` is S L."""

    def keep_here(state, rows):
        state = state._replace(clock=state.clock[0])
        one = partial(keep_of_one, shape=shape)
        state = jax.vmap(one, (OF_TRIALS, 0), OF_TRIALS)(state, rows)
        return state._replace(clock=state.clock[None])

    return on_each(keep_here)(state, rows)


def keep_of_one(state, rows, *, shape):
    """The same of one trial."""
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
        source=of_width(rows.source, S),
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
