"""From N head outputs to one: the merge rules.

A rule is a function of the heads' outputs, the layer's query-side input and its
parameters, and a row of `MERGE_RULES` that gives the shapes of these parameters in the
letters N (heads), V (value size) and D (width). A rule that multiplies each head by a
number has a function `*_weights` of these numbers beside it, named in its row.
docs/contributing.md shows how to add one.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float


def checked(function: Callable) -> Callable:
    """The rule, refusing parameters of other shapes than its row of `MERGE_RULES` says.

    An axis of 1 would be broadcast, and a mean become a sum without a word.
    """

    @functools.wraps(function)
    def rule(heads, x, **arguments):
        N, V = heads.shape[-2:]
        sizes = {"N": N, "V": V, "D": x.shape[-1]}
        for name, letters in MERGE_RULES[function.__name__].shapes.items():
            wanted = tuple(sizes[letter] for letter in letters.split())
            if name in arguments and np.shape(arguments[name]) != wanted:
                raise ValueError(
                    f"{name} of {function.__name__} must have the shape {letters} = "
                    f"{wanted}, got {np.shape(arguments[name])}"
                )
        return function(heads, x, **arguments)

    return rule


@checked
def concat(
    heads: Float[Array, "B T N V"],
    x: Float[Array, "B T D"],
    *,
    kernel: Float[Array, "N V D"],
) -> Float[Array, "B T D"]:
    """Project each head by its own kernel and add them up.

    The same as concatenating the heads and projecting once (Vaswani et al. 2017).
    """
    del x
    return jnp.einsum("BTNV,NVD->BTD", heads, kernel)


@checked
def scaled(
    heads: Float[Array, "B T N V"],
    x: Float[Array, "B T D"],
    *,
    kernel: Float[Array, "N V D"],
    scale: Float[Array, "N"],
) -> Float[Array, "B T D"]:
    """Concat, with each head times a learned number, 1 + scale.

    HeadScale of NormFormer (Shleifer et al. 2021); at scale 0 it is concat.
    """
    # not heads * (1 + scale), which in bfloat16 is 1 for a scale below 1 / 256
    return concat(heads + heads * scale[:, None], x, kernel=kernel)


def scaled_weights(
    x: Float[Array, "B T D"], *, scale: Float[Array, "N"]
) -> Float[Array, "N"]:
    """1 + scale, in float32 at least."""
    del x
    return 1 + wide(scale)


@checked
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


@checked
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
    """softmax(logits)."""
    del x
    return jax.nn.softmax(wide(logits))


@checked
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
    """softmax(x · router), of every token."""
    return jax.nn.softmax(wide(x @ router))


@checked
def gated(
    heads: Float[Array, "B T N V"],
    x: Float[Array, "B T D"],
    *,
    kernel: Float[Array, "N V D"],
    gate: Float[Array, "D N"],
) -> Float[Array, "B T D"]:
    """Concat, with each head under a sigmoid gate of the token.

    Qiu et al. 2025 (Gated attention for large language models), headwise.
    """
    gates = gated_weights(x, gate=gate)
    return concat(heads * gates[..., None], x, kernel=kernel)


def gated_weights(
    x: Float[Array, "B T D"], *, gate: Float[Array, "D N"]
) -> Float[Array, "B T N"]:
    """sigmoid(x · gate), of every token."""
    return jax.nn.sigmoid(x @ gate)


@checked
def gated_elementwise(
    heads: Float[Array, "B T N V"],
    x: Float[Array, "B T D"],
    *,
    kernel: Float[Array, "N V D"],
    gate: Float[Array, "D N V"],
) -> Float[Array, "B T D"]:
    """Concat, with each element of each head under a sigmoid gate of the token.

    Qiu et al. 2025 (Gated attention for large language models), elementwise.
    """
    return concat(heads * gated_elementwise_weights(x, gate=gate), x, kernel=kernel)


def gated_elementwise_weights(
    x: Float[Array, "B T D"], *, gate: Float[Array, "D N V"]
) -> Float[Array, "B T N V"]:
    """sigmoid(x · gate), of every token and element."""
    return jax.nn.sigmoid(jnp.einsum("BTD,DNV->BTNV", x, gate))


@checked
def mixture(
    heads: Float[Array, "B T N V"],
    x: Float[Array, "B T D"],
    *,
    kernel: Float[Array, "N V D"],
    router: Float[Array, "D N"],
    mixture_heads: int,
) -> Float[Array, "B T D"]:
    """Concat of the heads that each token chooses, by their share of its choice.

    A token takes the `mixture_heads` heads of the largest x · router, at equal values
    the first, and weighs them by the softmax over those; the others count 0. All heads
    are computed. A mixture of attention heads as of Zhang et al. 2022, over the whole
    of each head. A single head has the weight 1, whose gradient is theirs too: that of
    its share of all heads, divided by the share.
    """
    settings = {"router": router, "mixture_heads": mixture_heads}
    shares = mixture_weights(x, **settings).astype(heads.dtype)
    return concat(heads * shares[..., None], x, kernel=kernel)


def mixture_weights(
    x: Float[Array, "B T D"], *, router: Float[Array, "D N"], mixture_heads: int
) -> Float[Array, "B T N"]:
    """The softmax over the heads that a token chooses, and 0 for the others."""
    N = router.shape[1]
    if not 1 <= mixture_heads <= N:
        raise ValueError(
            f"mixture_heads must be from 1 to N = {N}, got {mixture_heads}"
        )
    logits = x @ router
    chosen = largest(logits, mixture_heads)
    if mixture_heads == 1:  # a softmax over one is 1, from which no router could learn
        of_all = jax.nn.softmax(wide(logits))
        largest_share = jax.lax.stop_gradient(of_all.max(-1, keepdims=True))
        return jnp.where(chosen, of_all / largest_share, 0.0)
    return jax.nn.softmax(wide(jnp.where(chosen, logits, -jnp.inf)))


def mixture_routes(
    x: Float[Array, "B T D"], *, router: Float[Array, "D N"], mixture_heads: int
) -> tuple[Float[Array, "B T N"], Bool[Array, "B T N"]]:
    """softmax(x · router), and which heads each token chooses."""
    logits = x @ router
    return jax.nn.softmax(wide(logits)), largest(logits, mixture_heads)


def largest(logits: Float[Array, "B T N"], count: int) -> Bool[Array, "B T N"]:
    """Which are the `count` largest, at equal values the first."""
    # by rank, not by the k-th value: at equal logits exactly k must be chosen
    order = jnp.argsort(-logits, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1) < count


@checked
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
    """Concat of the first heads, always on, and of those that each token chooses.

    MoH (Jin et al. 2024, 2410.11842): the `mixture_shared` first heads have the weights
    a softmax(x · router) over them, the `mixture_heads` best of the others
    (1 - a) softmax(x · router) over all the others. The published pair of weights is
    the softmax of two maps of x; a = sigmoid(x · split) is the same.
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
    """a times the shared heads' softmax, 1 - a times that of those chosen, else 0."""
    logits = x @ router
    shared = jax.nn.softmax(wide(logits[..., :mixture_shared]))
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
    """Do what `mixture_routes` does, for the heads that are not always on."""
    N = router.shape[1]
    if not (1 <= mixture_shared < N and 1 <= mixture_heads <= N - mixture_shared):
        raise ValueError(
            f"mixture_shared and mixture_heads must be at least 1 and their sum at "
            f"most N = {N}, got {mixture_shared} and {mixture_heads}"
        )
    own = router[:, mixture_shared:]
    return mixture_routes(x, router=own, mixture_heads=mixture_heads)


