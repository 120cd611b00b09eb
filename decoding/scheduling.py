"""Schedule many prompts on few rows: refills on the device, lanes, program sizes.

Prefilled prompts wait on the device (`Queue`) and replace prompts that are done
(`serve`). The host only chooses program sizes and sends prompts (`decode_all`). On a
CPU it decodes separate prompts on every core (`decode_in_lanes`).
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
from headcount.runtime.workdir import num_cores

TRIAL_AXES = State(clock=None, rows=0, cache=0)  # vmap axes: the clock is shared


class Queue(NamedTuple):
    """Prefilled prompts that wait on the device for a row."""

    prompts: Prompt  # Q
    numbers: Int[Array, "Q"]  # from which random keys are derived
    limits: Int[Array, "Q"]
    count: Int[Array, ""]  # number of prompts; the rest of Q is padding


class Served(NamedTuple):
    """Results of the B prompts that had rows at first, then of the Q in the queue."""

    places: Int[Array, "B"]  # index in `results` of each row's result
    begun: Int[Array, ""]  # how many prompts of the queue have started
    results: Decoded  # B + Q
    done: Bool[Array, " B+Q"]


def serve(
    step, map_trials, state: State, queue: Queue, seeds, enough
) -> tuple[State, Decoded, Array, Array, Array]:
    """Decode until every prompt of the queue has started, and enough rows are done.

    Finished rows are refilled on the device, without the host.

    Args:
        step: function for one decoding step of all trials.
        map_trials: function that maps a function over trials.
        state: the state of all trials. The following arguments are for all trials, too.
        queue: waiting prompts, which start in order, whenever an eighth of the rows (at
            least one) is done in every trial that has prompts left.
        seeds: seeds for sampling.
        enough: number of rows that must be done at the end, once the queue is empty.

    Returns:
        The state; from `Served` the results, which of them are done, and the index of
        each row's result; and the number of tokens of each row so far.
    """
    B, Q = state.rows.done.shape[-1], queue.numbers.shape[-1]

    def refill_and_run(carry):
        state, served = carry
        take = map_trials(partial(refill, clock=state.clock))
        rows, served = take(state.rows, served, queue, seeds)
        waiting = served.begun < queue.count
        fills = waiting & rows.done.any(-1)  # whether rows are still free
        num_done = jnp.where(fills.any(), 0, jnp.where(waiting, refill_size(B), 0))
        num_done = jnp.where(waiting.any(), num_done, enough)
        return run_until(step, state._replace(rows=rows), num_done), served

    def unfinished(carry):
        state, served = carry
        waiting = (served.begun < queue.count).any()
        return waiting | (state.rows.done.sum(-1) < enough).any()

    served = map_trials(partial(nothing_served, Q=Q))(state.rows)
    state, served = jax.lax.while_loop(unfinished, refill_and_run, (state, served))
    served = map_trials(save_results)(state.rows, served)
    age = state.clock - state.rows.begin
    return state, served.results, served.done, served.places, age


def refill_size(rows: int) -> int:
    """Return how many rows to refill at a time, as soon as this many are done."""
    return max(1, rows // 8)


def nothing_served(rows: Rows, Q: int) -> Served:
    """Return the initial results, before any of Q prompts has started."""
    results = jax.tree.map(
        lambda x: jnp.pad(x, [(0, Q)] + [(0, 0)] * (x.ndim - 1)), decoded(rows)
    )
    places = jnp.arange(len(rows.done))
    return Served(places, jnp.zeros((), jnp.int32), results, jnp.pad(rows.done, (0, Q)))


def save_results(rows: Rows, served: Served) -> Served:
    """Save the rows' results so far."""
    results, done = jax.tree.map(
        lambda old, new: old.at[served.places].set(new),
        (served.results, served.done),
        (decoded(rows), rows.done),
    )
    return served._replace(results=results, done=done)


