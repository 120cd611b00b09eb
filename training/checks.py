"""Checks of a config before any file is read, and of a run before it is built."""

import json

from headcount.configs import base
from headcount.configs.validation import (
    check_keys,
    check_values,
    choose,
    flat_config,
)
from headcount.models.cost import abstract
from headcount.models.precision import REMAT
from headcount.models.validation import check_positions, check_residual, check_unused
from headcount.runtime.memory import total_memory
from headcount.runtime.sharding import SHARD
from headcount.tasks import make_task
from headcount.training.optimizer import OPTIMIZERS, SCHEDULES
from headcount.training.tracking import tracker_names

_built: set[str] = set()  # sections of configs whose model can be built


def check_config(config) -> None:
    """Raise a ValueError that names the offending key if a config can't be trained."""
    model = config.model.to_dict()
    values = flat_config(config.to_dict())
    check_keys(values, "The config")
    check_values(values)
    make_task(config)
    choose("optimizer.name", config.optimizer.name, OPTIMIZERS)
    choose("optimizer.schedule", config.optimizer.schedule, SCHEDULES)
    if config.optimizer.muon_per_head and config.optimizer.name != "muon":
        raise ValueError(
            f"optimizer.muon_per_head needs optimizer.name=muon, got "
            f"{config.optimizer.name}."
        )
    choose("train.remat", config.train.remat, REMAT)
    tracker_names(config.train.tracker)
    choose("mesh.shard", config.mesh.shard, SHARD)
    check_positions(model, config.data.max_length)
    check_residual(model)
    check_unused(model, base.get_config().model.attention.to_dict())
    shallow = config.copy_and_resolve_references()
    for stack in ("num_encoder_layers", "num_decoder_layers"):
        shallow.model[stack] = min(1, shallow.model[stack])
    shallow.data.directory = None  # no corpus is read
    sections = {name: shallow[name].to_dict() for name in ("task", "data", "model")}
    # cached: a sweep checks many configs, and many of them share a model
    if (key := json.dumps(sections, sort_keys=True)) not in _built:
        # reading the data may take minutes; an invalid model should fail before that
        abstract(make_task(shallow).build)
        _built.add(key)


def check_memory(config, num_trials: int, count: int = 0) -> None:
    """Raise a ValueError if a run can't fit into the combined memory of all devices.

    This counts only a lower bound: four copies of the parameters (weights, gradient,
    one optimizer moment, best weights), the tokens of one dispatch, and one vector per
    token of an update. The actual step needs more.

    Args:
        count: number of parameters per trial; 0 if not known yet.
    """
    available = total_memory()
    if available is None:
        return
    train, tokens = config.train, 4 * num_trials * config.data.batch_tokens
    state = 4 * 4 * num_trials * count
    batches = tokens * train.steps_per_dispatch
    batches += tokens * config.model.width // train.accumulate_steps
    if state + batches <= available:
        return
    fix = (
        "choose a smaller model, or fewer trials (seeds)"
        if state > batches
        else "choose a lower data.batch_tokens or train.steps_per_dispatch, or fewer "
        "trials (seeds)"
    )
    raise ValueError(
        f"{num_trials} trials of {count:,} parameters need at least {gib(state)} GiB "
        f"for their state and {gib(batches)} GiB for batches, and the devices have "
        f"{gib(available)} GiB; {fix}."
        if count
        else f"{num_trials} trials need at least {gib(batches)} GiB for batches, and "
        f"the devices have {gib(available)} GiB; {fix}."
    )


def gib(count: int) -> str:
    """Format a number of bytes in GiB."""
    return f"{count / 2**30:,.1f}"
