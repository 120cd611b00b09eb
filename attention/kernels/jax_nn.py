"""`jax.nn.dot_product_attention` behind our interface, for comparison.

It holds a T x S map ("xla") or runs cuDNN's kernel ("cudnn"). Unsupported arguments
raise an error that names them. For a query that may attend to nothing, `jax.nn` returns
the mean of the values; this module returns zeros.
"""

import functools

import jax
import jax.numpy as jnp

from headcount.attention import masks
from headcount.attention.platform import compute_capability, platform


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
    """Return output and log-sum-exp: see `attention.api`.

    The log-sum-exp is float32, but only has the precision of the inputs' dtype, in
    which `jax.nn` returns it.

    Raises:
      NotImplementedError: `jax.nn` does not support the arguments.
    """
    if statistics:
        raise NotImplementedError(
            f"implementation {backend!r} (jax.nn) has no statistics; leave out "
            "return_statistics, or use 'blockwise'"
        )
    if alibi_slopes is not None or dropout_keys is not None:
        name = "dropout_rate" if alibi_slopes is None else "alibi_slopes"
        raise NotImplementedError(
            f"implementation {backend!r} (jax.nn) takes no {name}; use 'blockwise'"
        )
    H, V = query.shape[-1], value.shape[-1]
    if H != V:
        raise NotImplementedError(
            f"implementation {backend!r} (jax.nn) needs query and value of one head "
            f"size, got {H} and {V}; use 'blockwise'"
        )
    if backend == "cudnn" and platform() != "gpu":
        raise NotImplementedError(
            "implementation 'cudnn' needs an NVIDIA GPU, the platform is "
            f"{platform()!r}; use 'blockwise'"
        )
    staged = isinstance(jnp.zeros(()), jax.core.Tracer)  # as jax.jit does
    if query.dtype == jnp.float16 and platform() == "cpu" and staged:
        raise NotImplementedError(
            f"implementation {backend!r} (jax.nn) cannot be compiled for a CPU with "
            "query in float16; use float32, or 'blockwise'"
        )
    # jax.nn does not support segments: pass them as a T x S mask.
    inner = dict(structure)
    segments = {
        name: inner.pop(name) for name in ("query_segment_ids", "key_value_segment_ids")
    }
    T, S = query.shape[1], key.shape[1]
    allowed = masks.dense(T, S, mask, **structure)
    if bias is not None:  # jax.nn returns NaN for a row of -inf
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


def cudnn_fits(query, value, bias, mask) -> bool:
    """Return whether cuDNN computes attention of these arrays on the GPU at hand.

    It stays within what cuDNN has supported since Ampere. It also takes some biases and
    masks, and larger heads on Hopper, with conditions that change between versions.
    """
    H, V = query.shape[-1], value.shape[-1]
    return (
        bias is None
        and mask is None
        and query.dtype in (jnp.bfloat16, jnp.float16)
        and H == V <= 128
        and H % 8 == 0
        and (compute_capability() or 0) >= 8.0
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def refuse_gradient(backend, lse, inputs):
    """Return `lse`; its gradient raises, where `jax.nn` would silently return zeros."""
    return lse


def _refuse_gradient_forward(backend, lse, inputs):
    return lse.value, None


def _refuse_gradient_backward(backend, _, cotangent):
    if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        raise NotImplementedError(
            f"implementation {backend!r} (jax.nn) has no gradient with "
            "return_residual or a sink; use 'blockwise'"
        )
    return None, None


refuse_gradient.defvjp(
    _refuse_gradient_forward, _refuse_gradient_backward, symbolic_zeros=True
)
