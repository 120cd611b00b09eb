"""Fused attention for TPUs: Pallas through Mosaic, forward and backward.

Memory grows with T + S: no T x S array is held. Blocks that a causal or window mask,
lengths or segments exclude are neither computed nor read. The backward pass recomputes
the weights, once for the queries' gradient and once for the keys' and values', so
results are bit-identical in every run. Keys and values of grouped heads, and broadcast
masks, are read in place without repeating them.

float32 is computed to full precision (six bfloat16 products each). Statistics carry no
gradient, and there is no second derivative.

A block's float32 logits take 2 MiB of vector memory forward (512 queries by 1024 keys)
and 1 MiB backward, where three more such arrays are held. In the largest case, heads of
256 in float32 with a mask and a bias, everything including double-buffered inputs fits
into 32 MiB on v5e, v5p and v6e (tests/compilers/test_tpu.py). A v4 has 16 MiB, too
little for this case.
"""

import functools

import jax
import jax.numpy as jnp

from headcount.attention import masks
from headcount.attention.arguments import present
from headcount.attention.kernels import tpu_kernels as kernels
from headcount.attention.kernels.partition import axes_of, partitioned
from headcount.attention.kernels.tpu_blocks import EXCLUDED_KEY, EXCLUDED_QUERY, run
from headcount.attention.platform import platform
from headcount.attention.statistics import HeadStatistics, over_queries

DTYPES = ("float32", "bfloat16")
LARGEST = 256  # head size
# Largest number of queries and keys per block.
FORWARD_TILES = (512, 1024)
BACKWARD_TILES = (512, 512)


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
      NotImplementedError: the dtype is not float32 or bfloat16, a head size is above
        256, or the gradient with respect to the bias is needed.
    """
    _check(interpret, query, value)
    problem, ids = _split(query, key, interpret, **structure)
    others = present(
        mask=mask,
        alibi_slopes=masks.expand(alibi_slopes, 0),
        dropout_keys=dropout_keys,
        **ids,
    )
    return _attend((problem, statistics), query, key, value, bias, others)


def unsupported(query, value, bias, mask) -> str | None:
    """Return why the kernels don't support these arrays; None if they do."""
    if query.dtype.name not in DTYPES:
        dtypes = " or ".join(DTYPES)
        return f"takes query, key and value in {dtypes}, not in {query.dtype}"
    largest = max(query.shape[-1], value.shape[-1])
    if largest > LARGEST:
        return f"takes query and value with head sizes up to {LARGEST}, got {largest}"
    return None


def unsupported_device() -> str | None:
    """Return why the kernels can't run on the current devices; None if they can."""
    if platform() != "tpu":
        return f"needs a TPU, the platform is {platform()!r}"
    return None


def _check(interpret, query, value):
    reason = None if interpret else unsupported_device()
    reason = reason or unsupported(query, value, None, None)
    if reason is not None:
        raise NotImplementedError(f"implementation 'tpu' {reason}; use 'blockwise'")


def _split(
    query,
    key,
    interpret,
    *,
    query_seq_lengths,
    key_value_seq_lengths,
    query_segment_ids,
    key_value_segment_ids,
    **static,
):
    """Return static parameters, and ids that encode lengths and segments.

    A query's and a key's id are equal where lengths and segments allow the pair.
    """
    problem = kernels.Problem(interpret=interpret, **static)
    sides = (
        (query.shape[1], query_seq_lengths, query_segment_ids, EXCLUDED_QUERY),
        (key.shape[1], key_value_seq_lengths, key_value_segment_ids, EXCLUDED_KEY),
    )
    if all(lengths is None and ids is None for _, lengths, ids, _ in sides):
        return problem, {}
    query_ids, key_ids = (_ids(*side) for side in sides)
    return problem, {"query_ids": query_ids, "key_ids": key_ids}


def _ids(size, lengths, ids, excluded):
    ids = jnp.ones((1, size), jnp.int32) if ids is None else ids
    ids = jnp.where(ids == 0, excluded, ids)
    if lengths is None:
        return ids
    return jnp.where(jnp.arange(size) < lengths[:, None], ids, excluded)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, key, value, bias, others):
    arrays = present(query=query, key=key, value=value, bias=bias, **others)
    return _output(*static, arrays)[0]


def _output(problem, statistics, arrays):
    """Return the results of `attend`, and per-query arrays for the backward pass."""
    if statistics:
        letters = "BTN", "BTNx", "BTNV"
        highest, rows, out = _call(_statistics, problem, arrays, letters)
        rows = HeadStatistics(*jnp.moveaxis(rows, -1, 0))
        confidence, rows = rows.confidence, (over_queries(rows),)
    else:
        letters = "BTNV", "BTN", "BTN"
        out, highest, confidence = _call(_forward, problem, arrays, letters)
        rows = ()
    seen = confidence != 0  # it is 1 / the sum of all exponentials; may be NaN
    lse = jnp.where(seen, highest - jnp.log(confidence), masks.EMPTY)
    return (out, lse, *rows), {"highest": highest, "confidence": confidence}


