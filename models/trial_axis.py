"""Map functions over the trial axis R: sequentially on CPUs, else in parallel."""

import jax

from headcount.attention.platform import platform

TRIALS = "trials"  # name of the vmapped axis


def over_trials(function):
    """Map a function of one trial over the leading trial axis R.

    Accelerators compute all trials at once. CPUs compute them sequentially, which is
    faster than a batched product, because a single product already uses all cores and
    fills the caches.
    """

    def mapped(*arguments):
        if in_turn():
            return jax.lax.map(lambda one: function(*one), arguments)
        return jax.vmap(function, axis_name=TRIALS)(*arguments)

    return mapped


def in_turn() -> bool:
    """Return whether trials on one device are computed sequentially.

    False if the mesh shards trials over devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return platform() == "cpu" and dict(mesh.shape).get("trial", 1) == 1
