"""Fused attention for NVIDIA GPUs: Pallas through Triton, forward and backward.

Memory grows with T + S: no T x S array is ever held. Blocks that a causal or window
mask, lengths or segments rule out are not visited. The backward pass computes the
weights again, once for the queries' gradient and once for the keys' and values', so
that no two programs add to the same memory and results are the same bits every time.

float32 is computed to float32's precision, with three tf32 products each. Statistics
carry no gradient, and there is no second derivative.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from headcount.attention import masks, pallas_hopper
from headcount.attention import pallas_gpu_kernels as kernels
from headcount.attention.arguments import present
from headcount.attention.fused import check, refuse_gradient
from headcount.attention.pallas_gpu_blocks import choose_tiles, padded, visits
from headcount.attention.partition import axes_of, partitioned
from headcount.attention.statistics import HeadStatistics

DTYPES = ("float32", "bfloat16", "float16")


def attend(
    query,
    key,
    value,
    bias,
    mask,
    *,
    statistics=False,
    hopper=False,
    interpret=False,
    **structure,
):
    """Output `B T N V`, log-sum-exp `B T N`, statistics: see `attention.api`.

    `hopper`: by the kernels for compute capability 9.0.

    Raises NotImplementedError for float64, for head sizes above 256, and when a
    gradient by the bias is asked for; for `hopper` for what it has not besides.
    """
    _check(hopper, interpret, query, value, bias, mask)
    static, arrays = _split(structure, statistics, hopper, interpret)
    return _attend(static, query, key, value, bias, present(mask=mask, **arrays))


def head_statistics(
    query, key, bias, mask, *, hopper=False, interpret=False, **structure
):
    """Statistics of every row: see `attention.api`."""
    _check(hopper, interpret, query, query, bias, mask)
    static, arrays = _split(structure, True, hopper, interpret)
    arrays = present(query=query, key=key, bias=bias, mask=mask, **arrays)
    return _public(static, arrays, _forward(static, arrays))[-1]


def _check(hopper, interpret, query, value, bias, mask):
    if hopper:
        pallas_hopper.check(query, value, bias, mask, interpret)
    else:
        check("GPU", DTYPES, query, value)


def _split(structure, statistics, hopper, interpret):
    """What is known when compiling, hashable, and the arrays."""
    arrays = {name: structure.pop(name) for name in masks.STRUCTURE}
    structure |= {"statistics": statistics, "hopper": hopper, "interpret": interpret}
    return tuple(sorted(structure.items())), arrays


def _public(static, arrays, found):
    """What `attend` returns, of what `_forward` does."""
    rows = {name: jnp.swapaxes(found[name], 1, 2) for name in found if name != "out"}
    highest, confidence = rows.pop("highest"), rows["confidence"]
    seen = confidence > 0  # it is 1 / the sum of all exponentials
    unit = kernels.unit_of(arrays, dict(static)["scale"])
    lse = (highest * unit - jnp.log2(confidence)) / kernels.LOG2E
    lse = jnp.where(seen, lse, masks.EMPTY)
    statistics = (HeadStatistics(**rows),) if len(rows) > 1 else ()
    return found.get("out"), lse, *statistics


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, key, value, bias, others):
    arrays = present(query=query, key=key, value=value, bias=bias, **others)
    return _public(static, arrays, _forward(static, arrays))


def _attend_forward(static, query, key, value, bias, others):
    primals = query, key, value, bias, others
    refuse_gradient("GPU", bias)
    query, key, value, bias, others = jax.tree.map(
        lambda primal: primal.value, primals, is_leaf=lambda x: hasattr(x, "perturbed")
    )
    arrays = present(query=query, key=key, value=value, bias=bias, **others)
    found = _forward(static, arrays)
    kept = {name: found[name] for name in ("highest", "confidence")}
    return _public(static, arrays, found), (arrays | kept, found["out"])


def _attend_backward(static, residuals, gradients):
    arrays, out = residuals
    out_gradient, lse_gradient = (
        None if isinstance(gradient, jax.custom_derivatives.SymbolicZero) else gradient
        for gradient in gradients[:2]  # statistics have none
    )
    if out_gradient is None:
        out_gradient = jnp.zeros_like(out)
    # A logit gets weight x (dweight - delta + dlse): the two row sums enter as one.
    delta = jnp.float32(out * out_gradient.astype(jnp.float32)).sum(-1)
    if lse_gradient is not None:
        delta = delta - lse_gradient
    arrays = dict(
        arrays,
        out_gradient=out_gradient.astype(out.dtype),
        delta=jnp.swapaxes(delta, 1, 2),
    )
    query_gradient, key_gradient, value_gradient = _backward(static, arrays)
    bias = arrays.get("bias")
    bias_gradient = None if bias is None else jnp.zeros_like(bias)
    return query_gradient, key_gradient, value_gradient, bias_gradient, None


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _forward(static, arrays):
    """The kernel's results by name: of rows, `B N T`, and `out` if there are values."""
    statistics = dict(static)["statistics"]
    rows = ("highest", *(HeadStatistics._fields if statistics else ("confidence",)))
    names = (*rows, "out") if "value" in arrays else rows

    def outputs(arrays):
        B, T, N, _ = arrays["query"].shape
        shapes = dict.fromkeys(rows, (B, N, T))
        if "out" in names:
            shapes["out"] = (B, T, N, arrays["value"].shape[-1])
        return shapes

    kernel = kernels.statistics if statistics else kernels.forward
    letters = ["BTNV" if name == "out" else "BNT" for name in names]
    results = _run(kernel, static, arrays, outputs, letters)
    return dict(zip(names, results, strict=True))


