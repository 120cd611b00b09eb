"""How `attention.pallas_gpu` launches its kernels for Hopper, and what they lack."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from headcount.attention import pallas_hopper_kernels as kernels
from headcount.attention.pallas_gpu_blocks import Tiles
from headcount.attention.pallas_gpu_kernels import ROWS
from headcount.attention.pallas_hopper_kernels import HEIGHT
from headcount.attention.pallas_hopper_rings import Ring
from headcount.attention.partition import varying_alike

DTYPES = ("bfloat16", "float16")
LARGEST = 128  # head size, of which the backward pass fits into registers
THREADS = 6  # that the simulation is given
WIDTH = 32  # a head is padded to a multiple of it

# By kernel and largest head size: queries and keys of a block, warps that compute, and
# slots of a ring. The largest that fit an H200's shared memory and (but for some bytes)
# its registers. To be timed on one: benchmarks/attention_gpu.py --tune.
TILES = {
    "forward": {64: Tiles(128, 128, 8, 3), 128: Tiles(128, 128, 8, 2)},
    "statistics": {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 64, 8, 2)},
    "query_gradient": {64: Tiles(128, 128, 8, 3), 128: Tiles(128, 64, 8, 2)},
    "key_value_gradient": {64: Tiles(64, 128, 8, 3), 128: Tiles(64, 128, 8, 2)},
}


def choose_tiles(kernel, head_dim, num_queries, num_keys) -> Tiles:
    """The tiles of a kernel, one warpgroup's rows where the sequence has no more."""
    tiles = next(tiles for size, tiles in TILES[kernel].items() if head_dim <= size)
    if kernel == "key_value_gradient" and num_keys <= HEIGHT:
        return tiles._replace(keys=HEIGHT, num_warps=4)
    if kernel != "key_value_gradient" and num_queries <= HEIGHT:
        return tiles._replace(queries=HEIGHT, num_warps=4)
    return tiles


def check(query, value, bias, mask, interpret):
    """Raise NotImplementedError for what `pallas_gpu` has and these have not."""
    # XLA has at least as many threads as devices.
    if interpret and jax.local_device_count(backend="cpu") < THREADS:
        raise NotImplementedError(
            "implementation='pallas_hopper_interpret' needs a thread of XLA's for each "
            "warpgroup that it simulates, and may wait for one for ever; "
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={THREADS}"
        )
    refusal = "implementation='pallas_hopper' takes {}; use 'pallas' or 'blockwise'"
    if not interpret and query.dtype.name not in DTYPES:
        what = f"{' and '.join(DTYPES)}, not {query.dtype}"
        raise NotImplementedError(refusal.format(what))
    if bias is not None or mask is not None:
        what = f"no {'mask' if bias is None else 'bias'}, only structured masks"
        raise NotImplementedError(refusal.format(what))
    largest = max(query.shape[-1], value.shape[-1])
    if largest > LARGEST:
        what = f"heads of size {LARGEST} at most, got {largest}"
        raise NotImplementedError(refusal.format(what))


