"""Merge rules: combine the outputs of N heads into one.

A rule is a function of the heads' outputs, the layer's query-side input and the rule's
parameters. Its entry in `MERGE_RULES` gives the shapes of the parameters in the letters
N (heads), V (value size) and D (width). A rule that weights its heads also has a
function `*_weights` that returns the weights. docs/contributing.md shows how to add a
rule.
"""

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float


def concat(
    heads: Float[Array, "B T N V"],
    x: Float[Array, "B T D"],
    *,
    kernel: Float[Array, "N V D"],
) -> Float[Array, "B T D"]:
    """Project each head by its own kernel and sum the results.

    Equivalent to concatenating the heads and projecting once (Vaswani et al. 2017).
    """
    del x
    return jnp.einsum("BTNV,NVD->BTD", heads, kernel)


def scaled(
    heads: Float[Array, "B T N V"],
    x: Float[Array, "B T D"],
    *,
    kernel: Float[Array, "N V D"],
    scale: Float[Array, "N"],
) -> Float[Array, "B T D"]:
    """Multiply each head by a learned number, 1 + scale, then apply concat.

    HeadScale of NormFormer (Shleifer et al. 2021). With scale 0 it equals concat.
    """
    # not heads * (1 + scale): in bfloat16, 1 + scale is 1 for a scale below 1 / 256
    return concat(heads + heads * scale[:, None], x, kernel=kernel)


def scaled_weights(
    x: Float[Array, "B T D"], *, scale: Float[Array, "N"]
) -> Float[Array, "N"]:
    """Return 1 + scale, in at least float32."""
    del x
    return 1 + wide(scale)


def mean(
    heads: Float[Array, "B T N V"],
    x: Float[Array, "B T D"],
    *,
    kernel: Float[Array, "V D"],
) -> Float[Array, "B T D"]:
    """Average the heads, then project.

    One kernel serves all heads, so it has (N - 1)·V·D fewer parameters than concat.
    """
    del x
    return heads.mean(2) @ kernel


def weighted(
    heads: Float[Array, "B T N V"],
    x: Float[Array, "B T D"],
    *,
    kernel: Float[Array, "V D"],
    logits: Float[Array, "N"],
) -> Float[Array, "B T D"]:
    """Average the heads with learned weights, softmax(logits), then project."""
    weights = weighted_weights(x, logits=logits).astype(heads.dtype)
    return jnp.einsum("BTNV,N->BTV", heads, weights) @ kernel


def weighted_weights(
    x: Float[Array, "B T D"], *, logits: Float[Array, "N"]
) -> Float[Array, "N"]:
    """Return softmax(logits)."""
    del x
    return jax.nn.softmax(wide(logits))


def dynamic(
    heads: Float[Array, "B T N V"],
    x: Float[Array, "B T D"],
    *,
    kernel: Float[Array, "V D"],
    router: Float[Array, "D N"],
) -> Float[Array, "B T D"]:
    """Average the heads with weights that each token chooses, then project."""
    weights = dynamic_weights(x, router=router).astype(heads.dtype)
    return jnp.einsum("BTNV,BTN->BTV", heads, weights) @ kernel


def dynamic_weights(
    x: Float[Array, "B T D"], *, router: Float[Array, "D N"]
) -> Float[Array, "B T N"]:
    """Return softmax(x · router) per token."""
    return jax.nn.softmax(wide(x @ router))


def gated(
    heads: Float[Array, "B T N V"],
    x: Float[Array, "B T D"],
    *,
    kernel: Float[Array, "N V D"],
    gate: Float[Array, "D N"],
) -> Float[Array, "B T D"]:
    """Gate each head by a sigmoid that depends on the token, then apply concat.

    Qiu et al. 2025 (Gated attention for large language models), headwise.
    """
    gates = gated_weights(x, gate=gate)
    return concat(heads * gates[..., None], x, kernel=kernel)


def gated_weights(
    x: Float[Array, "B T D"], *, gate: Float[Array, "D N"]
) -> Float[Array, "B T N"]:
    """Return sigmoid(x · gate) per token."""
    return jax.nn.sigmoid(x @ gate)


def gated_elementwise(
    heads: Float[Array, "B T N V"],
    x: Float[Array, "B T D"],
    *,
    kernel: Float[Array, "N V D"],
    gate: Float[Array, "D N V"],
) -> Float[Array, "B T D"]:
    """Gate each element of each head by the token, then apply concat.

    Qiu et al. 2025 (Gated attention for large language models), elementwise.
    """
    return concat(heads * gated_elementwise_weights(x, gate=gate), x, kernel=kernel)