def _backward(static, arrays):
    def by_query(arrays):
        return {"query": arrays["query"].shape}

    def by_key(arrays):
        return {name: arrays[name].shape for name in ("key", "value")}

    return (
        *_run(kernels.query_gradient, static, arrays, by_query, ("BTNH",)),
        *_run(kernels.key_value_gradient, static, arrays, by_key, ("BSKH", "BSKV")),
    )


def _run(kernel, static, arrays, outputs, results):
    """Run a kernel, each device on its own part of the batch and heads."""
    by_key = kernel is kernels.key_value_gradient
    problem, arrays = _problem(kernel, static, arrays, by_key)
    run = _by_key if by_key else _by_query
    hopper = dict(static)["hopper"]
    if hopper:
        run = pallas_hopper.launch

    def function(arrays):
        return run(kernel, problem, arrays, _types(arrays, outputs(arrays)))

    if hopper and problem.interpret:  # with effects, which cannot be partitioned
        return function(arrays)
    axes = axes_of(arrays, **dict.fromkeys(kernels.ROWS, "BNT"))
    return partitioned(function, arrays, axes, results)


def _types(arrays, shapes):
    """The types of results of these shapes, by name: numbers of rows are float32."""
    dtype = arrays["query"].dtype
    dtypes = dict.fromkeys(("query", "key", "value", "out"), dtype)

    def results(arrays):
        # Under shard_map, what any input varies over the results do too.
        some = sum(x.ravel()[0].astype(jnp.float32) for x in arrays.values())
        return {
            name: jnp.broadcast_to(some, shape).astype(dtypes.get(name, jnp.float32))
            for name, shape in shapes.items()
        }

    # Without the shapes' order a dict would be in that of its names.
    types = jax.eval_shape(results, arrays)
    return {name: types[name] for name in shapes}


def _problem(kernel, static, arrays, by_key):
    """What the kernel is compiled for, and its inputs with the loops' bounds."""
    static = dict(static)
    T, S = arrays["query"].shape[1], arrays["key"].shape[1]
    H = arrays["query"].shape[-1]
    V = arrays["value"].shape[-1] if "value" in arrays else H
    dtype = arrays["query"].dtype
    interpret, scale = static.pop("interpret"), static.pop("scale")
    if static.pop("hopper"):
        sizes = pallas_hopper.choose_tiles(kernel.__name__, max(H, V), T, S)
    else:
        sizes = choose_tiles(kernel.__name__, max(H, V), dtype, T, S)
    del static["statistics"]
    seen = {name: arrays.get(name) for name in masks.STRUCTURE}
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
        **static,
    )
    return problem, dict(arrays, bounds=jnp.asarray(bounds))


