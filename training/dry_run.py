"""Memory, communication and cost of a training step on chips that are not attached.

The step is compiled ahead of time for a described topology (`runtime.topology`) with
the shardings that it would run with; nothing is executed. Memory and communication are
read from the compiled program instead of estimated by a formula.
"""

from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from headcount.data.examples import segments_of
from headcount.models import cost
from headcount.runtime import sharding, topology
from headcount.runtime.platform import GPU_MEMORY
from headcount.training.hlo_cost import Program
from headcount.training.step import init, make_static, train_steps

GIB = 2**30


class Plan(NamedTuple):
    """Memory and communication of a compiled step, per chip; sizes are in bytes."""

    parameters: int
    optimizer: int
    activations: int  # and gradients: buffers that are neither arguments nor results
    peak: int  # all of the above, plus the best parameters so far
    capacity: int
    collectives: dict[str, tuple[int, int]]  # by kind: count, bytes
    traffic: int  # to and from the chip's memory, per step
    operations: int  # in the compiled step; on a GPU, kernels
    flops: float  # per step, for this chip's share of the model
    chip: topology.Chip
    num_trials: int  # trials of which this chip holds (part of) the state
    mesh: dict[str, int]
    batch: dict  # the spec of a trial's batch

    @property
    def fits(self) -> bool:
        """Whether the step fits into the chip's memory."""
        return self.peak <= self.capacity

    @property
    def trials_that_fit(self) -> int:
        """Number of trials that would fit a chip at the present memory per trial."""
        return int(self.num_trials * self.capacity / self.peak)


def plan(config, task, arrays: dict, target: str) -> Plan:
    """Compile the step of a config for a target, and return what it needs.

    This assumes a vocabulary of the maximum size and rows of the maximum length.

    Args:
        config: the run's config, as in train.py.
        task: the config's task, made without a tokenizer folder.
        arrays: hyperparameters of the trials; see `training.step.train_steps`.
        target: see `topology.devices`.

    Raises:
        ValueError: the target is unknown, the mesh does not fit it, or the batch can't
            be divided as batch_tokens, accumulate_steps and the mesh require.
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
        shardings = sharding.state_shardings(state, mesh, config.mesh.shard)
        of_trials = sharding.named(mesh, "trial")
        arguments = (
            sharding.abstract(state, shardings),
            sharding.abstract(arrays, jax.tree.map(lambda _: of_trials, arrays)),
            sharding.abstract_batches(mesh, num_trials, 1, spec),
            1,
        )
        chip_name = target.split(":")[0]
        platform = "cuda" if chip_name in topology.GPUS else "tpu"
        traced = train_steps.trace(*arguments, static=static)
        compiled = traced.lower(lowering_platforms=(platform,)).compile()
    chip = topology.CHIPS[chip_name]
    memory, program = compiled.memory_analysis(), Program(compiled.as_text())
    traffic, operations = program.traffic()
    parameters = _bytes_of(state.params, shardings.params)
    return Plan(
        parameters=parameters,
        optimizer=_bytes_of(state.opt_state, shardings.opt_state),
        activations=memory.temp_size_in_bytes,
        peak=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + parameters,  # the best parameters so far stay on the chip, too
        capacity=int(chip.memory * (GPU_MEMORY if platform == "cuda" else 1)),
        collectives=program.collectives(),
        traffic=traffic,
        operations=operations,
        flops=cost.update_flops(model, spec) * num_trials / mesh.size,
        chip=chip,
        num_trials=num_trials // mesh.shape["trial"],
        mesh=dict(mesh.shape),
        batch=spec,
    )


def _bytes_of(tree, shardings) -> int:
    """Return the bytes that one chip holds of a sharded tree of arrays."""
    return sum(
        int(np.prod(sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf, sharding in zip(
            jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True
        )
    )


def advice(plan: Plan, config) -> str | None:
    """Suggest config changes if the step does not fit; return None if it does."""
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
        f"{field} {' x '.join(map(str, array.shape))}"
        for field, array in segments_of(spec).items()
    )


def rows(plan: Plan) -> list[tuple[str, str]]:
    """Format the plan as rows of a table: label and value."""

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
        ("FLOPs per step", f"{plan.flops:.3e}"),
        ("step at the chip's peak", f"{at_peak:.3f} ms"),
        ("step at 40% of the peak", f"{at_peak / 0.4:.3f} ms"),
        ("memory traffic per step", gib(plan.traffic)),
        (
            "step at the memory's bandwidth",
            f"{1e3 * plan.traffic / plan.chip.bandwidth:.3f} ms",
        ),
    ]
    if plan.chip in (topology.CHIPS[name] for name in topology.GPUS):
        lines.append(("kernels per step", str(plan.operations)))
    for kind, (count, size) in sorted(plan.collectives.items()):
        lines.append((kind, f"{count}, {size / 2**20:.3f} MiB"))
    if not plan.collectives:
        lines.append(("communication", "none"))
    return lines
