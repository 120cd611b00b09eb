"""Online softmax over blocks of queries and keys in XLA: exact, O(T) memory.

Forward and backward hold one block of the T x S map at a time and skip blocks that the
causal, window, length and segment masks exclude (after Rabe & Staats 2021,
arXiv:2112.05682, and Dao 2023, arXiv:2307.08691). Sequences that fit one block, such as
packed training rows, are one batched computation. Its backward pass reads the saved
exponentials, at most `SHORT` numbers per query, instead of recomputing them. On CPU,
where products of two matrices are fastest, long sequences are computed head by head;
elsewhere, all heads are computed together.
"""

import functools

import jax
import jax.numpy as jnp

from headcount.attention.arguments import present
from headcount.attention.kernels import blockwise_heads as heads
from headcount.attention.kernels.partition import axes_of, partitioned, unknown_axis
from headcount.attention.platform import platform
from headcount.attention.statistics import HeadStatistics, over_queries

SHORT = 128  # sequences of at most this many queries and keys are one block
LONG = (512, 1024)  # queries and keys per block when heads are computed one by one
SHARED = (128, 512)  # queries and keys per block when heads are computed together
# Every block reads its keys, values and gradient accumulators. Larger blocks of queries
# amortize these reads on accelerators, up to LOGITS logits over all heads.
LARGEST, LOGITS = 512, 2**24

# B T K G ...
QUERIES = ("query", "out_gradient", "maximum", "delta", "dropout_keys")
HEADS_THIRD = ("key", "value", *QUERIES)  # others are B K ...
ROWS = dict.fromkeys(("lse", *HeadStatistics._fields), "BTN")


