"""Fused attention for NVIDIA GPUs of compute capability 9.0, forward and backward.

Memory grows with T + S: no T x S array is held. Blocks that a causal or window mask,
lengths or segments exclude are skipped. The backward pass recomputes the weights, once
for the queries' gradient and once for the keys' and values', so no two programs add to
the same memory and results are deterministic.

Statistics carry no gradient, and there is no second derivative. docs/benchmarks/gpu.md
has its speed on an H200.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from headcount.attention import masks
from headcount.attention.arguments import present
from headcount.attention.kernels import gpu_kernels as kernels
from headcount.attention.kernels.gpu_blocks import HEIGHT, choose_tiles, visits
from headcount.attention.kernels.gpu_rings import Ring
from headcount.attention.kernels.partition import (
    axes_of,
    partitioned,
    varying_alike,
    varying_like,
)
from headcount.attention.platform import compute_capability, platform
from headcount.attention.statistics import HeadStatistics, over_queries

DTYPES = ("bfloat16", "float16")
LARGEST = 128  # head size whose backward pass fits into registers
# Fields of `HeadStatistics` that a kernel returns; max_logit follows from `highest`.
FIELDS = tuple(name for name in HeadStatistics._fields if name != "max_logit")
THREADS = 6  # needed by the simulation
WIDTH = 32  # head sizes are padded to a multiple of this


def attend(
    query,
    key,
    value,
    bias,
    mask,
    *,
    alibi_slopes=None,
    dropout_keys=None,
    statistics=False,
    interpret=False,
    **structure,
):
    """Return output, log-sum-exp and statistics: see `attention.api`.

    Raises:
      NotImplementedError: the dtype is not bfloat16 or float16, a head size is above
        128, there is a bias or mask array, or the device is unsupported.
    """
    _check(interpret, query, value, bias, mask)
    static, arrays = _split(structure, statistics, interpret)
    arrays["alibi_slopes"] = _slopes(alibi_slopes, static)
    if dropout_keys is not None:
        arrays["dropout_keys"] = jnp.swapaxes(dropout_keys, 1, 2)
    return _attend(static, query, key, value, present(**arrays))


def unsupported(query, value, bias, mask) -> str | None:
    """Return why the kernels don't support these arrays; None if they do."""
    if query.dtype.name not in DTYPES:
        dtypes = " or ".join(DTYPES)
        return f"takes query, key and value in {dtypes}, not in {query.dtype}"
    if bias is not None or mask is not None:
        what = "mask" if bias is None else "bias"
        return f"takes no {what}, only is_causal, window, lengths and segment ids"
    largest = max(query.shape[-1], value.shape[-1])
    if largest > LARGEST:
        return f"takes query and value with head sizes up to {LARGEST}, got {largest}"
    return None


def unsupported_device() -> str | None:
    """Return why the kernels can't run on the current devices; None if they can."""
    if platform() != "gpu":
        return f"needs a GPU, the platform is {platform()!r}"
    capability = compute_capability()
    is_elsewhere = capability is None and jax.default_backend() != "gpu"
    if capability == 9.0 or is_elsewhere:
        return None
    return (
        f"needs a GPU of compute capability 9.0 (H100, H200, GH200), this one has "
        f"{capability}"
    )


def _check(interpret, query, value, bias, mask):
    refusal = "implementation 'gpu' {}; use 'blockwise'"
    if interpret:
        # XLA has at least as many threads as devices
        if jax.local_device_count(backend="cpu") < THREADS:
            raise NotImplementedError(
                "implementation 'gpu_interpret' needs a thread of XLA per warpgroup "
                "that it simulates, and may wait for one for ever; set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={THREADS}"
            )
        like = jax.ShapeDtypeStruct(query.shape, "bfloat16")  # simulates any dtype
        reason = unsupported(like, value, bias, mask)
    else:
        reason = unsupported_device() or unsupported(query, value, bias, mask)
    if reason is not None:
        raise NotImplementedError(refusal.format(reason))


def _split(structure, statistics, interpret):
    """Split the arguments into hashable static ones and arrays."""
    arrays = {name: structure.pop(name) for name in masks.STRUCTURE}
    structure |= {"statistics": statistics, "interpret": interpret}
    return tuple(sorted(structure.items())), arrays