def _attend_forward(static, query, key, value, bias, others):
    if bias is not None and bias.perturbed:
        raise NotImplementedError(
            "implementation 'tpu' has no gradient with respect to the bias; use "
            "'blockwise', or jax.lax.stop_gradient(bias) if none is wanted"
        )
    primals = query, key, value, bias, others
    primals = jax.custom_derivatives.custom_vjp_primal_tree_values(primals)
    query, key, value, bias, others = primals
    arrays = present(query=query, key=key, value=value, bias=bias, **others)
    results, rows = _output(*static, arrays)
    return results, (arrays | rows, results[0])


def _attend_backward(static, residuals, gradients):
    problem, _ = static
    arrays, out = residuals
    out_gradient, lse_gradient = (
        jnp.zeros_like(primal)
        if isinstance(gradient, jax.custom_derivatives.SymbolicZero)
        else gradient
        for gradient, primal in zip(
            gradients[:2], (out, arrays["highest"]), strict=True
        )
    )
    # A logit's gradient is weight x (dweight - delta + dlse): merge the two row terms.
    delta = (out.astype(jnp.float32) * out_gradient.astype(jnp.float32)).sum(-1)
    arrays = dict(arrays, out_gradient=out_gradient, delta=delta - lse_gradient)
    (query_gradient,) = _call(_query_gradient, problem, arrays, ("BTNH",))
    key_gradient, value_gradient = _call(
        _key_value_gradient, problem, arrays, ("BSKH", "BSKV")
    )
    bias = arrays.get("bias")
    bias_gradient = None if bias is None else jnp.zeros_like(bias)
    return query_gradient, key_gradient, value_gradient, bias_gradient, None


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _call(function, problem, arrays, results):
    """Run a function per device shard, with trials of `jax.vmap` in one call."""

    def one_trial(arrays):
        trials = {name: array[None] for name, array in arrays.items()}
        results = _trials(function, problem)(trials)
        return tuple(result[0] for result in results)

    axes = axes_of(arrays, highest="BTN", confidence="BTN", alibi_slopes="1N")
    return partitioned(one_trial, arrays, axes, results)


@functools.cache
def _trials(function, problem):
    """Wrap `function`, whose arrays have a leading axis of trials, full size or 1.

    `jax.vmap` extends this axis. By default, it would run a kernel with scalar prefetch
    once per trial, one after the other.
    """

    @jax.custom_batching.custom_vmap
    def call(arrays):
        return function(problem, arrays)

    @call.def_vmap
    def _(axis_size, in_batched, arrays):
        trials = {
            name: x.shape[1 if in_batched[0][name] else 0] for name, x in arrays.items()
        }
        most = max(trials.values())

        def merge(name, x):
            if not in_batched[0][name] and trials[name] == 1:
                return x
            if not in_batched[0][name]:
                x = x[None]
            shape = (axis_size, most, *x.shape[2:])
            return jnp.broadcast_to(x, shape).reshape(-1, *x.shape[2:])

        results = call({name: merge(name, x) for name, x in arrays.items()})
        results = tuple(
            result.reshape(axis_size, -1, *result.shape[1:]) for result in results
        )
        return results, (True,) * len(results)

    return call


def _forward(problem, arrays):
    (T, N), V = arrays["query"].shape[2:4], arrays["value"].shape[-1]
    results = run(
        kernels.forward,
        problem,
        arrays,
        {
            "out": ((N, V, "T"), arrays["query"].dtype),
            "highest": ((N, 1, "T"), jnp.float32),
            "confidence": ((N, 1, "T"), jnp.float32),
        },
        [(1, "T"), (1, "T"), (V, "T")],
        tiles=FORWARD_TILES,
    )
    names = "out", "highest", "confidence"
    out, highest, confidence = (_back(results[name], T) for name in names)
    return out, highest[..., 0], confidence[..., 0]


def _statistics(problem, arrays):
    (T, N), V = arrays["query"].shape[2:4], arrays["value"].shape[-1]
    fields = len(HeadStatistics._fields)
    outputs = {
        "highest": ((N, 1, "T"), jnp.float32),
        "rows": ((N, fields, "T"), jnp.float32),
        "out": ((N, V, "T"), arrays["query"].dtype),
    }
    scratch = [(1, "T"), (1, "T"), (fields, "T"), (V, "T")]
    results = run(
        kernels.statistics, problem, arrays, outputs, scratch, tiles=FORWARD_TILES
    )
    highest, rows, out = (_back(results[name], T) for name in outputs)
    return highest[..., 0], rows, out


def _query_gradient(problem, arrays):
    T, N, H = arrays["query"].shape[2:]
    results = run(
        kernels.query_gradient,
        problem,
        arrays,
        {"query_gradient": ((N, H, "T"), arrays["query"].dtype)},
        [(H, "T")],
        tiles=BACKWARD_TILES,
    )
    return (_back(results["query_gradient"], T),)


def _key_value_gradient(problem, arrays):
    S, K, H = arrays["key"].shape[2:]
    V, dtype = arrays["value"].shape[-1], arrays["key"].dtype
    results = run(
        kernels.key_value_gradient,
        problem,
        arrays,
        {
            "key_gradient": ((K, H, "S"), dtype),
            "value_gradient": ((K, V, "S"), dtype),
        },
        [(H, "S"), (V, "S")],
        tiles=BACKWARD_TILES,
        by_key=True,
    )
    return _back(results["key_gradient"], S), _back(results["value_gradient"], S)


def _back(x, length):
    """Transpose from `R B N V T` to `R B T N V`, and remove the padding."""
    return x[..., :length].transpose(0, 1, 4, 2, 3)