def attend(
    query,
    key,
    value,
    bias,
    mask,
    *,
    scale,
    is_causal,
    local_window_size,
    dropout_rate=0.0,
    statistics=False,
    **indices,
):
    """Return output, log-sum-exp and statistics: see `attention.api`."""
    structure = scale, is_causal, local_window_size, dropout_rate
    problem = _problem(query, key, bias, structure, statistics)
    differentiable = present(query=query, key=key, value=value, bias=bias)
    constant = present(mask=mask, **indices)
    out, *rows = _attend(problem, differentiable, constant)
    lse, *rows = map(jnp.float32, rows)  # even for float64 inputs
    return (out, lse, over_queries(HeadStatistics(*rows))) if statistics else (out, lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(problem, differentiable, constant):
    return _attend_forward(problem, differentiable, constant)[0]


def _attend_forward(problem, differentiable, constant):
    results = {"out": "BTNV"} | (ROWS if problem.statistics else {"lse": "BTN"})
    head, kept = heads.forward, {"reciprocal": "BTN", "maximum": "BTN"}
    if problem.short:
        head, kept = heads.short, {"reciprocal": "BTN", "exponentials": "BKGTS"}
    outputs = _run(head, problem, differentiable | constant, results | kept)
    out, lse, *rows = outputs[: len(results)]
    kept = dict(zip(kept, outputs[len(results) :], strict=True))
    out = out.astype(differentiable["query"].dtype)
    return (out, lse, *rows), (differentiable, constant, out, kept)


def _attend_backward(problem, residuals, cotangents):
    return _backward(problem, residuals, cotangents), None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(problem, residuals, cotangents):
    differentiable, constant, out, kept = residuals
    out_gradient, lse_gradient, *_ = cotangents  # statistics have none
    dtype = jnp.promote_types(out.dtype, jnp.float32)
    out_gradient = out_gradient.astype(dtype)
    # The row terms of the softmax's and the log-sum-exp's derivatives combine.
    delta = jnp.sum(out.astype(dtype) * out_gradient, -1) - lse_gradient
    # Weights are exponentials * reciprocal: scale the smaller arrays instead.
    reciprocal, given = kept["reciprocal"], differentiable
    if out.dtype == jnp.float16:
        # With this factor, float16 gradients of long sequences can be subnormal.
        differentiable = {name: jnp.float32(x) for name, x in given.items()}
    arrays = differentiable | constant
    arrays |= {name: x for name, x in kept.items() if name != "reciprocal"}
    arrays["out_gradient"] = out_gradient * reciprocal[..., None]
    arrays["delta"] = delta * reciprocal
    results = {"query": "BTNH", "key": "BSKH", "value": "BSKV"}
    if "bias" in differentiable:
        results["bias"] = "BNTS"
    gradients = _run(heads.backward, problem, arrays, results)
    return {
        name: _fit(gradient, given[name])
        for name, gradient in zip(results, gradients, strict=True)
    }


@_backward.defjvp
def _refuse_second_order(problem, primals, tangents):
    raise NotImplementedError(
        "implementation 'blockwise' has a first derivative only; use 'reference' for a "
        "second one"
    )


_attend.defvjp(_attend_forward, _attend_backward)


def _fit(gradient, array):
    """Sum a gradient over the axes along which the array was broadcast."""
    axes = [i for i, n in enumerate(array.shape) if n == 1 < gradient.shape[i]]
    return gradient.sum(axes, keepdims=True).astype(array.dtype)


def _problem(query, key, bias, structure, statistics):
    T, S = query.shape[1], key.shape[1]
    short = max(T, S) <= SHORT
    # Heads may share a bias, and then its gradient sums over them: compute them
    # together.
    one_by_one = platform() == "cpu" and bias is None and not short
    one_by_one &= unknown_axis() is None
    sizes = LONG if one_by_one else SHARED
    if platform() != "cpu":
        sizes = _larger(query.shape[0] * query.shape[2], *sizes)
    # Blocks of nearly equal size need the least padding.
    queries, keys = (
        -(-n // -(-n // size)) for n, size in zip((T, S), sizes, strict=True)
    )
    return heads.Problem(*structure, queries, keys, short, one_by_one, statistics)


def _larger(num_heads, queries, keys):
    """Double a block's queries while all heads have at most `LOGITS` logits."""
    while 2 * queries <= LARGEST and 2 * queries * keys * num_heads <= LOGITS:
        queries *= 2
    return queries, keys


def _run(function, problem, arrays, results):
    """Apply `function(problem, head)` to each key/value head.

    `results` maps each result's name to its axes, one letter each.
    """
    T, S = arrays["query"].shape[1], arrays["key"].shape[1]
    if problem.queries < T or problem.keys < S:
        arrays = arrays | {"blocks": jnp.asarray(heads.blocks(problem, T, S))[None]}
    local = functools.partial(_all_heads, function, problem, tuple(results.values()))
    if not problem.one_by_one:
        return local(arrays)
    # A loop over a sharded axis would gather it on every device.
    return partitioned(local, arrays, axes_of(arrays), tuple(results.values()))


def _all_heads(function, problem, results, arrays):
    """Map the function over batch and key/value heads, then merge the results."""
    B, T, N, _ = arrays["query"].shape
    S, K = arrays["key"].shape[1:3]
    G = N // K
    more_queries, more_keys = -T % problem.queries, -S % problem.keys
    if more_keys and "key_value_seq_lengths" not in arrays:
        arrays = arrays | {"key_value_seq_lengths": jnp.full(B, S, jnp.int32)}

    def split(name, x):
        """Pad, and split N into K and G; broadcast axes keep size 1."""
        if name in ("query_seq_lengths", "key_value_seq_lengths", "blocks"):
            return x[:, None]
        if name == "query_segment_ids":
            return _pad(x, 1, more_queries)[:, None]
        if name == "key_value_segment_ids":
            return _pad(x, 1, more_keys)[:, None]
        if name == "alibi_slopes":
            return x.reshape(1, K, G)
        if name in ("key", "value"):
            return _pad(x, 1, more_keys)
        if name in ("mask", "bias"):
            x = _pad(x, 2, more_queries if x.shape[2] > 1 else 0)
            x = _pad(x, 3, more_keys if x.shape[3] > 1 else 0)
            heads = (K, G) if x.shape[1] > 1 else (1, 1)
            return x.reshape(x.shape[0], *heads, *x.shape[2:])
        if name == "exponentials":
            return x
        # Infinity: padded queries get zero weights even with a large broadcast bias.
        x = _pad(x, 1, more_queries, jnp.inf if name == "maximum" else 0)
        return x.reshape(B, -1, K, G, *x.shape[3:])

    def merge(letters, x):
        if letters == "BKGTS":
            return x
        if letters == "BNTS":
            return x.reshape(B, -1, *x.shape[3:])[:, :, :T, :S]
        if letters.startswith("BS"):
            return jnp.moveaxis(x, 3, 1)[:, :S]
        x = jnp.moveaxis(x, 3, 1)
        return x.reshape(B, -1, N, *x.shape[4:])[:, :T]

    arrays = {name: split(name, x) for name, x in arrays.items()}
    head = functools.partial(function, problem)
    every = _one_by_one if problem.one_by_one else _together
    outcomes = every(head, B, K, arrays)
    return tuple(merge(*pair) for pair in zip(results, outcomes, strict=True))


def _heads_first(name, x):
    """Transpose an array to B K (G) (T) (S) ..."""
    x = x.swapaxes(1, 2) if name in HEADS_THIRD else x
    return x.swapaxes(2, 3) if name in QUERIES else x


def _together(function, B, K, arrays):
    """Apply the function to all heads at once."""
    arrays = {name: _heads_first(name, x) for name, x in arrays.items()}
    return _map_axis(functools.partial(_map_axis, function, K), B, arrays)


def _map_axis(function, size, arrays):
    """Map over the leading axis of every array; axes of size 1 are shared."""
    shared = {n: x[0] for n, x in arrays.items() if x.shape[0] == 1}
    mapped = {n: x for n, x in arrays.items() if x.shape[0] == size > 1}
    if not mapped:
        return jax.tree.map(lambda x: x[None], function(shared))
    return jax.vmap(lambda mapped: function(shared | mapped))(mapped)


def _one_by_one(function, B, K, arrays):
    """Apply the function to one head at a time, sliced without a transposed copy."""

    def take(name, x, b, k):
        start, sizes = [0] * x.ndim, list(x.shape)
        for axis, index in ((0, b), (2 if name in HEADS_THIRD else 1, k)):
            start[axis] = index if x.shape[axis] > 1 else 0
            sizes[axis] = 1
        return _heads_first(name, jax.lax.dynamic_slice(x, start, sizes))[0, 0]

    def one(index):
        head = index // K, index % K
        return function({name: take(name, x, *head) for name, x in arrays.items()})

    results = jax.lax.map(one, jnp.arange(B * K))
    return jax.tree.map(lambda x: x.reshape(B, K, *x.shape[1:]), results)


def _pad(x, axis, count, fill=0):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, count)
    return jnp.pad(x, widths, constant_values=fill) if count else x
