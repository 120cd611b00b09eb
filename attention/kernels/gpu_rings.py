"""Ring buffers in shared memory, through which GPU kernels fetch blocks.

One warpgroup fills a ring's slots in turn by TMA, and the others read them.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Ring(NamedTuple):
    """Slots in shared memory, `slots x rows x width`, with two barriers per slot."""

    buffer: Any
    filled: Any
    free: Any = None  # None if each slot is filled only once


def fetch(rings, source, count):
    """Fill the rings with `source(name, turn)` for `count` turns, as slots free up."""
    slots = _slots(next(iter(rings.values())))

    @pl.loop(0, count)
    def _(turn):
        slot = lax.rem(turn, slots)
        for name, ring in rings.items():

            @pl.when(turn >= slots)
            def _(ring=ring):
                plgpu.barrier_wait(ring.free.at[slot])

            plgpu.copy_gmem_to_smem(
                source(name, turn), ring.buffer.at[slot], ring.filled.at[slot]
            )

    # Every phase of a barrier must be waited for, including the last ones.
    @pl.loop(jnp.maximum(count - slots, 0), count)
    def _(turn):
        for ring in rings.values():
            plgpu.barrier_wait(ring.free.at[lax.rem(turn, slots)])


def wait(ring, turn):
    """Wait for this turn's fetch; return the block and the slot to `release`."""
    slot = lax.rem(turn, _slots(ring))
    plgpu.barrier_wait(ring.filled.at[slot])
    return ring.buffer.at[slot], slot


def release(ring, slot, *, loaded):
    """Mark a slot as read by this warpgroup, so that it can be refilled.

    `loaded` says that it was read into registers rather than by a wgmma. Such a read
    needs a fence to order it before the next TMA write.
    """
    if loaded:
        plgpu.commit_smem()
    plgpu.barrier_arrive(ring.free.at[slot])


def fetch_own(ring, source, warpgroup):
    """Fetch a block that only this warpgroup reads, and wait for it."""
    buffer = ring.buffer.at[warpgroup]
    plgpu.copy_gmem_to_smem(source, buffer, ring.filled.at[warpgroup])
    plgpu.barrier_wait(ring.filled.at[warpgroup])
    return buffer


def store(ref, block, buffer):
    """Write registers to global memory through a buffer in shared memory."""
    buffer[...] = block.astype(ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, ref)
    plgpu.wait_smem_to_gmem(0)


def _slots(ring):
    return jnp.int32(ring.buffer.shape[0])
