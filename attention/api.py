"""The public functions: check and normalise the arguments, call one implementation.

An implementation is a module (or two names of it) with two functions:

    attend(query, key, value, bias, mask, *, scale, is_causal, query_seq_lengths,
           key_value_seq_lengths, local_window_size, query_segment_ids,
           key_value_segment_ids, alibi_slopes=None, dropout_rate=0.0,
           dropout_keys=None, statistics=False) -> (out, lse) or, with statistics,
           (out, lse, HeadStatistics)
    head_statistics(query, key, bias, mask, *, the same without dropout)
           -> HeadStatistics

- query `B T N H`, key `B S K H`, value `B S K V`, all of one floating dtype, N a
  multiple of K (query head n reads key head n // (N // K)); B, T, S >= 1, but B may
  be 0 in `attention.reference`.
- bias: None, or floating, 4-D, each axis of `B N T S` full size or 1.
- mask: None, or boolean likewise; True means may attend.
- Lengths lie between 0 and T or S.
- scale: a Python float. is_causal: a Python bool. local_window_size: None or (left,
  right), Python ints >= 0. What they mean for T != S stands in `masks.may_attend`.
- query_seq_lengths, key_value_seq_lengths: None or int32 `B`, independently.
- query_segment_ids `B T` and key_value_segment_ids `B S`: int32, both or neither; 0 is
  padding and sees and is seen by nothing. What is padding by a length or an id is 0
  in query, key and value.
- alibi_slopes: None or float32 `N`.
- dropout_rate: a Python float, 0 if and only if dropout_keys is None; dropout_keys:
  int32 `B T N`, of `dropout.row_keys`. Weights are dropped where `dropout.kept` is
  False; out is computed from the others, divided by 1 - dropout_rate. lse and
  statistics know nothing of it.
- All conditions hold together. What a kernel does not support it refuses with
  NotImplementedError, in one sentence that names the argument and another choice.
- out: `B T N V` in query's dtype. lse: `B T N` float32, the log-sum-exp of the scaled,
  biased logits. Logits and softmax are float32. A query that may attend to nothing has
  out = 0, lse = `masks.EMPTY`, and gives no gradient. Where the logits (and the sums
  of products that make them) are finite, and a bias may be -inf too, nothing is NaN.
- Both are differentiable by query, key and value (and bias where supported). If only
  out is used, its cotangent for lse is zero.
- HeadStatistics has `B T N` float32 fields here, zero where the query sees nothing. It
  need not be differentiable: gradients by it are cut.
- `head_gate`, `sink` and checks of dtypes, shapes and values are done here. In
  `jax.shard_map` all arrays vary over the same devices.
- `kernels.gpu` and `kernels.tpu` also take `interpret: bool = False`.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from headcount.attention import masks, reference, verification
from headcount.attention.arguments import dropout_arguments, normalise, require
from headcount.attention.kernels import cpu_build, jax_nn
from headcount.attention.platform import platform as current_platform
from headcount.attention.statistics import HeadStatistics, over_queries

# Name: the module that implements it, and options for it. Modules load when first used,
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


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | Array | None = None,
    is_causal: bool | int = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: SupportsIndex | Sequence[SupportsIndex] | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: int | Array | None = None,
    head_gate: ArrayLike | None = None,
    sink: ArrayLike | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    return_statistics: bool = False,
) -> Array | tuple[Array | HeadStatistics, ...]:
    """Softmax attention: a drop-in for `jax.nn.dot_product_attention`, with more.

    Args:
      query: `B T N H`, or `T N H` without a batch (then nor have the results). B, T
        and S may be 0.
      key: `B S K H` (or `S K H` for B = 1), N a multiple of K: grouped-query
        attention, multi-query for K = 1.
      value: `B S K V` (or `S K V` for B = 1); V may differ from H.
      bias: added to the scaled logits; broadcasts to `B N T S`. -inf rules a pair out;
        so does what is below about -1e38, except for "xla" and "cudnn".
      mask: boolean, True means may attend; broadcasts to `B N T S`.
      scale: of the logits; 1 / sqrt(H) if None. With one that is traced, as for its
        gradient, 16-bit inputs are computed in float32.
      is_causal: a query attends to no key of a larger index.
      query_seq_lengths: `B`; queries from there on attend to nothing.
      key_value_seq_lengths: `B`; nothing attends to the keys from there on.
      local_window_size: (left, right): query i attends to keys i - left to i + right.
        An int is both.
      query_segment_ids: `B T`; a query attends within its segment only. 0 is padding.
      key_value_segment_ids: `B S`; given if and only if query_segment_ids is.
      alibi_slopes: `N`; minus a head's slope times |i - j| is added to the logit of
        query i and key j (Press et al. 2022), inside the kernels. Indices count from
        the start of both sequences. Only "reference" has its gradient.
      dropout_rate: share of the weights that are dropped, the others being divided by
        1 - rate; at least 0, below 1, and known when compiling.
      dropout_seed: an integer below 2**32, or an array of one; needed if the rate is
        above 0. What is dropped depends on it and on batch row, head, query and key,
        and is the same in every implementation: see `attention.dropout`.
      head_gate: `N` or `B N`; multiplies each head's output.
      sink: `N` or `B N`; one more logit in each head's softmax, of no key: what it
        takes of the weight goes to nothing. In float32.
      implementation: a name in `IMPLEMENTATIONS`, or None: `resolve_implementation`.
      return_residual: also return the log-sum-exp of the logits, `B T N`, float32; with
        a sink its logit is one of them.
      return_statistics: also return what `head_statistics` does, from the same pass,
        of the keys alone: a sink changes nothing.

    Returns:
      The output `B T N V` in query's dtype, or a tuple of it and what was asked for, in
      this order. Softmax is in float32. A query that may attend to no key gives zeros,
      a log-sum-exp of `masks.EMPTY` (-2.4e38) and no gradient, with a sink or without;
      `jax.nn` gives it the mean of the values. Statistics have no gradient.

    Raises:
      ValueError: arguments that fit no implementation.
      NotImplementedError: the named implementation does not support the arguments.
      TypeError: a forward-mode derivative; "reference" has one.
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
    name = _named(implementation, arrays)
    if structure["alibi_slopes"] is not None and name != "reference":
        structure["alibi_slopes"] = _constant(name, structure["alibi_slopes"])
    out, lse, *rows = _function(name, "attend")(
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
        results.append(over_queries(jax.lax.stop_gradient(rows[0])))
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

    And the largest of their logits, `max_logit`: scaled, biased, of allowed pairs. A
    query that may attend to nothing is not real. `arguments` are those of
    `dot_product_attention` that decide the weights: scale, is_causal, the lengths,
    local_window_size, the segment ids and alibi_slopes. Dropout changes nothing: they
    are of the weights before it. Distances and offsets count key index minus
    query index. Of a head with a sink, which is not told here, they are those of what
    it leaves: the weights divided by their sum are the same as without it. In O(T)
    memory except for "reference"; not differentiable.

    Raises: as `dot_product_attention`; NotImplementedError for "xla" and "cudnn".
    """
    arrays, structure, batched = normalise(query, key, key, bias, mask, **arguments)
    query, key, _, bias, mask = jax.lax.stop_gradient(arrays)
    structure["alibi_slopes"] = jax.lax.stop_gradient(structure["alibi_slopes"])
    name = _named(implementation, arrays)
    statistics = over_queries(
        _function(name, "head_statistics")(query, key, bias, mask, **structure)
    )
    return statistics if batched else jax.tree.map(lambda x: x[0], statistics)


def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    sink: ArrayLike | None = None,
    **arguments,
) -> Array:
    """The whole map of weights, `B N T S` in float32, for plots.

    `arguments` as in `head_statistics`. Rows sum to 1, or to 0 where a query may attend
    to nothing; with a sink, `N` or `B N`, to less, by what it takes.
    """
    arrays, structure, batched = normalise(query, key, key, bias, mask, **arguments)
    query, key, _, bias, mask = arrays
    weights, lse, _ = reference.weights_and_lse(query, key, bias, mask, **structure)
    if sink is not None:
        share, _ = beside_sink(lse, sink, batched)
        weights = weights * share.transpose(0, 2, 1)[..., None]
    weights = weights.astype(jnp.float32)
    return weights if batched else weights[0]


def resolve_implementation(query, key, value, bias=None, mask=None, *, platform=None):
    """Return the name that `implementation=None` stands for.

    On a CPU "cpu" for all dtypes but float64, if its kernels can be compiled (which
    takes some seconds at the first call on a machine). On a GPU or TPU the fused kernel
    named like it, if it has these arrays and the device, and `verification` has
    accepted it there. Otherwise "blockwise". When compiling for a device that is not
    here, verification is taken for granted.

    Args:
      query, key, value, bias, mask: arrays or `jax.ShapeDtypeStruct`s, of any rank that
        `dot_product_attention` takes.
      platform: "cpu", "gpu" or "tpu". Default: that of the mesh set with
        `jax.set_mesh`, else `jax.default_backend()`.
    """
    require(
        platform in (None, "cpu", "gpu", "tpu"),
        f"platform must be 'cpu', 'gpu', 'tpu' or None, got {platform!r}",
    )
    is_here = platform is None and current_platform() == jax.default_backend()
    platform = platform or current_platform()
    if platform == "cpu":
        has_kernel = jnp.dtype(query.dtype).itemsize <= 4
        return "cpu" if has_kernel and cpu_build.unavailable() is None else "blockwise"
    kernel = importlib.import_module(f"{KERNELS}.{platform}")
    query, value = (_with_dtype_object(x) for x in (query, value))
    if bias is not None or kernel.unsupported(query, value, bias, mask):
        return "blockwise"
    if is_here and not (
        kernel.unsupported_device() is None
        and verification.is_accepted(platform, query.dtype.name)
    ):
        return "blockwise"
    return platform


def _with_dtype_object(array):
    return jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype))


def head_gated(out: Array, head_gate: ArrayLike | None, batched: bool = True) -> Array:
    """Each head's output, `B T N V`, times its gate, `N` or `B N`.

    Raises: ValueError: a gate of another shape.
    """
    if head_gate is None:
        return out
    B, _, N, _ = out.shape
    gate = _of_heads("head_gate", head_gate, B, N, batched)
    return (out * gate[..., None]).astype(out.dtype)


def beside_sink(
    lse: Float[Array, "B T N"], sink: ArrayLike, batched: bool = True
) -> tuple[Float[Array, "B T N"], Float[Array, "B T N"]]:
    """The share of the weight that a sink, `N` or `B N`, leaves; log-sum-exp with it.

    A softmax with e^sink in its denominator is sigmoid(lse - sink) times the one
    without: "softmax off by one" with a sink of 0 (Miller 2023), learned for each head
    in gpt-oss (OpenAI 2025). A row that may see nothing keeps `masks.EMPTY`.

    Raises: ValueError: a sink of another shape.
    """
    B, _, N = lse.shape
    sink = _of_heads("sink", sink, B, N, batched).astype(lse.dtype)
    both = jnp.where(lse > masks.EMPTY, jnp.logaddexp(lse, sink), lse)
    return jax.nn.sigmoid(lse - sink), both


def _of_heads(name, array, B, N, batched):
    """A number a head, as `B 1 N` or `1 1 N`."""
    array = jnp.asarray(array)
    allowed = ((N,), (B, N)) if batched else ((N,),)
    require(
        array.shape in allowed and not jnp.iscomplexobj(array),
        f"{name} must have one number a head, shape "
        f"{' or '.join(map(str, allowed))}, got {array.dtype}{array.shape}",
    )
    return array.reshape(-1, 1, N)


def _named(name, arrays):
    """The implementation to run: where there is nothing, the one that needs none."""
    require(
        name is None or isinstance(name, str) and name in IMPLEMENTATIONS,
        f"implementation must be one of {', '.join(IMPLEMENTATIONS)} or None, got "
        f"{name!r}",
    )
    if 0 in (*arrays[0].shape[:2], arrays[1].shape[1]):
        return "reference"
    return resolve_implementation(*arrays) if name is None else name


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _constant(name, alibi_slopes):
    """`alibi_slopes`, whose gradient raises: a kernel would return none."""
    return alibi_slopes


@_constant.defjvp
def _refuse_gradient(name, primals, tangents):
    raise NotImplementedError(
        f"implementation {name!r} has no gradient by alibi_slopes; use 'reference', or "
        "jax.lax.stop_gradient(alibi_slopes) if none is wanted"
    )


def _function(name, function):
    module, options = IMPLEMENTATIONS[name]
    if name == "cpu" and current_platform() != "cpu":
        raise NotImplementedError(
            f"implementation 'cpu' needs a CPU, the platform is {current_platform()!r};"
            " use None to choose by the platform, or 'blockwise'"
        )
    module = importlib.import_module(module)
    return functools.partial(getattr(module, function), **options)
