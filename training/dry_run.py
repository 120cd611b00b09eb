"""What a training step would need on chips that are not here, from their own compiler.

The step is compiled for a described topology (`runtime.topology`) with the shardings it
would run with; nothing is computed. What is printed of memory and communication is the
compiler's answer, not a formula's.
"""

from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from headcount.models import cost as counting
from headcount.models.transformer import Transformer
from headcount.runtime import sharding
from headcount.runtime import topology as targets
from headcount.runtime.platform import GPU_MEMORY
from headcount.training.hlo_cost import Program
from headcount.training.step import init, static_of, train_steps

GIB = 2**30


class Plan(NamedTuple):
    """Per chip, bytes: what a compiled step holds and moves."""

    parameters: int
    optimizer: int
    activations: int  # and gradients: what is neither argument nor result
    peak: int  # all of it, and the best parameters so far
    capacity: int
    collectives: dict[str, tuple[int, int]]  # by kind: how many, bytes
    traffic: int  # to and from the chip's memory, a step
    operations: int  # of the compiled step: kernels, on a GPU
    flops: float  # a step's, of this chip's share of the model
    chip: targets.Chip
    num_trials: int  # whose states this chip holds a part of
    mesh: dict[str, int]
    rows: tuple[int, int]  # B and T of a trial's batch

    @property
    def fits(self) -> bool:
        """Whether the step runs on the chip."""
        return self.peak <= self.capacity

    @property
    def trials_that_fit(self) -> int:
        """How many trials a chip could hold, each costing what one does now."""
        return int(self.num_trials * self.capacity / self.peak)


def plan(config, arrays: dict, target: str, shape: tuple[int, int]) -> Plan:
    """Compile the step of a config for a target, and read off what it needs.

    The vocabulary is taken to be of its full size.

    Args:
        config: as train.py has it.
        arrays: the numbers of its trials, see `training.step.train_steps`.
        target: see `targets.devices`.
        shape: B and T of a trial's batch, see `data.packing.largest_rows`.

    Raises:
        ValueError: no such target, a mesh that does not fit it, no row in a batch, or
            rows that can't be computed in parts.
    """
    num_trials = len(arrays["seed"])
    B, T = shape
    rows = sharding.rows_of_part(B, config.train.accumulate_steps)
    mesh = sharding.make_mesh(
        config.mesh, num_trials, rows, targets.devices(target).ravel()
    )
    vocabularies = [config.data.vocab_size] * (2 - config.data.joint_vocabulary)
    build = partial(Transformer, *vocabularies, **config.model.to_dict())
    with jax.set_mesh(mesh):
        model = counting.abstract(build)
        static = static_of(model, config)
        state = jax.eval_shape(partial(init, arrays, static=static, build=build))
        lie = sharding.state_shardings(state, mesh, config.mesh.shard)
        of_trials = sharding.named(mesh, "trial")
        arguments = (
            sharding.abstract(state, lie),
            sharding.abstract(arrays, jax.tree.map(lambda _: of_trials, arrays)),
            sharding.abstract_batches(mesh, num_trials, 1, (B, T, T)),
            1,
        )
        chip = target.split(":")[0]
        platform = "cuda" if chip in targets.GPUS else "tpu"
        traced = train_steps.trace(*arguments, static=static)
        compiled = traced.lower(lowering_platforms=(platform,)).compile()
    known = targets.CHIPS[chip]
    memory, program = compiled.memory_analysis(), Program(compiled.as_text())
    traffic, operations = program.traffic()
    parameters = _bytes_of(state.params, lie.params)
    return Plan(
        parameters=parameters,
        optimizer=_bytes_of(state.opt_state, lie.opt_state),
        activations=memory.temp_size_in_bytes,
        peak=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + parameters,  # the best so far lie beside those of now
        capacity=int(known.memory * (GPU_MEMORY if platform == "cuda" else 1)),
        collectives=program.collectives(),
        traffic=traffic,
        operations=operations,
        flops=counting.update_flops(model, B, T, T) * num_trials / mesh.size,
        chip=known,
        num_trials=num_trials // mesh.shape["trial"],
        mesh=dict(mesh.shape),
        rows=(B, T),
    )


def _bytes_of(tree, shardings) -> int:
    """What a chip holds of a tree of arrays."""
    return sum(
        int(np.prod(sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf, sharding in zip(
            jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True
        )
    )


def advice(plan: Plan, config) -> str | None:
    """What to change where the step does not fit."""
    if plan.fits:
        return None
    changes = []
    if plan.activations > plan.parameters + plan.optimizer:
        if config.train.remat == "none":
            changes.append("config.train.remat=block")
        parts = 2 * config.train.accumulate_steps
        changes.append(f"config.train.accumulate_steps={parts}")
    if plan.num_trials > 1:
        changes.append("fewer trials, or a larger config.mesh.trial")
    if config.mesh.shard != "parameters" and plan.mesh["data"] > 1:
        changes.append("config.mesh.shard=parameters")
    changes.append("more chips, or a larger config.mesh.model")
    return f"It does not fit; try {', '.join(changes)}."


def rows(plan: Plan) -> list[tuple[str, str]]:
    """The plan as lines of a table."""

    def gib(size):
        return f"{size / GIB:.3f} GiB"

    at_peak = 1e3 * plan.flops / plan.chip.flops
    lines = [
        ("mesh", " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())),
        ("batch of a trial", "{} rows of {} tokens a side".format(*plan.rows)),
        ("parameters", gib(plan.parameters)),
        ("optimizer state", gib(plan.optimizer)),
        ("activations and gradients", gib(plan.activations)),
        ("peak memory", f"{gib(plan.peak)} of {gib(plan.capacity)}"),
        ("fits", "yes" if plan.fits else "no"),
        ("trials on a chip", str(plan.num_trials)),
        ("trials that would fit", str(plan.trials_that_fit)),
        ("floating-point operations a step", f"{plan.flops:.3e}"),
        ("step at the chip's peak", f"{at_peak:.3f} ms"),
        ("step at 40 % of it", f"{at_peak / 0.4:.3f} ms"),
        ("memory traffic a step", gib(plan.traffic)),
        ("that at its bandwidth", f"{1e3 * plan.traffic / plan.chip.bandwidth:.3f} ms"),
    ]
    if plan.chip in (targets.CHIPS[name] for name in targets.GPUS):
        lines.append(("kernels a step", str(plan.operations)))
    for kind, (count, size) in sorted(plan.collectives.items()):
        lines.append((kind, f"{count}, {size / 2**20:.3f} MiB"))
    if not plan.collectives:
        lines.append(("communication", "none"))
    return lines
