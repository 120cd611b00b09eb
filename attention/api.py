"""Attention for users: arguments checked and normalised once, then one implementation.

An implementation is a module (or two names of it) with two functions:

    attend(query, key, value, bias, mask, *, scale, is_causal, query_seq_lengths,
           key_value_seq_lengths, local_window_size, query_segment_ids,
           key_value_segment_ids, statistics=False) -> (out, lse) or, with statistics,
           (out, lse, HeadStatistics)
    head_statistics(query, key, bias, mask, *, the same) -> HeadStatistics

- query `B T N H`, key `B S K H`, value `B S K V`, all of one floating dtype, N a
  multiple of K (query head n reads key head n // (N // K)); T, S >= 1.
- bias: None, or floating, 4-D, each axis of `B N T S` full size or 1.
- mask: None, or boolean likewise; True means may attend.
- Lengths lie between 0 and T or S.
- scale: a Python float. is_causal: a Python bool. local_window_size: None or (left,
  right), Python ints >= 0. What they mean for T != S stands in `masks.may_attend`.
- query_seq_lengths, key_value_seq_lengths: None or int32 `B`, independently.
- query_segment_ids `B T` and key_value_segment_ids `B S`: int32, both or neither; 0 is
  padding and sees and is seen by nothing.
- All conditions hold together. What a kernel does not support it refuses with
  NotImplementedError, in one sentence that names the argument and another choice.
- out: `B T N V` in query's dtype. lse: `B T N` float32, the log-sum-exp of the scaled,
  biased logits. Logits and softmax are float32. A query that may attend to nothing has
  out = 0, lse = `masks.EMPTY`, and gives no gradient. Of finite arrays, and a bias of
  -inf too, nothing is ever NaN.
- Both are differentiable by query, key and value (and bias where supported). If only
  out is used, its cotangent for lse is zero.
- HeadStatistics has `B T N` float32 fields here, zero where the query sees nothing. It
  need not be differentiable: gradients by it are cut.
- Kernels need no `head_gate`, dtype, shape or value checks: they are done here. In
  `jax.shard_map` all arrays vary over the same devices.
- `attention.pallas_tpu` and `attention.pallas_gpu` take `interpret: bool = False` too.
"""

import functools
import importlib
import operator
from collections.abc import Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from attention import jax_nn, reference
from attention.partition import varying_alike
from attention.platform import compute_capability
from attention.platform import platform as current_platform
from attention.statistics import HeadStatistics, mean_over_queries

# name: the module that implements it, and what it is told beyond the arguments.
# Modules load when first used: Pallas is slow to import.
IMPLEMENTATIONS = {
    "reference": ("attention.reference", {}),
    "blockwise": ("attention.blockwise", {}),
    "xla": ("attention.jax_nn", {"backend": "xla"}),
    "cudnn": ("attention.jax_nn", {"backend": "cudnn"}),
    "pallas": ("attention.pallas_{platform}", {}),
    "pallas_tpu_interpret": ("attention.pallas_tpu", {"interpret": True}),
    "pallas_gpu_interpret": ("attention.pallas_gpu", {"interpret": True}),
}
SMALL_GPUS = (8.6, 8.9, 12.0, 12.1)  # 99 KiB of shared memory, others 163 and more
FAR = 2**30  # a window without an end; an index and this are less than 2**31


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: SupportsIndex | Sequence[SupportsIndex] | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    head_gate: ArrayLike | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    return_statistics: bool = False,
) -> Array | tuple[Array | HeadStatistics, ...]:
    """Softmax attention: a drop-in for `jax.nn.dot_product_attention`, with more.

    Args:
      query: `B T N H`, or `T N H` without a batch (then nothing else has one either).
      key: `B S K H`, N a multiple of K: grouped-query attention, multi-query for K = 1.
      value: `B S K V`; V may differ from H.
      bias: added to the scaled logits; broadcasts to `B N T S`. -inf rules a pair out;
        so does what is below about -1e38, except for "xla" and "cudnn".
      mask: boolean, True means may attend; broadcasts to `B N T S`.
      scale: of the logits; 1 / sqrt(H) if None. One that is traced multiplies query,
        in its dtype.
      is_causal: a query attends to no key of a larger index.
      query_seq_lengths: `B`; queries from there on attend to nothing.
      key_value_seq_lengths: `B`; nothing attends to the keys from there on.
      local_window_size: (left, right): query i attends to keys i - left to i + right.
        An int is both.
      query_segment_ids: `B T`; a query attends within its segment only. 0 is padding.
      key_value_segment_ids: `B S`; given if and only if query_segment_ids is.
      head_gate: `N` or `B N`; multiplies each head's output.
      implementation: a name in `IMPLEMENTATIONS`, or None: `resolve_implementation`.
      return_residual: also return the log-sum-exp of the logits, `B T N`, float32.
      return_statistics: also return what `head_statistics` does, from the same pass.

    Returns:
      The output `B T N V` in query's dtype, or a tuple of it and what was asked for, in
      this order. Softmax is in float32. A query that may attend to nothing gives zeros,
      a log-sum-exp of `masks.EMPTY` (-2.4e38) and no gradient; `jax.nn` gives it the
      mean of the values. Statistics have no gradient.

    Raises:
      ValueError: arguments that fit no implementation.
      NotImplementedError: the named implementation does not support the arguments.
      TypeError: a forward-mode derivative; "reference" has one.
    """
    arrays, structure, batched = normalise(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
    )
    name = resolve_implementation(*arrays) if implementation is None else implementation
    out, lse, *rows = _function(name, "attend")(
        *arrays, statistics=return_statistics, **structure
    )
    results = [head_gated(out, head_gate, batched)]
    if return_residual:
        refuses = name in ("xla", "cudnn")
        results.append(jax_nn.refuse_gradient(name, lse, arrays) if refuses else lse)
    if return_statistics:
        results.append(mean_over_queries(jax.lax.stop_gradient(rows[0])))
    if not batched:
        results = jax.tree.map(lambda x: x[0], results)
    return tuple(results) if len(results) > 1 else results[0]


