"""`jax.nn.dot_product_attention` behind our interface, for comparison.

It holds a T x S map ("xla") or runs cuDNN's kernel ("cudnn"). What it cannot do is
refused by name; the mean of the values that it gives to a query that may attend to
nothing is set to zero here.
"""

import functools

import jax
import jax.numpy as jnp

from headcount.attention import masks
from headcount.attention.platform import platform


def attend(
    query,
    key,
    value,
    bias,
    mask,
    *,
    scale,
    backend,
    alibi_slopes=None,
    dropout_rate=0.0,
    dropout_keys=None,
    statistics=False,
    **structure,
):
    """Output `B T N V` and log-sum-exp `B T N`: see `attention.api` for the arguments.

    The log-sum-exp has the precision of the inputs' dtype, as `jax.nn` returns it.
    """
    if statistics:
        head_statistics(query, key, bias, mask, backend=backend)
    if alibi_slopes is not None or dropout_keys is not None:
        name = "dropout_rate" if alibi_slopes is None else "alibi_slopes"
        raise NotImplementedError(
            f"implementation {backend!r} (jax.nn) takes no {name}; use 'blockwise'"
        )
    H, V = query.shape[-1], value.shape[-1]
    if H != V:
        raise NotImplementedError(
            f"implementation {backend!r} (jax.nn) needs equal key and value sizes, got "
            f"{H} and {V}; use 'blockwise'"
        )
    if backend == "cudnn" and platform() != "gpu":
        raise NotImplementedError(
            "implementation 'cudnn' needs an NVIDIA GPU, the platform is "
            f"{platform()!r}; use 'blockwise'"
        )
    staged = isinstance(jnp.zeros(()), jax.core.Tracer)  # as jax.jit does
    if query.dtype == jnp.float16 and platform() == "cpu" and staged:
        raise NotImplementedError(
            f"implementation {backend!r} (jax.nn) in float16 cannot be compiled for a "
            "CPU; use 'blockwise'"
        )
    # jax.nn knows no segments: they enter as a mask of all T x S pairs.
    inner = dict(structure)
    segments = {
        name: inner.pop(name) for name in ("query_segment_ids", "key_value_segment_ids")
    }
    T, S = query.shape[1], key.shape[1]
    allowed = masks.dense(T, S, mask, **structure)
    if bias is not None:  # of a row of -inf jax.nn makes NaN
        finite = bias > -jnp.inf
        allowed = finite if allowed is None else allowed & finite
        bias = jnp.maximum(bias, jnp.finfo(bias.dtype).min)
    try:
        out, lse = jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias,
            masks.dense(T, S, mask, **segments),
            scale=scale,
            implementation=backend,
            return_residual=True,
            **inner,
        )
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise NotImplementedError(
            f"implementation {backend!r} (jax.nn) refuses these arguments: {error}"
        ) from error
    lse = lse.astype(jnp.float32)
    if allowed is not None:
        seen = allowed.any(-1).transpose(0, 2, 1)  # B T N
        out = jnp.where(seen[..., None], out, 0)
        lse = jnp.where(seen, lse, masks.EMPTY)
    return out, lse


def head_statistics(query, key, bias, mask, *, backend, **arguments):
    """Refuse: `jax.nn` tells nothing about its weights."""
    raise NotImplementedError(
        f"implementation {backend!r} (jax.nn) returns no statistics; use 'blockwise'"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def refuse_gradient(backend, lse, inputs):
    """`lse`, whose gradient raises: `jax.nn` would silently return zeros for it."""
    return lse


def _refuse_gradient_forward(backend, lse, inputs):
    return lse.value, None


def _refuse_gradient_backward(backend, _, cotangent):
    if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        raise NotImplementedError(
            f"implementation {backend!r} (jax.nn) has no gradient of the residual, and "
            "so none with a sink; use 'blockwise'"
        )
    return None, None


refuse_gradient.defvjp(
    _refuse_gradient_forward, _refuse_gradient_backward, symbolic_zeros=True
)