def refill(
    rows: Rows, served: Served, queue: Queue, seed, clock
) -> tuple[Rows, Served]:
    """Save results, and start prompts in some of the rows that are done."""
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
    """Wrap a function so that every device calls it for its own trials.

    All arrays have a leading trial axis R, except the clock of a `State`, which has one
    entry per device. If trials can't be divided evenly, every device computes all.
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
    """Map a function over trials, or call it without the axis for a single trial.

    XLA's programs are slower with a trial axis of size 1. `mapped` maps over several
    trials; pass the identity if the function does so itself.
    """

    def call(*arrays):
        if len(jax.tree.leaves(arrays)[0]) > 1:
            return mapped(function)(*arrays)
        arrays = jax.tree.map(lambda x: x[0] if x.ndim else x, arrays)
        return jax.tree.map(lambda x: x[None] if x.ndim else x, function(*arrays))

    return call


def decode_in_lanes(programs, prompts, limits, waiting, sizes, room, most):
    """Run `decode_all` on every core of a CPU at once, if there are enough prompts.

    While one lane is in a single-threaded part, others keep the other cores busy. On
    two cores, two lanes decode 1.4 to 1.6 times as fast as one.
    """
    one = partial(
        decode_all, programs, prompts, limits, sizes=sizes, room=room, most=most
    )
    count = min(num_lanes(len(waiting)), -(-len(waiting[0]) // sizes[-1]))
    if count <= 1:  # 0 if the first of several trials has no prompts left
        return one(waiting)
    mesh = jax.sharding.get_mesh()  # threads don't inherit it
    shares = [waiting[0][k::count] for k in range(count)]

    def lane(share):
        with jax.set_mesh(mesh):
            return one([share])[0]

    with ThreadPoolExecutor(count) as pool:
        lanes = [pool.submit(lane, share) for share in shares]
        try:  # in order of completion, so that a failing lane stops the others
            by_lane = [lane.result() for lane in as_completed(lanes)]
            return [{n: x for lane_results in by_lane for n, x in lane_results.items()}]
        except BaseException:  # also Ctrl-C: let the other lanes end soon
            for share in shares:
                share.clear()
            raise


def num_lanes(num_trials: int) -> int:
    """Return the number of lanes: one per core for one trial on a CPU, else 1."""
    if jax.default_backend() != "cpu" or num_trials > 1:
        return 1
    return num_cores()


def compiles_slowly() -> bool:
    """Return whether compiling a smaller program takes longer than it saves.

    True on accelerators, where a step with fewer rows or columns is hardly faster.
    """
    return jax.default_backend() != "cpu"


def decode_all(programs, prompts, limits, waiting, *, sizes, room, most) -> list[dict]:
    """Decode the waiting prompts of each trial.

    Args:
        programs: see `generate.Programs`.
        prompts: token ids by number.
        limits: largest number of tokens of each result, by number.
        waiting: numbers of the prompts of each trial, the longest last. The lists are
            emptied.
        sizes: allowed numbers of rows, ascending.
        room: function from the prompts' width S to the number of slots L.
        most: largest number of prompts that wait on the device.

    Returns:
        For each trial, (tokens, score) by prompt number, or a list of the n best.
        Results that do not fit the cache are missing.
    """
    make_idle, prefill, run_queue = programs
    one_size = compiles_slowly()
    sizes = sizes[-1:] if one_size else sizes
    R, longest = len(waiting), max(map(len, waiting))
    B, Q = at_least(longest, sizes), at_least(longest, [*sizes, most])
    S = bucket(longest_of(prompts, waiting))
    width = columns if longest > most else bucket  # `columns` needs more programs
    if one_size:
        width = partial(max, S)  # S, which no prompt exceeds
    state = make_idle(shape=(B, S), max_length=room(S))
    running: list[dict[int, int]] = [{} for _ in range(R)]  # numbers by row
    finished: list[dict] = [{} for _ in range(R)]
    age, prefilled, queue_arrays = np.zeros((R, B), int), None, ()  # of the last queue
    num_too_long = 0  # results that do not fit the cache
    while any(waiting) or any(running):
        narrower = S
        # With many prompts left, compiling a program for narrower prompts pays off. It
        # is used as soon as all running rows fit. Rows that already exceed the slots
        # for their own width would delay this, so they are dropped.
        if max(map(len, waiting)) >= B and not one_size:
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
            kept_rows = [
                [*r, *(row for row in range(B) if row not in r)] for r in running
            ]
            kept_rows = np.array(kept_rows, np.int32)[:, :fewer]
            running = [
                {new: r[old] for new, old in enumerate(rows) if old in r}
                for r, rows in zip(running, kept_rows.tolist(), strict=True)
            ]
            B, S = fewer, narrower
            count = np.array([len(rows) for rows in running], np.int32)
            state = keep(state, kept_rows, count, shape=(S, room(S)))

        next_prompts = [last(w, Q) for w in waiting]
        for numbers, sent in zip(waiting, next_prompts, strict=True):
            del numbers[len(numbers) - len(sent) :]
        if any(next_prompts):
            shape = R, Q, width(longest_of(prompts, next_prompts))
            tokens, lengths, *queue_arrays = to_arrays(
                next_prompts, prompts, limits, shape
            )
            prefilled = prefill(tokens, lengths)
            if shape[2] < S:
                prefilled = widen(prefilled, S)
        count = np.array([len(numbers) for numbers in next_prompts], np.int32)
        # the last rows run until a smaller program can take over
        smaller = max((size for size in sizes if size < B), default=0)
        enough = np.full(R, 0 if any(waiting) else B - smaller, np.int32)
        state, *out = run_queue(state, Queue(prefilled, *queue_arrays, count), enough)
        (tokens, lengths, scores, ended), done, places, age = jax.device_get(out)
        for r in range(R):
            number_at = running[r] | {
                B + place: n for place, n in enumerate(next_prompts[r])
            }
            for place, number in number_at.items():
                if not done[r, place]:
                    continue
                if ended[r, place]:
                    hypothesis = (x[r, place] for x in (tokens, lengths, scores))
                    finished[r][number] = as_lists(*hypothesis)
                elif limits[number] <= room(S):
                    lost = [], float("nan")
                    finished[r][number] = lost if tokens.ndim == 3 else [lost]
                else:
                    num_too_long += 1
            running[r] = {
                row: number_at[place]
                for row, place in enumerate(places[r].tolist())
                if not done[r, place]
            }
        if num_too_long > R * B + sum(map(len, finished)):
            break  # most are too long: restart the others with more slots
    return finished


def as_lists(tokens: np.ndarray, length, score):
    """Return token ids without EOS and the score, or a list for n hypotheses."""
    if tokens.ndim == 2:
        hypotheses = zip(tokens, length, score, strict=True)
        return [as_lists(*hypothesis) for hypothesis in hypotheses if hypothesis[1] > 0]
    return tokens[: length - 1].tolist(), float(score)


def to_arrays(numbers, prompts, limits, shape) -> tuple[np.ndarray, ...]:
    """Build arrays of prompts, R Q S, and of lengths, numbers and limits, R Q."""
    R, Q, S = shape
    tokens = np.zeros((R, Q, S), np.int32)
    lengths, prompt_numbers = np.zeros((2, R, Q), np.int32)
    bounds = np.ones((R, Q), np.int32)
    for r, row in enumerate(numbers):
        for place, number in enumerate(row):
            prompt = prompts[number]
            tokens[r, place, : len(prompt)] = prompt
            lengths[r, place] = len(prompt)
            prompt_numbers[r, place], bounds[r, place] = number, limits[number]
    return tokens, lengths, prompt_numbers, bounds


def last(numbers: list[int], count: int) -> list[int]:
    """Return the last `count` numbers, in reverse order."""
    return numbers[: -count - 1 : -1]


def longest_of(prompts, numbers: list[list[int]]) -> int:
    """Return the length of the longest prompt with one of these numbers."""
    return max(len(prompts[i]) for i in itertools.chain(*numbers))


def slots(S: int, *, factor: int, longest: int) -> int:
    """Return L for prompts of S tokens: factor · 4/3 S, rounded up, up to longest."""
    return min(factor * bucket(4 * S // 3), longest)


def at_least(count, sizes):
    """Return the smallest size that is at least count, else the largest size."""
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
    """Move the given rows of every trial to a state with fewer and narrower rows.

    Args:
        state: the state with more and wider rows.
        rows: indices of the rows to keep.
        count: how many of these rows continue; the rest are marked as done.
        shape: S and L of the new state.
    """

    def keep_here(state, rows, count):
        state = state._replace(clock=state.clock[0])
        one = partial(keep_of_one, shape=shape)
        state = jax.vmap(one, (TRIAL_AXES, 0, 0), TRIAL_AXES)(state, rows, count)
        return state._replace(clock=state.clock[None])

    return per_device(keep_here)(state, rows, count)


def keep_of_one(state, rows, count, *, shape):
    """Apply `keep` to one trial."""
    S, L = shape
    continues = jnp.arange(len(rows)) < count
    clock, rows, cache = jax.tree.map(lambda x: x[rows] if x.ndim else x, state)
    old_slots = rows.tokens.shape[2]
    # new slot j takes the entry of the latest clock that is j modulo L
    latest = (clock - 1 - (clock - 1 - jnp.arange(L)) % L) % old_slots

    def moved(x, axis):
        apart = x.reshape(*x.shape[:axis], old_slots, -1, *x.shape[axis + 1 :])
        return apart[(slice(None),) * axis + (latest,)].reshape(
            *x.shape[:axis], -1, *x.shape[axis + 1 :]
        )

    rows = rows._replace(
        done=rows.done | ~continues,
        tokens=rows.tokens[..., latest],
        visible=see_own_slot(rows.visible[:, :, latest], clock),
        best=rows.best._replace(tokens=rows.best.tokens[..., latest]),
        prompt=fit_width(rows.prompt, S),
    )
    cache = [tuple(map(moved, arrays, SLOTS)) for arrays in cache]
    return State(clock, rows, cache)


def bucket(length: int) -> int:
    """Round up to 16, 24, 32, 48, 64, 96, ..."""
    power = power_of_two(length)
    return power * 3 // 4 if power > 16 and length <= power * 3 // 4 else power


def columns(length: int) -> int:
    """Round up to 8, 12, 16, 20, 24, 28, 32, 40, 48, ...: widths for prefilling many.

    The steps are finer than those of `bucket`: prefilling takes a quarter of the time,
    and its program compiles quickly.
    """
    step = max(4, power_of_two(length) // 8)
    return max(8, -(-length // step) * step)


def power_of_two(length: int) -> int:
    """Round up to a power of two, at least 16."""
    return max(16, 1 << (length - 1).bit_length())
