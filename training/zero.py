"""ZeRO-1 and FSDP in an update: parameters are gathered, and gradients scattered.

`sharding.specs` says what of the state `data` divides. Of that alone the compiler would
conclude that it divides activations likewise, which costs far more to move.
"""

import jax
from jax.sharding import PartitionSpec

from headcount.runtime import sharding


def gathered(params, shard: str):
    """The parameters of one trial as its products read them, whole along `data`."""
    return params if shard == "none" else _lying(params, "none")


def scattered(gradient, shard: str):
    """The gradient of one trial, which lies as the optimizer's state does."""
    return gradient if shard == "none" else _lying(gradient, shard)


def _lying(tree, shard: str):
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or not mesh.axis_names:
        return tree
    of_trials = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), tree
    )

    def constrain(leaf, spec):
        return jax.lax.with_sharding_constraint(leaf, PartitionSpec(*spec[1:]))

    parts = sharding.specs(of_trials, mesh, shard=shard)
    return jax.tree.map(constrain, tree, parts)