def _by_query(kernel, problem, arrays, outputs):
    """Run a kernel that has one program a block of queries."""
    B, T, N, _ = arrays["query"].shape
    group = N // arrays["key"].shape[2]
    tile = problem.tiles.queries
    blocks = pl.cdiv(T, tile)
    keys = pl.cdiv(problem.num_keys, problem.tiles.keys) * problem.tiles.keys
    head_dim, value_dim = padded(problem.head_dim), padded(problem.value_dim)

    def block(i):
        return blocks - 1 - i if problem.is_causal else i

    def queries(width):
        return pl.BlockSpec(
            (None, tile, None, width), lambda i, n, b: (b, block(i), n, 0)
        )

    def keys_of_group(width):
        return pl.BlockSpec(
            (None, keys, None, width), lambda i, n, b: (b, 0, n // group, 0)
        )

    def whole_map(array):
        batch, heads, rows, columns = (size > 1 for size in array.shape)
        return pl.BlockSpec(
            (None, None, tile if rows else 1, keys if columns else 1),
            lambda i, n, b: (b * batch, n * heads, block(i) * rows, 0),
        )

    many = arrays["bounds"].shape[0] > 1
    row = pl.BlockSpec((None, None, tile), lambda i, n, b: (b, n, block(i)))
    specs = {
        "query": queries(head_dim),
        "out": queries(value_dim),
        "out_gradient": queries(value_dim),
        "key": keys_of_group(head_dim),
        "value": keys_of_group(value_dim),
        "bounds": pl.BlockSpec(
            (None, None, 4), lambda i, n, b: (b * many, block(i), 0)
        ),
        "query_seq_lengths": pl.BlockSpec((None,), lambda i, n, b: (b,)),
        "key_value_seq_lengths": pl.BlockSpec((None,), lambda i, n, b: (b,)),
        "query_segment_ids": pl.BlockSpec((None, tile), lambda i, n, b: (b, block(i))),
        "key_value_segment_ids": pl.BlockSpec((None, keys), lambda i, n, b: (b, 0)),
        **dict.fromkeys((*kernels.ROWS, *HeadStatistics._fields), row),
        **{
            name: whole_map(arrays[name]) for name in ("bias", "mask") if name in arrays
        },
    }
    return _call(kernel, problem, (blocks, N, B), arrays, specs, outputs)


def _by_key(kernel, problem, arrays, outputs):
    """Run a kernel that has one program a block of keys."""
    B, S, K, _ = arrays["key"].shape
    group = arrays["query"].shape[2] // K
    tile = problem.tiles.keys
    blocks = pl.cdiv(S, tile)
    queries = pl.cdiv(problem.num_queries, problem.tiles.queries)
    queries *= problem.tiles.queries
    head_dim, value_dim = padded(problem.head_dim), padded(problem.value_dim)

    def keys(width):
        return pl.BlockSpec((None, tile, None, width), lambda j, k, b: (b, j, k, 0))

    def queries_of_group(width):
        return pl.BlockSpec((None, queries, group, width), lambda j, k, b: (b, 0, k, 0))

    def whole_map(array):
        batch, heads, rows, columns = (size > 1 for size in array.shape)
        return pl.BlockSpec(
            (
                None,
                group if heads else None,
                queries if rows else 1,
                tile if columns else 1,
            ),
            lambda j, k, b: (b * batch, k * heads, 0, j * columns),
        )

    many = arrays["bounds"].shape[0] > 1
    row = pl.BlockSpec((None, group, queries), lambda j, k, b: (b, k, 0))
    specs = {
        "query": queries_of_group(head_dim),
        "out_gradient": queries_of_group(value_dim),
        "key": keys(head_dim),
        "value": keys(value_dim),
        **dict.fromkeys(kernels.ROWS, row),
        "bounds": pl.BlockSpec((None, None, 4), lambda j, k, b: (b * many, j, 0)),
        "query_seq_lengths": pl.BlockSpec((None,), lambda j, k, b: (b,)),
        "key_value_seq_lengths": pl.BlockSpec((None,), lambda j, k, b: (b,)),
        "query_segment_ids": pl.BlockSpec((None, queries), lambda j, k, b: (b, 0)),
        "key_value_segment_ids": pl.BlockSpec((None, tile), lambda j, k, b: (b, j)),
        **{
            name: whole_map(arrays[name]) for name in ("bias", "mask") if name in arrays
        },
    }
    return _call(kernel, problem, (blocks, K, B), arrays, specs, outputs)


def _call(kernel, problem, grid, arrays, specs, outputs):
    if "mask" in arrays and 2**31 < arrays["mask"].size <= 2**32:
        # Pallas counts with 64 bits beyond 2**32 bytes only, and 32 have a sign: as
        # bytes the mask would be read before its beginning.
        arrays = dict(arrays, mask=arrays["mask"].astype(jnp.int16))
    return pl.pallas_call(
        functools.partial(kernel, problem=problem),
        grid=grid,
        in_specs=[{name: specs[name] for name in arrays}],
        out_specs=[specs[name] for name in outputs],
        out_shape=list(outputs.values()),
        compiler_params=plgpu.CompilerParams(
            num_warps=problem.tiles.num_warps, num_stages=problem.tiles.num_stages
        ),
        interpret=problem.interpret,
        name=kernel.__name__,
    )(arrays)
