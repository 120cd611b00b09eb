"""Many prompts through few rows: refilling on the device, lanes, and program sizes.

Prompts wait prefilled on the device (`Queue`), and take the place of those that are
done (`serve`). The host only decides which programs run on what (`decode_all`), and on
a CPU gives every core prompts of its own (`decode_in_lanes`).
"""

import itertools
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from headcount.attention.platform import cores
from headcount.decoding.step import (
    SLOTS,
    Decoded,
    Prompt,
    Rows,
    State,
    decoded,
    fit_width,
    run_until,
    see_own_slot,
    start,
)

TRIAL_AXES = State(clock=None, rows=0, cache=0)  # vmap axes: the clock is shared


class Queue(NamedTuple):
    """Prefilled prompts that wait on the device for a row."""

    prompts: Prompt  # Q
    numbers: Int[Array, "Q"]  # random keys are made from them
    limits: Int[Array, "Q"]
    count: Int[Array, ""]  # of prompts; the rest of Q is padding


class Served(NamedTuple):
    """Results by place: first of the B prompts that had rows, then of the queue's Q."""

    places: Int[Array, "B"]  # where in `found` each row's result goes
    begun: Int[Array, ""]  # how many of the queue have had a row
    found: Decoded  # of each of B + Q
    done: Bool[Array, " B+Q"]


def serve(
    step, each, state: State, queue: Queue, seeds, enough
) -> tuple[State, Decoded, Array, Array, Array]:
    """Decode until every prompt of the queue has a row, and enough rows are done.

    Finished rows are refilled on the device, without the host.

    Args:
        step: one step of decoding of all trials.
        each: maps a function over trials.
        state: of all trials, as are the arguments after it.
        queue: taken in order, whenever an eighth of the rows (at least one) is done in
            every trial that has prompts left.
        seeds: of samples.
        enough: rows that are to be done at the end, once the queue is empty.

    Returns:
        The state, and what the host needs of `Served`: the results, which are done, the
        place of each row's result, and the number of tokens so far.
    """
    B, Q = state.rows.done.shape[-1], queue.numbers.shape[-1]

    def refill_and_run(both):
        state, served = both
        take = each(partial(refill, clock=state.clock))
        rows, served = take(state.rows, served, queue, seeds)
        waiting = served.begun < queue.count
        fills = waiting & rows.done.any(-1)  # some rows are still free
        few = jnp.where(fills.any(), 0, jnp.where(waiting, refill_size(B), 0))
        few = jnp.where(waiting.any(), few, enough)
        return run_until(step, state._replace(rows=rows), few), served

    def unfinished(both):
        state, served = both
        waiting = (served.begun < queue.count).any()
        return waiting | (state.rows.done.sum(-1) < enough).any()

    served = each(partial(nothing_served, Q=Q))(state.rows)
    state, served = jax.lax.while_loop(unfinished, refill_and_run, (state, served))
    served = each(save_results)(state.rows, served)
    age = state.clock - state.rows.begin
    return state, served.found, served.done, served.places, age


def refill_size(rows: int) -> int:
    """Return how many rows are refilled at a time, once so many are done."""
    return max(1, rows // 8)


def nothing_served(rows: Rows, Q: int) -> Served:
    """Return the results before any of Q prompts has a row."""
    found = jax.tree.map(
        lambda x: jnp.pad(x, [(0, Q)] + [(0, 0)] * (x.ndim - 1)), decoded(rows)
    )
    places = jnp.arange(len(rows.done))
    return Served(places, jnp.zeros((), jnp.int32), found, jnp.pad(rows.done, (0, Q)))


def save_results(rows: Rows, served: Served) -> Served:
    """Save what the rows have found so far."""
    found, done = jax.tree.map(
        lambda old, new: old.at[served.places].set(new),
        (served.found, served.done),
        (decoded(rows), rows.done),
    )
    return served._replace(found=found, done=done)


def refill(
    rows: Rows, served: Served, queue: Queue, seed, clock
) -> tuple[Rows, Served]:
    """Save results, and begin prompts in some of the rows that are done."""
    B, W, L = rows.tokens.shape
    sizes = {"max_length": L, "beam_size": W}
    if rows.best.score.ndim == 2:
        sizes["n_best"] = rows.best.score.shape[1]
    served = save_results(rows, served)
    free = jnp.argsort(~rows.done)[: refill_size(B)]
    place = served.begun + jnp.arange(len(free))
    begins = rows.done[free] & (place < queue.count)
    chosen, numbers, limits = jax.tree.map(
        lambda x: x.at[place].get(mode="clip"), tuple(queue)[:3]
    )
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers)
    fresh = start(chosen, keys, limits, clock, **sizes)
    rows, places = jax.tree.map(
        lambda old, new: old.at[jnp.where(begins, free, B)].set(new, mode="drop"),
        (rows, served.places),
        (fresh, B + place),
    )
    begun = served.begun + begins.sum(dtype=jnp.int32)
    return rows, served._replace(places=places, begun=begun)


