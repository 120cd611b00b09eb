"""Fused attention for CPUs: C++ through XLA's foreign function interface.

Memory grows with T + S. Pairs that a causal or window mask, lengths or segments exclude
are not computed. The backward pass recomputes the weights. 16-bit arrays are computed
in float32; the kernels convert bfloat16 themselves. Statistics carry no gradient, and
there is no second derivative.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from headcount.attention import dropout, masks
from headcount.attention.arguments import FAR, present
from headcount.attention.kernels import cpu_build
from headcount.attention.kernels.partition import axes_of, partitioned, varying_alike
from headcount.attention.statistics import HeadStatistics, or_nan

DTYPES = ("float32", "bfloat16", "float16")
# Optional operands of the kernels, after query, key and value.
OPTIONAL = ("bias", "mask", "alibi_slopes", "dropout_keys", *masks.STRUCTURE)
# What the kernel returns for the statistics, in this order: see `summarize` there.
SUMMARY = (
    *("energy", "distance", "previous", "current", "following"),
    *("confidence", "count", "max_logit"),
)
QUERIES = 512  # per summary, as in cpu_problem.h; the kernel checks it


def attend(query, key, value, bias, mask, *, statistics=False, **structure):
    """Return output, log-sum-exp and statistics: see `attention.api`.

    Raises:
      NotImplementedError: the dtype is float64, or the kernels cannot be compiled.
    """
    _check(query)
    dtype = query.dtype
    if dtype == jnp.float16:
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    bias = None if bias is None else bias.astype(jnp.float32)
    static, arrays = _split(structure)
    others = present(mask=mask, **arrays)
    out, *rows = _attend((statistics, static), query, key, value, bias, others)
    return out.astype(dtype), *rows


def _check(query):
    refusal = "implementation 'cpu' {}; use 'blockwise'"
    if query.dtype.name not in DTYPES:
        dtypes = ", ".join(DTYPES)
        reason = f"takes query, key and value in {dtypes}, not in {query.dtype}"
        raise NotImplementedError(refusal.format(reason))
    reason = cpu_build.unavailable()
    if reason is not None:
        raise NotImplementedError(refusal.format(f"cannot be compiled here: {reason}"))


def _split(structure):
    """Split the arguments into the kernels' static attributes and arrays."""
    structure = {"alibi_slopes": None, "dropout_keys": None} | structure
    names = "alibi_slopes", "dropout_keys", *masks.STRUCTURE
    arrays = {name: structure.pop(name) for name in names}
    left, right = structure["local_window_size"] or (FAR, FAR)
    static = {
        "scale": np.float32(structure["scale"]),
        "is_causal": structure["is_causal"],
        "left": np.int64(left),
        "right": np.int64(right),
        "dropped": np.int32(dropout.threshold(structure.get("dropout_rate", 0.0))),
        "kept": np.float32(1 / (1 - structure.get("dropout_rate", 0.0))),
    }
    return tuple(static.items()), arrays


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(problem, query, key, value, bias, others):
    return _results(problem, query, key, value, bias, others)[0]


def _attend_forward(problem, query, key, value, bias, others):
    primals = query, key, value, bias, others
    wants_bias = bias is not None and bias.perturbed
    primals = jax.custom_derivatives.custom_vjp_primal_tree_values(primals)
    results, kept = _results(problem, *primals)
    # Residuals are arrays: encode the static flag in the tree's structure.
    return results, (*kept, {"bias": None} if wants_bias else {})