def head_statistics(
    query: ArrayLike,
    key: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    implementation: str | None = None,
    **arguments,
) -> HeadStatistics:
    """What each head attends to, as the mean over its real queries, `B N` each.

    A query that may attend to nothing is not real. `arguments` are those of
    `dot_product_attention` that decide the weights: scale, is_causal, the lengths,
    local_window_size and the segment ids. Distances and offsets count key index minus
    query index. In O(T) memory except for "reference"; not differentiable.

    Raises: as `dot_product_attention`; NotImplementedError for "xla" and "cudnn".
    """
    arrays, structure, batched = normalise(query, key, key, bias, mask, **arguments)
    query, key, _, bias, mask = jax.lax.stop_gradient(arrays)
    name = resolve_implementation(*arrays) if implementation is None else implementation
    statistics = mean_over_queries(
        _function(name, "head_statistics")(query, key, bias, mask, **structure)
    )
    return statistics if batched else jax.tree.map(lambda x: x[0], statistics)


def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    **arguments,
) -> Array:
    """The whole map of weights, `B N T S` in float32, for plots.

    `arguments` as in `head_statistics`. Rows sum to 1, or to 0 where a query may attend
    to nothing.
    """
    arrays, structure, batched = normalise(query, key, key, bias, mask, **arguments)
    query, key, _, bias, mask = arrays
    weights, _ = reference.weights_and_lse(query, key, bias, mask, **structure)
    weights = weights.astype(jnp.float32)
    return weights if batched else weights[0]


def resolve_implementation(query, key, value, bias=None, mask=None, *, platform=None):
    """The name that `implementation=None` stands for.

    Arrays or `jax.ShapeDtypeStruct`s, of any rank that `dot_product_attention` takes.
    `platform` is "cpu", "gpu" or "tpu", by default the one that is compiled for: the
    devices of the mesh set with `jax.set_mesh`, else `jax.default_backend()`.
    """
    _require(
        platform in (None, "cpu", "gpu", "tpu"),
        f"platform must be 'cpu', 'gpu', 'tpu' or None, got {platform!r}",
    )
    dtype, size = jnp.dtype(query.dtype), max(query.shape[-1], value.shape[-1])
    largest = _largest_fused(platform or current_platform()).get(dtype.name, 0)
    return "pallas" if size <= largest and bias is None else "blockwise"


def _largest_fused(platform):
    """Head sizes up to which there is a fused kernel, by dtype."""
    if platform not in ("tpu", "gpu"):
        return {}
    capability = compute_capability() if platform == "gpu" else None
    if capability is not None and capability < 8:
        return {}  # no products of these types
    if capability in SMALL_GPUS:
        return {"float32": 32, "bfloat16": 128}
    return {"float32": 256, "bfloat16": 256}


def head_gated(out: Array, head_gate: ArrayLike | None, batched: bool = True) -> Array:
    """Each head's output, `B T N V`, times its gate, `N` or `B N`.

    Raises: ValueError: a gate of another shape.
    """
    if head_gate is None:
        return out
    gate = jnp.asarray(head_gate)
    B, _, N, _ = out.shape
    allowed = ((N,), (B, N)) if batched else ((N,),)
    _require(
        gate.shape in allowed and not jnp.iscomplexobj(gate),
        f"head_gate must have one number a head, shape "
        f"{' or '.join(map(str, allowed))}, got {gate.dtype}{gate.shape}",
    )
    return (out * gate.reshape(-1, 1, N, 1)).astype(out.dtype)


