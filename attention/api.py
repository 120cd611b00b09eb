"""The public functions: check and normalise arguments, then call an implementation.

An implementation is a module with the function below. One module can serve two names in
`IMPLEMENTATIONS`.

    attend(query, key, value, bias, mask, *, scale, is_causal, query_seq_lengths,
           key_value_seq_lengths, local_window_size, query_segment_ids,
           key_value_segment_ids, alibi_slopes=None, dropout_rate=0.0,
           dropout_keys=None, statistics=False) -> (out, lse) or, with statistics,
           (out, lse, HeadStatistics)

- query `B T N H`, key `B S K H`, value `B S K V`, all of one floating dtype, N a
  multiple of K (query head n reads key head n // (N // K)); B, T, S >= 1, and in
  `attention.reference` also 0.
- bias: None, or floating and 4-D, with each axis of `B N T S` full size or 1.
- mask: None, or boolean with axes as for bias. True means may attend.
- scale: a Python float. is_causal: a Python bool. local_window_size: None or (left,
  right), Python ints >= 0. `masks.may_attend` defines their meaning for T != S.
- query_seq_lengths, key_value_seq_lengths: each None or int32 `B`, with values from 0
  to T or S.
- query_segment_ids `B T` and key_value_segment_ids `B S`: int32, both or neither. Id 0
  is padding, which neither attends nor is attended to. Query, key and value are zero
  wherever a length or an id marks padding.
- alibi_slopes: None or float32 `N`.
- dropout_rate: a Python float, 0 if and only if dropout_keys is None. dropout_keys:
  int32 `B T N`, from `dropout.row_keys`. Weights are dropped where `dropout.kept` is
  False; out is computed from the others, divided by 1 - dropout_rate. Dropout does not
  affect lse or statistics.
- All masking conditions apply together. For unsupported arguments, an implementation
  raises NotImplementedError with one sentence that names the argument and suggests an
  alternative.
- out: `B T N V` in query's dtype. lse: `B T N` float32, the log-sum-exp of the scaled,
  biased logits. Logits and softmax are float32. A query that may attend to nothing has
  out = 0, lse = `masks.EMPTY` and zero gradient. Nothing is NaN as long as the logits
  and the partial sums of their dot products are finite; a bias may also be -inf.
- out and lse are differentiable with respect to query, key and value (and bias where
  supported). If only out is used, the cotangent of lse is zero.
- HeadStatistics has `B N` float32 fields, as of `statistics.over_queries`. It need not
  be differentiable, because callers stop its gradient.
- This module handles `head_gate` and `sink` and checks dtypes, shapes and values.
  Inside `jax.shard_map`, all arrays vary over the same devices.
- `kernels.gpu` and `kernels.tpu` also take `interpret: bool = False`.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Literal, SupportsIndex, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from headcount.attention import masks, reference, verification
from headcount.attention.arguments import dropout_arguments, normalise, require
from headcount.attention.kernels import cpu_build, jax_nn, partition
from headcount.attention.platform import platform as current_platform
from headcount.attention.statistics import HeadStatistics

# Implementing module and keyword options by name. Modules are imported on first use,
# because Pallas is slow to import.
KERNELS = "headcount.attention.kernels"
IMPLEMENTATIONS = {
    "reference": ("headcount.attention.reference", {}),
    "blockwise": (f"{KERNELS}.blockwise", {}),
    "cpu": (f"{KERNELS}.cpu", {}),
    "gpu": (f"{KERNELS}.gpu", {}),
    "tpu": (f"{KERNELS}.tpu", {}),
    "cudnn": (f"{KERNELS}.jax_nn", {"backend": "cudnn"}),
    "xla": (f"{KERNELS}.jax_nn", {"backend": "xla"}),
    "gpu_interpret": (f"{KERNELS}.gpu", {"interpret": True}),
    "tpu_interpret": (f"{KERNELS}.tpu", {"interpret": True}),
}


Numbers = ArrayLike | Sequence  # an array, or a list


class Structure(TypedDict, total=False):
    """The arguments that determine weights with query and key, for type checkers."""

    scale: ArrayLike | None
    is_causal: SupportsIndex | np.bool_
    query_seq_lengths: Numbers | None
    key_value_seq_lengths: Numbers | None
    local_window_size: SupportsIndex | Sequence[SupportsIndex] | None
    query_segment_ids: Numbers | None
    key_value_segment_ids: Numbers | None
    alibi_slopes: Numbers | None


class Arguments(Structure, total=False):
    """The optional arguments of `dot_product_attention`, for type checkers."""

    dropout_rate: float
    dropout_seed: ArrayLike | None
    head_gate: Numbers | None
    sink: Numbers | None
    implementation: str | None


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    return_statistics: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    return_statistics: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> tuple[Array, Array]: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    return_statistics: Literal[True],
    **arguments: Unpack[Arguments],
) -> tuple[Array, HeadStatistics]: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    return_statistics: Literal[True],
    **arguments: Unpack[Arguments],
) -> tuple[Array, Array, HeadStatistics]: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: bool = False,
    return_statistics: bool = False,
    **arguments: Unpack[Arguments],
) -> Array | tuple[Array | HeadStatistics, ...]: ...


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: SupportsIndex | np.bool_ = False,
    query_seq_lengths: Numbers | None = None,
    key_value_seq_lengths: Numbers | None = None,
    local_window_size: SupportsIndex | Sequence[SupportsIndex] | None = None,
    query_segment_ids: Numbers | None = None,
    key_value_segment_ids: Numbers | None = None,
    alibi_slopes: Numbers | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: ArrayLike | None = None,
    head_gate: Numbers | None = None,
    sink: Numbers | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    return_statistics: bool = False,
) -> Array | tuple[Array | HeadStatistics, ...]:
    """Compute softmax attention: a superset of `jax.nn.dot_product_attention`.

    Args:
      query: `B T N H`, or `T N H` without a batch axis, in which case the results have
        none either. B, T and S may be 0.
      key: `B S K H` (or `S K H` for B = 1). N must be a multiple of K: K < N is
        grouped-query attention, K = 1 is multi-query attention.
      value: `B S K V` (or `S K V` for B = 1). V may differ from H.
      bias: added to the scaled logits; broadcasts to `B N T S`. A bias of -inf excludes
        a pair. So does any value below about -1e38, except for "xla" and "cudnn".
      mask: boolean, True means may attend; broadcasts to `B N T S`.
      scale: multiplies the logits; 1 / sqrt(H) if None. If it is traced, for example
        to differentiate with respect to it, 16-bit inputs are computed in float32.
      is_causal: whether to prevent a query from attending to keys of a larger index.
      query_seq_lengths: `B`; queries at or beyond this index attend to nothing.
      key_value_seq_lengths: `B`; keys at or beyond this index are not attended to.
      local_window_size: (left, right): query i attends to keys i - left to i + right.
        An int sets both.
      query_segment_ids: `B T`; a query attends within its segment only. 0 is padding.
      key_value_segment_ids: `B S`; required if and only if query_segment_ids is given.
      alibi_slopes: `N`; subtracts the head's slope times |i - j| from the logit of
        query i and key j (Press et al. 2022), inside the kernels. Indices count from
        the start of each sequence. Only "reference" is differentiable with respect to
        the slopes.
      dropout_rate: fraction of the weights to drop, in steps of 2^-24; the others are
        divided by 1 - rate. At least 0, below 1, and static.
      dropout_seed: an integer below 2**32, or an array holding one; required if the
        rate is above 0. Which weights are dropped depends only on the seed and on batch
        row, head, query and key, and is the same in every implementation: see
        `attention.dropout`.
      head_gate: `N` or `B N`; multiplies each head's output.
      sink: `N` or `B N`, used in float32; adds a logit that belongs to no key to each
        head's softmax. The weight it receives contributes nothing to the output.
      implementation: a name in `IMPLEMENTATIONS`, or None to call
        `resolve_implementation`.
      return_residual: also return the log-sum-exp of the logits, `B T N` in float32,
        including the sink's logit if there is a sink.
      return_statistics: also return the result of `head_statistics`, computed in the
        same pass. It covers only the keys, so a sink does not change it.

    Returns:
      The output `B T N V` in query's dtype, or a tuple of the output and the requested
      extras, in this order. Softmax is in float32. A query that may attend to no key
      gives zeros, a log-sum-exp of `masks.EMPTY` (-2.4e38) and no gradient, with or
      without a sink; `jax.nn` returns the mean of the values instead. Statistics have
      no gradient.

    Raises:
      ValueError: the arguments are invalid for every implementation.
      NotImplementedError: the named implementation does not support the arguments.
      TypeError: a forward-mode derivative is taken; only "reference" supports it.
    """
    query = jnp.asarray(query)
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
        alibi_slopes=alibi_slopes,
    )
    structure |= dropout_arguments(dropout_rate, dropout_seed, arrays[0])
    has_extras = return_residual or return_statistics or sink is not None
    name = _named(implementation, arrays, _is_plain(structure) and not has_extras)
    if structure["alibi_slopes"] is not None and name != "reference":
        structure["alibi_slopes"] = _constant(name, structure["alibi_slopes"])
    out, lse, *rows = _function(name)(
        *arrays, statistics=return_statistics, **structure
    )
    if name in ("xla", "cudnn") and (return_residual or sink is not None):
        lse = jax_nn.refuse_gradient(name, lse, arrays)
    if sink is not None:
        share, lse = beside_sink(lse, sink, batched)
        out = out * share[..., None]
    results = [head_gated(out, head_gate, batched).astype(query.dtype)]
    if return_residual:
        results.append(lse)
    if return_statistics:
        results.append(jax.lax.stop_gradient(rows[0]))
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
    **arguments: Unpack[Structure],
) -> HeadStatistics:
    """Compute statistics of each head's weights, averaged over real queries.

    Each field has shape `B N`. `max_logit` is a maximum, not a mean: the largest scaled
    and biased logit of any allowed pair. A query is real if it may attend to some key.
    Offsets are key index minus query index. Statistics describe the weights before
    dropout. Sinks are not an argument: the statistics describe the weights on keys
    after normalization, which a sink does not change. Uses O(T) memory, except in
    "reference", and is not differentiable.

    Args:
      **arguments: the arguments of `dot_product_attention` that determine the weights:
        scale, is_causal, the lengths, local_window_size, the segment ids and
        alibi_slopes.

    Raises:
      As `dot_product_attention`, and NotImplementedError for "xla" and "cudnn".
    """
    value = jnp.asarray(key)[..., :1]  # the output is not used
    arrays, structure, batched = normalise(query, key, value, bias, mask, **arguments)
    arrays = jax.lax.stop_gradient(arrays)
    structure["alibi_slopes"] = jax.lax.stop_gradient(structure["alibi_slopes"])
    name = _named(implementation, arrays)
    *_, statistics = _function(name)(*arrays, statistics=True, **structure)
    return statistics if batched else jax.tree.map(lambda x: x[0], statistics)


def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    sink: Numbers | None = None,
    **arguments: Unpack[Structure],
) -> Array:
    """Compute the full attention map, `B N T S` in float32, for plots.

    `arguments` are as in `head_statistics`. Rows sum to 1, or to 0 where a query may
    attend to nothing. With a sink, `N` or `B N`, rows sum to 1 minus the sink's weight.
    """
    arrays, structure, batched = normalise(query, key, key, bias, mask, **arguments)
    query, key, _, bias, mask = arrays
    weights, lse, _ = reference.weights_and_lse(query, key, bias, mask, **structure)
    if sink is not None:
        share, _ = beside_sink(lse, sink, batched)
        weights = weights * share.transpose(0, 2, 1)[..., None]
    weights = weights.astype(jnp.float32)
    return weights if batched else weights[0]


def resolve_implementation(
    query: ArrayLike | jax.ShapeDtypeStruct,
    key: ArrayLike | jax.ShapeDtypeStruct,
    value: ArrayLike | jax.ShapeDtypeStruct,
    bias: ArrayLike | jax.ShapeDtypeStruct | None = None,
    mask: ArrayLike | jax.ShapeDtypeStruct | None = None,
    *,
    platform: str | None = None,
    is_plain: bool = False,
) -> str:
    """Return the name that `implementation=None` stands for.

    On a CPU, this is "cpu" for every dtype but float64, if its kernels can be compiled,
    which takes a few seconds on the first call on a machine; else "blockwise". On a GPU
    or TPU, it is the first of these that is possible:

    - the fused kernel "gpu" or "tpu", if it supports the arrays and the device, and
      `verification` has accepted it here. When compiling for a device that is not
      present, verification is skipped;
    - "cudnn", on an NVIDIA GPU that is present, for plain calls that it supports. It
      goes before "gpu" if `verification` found it to be faster;
    - "blockwise".

    If the current mesh has an axis of which kernels can't tell what it divides (see
    `kernels.partition`), the result is "blockwise" on any platform.

    Args:
      query, key, value, bias, mask: arrays or `jax.ShapeDtypeStruct`s, of any rank that
        `dot_product_attention` takes.
      platform: "cpu", "gpu" or "tpu". Defaults to the platform of the mesh set with
        `jax.set_mesh`, else `jax.default_backend()`.
      is_plain: whether the call has none of the optional arguments that are not among
        these, except scale, is_causal and head_gate.
    """
    require(
        platform in (None, "cpu", "gpu", "tpu"),
        f"platform must be 'cpu', 'gpu', 'tpu' or None, got {platform!r}",
    )
    is_target = platform is None
    platform = platform or current_platform()
    if is_target and partition.unknown_axis() is not None:
        return "blockwise"
    if platform == "cpu":
        if jnp.dtype(query.dtype).itemsize > 4:
            return "blockwise"
        reason = cpu_build.unavailable()
        if reason is not None:
            verification.log_unused("cpu", reason)
        return "cpu" if reason is None else "blockwise"
    kernel = importlib.import_module(f"{KERNELS}.{platform}")
    query, value = (
        jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in (query, value)
    )
    is_here = is_target and platform == jax.default_backend()
    fits_cudnn = (
        is_plain
        and is_here
        and platform == "gpu"
        and jax_nn.cudnn_fits(query, value, bias, mask)
    )
    fallback = "cudnn" if fits_cudnn else "blockwise"
    if (
        bias is not None
        or kernel.unsupported(query, value, bias, mask)
        or (is_target and kernel.unsupported_device())
    ):
        return fallback
    is_picked = not is_here or verification.is_accepted(
        platform, query.dtype.name, beside_cudnn=fits_cudnn
    )
    return platform if is_picked else fallback


def head_gated(out: Array, head_gate: Numbers | None, batched: bool = True) -> Array:
    """Multiply each head's output, `B T N V`, by its gate, `N` or `B N`.

    Raises:
      ValueError: the gate has another shape.
    """
    if head_gate is None:
        return out
    require(out.ndim == 4, f"heads must be B T N V, got {out.shape}")
    B, _, N, _ = out.shape
    gate = _of_heads("head_gate", head_gate, B, N, batched)
    return (out * gate[..., None]).astype(out.dtype)


def beside_sink(
    lse: Float[Array, "B T N"], sink: ArrayLike, batched: bool
) -> tuple[Float[Array, "B T N"], Float[Array, "B T N"]]:
    """Return the share of weight that a sink leaves to the keys, and the new lse.

    Adding e^sink to a softmax's denominator multiplies the weights by
    sigmoid(lse - sink). A sink of 0 is "softmax off by one" (Miller 2023); gpt-oss
    (OpenAI 2025) learns one per head. The lse of a query that may attend to nothing
    stays `masks.EMPTY`.

    Args:
      lse: log-sum-exp without the sink.
      sink: `N` or `B N`.

    Raises:
      ValueError: the sink has another shape.
    """
    B, _, N = lse.shape
    sink = _of_heads("sink", sink, B, N, batched).astype(lse.dtype)
    lse_with_sink = jnp.where(lse > masks.EMPTY, jnp.logaddexp(lse, sink), lse)
    return jax.nn.sigmoid(lse - sink), lse_with_sink


def _of_heads(name, array, B, N, batched):
    """Reshape one number per head to `B 1 N` or `1 1 N`."""
    array = jnp.asarray(array)
    allowed = ((N,), (B, N)) if batched else ((N,),)
    require(
        array.shape in allowed and not jnp.iscomplexobj(array),
        f"{name} must have one number per head, shape "
        f"{' or '.join(map(str, allowed))}, got {array.dtype}{array.shape}",
    )
    return array.reshape(-1, 1, N)


def _is_plain(structure: dict) -> bool:
    """Return whether a call has no masking but causality, no slopes, no dropout."""
    optional = structure.keys() - {"scale", "is_causal", "dropout_rate"}
    return all(structure[name] is None for name in optional)


def _named(name, arrays, is_plain=False):
    """Resolve an implementation's name; empty arrays always use "reference"."""
    check_name(name)
    if 0 in (*arrays[0].shape[:2], arrays[1].shape[1]):
        return "reference"
    return resolve_implementation(*arrays, is_plain=is_plain) if name is None else name


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _constant(name, alibi_slopes):
    """Return `alibi_slopes`; differentiating them raises, as kernels lack a rule."""
    return alibi_slopes


@_constant.defjvp
def _refuse_gradient(name, primals, tangents):
    raise NotImplementedError(
        f"implementation {name!r} has no gradient by alibi_slopes; use 'reference', or "
        "jax.lax.stop_gradient(alibi_slopes) if none is wanted"
    )


def check_name(implementation) -> None:
    """Check an implementation's name, which may be None.

    Raises:
      ValueError: there is no such implementation.
    """
    require(
        implementation is None
        or isinstance(implementation, str)
        and implementation in IMPLEMENTATIONS,
        f"implementation must be one of {', '.join(IMPLEMENTATIONS)} or None, got "
        f"{implementation!r}",
    )


def _function(name):
    module, options = IMPLEMENTATIONS[name]
    if name == "cpu" and current_platform() != "cpu":
        raise NotImplementedError(
            f"implementation 'cpu' needs a CPU, the platform is {current_platform()!r};"
            " use None to choose by the platform, or 'blockwise'"
        )
    module = importlib.import_module(module)
    return functools.partial(module.attend, **options)
