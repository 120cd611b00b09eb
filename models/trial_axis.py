"""How the leading trial axis R is computed: in turn on CPUs, else side by side."""

import jax

from headcount.attention.platform import platform

TRIALS = "trials"  # name of the vmapped axis


def over_trials(function):
    """Map a function of one trial over the trial axis R, which is in front.

    Accelerators compute all trials at once. On CPU they take turns: there a batched
    product is slower than one product after another, each of which fills the cores and
    caches already.
    """

    def mapped(*arguments):
        if in_turn():
            return jax.lax.map(lambda one: function(*one), arguments)
        return jax.vmap(function, axis_name=TRIALS)(*arguments)

    return mapped


def in_turn() -> bool:
    """Whether trials take turns; those on different devices never do."""
    mesh = jax.sharding.get_abstract_mesh()
    return platform() == "cpu" and dict(mesh.shape).get("trial", 1) == 1