def gated_elementwise_weights(
    x: Float[Array, "B T D"], *, gate: Float[Array, "D N V"]
) -> Float[Array, "B T N V"]:
    """Return sigmoid(x · gate) per token and element."""
    return jax.nn.sigmoid(jnp.einsum("BTD,DNV->BTNV", x, gate))


def mixture(
    heads: Float[Array, "B T N V"],
    x: Float[Array, "B T D"],
    *,
    kernel: Float[Array, "N V D"],
    router: Float[Array, "D N"],
    mixture_heads: int,
) -> Float[Array, "B T D"]:
    """Weight the heads that each token's router chooses, then apply concat.

    Each token chooses the `mixture_heads` heads with the largest x · router (the first
    ones in case of ties) and weights them by the softmax over the chosen ones. Other
    heads get weight 0, but are still computed. This is the mixture of attention heads
    of Zhang et al. 2022, applied to whole heads. A single chosen head has weight 1. As
    in the paper, the gradient of this weight is that of the head's softmax share over
    all heads, divided by the share.
    """
    settings = {"router": router, "mixture_heads": mixture_heads}
    shares = mixture_weights(x, **settings).astype(heads.dtype)
    return concat(heads * shares[..., None], x, kernel=kernel)


def mixture_weights(
    x: Float[Array, "B T D"], *, router: Float[Array, "D N"], mixture_heads: int
) -> Float[Array, "B T N"]:
    """Return the softmax over the heads that each token chooses, 0 for the others."""
    N = router.shape[1]
    if not 1 <= mixture_heads <= N:
        raise ValueError(
            f"mixture_heads must be from 1 to N = {N}, got {mixture_heads}"
        )
    logits = wide(x) @ wide(router)
    chosen = largest(logits, mixture_heads)
    if mixture_heads == 1:  # a softmax over one head has no gradient for the router
        of_all = jax.nn.softmax(wide(logits))
        largest_share = jax.lax.stop_gradient(of_all.max(-1, keepdims=True))
        return jnp.where(chosen, of_all / largest_share, 0.0)
    return jax.nn.softmax(wide(jnp.where(chosen, logits, -jnp.inf)))


def mixture_routes(
    x: Float[Array, "B T D"], *, router: Float[Array, "D N"], mixture_heads: int
) -> tuple[Float[Array, "B T N"], Bool[Array, "B T N"]]:
    """Return softmax(x · router), and which heads each token chooses."""
    logits = wide(x) @ wide(router)
    return jax.nn.softmax(wide(logits)), largest(logits, mixture_heads)


def largest(logits: Float[Array, "B T N"], count: int) -> Bool[Array, "B T N"]:
    """Return a mask of the `count` largest logits, the first ones in case of ties."""
    # by rank, not by the k-th value: with ties, exactly k must be chosen
    order = jnp.argsort(-logits, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1) < count


def shared_mixture(
    heads: Float[Array, "B T N V"],
    x: Float[Array, "B T D"],
    *,
    kernel: Float[Array, "N V D"],
    router: Float[Array, "D N"],
    split: Float[Array, " D"],
    mixture_heads: int,
    mixture_shared: int,
) -> Float[Array, "B T D"]:
    """Weight heads that are always on and heads that each token chooses, then concat.

    MoH (Jin et al. 2024, 2410.11842): the first `mixture_shared` heads have the weights
    a softmax(x · router) over these heads. Of the others, each token chooses the
    `mixture_heads` best, with the weights (1 - a) softmax(x · router) over all others.
    The paper computes (a, 1 - a) as a softmax of two linear maps of x, which is
    equivalent to a = sigmoid(x · split).
    """
    settings = {"mixture_heads": mixture_heads, "mixture_shared": mixture_shared}
    weights = shared_mixture_weights(x, router=router, split=split, **settings)
    return concat(heads * weights.astype(heads.dtype)[..., None], x, kernel=kernel)


def shared_mixture_weights(
    x: Float[Array, "B T D"],
    *,
    router: Float[Array, "D N"],
    split: Float[Array, " D"],
    mixture_heads: int,
    mixture_shared: int,
) -> Float[Array, "B T N"]:
    """Return the weights of shared and chosen heads, 0 for others: see the rule."""
    shared = jax.nn.softmax(wide(x) @ wide(router[:, :mixture_shared]))
    settings = {"mixture_heads": mixture_heads, "mixture_shared": mixture_shared}
    routed, chosen = shared_mixture_routes(x, router=router, **settings)
    a = jax.nn.sigmoid(wide(x @ split))[..., None]
    return jnp.concatenate([a * shared, (1 - a) * routed * chosen], axis=-1)


