"""Check a config before anything is read or written, and a run before it is built."""

import math

from headcount.configs.validation import check_values, choose, flatten
from headcount.models.cost import abstract, parameters
from headcount.models.precision import REMAT
from headcount.models.validation import check_positions
from headcount.runtime.memory import total_memory
from headcount.runtime.sharding import SHARD
from headcount.tasks import make_task
from headcount.training.optimizer import OPTIMIZERS, SCHEDULES


def check_config(config) -> None:
    """Raise a ValueError that names the key if a config can't be trained."""
    model = config.model.to_dict()
    check_values(flatten(config.to_dict()))
    make_task(config)
    choose("optimizer.name", config.optimizer.name, OPTIMIZERS)
    choose("optimizer.schedule", config.optimizer.schedule, SCHEDULES)
    choose("train.remat", config.train.remat, REMAT)
    choose("mesh.shard", config.mesh.shard, SHARD)
    check_positions(model, config.data.max_length)
    shallow = config.copy_and_resolve_references()
    for stack in ("num_encoder_layers", "num_decoder_layers"):
        shallow.model[stack] = min(1, shallow.model[stack])
    # reading the data may take minutes, so find out first whether the heads fit
    abstract(make_task(shallow).build)


def check_memory(config, model, spec: dict, num_trials: int) -> None:
    """Raise a ValueError if a run can't fit the memory of all devices together.

    What is counted is there at the least: four copies of the parameters (the weights,
    their gradient, a moment of the optimizer, the best weights), and the batches of one
    dispatch with one vector of the model per token. The step needs more.

    Args:
        model: abstract.
        spec: of one trial's batch; see `tasks.base.Batches`.
    """
    available = total_memory()
    if available is None:
        return
    train, count = config.train, parameters(model)
    tokens = sum(math.prod(array.shape) for array in spec.values())
    longest = max(math.prod(array.shape) for array in spec.values())
    state = 4 * 4 * num_trials * count
    batches = 4 * num_trials * train.steps_per_dispatch * tokens
    batches += 4 * num_trials * longest * config.model.width // train.accumulate_steps
    if state + batches <= available:
        return
    large = "a smaller model" if state > batches else "a lower data.batch_tokens"
    raise ValueError(
        f"{num_trials} trials of {count:,} parameters need at least "
        f"{gib(state)} GiB for their state and {gib(batches)} GiB for batches, and the "
        f"devices have {gib(available)} GiB; choose {large} or fewer trials (seeds)."
    )


def gib(count: int) -> str:
    """Format a number of bytes in GiB."""
    return f"{count / 2**30:,.1f}"