def per_device(function):
    """Let every device call a function for the trials that it holds.

    All arrays have the trial axis R in front, except the clock of a `State`, of which
    there is one per device. If the trials can't be divided, every device does all.
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


def squeeze_trials(function, mapped=jax.vmap):
    """Map over trials, but call it without the axis if there is only one trial.

    XLA makes slower programs of a trial axis of size 1. `mapped` maps over several
    trials; the identity if the function does that itself.
    """

    def call(*arrays):
        if len(jax.tree.leaves(arrays)[0]) > 1:
            return mapped(function)(*arrays)
        arrays = jax.tree.map(lambda x: x[0] if x.ndim else x, arrays)
        return jax.tree.map(lambda x: x[None] if x.ndim else x, function(*arrays))

    return call


def decode_in_lanes(programs, prompts, limits, waiting, sizes, room, most):
    """Run `decode_all` on every core of a CPU at once, if there are enough prompts.

    While one lane does what uses a single core, the others keep the other cores busy:
    on two cores, two lanes decode 1.4 to 1.6 times as fast as one.
    """
    one = partial(
        decode_all, programs, prompts, limits, sizes=sizes, room=room, most=most
    )
    count = min(num_lanes(len(waiting)), -(-len(waiting[0]) // sizes[-1]))
    if count == 1:
        return one(waiting)
    mesh = jax.sharding.get_mesh()  # threads don't inherit it
    shares = [waiting[0][k::count] for k in range(count)]

    def lane(share):
        with jax.set_mesh(mesh):
            return one([share])[0]

    with ThreadPoolExecutor(count) as pool:
        lanes = [pool.submit(lane, share) for share in shares]
        try:  # whichever lane ends first: one that fails stops the others
            each = [lane.result() for lane in as_completed(lanes)]
            return [{n: x for some in each for n, x in some.items()}]
        except BaseException:  # Ctrl-C, too: let the others end soon
            for share in shares:
                share.clear()
            raise


def num_lanes(num_trials: int) -> int:
    """Return how many lanes decode at a time: on a CPU, of one trial, one per core."""
    if jax.default_backend() != "cpu" or num_trials > 1:
        return 1
    return cores()


def decode_all(programs, prompts, limits, waiting, *, sizes, room, most) -> list[dict]:
    """Return (tokens, score) by prompt number, or a list of the n best, of each trial.

    Results that do not fit the cache are left out.

    Args:
        programs: see `generate.Programs`.
        prompts: token ids by number.
        limits: tokens that each result may have.
        waiting: numbers of the prompts of each trial, the longest last; consumed.
        sizes: how many rows there may be, ascending.
        room: the slots L for prompts of up to S tokens.
        most: how many prompts may wait for a row on the device.
    """
    make_idle, prefill, go_on = programs
    R, longest = len(waiting), max(map(len, waiting))
    B, Q = at_least(longest, sizes), at_least(longest, [*sizes, most])
    width = columns if longest > most else bucket  # `columns` compiles more programs
    S = bucket(longest_of(prompts, waiting))
    state = make_idle(shape=(B, S), max_length=room(S))
    running: list[dict[int, int]] = [{} for _ in range(R)]  # numbers by row
    finished: list[dict] = [{} for _ in range(R)]
    age, prefilled, rest = np.zeros((R, B), int), None, ()  # of the last queue
    num_too_long = 0  # for the cache
    while any(waiting) or any(running):
        narrower = S
        # With many prompts left, another program for narrower ones is worth compiling,
        # and takes over once every running row fits. Rows that are too old for their
        # own lengths don't delay that: they are left out.
        if max(map(len, waiting)) >= B:
            fitting = [
                {
                    row: number
                    for row, number in rows.items()
                    if age[r, row] < room(bucket(len(prompts[number])))
                }
                for r, rows in enumerate(running)
            ]
            of_running = [list(rows.values()) for rows in fitting]
            of_waiting = [last(w, 1) for w in waiting]
            narrower = bucket(longest_of(prompts, [*of_running, *of_waiting]))
            if narrower < S:
                running = fitting
        remaining = [len(w) + len(r) for w, r in zip(waiting, running, strict=True)]
        fewer = at_least(max(remaining), sizes)
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
            shape = R, Q, width(longest_of(prompts, new))
            tokens, lengths, *rest = to_arrays(new, prompts, limits, shape)
            prefilled = prefill(tokens, lengths)
            if shape[2] < S:
                prefilled = widen(prefilled, S)
        count = np.array([len(numbers) for numbers in new], np.int32)
        # the last rows go on until a smaller program can take over
        smaller = max((size for size in sizes if size < B), default=0)
        enough = np.full(R, 0 if any(waiting) else B - smaller, np.int32)
        state, *out = go_on(state, Queue(prefilled, *rest, count), enough)
        (tokens, lengths, scores, ended), done, places, age = jax.device_get(out)
        for r in range(R):
            held = running[r] | {B + place: n for place, n in enumerate(new[r])}
            for place, number in held.items():
                if not done[r, place]:
                    continue
                if ended[r, place]:
                    each = (x[r, place] for x in (tokens, lengths, scores))
                    finished[r][number] = as_lists(*each)
                elif limits[number] <= room(S):
                    lost = [], float("nan")
                    finished[r][number] = lost if tokens.ndim == 3 else [lost]
                else:
                    num_too_long += 1
            running[r] = {
                row: held[place]
                for row, place in enumerate(places[r].tolist())
                if not done[r, place]
            }
        if num_too_long > R * B + sum(map(len, finished)):
            break  # most are too long: start the others again with more room
    return finished


def as_lists(tokens: np.ndarray, length, score):
    """Return token ids without EOS and the score; of several hypotheses a list."""
    if tokens.ndim == 2:
        hypotheses = zip(tokens, length, score, strict=True)
        return [as_lists(*each) for each in hypotheses if each[1] > 0]
    return tokens[: length - 1].tolist(), float(score)


def to_arrays(numbers, prompts, limits, shape) -> tuple[np.ndarray, ...]:
    """Return prompts R Q S, and their lengths, numbers and limits, each R Q."""
    R, Q, S = shape
    tokens = np.zeros((R, Q, S), np.int32)
    lengths, known = np.zeros((2, R, Q), np.int32)
    bounds = np.ones((R, Q), np.int32)
    for r, each in enumerate(numbers):
        for place, number in enumerate(each):
            prompt = prompts[number]
            tokens[r, place, : len(prompt)] = prompt
            lengths[r, place] = len(prompt)
            known[r, place], bounds[r, place] = number, limits[number]
    return tokens, lengths, known, bounds


def last(numbers: list[int], count: int) -> list[int]:
    """Return the last so many, in reverse order."""
    return numbers[: -count - 1 : -1]


def longest_of(prompts, numbers: list[list[int]]) -> int:
    """Return the length of the longest prompt among those of the numbers."""
    return max(len(prompts[i]) for i in itertools.chain(*numbers))


def slots(S: int, *, factor: int, longest: int) -> int:
    """Return the slots L for prompts of S tokens; factor 1 leaves a third more."""
    return min(factor * bucket(4 * S // 3), longest)


def at_least(count, sizes):
    """Return the smallest size that holds so many, or the largest."""
    return min((size for size in sizes if size >= count), default=sizes[-1])


@partial(jax.jit, static_argnames="S")
def widen(prompts: Prompt, S: int) -> Prompt:
    """Pad the prompts of every trial to S columns."""
    return per_device(jax.vmap(partial(fit_width, S=S)))(prompts)


@partial(jax.jit, static_argnames="shape")
def keep(
    state: State,
    rows: Int[Array, "R B"],
    count: Int[Array, "R"],
    *,
    shape: tuple[int, int],
) -> State:
    """Move the given rows of every trial to fewer and narrower ones.

    Args:
        state: of more and wider rows.
        rows: which to keep.
        count: how many of these go on; the rest are done.
        shape: S and L of the new state.
    """

    def keep_here(state, rows, count):
        state = state._replace(clock=state.clock[0])
        one = partial(keep_of_one, shape=shape)
        state = jax.vmap(one, (TRIAL_AXES, 0, 0), TRIAL_AXES)(state, rows, count)
        return state._replace(clock=state.clock[None])

    return per_device(keep_here)(state, rows, count)


def keep_of_one(state, rows, count, *, shape):
    """Do the same for one trial."""
    S, L = shape
    goes_on = jnp.arange(len(rows)) < count
    clock, rows, cache = jax.tree.map(lambda x: x[rows] if x.ndim else x, state)
    old = rows.tokens.shape[2]
    # new slot j takes what was written at the latest clock that is j modulo L
    latest = (clock - 1 - (clock - 1 - jnp.arange(L)) % L) % old

    def moved(x, axis):
        apart = x.reshape(*x.shape[:axis], old, -1, *x.shape[axis + 1 :])
        return apart[(slice(None),) * axis + (latest,)].reshape(
            *x.shape[:axis], -1, *x.shape[axis + 1 :]
        )

    rows = rows._replace(
        done=rows.done | ~goes_on,
        tokens=rows.tokens[..., latest],
        visible=see_own_slot(rows.visible[:, :, latest], clock),
        best=rows.best._replace(tokens=rows.best.tokens[..., latest]),
        prompt=fit_width(rows.prompt, S),
    )
    cache = [tuple(map(moved, kept, SLOTS)) for kept in cache]
    return State(clock, rows, cache)


def bucket(length: int) -> int:
    """Round up to 16, 24, 32, 48, 64, 96, ..."""
    power = power_of_two(length)
    return power * 3 // 4 if power > 16 and length <= power * 3 // 4 else power


def columns(length: int) -> int:
    """Round up to 8, 12, 16, 20, 24, 28, 32, 40, 48, ...: widths of prefills of many.

    They are closer together than `bucket`, since a quarter of the time goes into the
    prefill, whose program compiles quickly.
    """
    step = max(4, power_of_two(length) // 8)
    return max(8, -(-length // step) * step)


def power_of_two(length: int) -> int:
    """Round up to a power of two, at least 16."""
    return max(16, 1 << (length - 1).bit_length())