def launch(kernel, problem, arrays, types):
    """Run a kernel -> its outputs, in order.

    Args:
      kernel: of `pallas_gpu_kernels`, the one here that does the same is run.
      problem: what it is compiled for.
      arrays: by name, as `pallas_gpu` holds them.
      types: of the outputs by name.
    """
    name = kernel.__name__
    function = getattr(kernels, "forward" if name == "statistics" else name)
    inputs = _inputs(arrays, problem)
    names = list(inputs)
    padded = {name: _padded(name, types[name].shape, problem) for name in types}
    outer = "key" if name == "key_value_gradient" else "query"
    warpgroups = getattr(problem.tiles, _AXES[outer]) // HEIGHT

    def body(*refs, **scratch):
        outputs = dict(zip(types, refs[len(names) :], strict=True))
        function(dict(zip(names, refs, strict=False)), outputs, scratch, problem)

    outputs = plgpu.kernel(
        body,
        out_type=tuple(types[name].update(shape=padded[name]) for name in types),
        scratch_types=_scratch(inputs, padded, outer, warpgroups, problem),
        # Of one axis, CUDA's only one of more than 65,535 programs; vmap adds others.
        grid=(inputs["bounds"].shape[1] * inputs[outer].shape[2] * len(inputs[outer]),),
        grid_names=("program",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=_interpreter() if problem.interpret else None,
    )(*inputs.values())
    # It has lost what they vary over in `jax.shard_map`.
    _, outputs = varying_alike((inputs, outputs))
    return tuple(
        output[tuple(slice(0, size) for size in types[name].shape)]
        for name, output in zip(types, outputs, strict=True)
    )


# Which of the tiles' sides an array's sequence is cut into.
_AXES = {
    **dict.fromkeys(("query", "out", "out_gradient", "query_segment_ids"), "queries"),
    **dict.fromkeys(("key", "value", "key_value_segment_ids"), "keys"),
}


def _inputs(arrays, problem):
    """The arrays as the kernels read them."""
    inputs = {name: x for name, x in arrays.items() if name not in ROWS}
    if "delta" in arrays:
        highest, confidence, delta = (
            _pad(arrays[name], _padded(name, arrays[name].shape, problem))
            for name in ROWS
        )
        inputs["stacked"] = jnp.stack([highest, jnp.log2(confidence), delta], 2)
    return {
        name: _pad(x, _padded(name, x.shape, problem)) if name in _AXES else x
        for name, x in inputs.items()
    }


def _pad(x, shape):
    return jnp.pad(x, [(0, size - n) for size, n in zip(shape, x.shape, strict=True)])


def _padded(name, shape, problem):
    """The shape with a sequence and a width as a kernel takes them.

    What is fetched and stored in blocks may end within one, but at a multiple of 8:
    beyond, the hardware reads zeros and writes nothing. The simulation does not.
    """
    tile = getattr(problem.tiles, _AXES.get(name, "queries"))
    if len(shape) < 4:
        return *shape[:-1], pl.cdiv(shape[-1], tile) * tile
    B, size, heads, width = shape
    part = tile if problem.interpret else 8
    size = max(tile, pl.cdiv(size, part) * part)
    return B, size, heads, pl.cdiv(width, WIDTH) * WIDTH


def _scratch(inputs, outputs, outer, warpgroups, problem):
    """Shared memory with its barriers: own rows, and rings of all that is fetched."""
    tiles, dtype = problem.tiles, inputs["query"].dtype

    def blocks(number, rows, width):
        swizzle = next(x for x in (128, 64) if width * dtype.itemsize % x == 0)
        layout = (
            plgpu.TilingTransform((8, swizzle // dtype.itemsize)),
            plgpu.SwizzleTransform(swizzle),
        )
        shape = number, rows, width
        return plgpu.SMEM(shape, dtype, transforms=() if problem.interpret else layout)

    def ring(buffer):
        slots = tiles.num_stages
        free = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=slots)
        return Ring(buffer, plgpu.Barrier(num_barriers=slots), free)

    scratch = {}
    for name in ("query", "out_gradient", "key", "value"):
        if name not in inputs:
            continue
        width = inputs[name].shape[-1]
        if _AXES[name] == _AXES[outer]:
            filled = plgpu.Barrier(num_barriers=warpgroups)
            scratch[name] = Ring(blocks(warpgroups, HEIGHT, width), filled)
        else:
            tile = getattr(tiles, _AXES[name])
            scratch[name] = ring(blocks(tiles.num_stages, tile, width))
    if outer == "key":
        shape = tiles.num_stages, len(kernels.STACKED), tiles.queries
        scratch["stacked"] = ring(plgpu.SMEM(shape, jnp.float32))
    if "out" in outputs:
        scratch["out"] = blocks(warpgroups, HEIGHT, outputs["out"][-1])
    return scratch


def _interpreter():
    """Tells races, and stops at what is read beyond an array."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(detect_races=True)