def _function(name, function):
    _require(
        isinstance(name, str) and name in IMPLEMENTATIONS,
        f"implementation must be one of {', '.join(IMPLEMENTATIONS)} or None, got "
        f"{name!r}",
    )
    module, options = IMPLEMENTATIONS[name]
    platform = current_platform()
    if name == "pallas" and platform not in ("tpu", "gpu"):
        raise NotImplementedError(
            f"implementation 'pallas' needs a GPU or TPU, the platform is "
            f"{platform!r}; use 'blockwise', or 'pallas_tpu_interpret' to debug"
        )
    module = importlib.import_module(module.format(platform=platform))
    return functools.partial(getattr(module, function), **options)


def normalise(
    query,
    key,
    value,
    bias,
    mask,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
):
    """Arrays and structure as implementations take them, and whether B was given."""
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    rank = query.ndim
    for name, x in (("query", query), ("key", key), ("value", value)):
        _require(
            x.ndim == rank and rank in (3, 4),
            f"{name} must have 4 axes, or all three of them 3, got {x.shape}",
        )
    if rank == 3:
        query, key, value = query[None], key[None], value[None]
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    dtype = query.dtype
    _require(
        jnp.issubdtype(dtype, jnp.floating) and key.dtype == value.dtype == dtype,
        "query, key and value must have one floating dtype, got "
        f"{dtype}, {key.dtype} and {value.dtype}",
    )
    _require(
        key.shape == (B, S, K, H),
        f"key must be {(B, S, K, H)} to fit query, got {key.shape}",
    )
    _require(
        value.shape[:3] == (B, S, K),
        f"value must begin with key's {(B, S, K)}, got {value.shape}",
    )
    for name, x in (("query", query), ("key", key), ("value", value)):
        _require(x.size > 0, f"{name} has an axis of size 0, its shape is {x.shape}")
    _require(
        N % K == 0, f"query heads must be a multiple of key heads, got {N} and {K}"
    )
    bias = _map("bias", bias, (B, N, T, S), jnp.floating)
    mask = _map("mask", mask, (B, N, T, S), jnp.bool_)
    scale = H**-0.5 if scale is None else scale
    _require(_is_real(scale), f"scale must be one real number, got {scale!r}")
    if isinstance(scale, jax.core.Tracer):
        # It may be differentiated, so it cannot be a kernel's constant.
        query, scale = (query * scale).astype(dtype), 1.0
    _require(
        isinstance(is_causal, bool | np.bool_),
        f"is_causal must be True or False, known when compiling; got {is_causal!r}",
    )
    if local_window_size is not None:
        local_window_size = _window(local_window_size)
    _require(
        (query_segment_ids is None) == (key_value_segment_ids is None),
        "query_segment_ids and key_value_segment_ids must be given together",
    )
    batched = rank == 4
    integers = {
        name: _integers(name, array, shape, batched, most)
        for name, array, shape, most in (
            ("query_seq_lengths", query_seq_lengths, (B,), T),
            ("key_value_seq_lengths", key_value_seq_lengths, (B,), S),
            ("query_segment_ids", query_segment_ids, (B, T), None),
            ("key_value_segment_ids", key_value_segment_ids, (B, S), None),
        )
    }
    arrays, integers = varying_alike(((query, key, value, bias, mask), integers))
    structure = {
        "scale": float(scale),
        "is_causal": bool(is_causal),
        "local_window_size": local_window_size,
        **integers,
    }
    return arrays, structure, batched


def _is_real(number):
    if not isinstance(number, jax.Array):
        number = np.asarray(number)
    dtype = number.dtype
    real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    return real and number.ndim == 0


def _window(size):
    try:
        left, right = map(operator.index, (size, size) if np.ndim(size) == 0 else size)
    except (TypeError, ValueError):
        left = right = -1
    _require(
        min(left, right) >= 0,
        f"local_window_size must be one or two whole numbers >= 0, got {size}",
    )
    return min(left, FAR), min(right, FAR)


def _map(name, array, full, kind):
    if array is None:
        return None
    array = jnp.asarray(array)
    pairs = zip(array.shape[::-1], full[::-1], strict=False)
    _require(
        array.ndim <= 4 and all(n in (1, m) for n, m in pairs),
        f"{name} must broadcast to B N T S = {full}, got {array.shape}",
    )
    _require(
        jnp.issubdtype(array.dtype, kind),
        f"{name} must be {kind.__name__.strip('_')}, got {array.dtype} (an additive "
        "mask is a bias, a boolean one a mask)",
    )
    return jnp.expand_dims(array, range(4 - array.ndim))


def _integers(name, array, shape, batched, most):
    if array is None:
        return None
    array = jnp.asarray(array)
    if not batched and array.ndim == len(shape) - 1:
        array = array[None]
    _require(
        jnp.issubdtype(array.dtype, jnp.integer) and array.shape == shape,
        f"{name} must be integers of shape {shape}, got {array.dtype}{array.shape}",
    )
    if most is not None:
        # before its type is, of which it may be out, as the end may be of its own
        array = jnp.clip(array, 0, min(most, jnp.iinfo(array.dtype).max))
    return array.astype(jnp.int32)


def _require(condition, message):
    if not condition:
        raise ValueError(message)