def _slopes(alibi_slopes, static):
    """Convert the slopes to the unit of the kernels' logits."""
    if alibi_slopes is None:
        return None
    return alibi_slopes * (kernels.LOG2E / kernels.exponent_unit(dict(static)["scale"]))


def _public(static, results):
    """Convert the results of `_forward` to those of `attend`."""
    rows = {name: jnp.swapaxes(x, 1, 2) for name, x in results.items() if name != "out"}
    highest, confidence = rows.pop("highest"), rows["confidence"]
    seen = confidence != 0  # it is 1 / the sum of all exponentials; may be NaN
    unit = kernels.exponent_unit(dict(static)["scale"])
    lse = (highest * unit - jnp.log2(confidence)) / kernels.LOG2E
    lse = jnp.where(seen, lse, masks.EMPTY)
    statistics = ()
    if len(rows) > 1:
        max_logit = jnp.where(seen, highest * (unit / kernels.LOG2E), 0)
        statistics = (over_queries(HeadStatistics(**rows, max_logit=max_logit)),)
    return results["out"], lse, *statistics


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, key, value, others):
    arrays = present(query=query, key=key, value=value, **others)
    return _public(static, _forward(static, arrays))


def _attend_forward(static, query, key, value, others):
    arrays = present(query=query, key=key, value=value, **others)
    results = _forward(static, arrays)
    kept = {name: results[name] for name in ("highest", "confidence")}
    return _public(static, results), (arrays | kept, results["out"])


def _attend_backward(static, residuals, gradients):
    arrays, out = residuals
    out_gradient, lse_gradient, *_ = gradients  # statistics have none
    # A logit's gradient is weight x (dweight - delta + dlse): merge the two row terms.
    delta = jnp.float32(out * out_gradient.astype(jnp.float32)).sum(-1) - lse_gradient
    arrays = dict(
        arrays,
        out_gradient=out_gradient.astype(out.dtype),
        delta=jnp.swapaxes(delta, 1, 2),
    )
    return *_backward(static, arrays), None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(static, arrays):
    """Return results by name: `B N T` per query, and `out`."""
    statistics = dict(static)["statistics"]
    rows = ("highest", *(FIELDS if statistics else ("confidence",)))

    def outputs(arrays):
        B, T, N, _ = arrays["query"].shape
        out = B, T, N, arrays["value"].shape[-1]
        return dict.fromkeys(rows, (B, N, T)) | {"out": out}

    kernel = "statistics" if statistics else "forward"
    letters = [*("BNT" for _ in rows), "BTNV"]
    results = _run(kernel, static, arrays, outputs, letters)
    return dict(zip((*rows, "out"), results, strict=True))


def _backward(static, arrays):
    def by_query(arrays):
        return {"query": arrays["query"].shape}

    def by_key(arrays):
        return {name: arrays[name].shape for name in ("key", "value")}

    return (
        *_run("query_gradient", static, arrays, by_query, ("BTNH",)),
        *_run("key_value_gradient", static, arrays, by_key, ("BSKH", "BSKV")),
    )


def _run(kernel, static, arrays, outputs, results):
    """Run a kernel, each device on its own part of the batch and heads."""
    problem, arrays = _problem(kernel, static, arrays)

    def function(arrays):
        return _launch(kernel, problem, arrays, _types(arrays, outputs(arrays)))

    if problem.interpret:  # the simulation has effects, which can't be partitioned
        return function(arrays)
    by_head = dict.fromkeys((*kernels.ROWS, "dropout_keys"), "BNT")
    axes = axes_of(arrays, **by_head)
    return partitioned(function, arrays, axes, results)


def _types(arrays, shapes):
    """Return the results' types by name: query's dtype, or float32 per query."""
    dtypes = dict.fromkeys(("query", "key", "value", "out"), arrays["query"].dtype)
    return {
        name: varying_like(arrays, shape, dtypes.get(name, jnp.float32))
        for name, shape in shapes.items()
    }