def shared_mixture_routes(
    x: Float[Array, "B T D"],
    *,
    router: Float[Array, "D N"],
    mixture_heads: int,
    mixture_shared: int,
    **_,
) -> tuple[Float[Array, "B T M"], Bool[Array, "B T M"]]:
    """Apply `mixture_routes` to the heads that are not always on."""
    N = router.shape[1]
    if not (1 <= mixture_shared < N and 1 <= mixture_heads <= N - mixture_shared):
        raise ValueError(
            f"mixture_shared and mixture_heads must be at least 1 and their sum at "
            f"most N = {N}, got {mixture_shared} and {mixture_heads}"
        )
    routed_columns = router[:, mixture_shared:]
    return mixture_routes(x, router=routed_columns, mixture_heads=mixture_heads)


def wide(x: Array) -> Array:
    """Convert to at least float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class MergeRule(NamedTuple):
    """An entry of `MERGE_RULES`."""

    function: Callable  # (heads, x, **parameters, **settings) -> B T D
    shapes: dict[str, str]  # of the parameters, in the letters N, V and D
    settings: tuple[str, ...] = ()  # keys of model.attention that the function takes
    # (x, **parameters but kernel, **settings) -> factors on heads: N, B T N or B T N V
    weights: Callable | None = None
    # as weights -> probabilities and choice of the routed heads, B T M each
    routes: Callable | None = None


def entry(function: Callable, shapes: dict[str, str], **others) -> MergeRule:
    """Return a `MergeRule` whose function checks the shapes of its parameters.

    Otherwise an axis of size 1 would be broadcast, and silently turn a mean into a sum.

    Raises:
      ValueError: the shapes do not fit the function, or there is no kernel; from the
        rule's function, if a parameter or the output has another shape.
    """
    rule = f"The merge rule {function.__name__}"
    for name, letters in shapes.items():
        if not set(letters.split()) <= {"N", "V", "D"}:
            raise ValueError(
                f"{rule}: the shape of {name} must be letters N, V and D separated by "
                f"blanks, got {letters!r}"
            )
    if shapes.get("kernel") not in ("N V D", "V D"):
        raise ValueError(f"{rule} needs a parameter kernel of shape N V D or V D")
    try:
        names = dict.fromkeys((*shapes, *others.get("settings", ())))
        inspect.signature(function).bind(None, None, **names)
    except TypeError as error:
        raise ValueError(
            f"{rule} must take (heads, x, *, {', '.join(names)}): {error}"
        ) from None

    @functools.wraps(function)
    def checked(heads, x, **arguments):
        N, V = heads.shape[-2:]
        sizes = {"N": N, "V": V, "D": x.shape[-1]}
        for name, letters in shapes.items():
            shape = tuple(sizes[letter] for letter in letters.split())
            if name in arguments and np.shape(arguments[name]) != shape:
                raise ValueError(
                    f"{name} of {function.__name__} must have the shape {letters} = "
                    f"{shape}, got {np.shape(arguments[name])}"
                )
        merged = function(heads, x, **arguments)
        shape = (*heads.shape[:-2], x.shape[-1])
        if np.shape(merged) != shape:
            raise ValueError(
                f"{rule} must return the shape B T D = {shape}, got {np.shape(merged)}"
            )
        return merged

    return MergeRule(checked, shapes, **others)


MERGE_RULES = {
    "concat": entry(concat, {"kernel": "N V D"}),
    "scaled": entry(scaled, {"kernel": "N V D", "scale": "N"}, weights=scaled_weights),
    "mean": entry(mean, {"kernel": "V D"}),
    "weighted": entry(
        weighted, {"kernel": "V D", "logits": "N"}, weights=weighted_weights
    ),
    "dynamic": entry(
        dynamic, {"kernel": "V D", "router": "D N"}, weights=dynamic_weights
    ),
    "gated": entry(gated, {"kernel": "N V D", "gate": "D N"}, weights=gated_weights),
    "gated_elementwise": entry(
        gated_elementwise,
        {"kernel": "N V D", "gate": "D N V"},
        weights=gated_elementwise_weights,
    ),
    "mixture": entry(
        mixture,
        {"kernel": "N V D", "router": "D N"},
        settings=("mixture_heads",),
        weights=mixture_weights,
        routes=mixture_routes,
    ),
    "shared_mixture": entry(
        shared_mixture,
        {"kernel": "N V D", "router": "D N", "split": "D"},
        settings=("mixture_heads", "mixture_shared"),
        weights=shared_mixture_weights,
        routes=shared_mixture_routes,
    ),
}
