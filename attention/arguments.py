"""Check user arguments and convert them to the form that implementations expect."""

import operator

import jax
import jax.numpy as jnp
import numpy as np

from headcount.attention import dropout, masks
from headcount.attention.kernels.partition import varying_alike

FAR = 2**30  # unlimited window; adding an index does not overflow int32
DTYPES = ("bfloat16", "float16", "float32", "float64")


def present(**arrays):
    """Return the arrays that are not None."""
    return {name: array for name, array in arrays.items() if array is not None}


# Arguments of `dot_product_attention` that not all functions of this package take.
ONLY_SOME_TAKE = (
    *("dropout_rate", "dropout_seed", "head_gate", "sink", "implementation"),
    *("return_residual", "return_statistics"),
)


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
    alibi_slopes=None,
    **others,
):
    """Check arguments and convert them to what implementations expect.

    If scale is traced, 16-bit arrays become float32.

    Returns:
      The arrays (query, key, value, bias, mask), the other arguments by name, and
      whether query has a batch axis.

    Raises:
      ValueError: an argument is invalid.
      NotImplementedError: `others` has an argument that only some functions take.
      TypeError: `others` has an argument that none takes.
    """
    for name in others:
        if name in ONLY_SOME_TAKE:
            raise NotImplementedError(f"this function does not take {name}")
        raise TypeError(f"attention has no argument {name!r}")
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    for name, x in (("query", query), ("key", key), ("value", value)):
        require(x.ndim in (3, 4), f"{name} must have 4 axes or 3, got {x.shape}")
    batched = query.ndim == 4
    query, key, value = (x if x.ndim == 4 else x[None] for x in (query, key, value))
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    dtype = query.dtype
    require(
        dtype in DTYPES and key.dtype == value.dtype == dtype,
        f"query, key and value must have one floating dtype ({', '.join(DTYPES)}), got "
        f"{dtype}, {key.dtype} and {value.dtype}",
    )
    require(
        key.shape == (B, S, K, H),
        f"key must be {(B, S, K, H)} to fit query {query.shape}, got {key.shape}",
    )
    require(
        value.shape[:3] == (B, S, K),
        f"value must begin with key's {(B, S, K)}, got {value.shape}",
    )
    for name, x in (("query", query), ("key", key), ("value", value)):
        require(
            0 not in x.shape[2:],
            f"{name} has no heads or heads of size 0, its shape is {x.shape}",
        )
    require(
        N % K == 0,
        f"query heads must be a multiple of key heads, got {N} and {K}: query has "
        f"shape {query.shape}, key {key.shape}",
    )
    if bias is not None and jnp.issubdtype(jnp.result_type(bias), jnp.integer):
        bias = jnp.asarray(bias, jnp.float32)
    bias = _map("bias", bias, (B, N, T, S), jnp.floating)
    mask = _map("mask", mask, (B, N, T, S), jnp.bool_)
    scale = H**-0.5 if scale is None else scale
    kind = scale.dtype if isinstance(scale, jax.Array) else np.asarray(scale).dtype
    require(
        np.ndim(scale) == 0 and _is_real(kind),
        f"scale must be one real number, got {scale!r}",
    )
    if isinstance(scale, jax.core.Tracer):
        # A traced scale cannot be a constant of the kernel. Use float32: terms of its
        # gradient cancel, so rounding of a 16-bit scaled query would dominate.
        wide = jnp.promote_types(dtype, jnp.float32)
        query, key, value = (x.astype(wide) for x in (query, key, value))
        query, scale = (query * scale).astype(wide), 1.0
    require(
        isinstance(is_causal, int | np.integer | np.bool_) and is_causal in (0, 1),
        f"is_causal must be True or False, known when compiling; got {is_causal!r}",
    )
    if local_window_size is not None:
        local_window_size = _window(local_window_size)
    require(
        (query_segment_ids is None) == (key_value_segment_ids is None),
        "query_segment_ids and key_value_segment_ids must be given together",
    )
    integers = {
        name: _integers(name, array, shape, batched, most)
        for name, array, shape, most in (
            ("query_seq_lengths", query_seq_lengths, (B,), T),
            ("key_value_seq_lengths", key_value_seq_lengths, (B,), S),
            ("query_segment_ids", query_segment_ids, (B, T), None),
            ("key_value_segment_ids", key_value_segment_ids, (B, S), None),
        )
    }
    if alibi_slopes is not None:
        alibi_slopes = jnp.asarray(alibi_slopes)
        require(
            alibi_slopes.shape == (N,) and _is_real(alibi_slopes.dtype),
            f"alibi_slopes must have one real number per head, shape {(N,)}, got "
            f"{alibi_slopes.dtype}{alibi_slopes.shape}",
        )
        alibi_slopes = alibi_slopes.astype(jnp.float32)
    query, key, value = _without_padding(query, key, value, **integers)
    arrays = query, key, value, bias, mask
    more = integers | {"alibi_slopes": alibi_slopes}
    arrays, more = varying_alike((arrays, more))
    structure = {
        "scale": float(scale),
        "is_causal": bool(is_causal),
        "local_window_size": local_window_size,
        **more,
    }
    return arrays, structure, batched


