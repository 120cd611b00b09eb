"""What both fused kernels refuse, in the same words."""


def check(platform, dtypes, query, value):
    """Raise NotImplementedError for a dtype or a head size that a kernel lacks."""
    if query.dtype.name not in dtypes:
        raise NotImplementedError(
            f"implementation='pallas' on a {platform} takes {', '.join(dtypes)}, not "
            f"{query.dtype}; use 'blockwise'"
        )
    for name, array in (("query and key", query), ("value", value)):
        if array.shape[-1] > 256:
            raise NotImplementedError(
                f"implementation='pallas' on a {platform} takes heads of size 256 at "
                f"most, got {array.shape[-1]} for {name}; use 'blockwise'"
            )


def refuse_gradient(platform, bias):
    """Raise NotImplementedError for a bias, as a `custom_vjp` sees it, to be learnt."""
    if bias is not None and bias.perturbed:
        raise NotImplementedError(
            f"implementation='pallas' on a {platform} gives no gradient by the bias; "
            "use 'blockwise', or jax.lax.stop_gradient(bias) if none is wanted"
        )