def wide(x: Array) -> Array:
    """In float32 at least."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class MergeRule(NamedTuple):
    """A row of the table."""

    function: Callable  # heads, x, and by name its parameters and settings -> B T D
    shapes: dict[str, str]  # of its parameters, in the letters N, V and D
    settings: tuple[str, ...] = ()  # of model.attention, that the function takes
    # x, and all but the kernel -> N, B T N or B T N V: what each head is multiplied by
    weights: Callable | None = None
    # the same -> probabilities and choice of the heads that it routes, B T M each
    routes: Callable | None = None


def check_names(rules: dict[str, MergeRule]) -> None:
    """Raise a ValueError if a function has another name than its key in the table.

    By its name `checked` finds a function's row.
    """
    for name, rule in rules.items():
        if rule.function.__name__ != name:
            raise ValueError(
                f"the merge rule {name!r} has the function "
                f"{rule.function.__name__}; name the function {name}"
            )


MERGE_RULES = {
    "concat": MergeRule(concat, {"kernel": "N V D"}),
    "scaled": MergeRule(
        scaled, {"kernel": "N V D", "scale": "N"}, weights=scaled_weights
    ),
    "mean": MergeRule(mean, {"kernel": "V D"}),
    "weighted": MergeRule(
        weighted, {"kernel": "V D", "logits": "N"}, weights=weighted_weights
    ),
    "dynamic": MergeRule(
        dynamic, {"kernel": "V D", "router": "D N"}, weights=dynamic_weights
    ),
    "gated": MergeRule(
        gated, {"kernel": "N V D", "gate": "D N"}, weights=gated_weights
    ),
    "gated_elementwise": MergeRule(
        gated_elementwise,
        {"kernel": "N V D", "gate": "D N V"},
        weights=gated_elementwise_weights,
    ),
    "mixture": MergeRule(
        mixture,
        {"kernel": "N V D", "router": "D N"},
        ("mixture_heads",),
        mixture_weights,
        mixture_routes,
    ),
    "shared_mixture": MergeRule(
        shared_mixture,
        {"kernel": "N V D", "router": "D N", "split": "D"},
        ("mixture_heads", "mixture_shared"),
        shared_mixture_weights,
        shared_mixture_routes,
    ),
}

check_names(MERGE_RULES)
