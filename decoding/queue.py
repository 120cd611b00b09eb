"""Sentences that take turns in the rows of a batch, without a word to the host.

`serve` runs the decoding of a batch. A sentence that is done makes room for the next of
a `Queue`, which lies encoded on the device.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from headcount.decoding.step import Decoded, Encoded, Rows, State, decoded, run, start


class Queue(NamedTuple):
    """Encoded sentences that wait on the device for a row."""

    encoded: Encoded  # Q
    numbers: Int[Array, "Q"]  # which tell the random keys
    limits: Int[Array, "Q"]
    count: Int[Array, ""]  # of sentences; what is left of Q is padding


class Served(NamedTuple):
    """Sentences in rows, and those that have been: first B that had rows, then Q."""

    places: Int[Array, "B"]  # where in `found` each row's sentence stands
    begun: Int[Array, ""]  # how many of the queue have had a row
    found: Decoded  # of each of B + Q
    done: Bool[Array, " B+Q"]


def serve(
    step, each, state: State, queue: Queue, seeds, enough
) -> tuple[State, Decoded, Array, Array, Array]:
    """Decode until all of the queue have a row, and so many rows of it are done.

    Args:
        step: a step of decoding of all trials.
        each: maps a function over trials.
        state: of all trials, as are the arguments after it.
        queue: taken from in order, when an eighth of the rows (at least one) of every
            trial that has some left is done.
        seeds: of samples.
        enough: rows to be done at the end, when no sentence of the queue waits.

    Returns:
        The state, and what of `Served` the host needs: what was found, what is done,
        the places of the rows' sentences, and their tokens so far.
    """
    B, Q = state.rows.done.shape[-1], queue.numbers.shape[-1]

    def waits(served):
        return (served.begun < queue.count).any()

    def go_on(both):
        state, served = both
        take = each(partial(refill, clock=state.clock))
        rows, served = take(state.rows, served, queue, seeds)
        waiting = served.begun < queue.count
        fills = waiting & rows.done.any(-1)  # there are free rows still
        few = jnp.where(fills.any(), 0, jnp.where(waiting, share_of(B), 0))
        few = jnp.where(waiting.any(), few, enough)
        return run(step, state._replace(rows=rows), few), served

    def goes_on(both):
        state, served = both
        return waits(served) | (state.rows.done.sum(-1) < enough).any()

    served = each(partial(nothing_served, Q=Q))(state.rows)
    state, served = jax.lax.while_loop(goes_on, go_on, (state, served))
    served = each(noted)(state.rows, served)
    age = state.clock - state.rows.begin
    return state, served.found, served.done, served.places, age


def share_of(rows: int) -> int:
    """How many must be done before others begin, and how many begin at a time."""
    return max(1, rows // 8)


def nothing_served(rows: Rows, Q: int) -> Served:
    """Before any of Q sentences has a row."""
    found = jax.tree.map(
        lambda x: jnp.pad(x, [(0, Q)] + [(0, 0)] * (x.ndim - 1)), decoded(rows)
    )
    places = jnp.arange(len(rows.done))
    return Served(places, jnp.zeros((), jnp.int32), found, jnp.pad(rows.done, (0, Q)))


def noted(rows: Rows, served: Served) -> Served:
    """With what the rows have found so far."""
    found, done = jax.tree.map(
        lambda old, new: old.at[served.places].set(new),
        (served.found, served.done),
        (decoded(rows), rows.done),
    )
    return served._replace(found=found, done=done)


def refill(
    rows: Rows, served: Served, queue: Queue, seed, clock
) -> tuple[Rows, Served]:
    """Note what was found, and begin sentences in some of the rows that are done."""
    B, W, L = rows.tokens.shape
    sizes = {"max_length": L, "beam_size": W}
    if rows.best.score.ndim == 2:
        sizes["n_best"] = rows.best.score.shape[1]
    served = noted(rows, served)
    free = jnp.argsort(~rows.done)[: share_of(B)]
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
