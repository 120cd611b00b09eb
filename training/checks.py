"""Check a config before anything is read or written."""

from flax.traverse_util import flatten_dict

from headcount.configs.validation import check_counts, choose
from headcount.models.cost import abstract
from headcount.models.precision import REMAT
from headcount.models.validation import check_positions
from headcount.runtime.sharding import SHARD
from headcount.tasks import make_task
from headcount.training.optimizer import OPTIMIZERS, SCHEDULES


def check_config(config) -> None:
    """Raise a ValueError that names the key if a config can't be trained."""
    model = config.model.to_dict()
    check_counts(flatten_dict(config.to_dict(), sep="."))
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
