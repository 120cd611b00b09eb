"""Fused attention for CPUs: C++ through XLA's foreign functions, forward and backward.

Memory grows with T + S, and what a causal or window mask, lengths or segments rule out
is not computed. The backward pass computes the weights again. float32 only; statistics
carry no gradient, and there is no second derivative.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from headcount.attention import masks
from headcount.attention.arguments import FAR, present
from headcount.attention.kernels import cpu_build
from headcount.attention.kernels.partition import axes_of, partitioned, varying_alike
from headcount.attention.statistics import HeadStatistics

# What the kernel adds up of a row for its statistics, in this order.
SUMS = ("energy", "distance", "previous", "current", "following")


def attend(query, key, value, bias, mask, *, statistics=False, **structure):
    """Output `B T N V`, log-sum-exp `B T N`, statistics: see `attention.api`.

    Raises NotImplementedError for another type than float32, for a bias, and where no
    C++ compiler is.
    """
    _check(query, bias)
    static, arrays = _split(structure)
    others = present(mask=mask, **arrays)
    return _attend((statistics, static), query, key, value, others)


def head_statistics(query, key, bias, mask, **structure):
    """Statistics of every row: see `attention.api`."""
    _check(query, bias)
    static, arrays = _split(structure)
    others = present(mask=mask, **arrays)
    value = key[..., :0]  # of no size: only the weights are wanted
    return _attend((True, static), query, key, value, others)[-1]


def _check(query, bias):
    refusal = "implementation 'cpu' {}; use 'blockwise'"
    if query.dtype != jnp.float32:
        raise NotImplementedError(refusal.format(f"takes float32, not {query.dtype}"))
    if bias is not None:
        raise NotImplementedError(refusal.format("takes no bias"))
    reason = cpu_build.unavailable()
    if reason is not None:
        raise NotImplementedError(refusal.format(f"cannot be compiled here: {reason}"))


def _split(structure):
    """What is known when compiling, as the kernels take it, and the arrays."""
    arrays = {name: structure.pop(name) for name in masks.STRUCTURE}
    left, right = structure["local_window_size"] or (FAR, FAR)
    return (structure["scale"], structure["is_causal"], left, right), arrays


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(problem, query, key, value, others):
    return _attend_forward(problem, query, key, value, others)[0]


def _attend_forward(problem, query, key, value, others):
    statistics, static = problem
    arrays = dict(query=query, key=key, value=value, **others)

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
        results.append(HeadStatistics(entropy, confidence=reciprocal, **rows))
    return tuple(results), (arrays, out, maximum, reciprocal)


def _attend_backward(problem, residuals, cotangents):
    _, static = problem
    arrays, out, maximum, reciprocal = residuals
    out_gradient, lse_gradient, *_ = cotangents  # statistics have none
    # A logit gets weight x (dweight - delta + dlse): the two row sums enter as one.
    delta = (out * out_gradient).sum(-1) - lse_gradient
    more = {"maximum": maximum, "reciprocal": reciprocal}
    more |= {"out_gradient": out_gradient, "delta": delta}
    arrays = arrays | more

    def backward(arrays):
        B, T, N, H = arrays["query"].shape
        S, K, V = arrays["value"].shape[1:]
        shapes = (B, T, N, H), (B, S, N, H), (B, S, N, V)
        by_query, *rest = _call("attention_backward", static, arrays, more, shapes)
        if K < N:
            rest = [x.reshape(B, S, K, N // K, -1).sum(3) for x in rest]
        return by_query, *rest

    axes = axes_of(arrays, reciprocal="BTN")
    gradients = partitioned(backward, arrays, axes, ("BTNH", "BSKH", "BSKV"))
    return *gradients, None


_attend.defvjp(_attend_forward, _attend_backward)


def _call(target, static, arrays, names, shapes):
    """Run a kernel on the arrays of these names beside the usual ones."""
    B = arrays["query"].shape[0]
    absent = {name: jnp.zeros((B, 0), jnp.int32) for name in masks.STRUCTURE}
    absent["mask"] = jnp.zeros((1, 0, 0, 0), bool)
    order = ("query", "key", "value", "mask", *masks.STRUCTURE, *names)
    operands = [arrays[name] if name in arrays else absent[name] for name in order]
    scale, is_causal, left, right = static
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    call = jax.ffi.ffi_call(target, results, vmap_method="broadcast_all")
    operands = varying_alike(operands)
    found = call(
        *operands,
        scale=np.float32(scale),
        is_causal=is_causal,
        left=np.int64(left),
        right=np.int64(right),
    )
    # They have lost what they vary over in `jax.shard_map`.
    return tuple(varying_alike((operands, found))[1])