def _results(problem, query, key, value, bias, others):
    statistics, static = problem
    arrays = present(query=query, key=key, value=value, bias=bias, **others)

    def forward(arrays):
        B, T, N, _ = arrays["query"].shape
        V = arrays["value"].shape[-1]
        rows = (B, T, N)
        summaries = (B, N, -(-T // QUERIES), len(SUMMARY) if statistics else 0)
        shapes = (*rows, V), rows, rows, summaries
        return _call("forward", static, arrays, (), shapes)

    letters = "BTNV", "BTN", "BTN", "BNxy"
    axes = axes_of(arrays)
    out, maximum, reciprocal, summaries = partitioned(forward, arrays, axes, letters)
    seen = reciprocal != 0  # True for NaN as well
    log_total = -jnp.log(jnp.where(seen, reciprocal, 1))
    results = [out, jnp.where(seen, maximum + log_total, masks.EMPTY)]
    if statistics:
        results.append(_statistics(summaries, reciprocal, log_total))
    return tuple(results), (arrays, out, maximum, reciprocal)


def _statistics(summaries, reciprocal, log_total):
    """Return the statistics, given the kernel's summaries of blocks of queries."""
    totals = jnp.moveaxis(summaries[..., :-1].sum(2), -1, 0)
    sums = dict(zip(SUMMARY[:-1], totals, strict=True))
    count = sums.pop("count")
    # The energy's logits are relative to the maximum, as is log(total).
    logs = jnp.where(reciprocal != 0, log_total, 0).sum(1)
    sums["entropy"] = logs - sums.pop("energy")
    means = {name: total / jnp.maximum(count, 1) for name, total in sums.items()}
    largest = summaries[..., -1].max(2, initial=-jnp.inf)
    largest = jnp.where(count > 0, largest, 0)
    return HeadStatistics(**means, max_logit=or_nan(largest, means["confidence"]))


def _attend_backward(problem, residuals, cotangents):
    _, static = problem
    arrays, out, maximum, reciprocal, wants = residuals
    out_gradient, lse_gradient = (
        jnp.zeros_like(primal)
        if isinstance(gradient, jax.custom_derivatives.SymbolicZero)
        else gradient
        for gradient, primal in zip(cotangents[:2], (out, maximum), strict=True)
    )  # statistics have none
    # A logit's gradient is weight x (dweight - delta + dlse): merge the two row terms.
    product = out.astype(jnp.float32) * out_gradient.astype(jnp.float32)
    delta = product.sum(-1) - lse_gradient
    more = {"maximum": maximum, "reciprocal": reciprocal}
    more |= {"out_gradient": out_gradient, "delta": delta}
    arrays = arrays | more

    def backward(arrays):
        B, T, N, H = arrays["query"].shape
        S, K, V = arrays["value"].shape[1:]
        shapes = (B, T, N, H), (B, S, N, H), (B, S, N, V)
        shapes += ((B, N, T, S) if wants else (B, N, 0, 0),)
        by_query, *rest, by_bias = _call("backward", static, arrays, more, shapes)
        if K < N:
            rest = [x.reshape(B, S, K, N // K, -1) for x in rest]
            rest = [x.astype(jnp.float32).sum(3).astype(x.dtype) for x in rest]
        return by_query, *rest, *([by_bias] if wants else [])

    axes = axes_of(arrays, reciprocal="BTN")
    letters = ("BTNH", "BSKH", "BSKV", "BNTS") if wants else ("BTNH", "BSKH", "BSKV")
    gradients = list(partitioned(backward, arrays, axes, letters))
    bias, by_bias = arrays.get("bias"), None
    if wants:
        by_bias = gradients.pop()
        axes = [i for i, n in enumerate(bias.shape) if n == 1 < by_bias.shape[i]]
        by_bias = by_bias.sum(axes, keepdims=True)
    elif bias is not None:
        by_bias = jnp.zeros_like(bias)
    return *gradients, by_bias, None


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _call(name, static, arrays, names, shapes):
    """Run a kernel on the usual operands, then those in `names`."""
    B, dtype = arrays["query"].shape[0], arrays["query"].dtype
    absent = {name: jnp.zeros((B, 0), jnp.int32) for name in masks.STRUCTURE}
    absent["bias"] = jnp.zeros((1, 0, 0, 0), jnp.float32)
    absent["mask"] = jnp.zeros((1, 0, 0, 0), bool)
    absent["alibi_slopes"] = jnp.zeros(0, jnp.float32)
    absent["dropout_keys"] = jnp.zeros((B, 0, 0), jnp.int32)
    order = ("query", "key", "value", *OPTIONAL, *names)
    operands = [arrays[name] if name in arrays else absent[name] for name in order]
    alike = 1 if name == "forward" else 3  # results of the inputs' dtype
    dtypes = [dtype] * alike + [jnp.float32] * (4 - alike)
    results = list(map(jax.ShapeDtypeStruct, shapes, dtypes))
    target = f"attention_{name}_{dtype.name}"
    call = jax.ffi.ffi_call(target, results, vmap_method="broadcast_all")
    operands = varying_alike(operands)
    outputs = call(*operands, **dict(static))
    # In `jax.shard_map`, results of the call lose the axes they vary over.
    return tuple(varying_alike((operands, outputs))[1])
