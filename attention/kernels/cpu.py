"""Fused attention for CPUs: C++ through XLA's foreign functions, forward and backward.

Memory grows with T + S, and what a causal or window mask, lengths or segments rule out
is not computed. The backward pass computes the weights again. 16-bit arrays are
computed in float32; statistics carry no gradient, and there is no second derivative.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from headcount.attention import dropout, masks
from headcount.attention.arguments import FAR, present
from headcount.attention.kernels import cpu_build
from headcount.attention.kernels.partition import axes_of, partitioned, varying_alike
from headcount.attention.statistics import HeadStatistics

DTYPES = ("float32", "bfloat16", "float16")
# Operands of the kernels after query, key and value, that a call may lack.
OPTIONAL = ("bias", "mask", "alibi_slopes", "dropout_keys", *masks.STRUCTURE)
# What the kernel adds up of a row for its statistics, in this order.
SUMS = ("energy", "distance", "previous", "current", "following")


def attend(query, key, value, bias, mask, *, statistics=False, **structure):
    """Output `B T N V`, log-sum-exp `B T N`, statistics: see `attention.api`.

    Raises NotImplementedError for float64, and where no C++ compiler is.
    """
    _check(query)
    dtype = query.dtype
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    bias = None if bias is None else bias.astype(jnp.float32)
    static, arrays = _split(structure)
    others = present(mask=mask, **arrays)
    out, *rows = _attend((statistics, static), query, key, value, bias, others)
    return out.astype(dtype), *rows


def head_statistics(query, key, bias, mask, **structure):
    """Statistics of every row: see `attention.api`."""
    value = key[..., :0]  # of no size: only the weights are wanted
    return attend(query, key, value, bias, mask, statistics=True, **structure)[-1]


def _check(query):
    refusal = "implementation 'cpu' {}; use 'blockwise'"
    if query.dtype.name not in DTYPES:
        told = f"takes {', '.join(DTYPES)}, not {query.dtype}"
        raise NotImplementedError(refusal.format(told))
    reason = cpu_build.unavailable()
    if reason is not None:
        raise NotImplementedError(refusal.format(f"cannot be compiled here: {reason}"))


def _split(structure):
    """What is known when compiling, as the kernels take it, and the arrays."""
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
    primals = jax.tree.map(
        lambda x: x.value, primals, is_leaf=lambda x: hasattr(x, "perturbed")
    )
    results, kept = _results(problem, *primals)
    # A leaf that is static: the structure of a tree tells it.
    return results, (*kept, {"bias": None} if wants_bias else {})


def _results(problem, query, key, value, bias, others):
    statistics, static = problem
    arrays = present(query=query, key=key, value=value, bias=bias, **others)

    def forward(arrays):
        B, T, N, _ = arrays["query"].shape
        V = arrays["value"].shape[-1]
        rows = (B, T, N)
        shapes = (*rows, V), rows, rows, (*rows, len(SUMS) if statistics else 0)
        return _call("attention_forward", static, arrays, (), shapes)

    letters = "BTNV", "BTN", "BTN", "BTNx"
    axes = axes_of(arrays)
    out, maximum, reciprocal, sums = partitioned(forward, arrays, axes, letters)
    seen = reciprocal != 0  # also of a NaN
    log_total = -jnp.log(jnp.where(seen, reciprocal, 1))
    results = [out, jnp.where(seen, maximum + log_total, masks.EMPTY)]
    if statistics:
        rows = dict(zip(SUMS, jnp.moveaxis(sums, -1, 0), strict=True))
        # The energy's logits count from the maximum, as log(total) does.
        entropy = log_total - rows.pop("energy")
        max_logit = jnp.where(seen, maximum, 0)
        results.append(HeadStatistics(entropy, reciprocal, **rows, max_logit=max_logit))
    return tuple(results), (arrays, out, maximum, reciprocal)


def _attend_backward(problem, residuals, cotangents):
    _, static = problem
    arrays, out, maximum, reciprocal, wants = residuals
    out_gradient, lse_gradient = (
        jnp.zeros_like(primal)
        if isinstance(gradient, jax.custom_derivatives.SymbolicZero)
        else gradient
        for gradient, primal in zip(cotangents[:2], (out, maximum), strict=True)
    )  # statistics have none
    # A logit gets weight x (dweight - delta + dlse): the two row sums enter as one.
    delta = (out * out_gradient).sum(-1) - lse_gradient
    more = {"maximum": maximum, "reciprocal": reciprocal}
    more |= {"out_gradient": out_gradient, "delta": delta}
    arrays = arrays | more

    def backward(arrays):
        B, T, N, H = arrays["query"].shape
        S, K, V = arrays["value"].shape[1:]
        shapes = (B, T, N, H), (B, S, N, H), (B, S, N, V)
        shapes += ((B, N, T, S) if wants else (B, N, 0, 0),)
        by_query, *rest, by_bias = _call(
            "attention_backward", static, arrays, more, shapes
        )
        if K < N:
            rest = [x.reshape(B, S, K, N // K, -1).sum(3) for x in rest]
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


def _call(target, static, arrays, names, shapes):
    """Run a kernel on the arrays of these names beside the usual ones."""
    B = arrays["query"].shape[0]
    absent = {name: jnp.zeros((B, 0), jnp.int32) for name in masks.STRUCTURE}
    absent["bias"] = jnp.zeros((1, 0, 0, 0), jnp.float32)
    absent["mask"] = jnp.zeros((1, 0, 0, 0), bool)
    absent["alibi_slopes"] = jnp.zeros(0, jnp.float32)
    absent["dropout_keys"] = jnp.zeros((B, 0, 0), jnp.int32)
    order = ("query", "key", "value", *OPTIONAL, *names)
    operands = [arrays[name] if name in arrays else absent[name] for name in order]
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    call = jax.ffi.ffi_call(target, results, vmap_method="broadcast_all")
    operands = varying_alike(operands)
    found = call(*operands, **dict(static))
    # They have lost what they vary over in `jax.shard_map`.
    return tuple(varying_alike((operands, found))[1])
