"""Many sentences through few rows: which are decoded when, decided on the host."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from models.decoding_step import State

OF_TRIALS = State(clock=None, rows=0, cache=0)  # which leaves have the trial axis R


def on_each(function):
    """Let every device call it for the trials that it holds, on its own.

    All arrays have the trial axis R in front, but the clock of a `State`: one a device.
    """
    if dict(jax.sharding.get_abstract_mesh().shape).get("trial", 1) == 1:
        return function
    parts = PartitionSpec("trial")
    return jax.shard_map(function, in_specs=parts, out_specs=parts, check_vma=False)


def stream(begin, step, sentences, limits, waiting, sizes, room) -> list[dict]:
    """The (tokens, score) by number of each trial's sentences.

    They are taken from the end of those waiting; those that do not fit the cache are
    left out.
    """
    R = len(waiting)
    B = at_least(max(map(len, waiting)), sizes)
    S = bucket(longest_of(sentences, waiting))
    state = begin(shape=(B, S), max_length=room(S))
    free = [list(range(B)) for _ in range(R)]
    running: list[dict[int, int]] = [{} for _ in range(R)]  # numbers by row
    finished: list[dict] = [{} for _ in range(R)]
    age = np.zeros((R, B), int)
    while any(waiting) or any(running):
        left = [len(w) + len(r) for w, r in zip(waiting, running, strict=True)]
        fewer = at_least(max(left), sizes)
        of_running = [list(rows.values()) for rows in running]
        narrower = bucket(longest_of(sentences, [*of_running, *waiting]))
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
        E = B if B <= 16 else B // 8  # sentences encoded at a time, rows waited for
        source, places = np.zeros((R, E, S), np.int32), np.full((R, E), B, np.int32)
        numbers, bounds = np.zeros((R, E), np.int32), np.ones((R, E), np.int32)
        # Fill all rows first; then wait for a few; at last until fewer rows will do.
        smaller = max((size for size in sizes if size < B), default=0)
        enough = np.full(R, B - smaller, np.int32)
        for r in range(R):
            for n in range(min(E, len(free[r]), len(waiting[r]))):
                number, row = waiting[r].pop(), free[r].pop()
                source[r, n, : len(sentences[number])] = sentences[number]
                places[r, n], numbers[r, n] = row, number
                bounds[r, n] = limits[number]
                running[r][row] = number
            if waiting[r]:
                enough[r] = len(free[r]) or E
        state, *out = step(state, source, numbers, bounds, places, enough)
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


def longest_of(sentences, numbers: list[list[int]]) -> int:
    """Tokens of the longest sentence among those of the numbers."""
    return max(len(sentences[i]) for i in itertools.chain(*numbers))


def slots(S: int, *, factor: int, longest: int) -> int:
    """L for sources of up to S tokens."""
    return min(factor * S, longest)


def at_least(count, sizes):
    """The smallest of the sizes that holds so many, or the largest."""
    return min((size for size in sizes if size >= count), default=sizes[-1])


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