def _problem(kernel, static, arrays):
    """Return the kernel's static parameters, and its inputs with the loop bounds."""
    static = dict(static)
    T, S = arrays["query"].shape[1], arrays["key"].shape[1]
    H = arrays["query"].shape[-1]
    V = arrays["value"].shape[-1]
    interpret, scale = static.pop("interpret"), static.pop("scale")
    sizes = choose_tiles(kernel, max(H, V), T, S)
    del static["statistics"]
    rate = static.pop("dropout_rate", 0.0)
    seen = {name: arrays.get(name) for name in masks.STRUCTURE}
    by_key = kernel == "key_value_gradient"
    bounds, head, tail = visits(T, S, sizes, by_key=by_key, **static, **seen)
    problem = kernels.Problem(
        num_queries=T,
        num_keys=S,
        head_dim=H,
        value_dim=V,
        tiles=sizes,
        scale=scale,
        head=head,
        tail=tail,
        interpret=interpret,
        dropout_rate=rate,
        **static,
    )
    return problem, dict(arrays, bounds=jnp.asarray(bounds))


def _launch(name, problem, arrays, types):
    """Run a kernel and return its outputs in order.

    Args:
      name: a kernel's name in `TILES`.
      problem: static parameters.
      arrays: the inputs by name.
      types: the outputs' types by name.
    """
    function = getattr(kernels, "forward" if name == "statistics" else name)
    inputs = _inputs(arrays, problem)
    input_names = list(inputs)
    padded = {key: _padded(key, types[key].shape, problem) for key in types}
    outer = "key" if name == "key_value_gradient" else "query"
    warpgroups = getattr(problem.tiles, _AXES[outer]) // HEIGHT

    def body(*refs, **scratch):
        outputs = dict(zip(types, refs[len(input_names) :], strict=True))
        function(dict(zip(input_names, refs, strict=False)), outputs, scratch, problem)

    outputs = plgpu.kernel(
        body,
        out_type=tuple(types[key].update(shape=padded[key]) for key in types),
        scratch_types=_scratch(inputs, padded, outer, warpgroups, problem),
        # one axis: only CUDA's first allows over 65,535 programs; vmap adds others
        grid=(inputs["bounds"].shape[1] * inputs[outer].shape[2] * len(inputs[outer]),),
        grid_names=("program",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=_interpreter() if problem.interpret else None,
    )(*inputs.values())
    # in `jax.shard_map`, the kernel's outputs lose the axes they vary over
    _, outputs = varying_alike((inputs, outputs))
    return tuple(
        output[tuple(slice(0, size) for size in types[key].shape)]
        for key, output in zip(types, outputs, strict=True)
    )


# The field of `Tiles` that gives the block length along each array's sequence.
_AXES = {
    **dict.fromkeys(("query", "out", "out_gradient"), "queries"),
    **dict.fromkeys(("query_segment_ids", "dropout_keys"), "queries"),
    **dict.fromkeys(("key", "value", "key_value_segment_ids"), "keys"),
}


def _inputs(arrays, problem):
    """Pad the arrays and stack the per-query ones, as the kernels read them."""
    inputs = {name: x for name, x in arrays.items() if name not in kernels.ROWS}
    if "delta" in arrays:
        highest, confidence, delta = (
            _pad(arrays[name], _padded(name, arrays[name].shape, problem))
            for name in kernels.ROWS
        )
        inputs["stacked"] = jnp.stack([highest, jnp.log2(confidence), delta], 2)
    return {
        name: _pad(x, _padded(name, x.shape, problem)) if name in _AXES else x
        for name, x in inputs.items()
    }


def _pad(x, shape):
    return jnp.pad(x, [(0, size - n) for size, n in zip(shape, x.shape, strict=True)])


def _padded(name, shape, problem):
    """Return the shape with sequence and width padded for the kernel.

    A sequence may end within a block, at a multiple of 8: out of bounds, the hardware
    reads zeros and writes nothing. The simulation doesn't, so it needs whole blocks.
    """
    tile = getattr(problem.tiles, _AXES.get(name, "queries"))
    if len(shape) < 4:
        return *shape[:-1], pl.cdiv(shape[-1], tile) * tile
    B, size, heads, width = shape
    part = tile if problem.interpret else 8
    size = max(tile, pl.cdiv(size, part) * part)
    return B, size, heads, pl.cdiv(width, WIDTH) * WIDTH


def _scratch(inputs, outputs, outer, warpgroups, problem):
    """Return scratch types: blocks per warpgroup, and rings for fetched blocks."""
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
    """Return a simulator that detects races and fails on out-of-bounds reads."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(detect_races=True)
