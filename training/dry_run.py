"""What a training step needs on chips that are not here, by their own compiler.

The step is compiled for a described topology (`runtime.topology`) with the shardings it
would run with; nothing is computed. Memory and communication are the compiler's
answers, not a formula's.
"""

from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from headcount.models import cost
from headcount.runtime import sharding, topology
from headcount.runtime.platform import GPU_MEMORY
from headcount.training.hlo_cost import Program
from headcount.training.step import init, make_static, train_steps

GIB = 2**30


class Plan(NamedTuple):
    """What a compiled step holds and moves, per chip, in bytes."""

    parameters: int
    optimizer: int
    activations: int  # and gradients: what is neither argument nor result
    peak: int  # all of it, and the best parameters so far
    capacity: int
    collectives: dict[str, tuple[int, int]]  # by kind: how many, bytes
    traffic: int  # to and from the chip's memory, a step
    operations: int  # of the compiled step: kernels, on a GPU
    flops: float  # a step's, of this chip's share of the model
    chip: topology.Chip
    num_trials: int  # whose states this chip holds a part of
    mesh: dict[str, int]
    batch: dict  # the spec of a trial's batch

    @property
    def fits(self) -> bool:
        """Whether the step runs on the chip."""
        return self.peak <= self.capacity

    @property
    def trials_that_fit(self) -> int:
        """How many trials a chip could hold, each costing what one does now."""
        return int(self.num_trials * self.capacity / self.peak)


def plan(config, task, arrays: dict, target: str) -> Plan:
    """Compile the step of a config for a target, and return what it needs.

    The vocabulary is taken to have its full size, and rows the longest length.

    Args:
        config: as train.py has it.
        task: of the config, without a folder.
        arrays: hyperparameters of its trials; see `training.step.train_steps`.
        target: see `topology.devices`.

    Raises:
        ValueError: there is no such target, the mesh does not fit it, or batch_tokens
            or accumulate_steps do not fit the rows.
    """
    num_trials, spec = len(arrays["seed"]), task.spec()
    B = next(iter(spec.values())).shape[0]
    rows = sharding.rows_of_part(B, config.train.accumulate_steps)
    mesh = sharding.make_mesh(
        config.mesh, num_trials, rows, topology.devices(target).ravel()
    )
    with jax.set_mesh(mesh):
        model = cost.abstract(task.build)
        static = make_static(model, config, task.loss)
        state = jax.eval_shape(partial(init, arrays, static=static, build=task.build))
        lie = sharding.state_shardings(state, mesh, config.mesh.shard)
        of_trials = sharding.named(mesh, "trial")
        arguments = (
            sharding.abstract(state, lie),
            sharding.abstract(arrays, jax.tree.map(lambda _: of_trials, arrays)),
            sharding.abstract_batches(mesh, num_trials, 1, spec),
            1,
        )
        chip = target.split(":")[0]
        platform = "cuda" if chip in topology.GPUS else "tpu"
        traced = train_steps.trace(*arguments, static=static)
        compiled = traced.lower(lowering_platforms=(platform,)).compile()
    known = topology.CHIPS[chip]
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
        flops=cost.update_flops(model, spec) * num_trials / mesh.size,
        chip=known,
        num_trials=num_trials // mesh.shape["trial"],
        mesh=dict(mesh.shape),
        batch=spec,
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


def shapes_of(spec: dict) -> str:
    """Format the shapes of a batch's token fields."""
    return ", ".join(
        f"{name.removesuffix('_segments')} {' x '.join(map(str, array.shape))}"
        for name, array in spec.items()
        if name.endswith("_segments")
    )


def rows(plan: Plan) -> list[tuple[str, str]]:
    """The plan as lines of a table."""

    def gib(size):
        return f"{size / GIB:.3f} GiB"

    at_peak = 1e3 * plan.flops / plan.chip.flops
    lines = [
        ("mesh", " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())),
        ("batch of a trial", shapes_of(plan.batch)),
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
    if plan.chip in (topology.CHIPS[name] for name in topology.GPUS):
        lines.append(("kernels a step", str(plan.operations)))
    for kind, (count, size) in sorted(plan.collectives.items()):
        lines.append((kind, f"{count}, {size / 2**20:.3f} MiB"))
    if not plan.collectives:
        lines.append(("communication", "none"))
    return lines
