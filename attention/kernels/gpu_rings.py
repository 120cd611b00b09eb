"""Rings of slots in shared memory, through which GPU kernels fetch blocks.

A ring is a few slots that one warpgroup fills by TMA, over and over, and others read.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Ring(NamedTuple):
    """Slots in shared memory: `slots x rows x width`, and two barriers for each."""

    buffer: Any
    filled: Any
    free: Any = None  # of slots that are filled once


def fetch(rings, source, count):
    """Fill each ring so many times with `source(name, turn)`, as slots get free."""
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

    # Every phase of a barrier has to be waited for, the last ones too.
    @pl.loop(jnp.maximum(count - slots, 0), count)
    def _(turn):
        for ring in rings.values():
            plgpu.barrier_wait(ring.free.at[lax.rem(turn, slots)])


def wait(ring, turn):
    """What is fetched in this turn, once it is there, and the slot to `release`."""
    slot = lax.rem(turn, _slots(ring))
    plgpu.barrier_wait(ring.filled.at[slot])
    return ring.buffer.at[slot], slot


def release(ring, slot, *, loaded):
    """Let the slot be filled again: this warpgroup has read it.

    `loaded`: into registers, not by a wgmma. Only a fence orders that before what the
    TMA writes.
    """
    if loaded:
        plgpu.commit_smem()
    plgpu.barrier_arrive(ring.free.at[slot])


def fetch_own(ring, source, warpgroup):
    """What only this warpgroup reads, once it is there."""
    own = ring.buffer.at[warpgroup]
    plgpu.copy_gmem_to_smem(source, own, ring.filled.at[warpgroup])
    plgpu.barrier_wait(ring.filled.at[warpgroup])
    return own


def store(ref, block, buffer):
    """Write registers to global memory by way of a buffer in shared memory."""
    buffer[...] = block.astype(ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, ref)
    plgpu.wait_smem_to_gmem(0)


def _slots(ring):
    return jnp.int32(ring.buffer.shape[0])