def dropout_arguments(rate, seed, query):
    """Check rate and seed; return `dropout_rate` and `dropout_keys` by name."""
    given = rate
    try:
        rate = float(given)
    except (TypeError, ValueError):  # traced, or not a number
        rate = float("nan")
    require(
        0 <= rate < 1,
        "dropout_rate must be a number from 0 to below 1, known when compiling; got "
        f"{given!r}",
    )
    if rate == 0:
        return {"dropout_rate": 0.0, "dropout_keys": None}
    require(seed is not None, "dropout_seed must be given with a dropout_rate above 0")
    if not isinstance(seed, jax.Array):
        seed = np.asarray(seed)
        whole = seed.ndim == 0 and np.issubdtype(seed.dtype, np.integer)
        require(
            whole and 0 <= seed < 2**32,
            f"dropout_seed must be an integer from 0 to below 2**32, got {seed}",
        )
        seed = seed.astype(np.uint32)
    require(
        seed.ndim == 0 and jnp.issubdtype(seed.dtype, jnp.integer),
        f"dropout_seed must be one integer, got {seed.dtype}{seed.shape}; to make "
        f"one from a key, use jax.random.bits(key, dtype='uint32')",
    )
    B, T, N, _ = query.shape
    keys = dropout.row_keys(jnp.asarray(seed).astype(jnp.int32), B, T, N)
    _, keys = varying_alike((query, keys))
    return {"dropout_rate": rate, "dropout_keys": keys}


def _without_padding(
    query,
    key,
    value,
    query_seq_lengths,
    key_value_seq_lengths,
    query_segment_ids,
    key_value_segment_ids,
):
    """Zero out padding, whose infinities times a weight of 0 would be NaN."""

    def real(x, lengths, ids):
        index = jnp.arange(x.shape[1])
        return masks.conjunction(
            None if lengths is None else index < lengths[:, None],
            None if ids is None else ids != 0,
        )

    def zeroed(x, seen):
        return x if seen is None else jnp.where(seen[..., None, None], x, 0)

    seen = real(key, key_value_seq_lengths, key_value_segment_ids)
    query = zeroed(query, real(query, query_seq_lengths, query_segment_ids))
    return query, zeroed(key, seen), zeroed(value, seen)


def _is_real(dtype):
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _window(size):
    try:
        left, right = map(operator.index, (size, size) if np.ndim(size) == 0 else size)
    except (TypeError, ValueError):
        left = right = -1
    require(
        min(left, right) >= 0,
        "local_window_size must be one or two whole numbers >= 0, known when "
        f"compiling; got {size}",
    )
    return min(left, FAR), min(right, FAR)


def _map(name, array, full, kind):
    if array is None:
        return None
    array = jnp.asarray(array)
    pairs = zip(array.shape[::-1], full[::-1], strict=False)
    require(
        array.ndim <= 4 and all(n in (1, m) for n, m in pairs),
        f"{name} must broadcast to B N T S = {full}, got {array.shape}",
    )
    require(
        jnp.issubdtype(array.dtype, kind),
        f"{name} must be {kind.__name__.strip('_')}, got {array.dtype} (an additive "
        "mask is a bias, a boolean one a mask)",
    )
    return jnp.expand_dims(array, range(4 - array.ndim))


def _integers(name, array, shape, batched, most):
    if array is None:
        return None
    if most is None:
        array = _ids(name, array)
    elif not isinstance(array, jax.Array):
        array = np.asarray(array)
        if _is_integer(array):  # jnp.asarray would wrap what int32 does not hold
            array = np.clip(array, 0, min(most, np.iinfo(array.dtype).max))
    array = jnp.asarray(array)
    if not batched and array.ndim == len(shape) - 1:
        array = array[None]
    require(
        jnp.issubdtype(array.dtype, jnp.integer) and array.shape == shape,
        f"{name} must be integers of shape {shape}, got {array.dtype}{array.shape}",
    )
    if most is not None:
        # `most` may exceed what the array's own dtype holds, such as int8
        array = jnp.clip(array, 0, min(most, jnp.iinfo(array.dtype).max))
    return array.astype(jnp.int32)


def _ids(name, ids):
    """Check that ids fit into int32; wrapping could make different ids equal."""
    if isinstance(ids, jax.Array):
        narrow = jnp.iinfo(ids.dtype).max < 2**31 if _is_integer(ids) else True
        require(
            narrow,
            f"{name} must be of a type that int32 holds, got {ids.dtype}; number the "
            "segments of a row from 1 and pass int32",
        )
        return ids
    ids = np.asarray(ids)
    if _is_integer(ids) and ids.size:
        least, most = int(ids.min()), int(ids.max())
        require(  # the TPU kernels use the two least ids
            least > -(2**31) + 1 and most < 2**31,
            f"{name} must fit into int32, got ids from {least} to {most}",
        )
    return ids


def _is_integer(array):
    return jnp.issubdtype(array.dtype, jnp.integer)


def require(condition, message):
    if not condition:
        raise ValueError(message)
