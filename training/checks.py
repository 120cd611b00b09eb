"""What a config must be, before anything is read or written."""

from functools import partial

from flax.traverse_util import flatten_dict

from headcount.models import checks
from headcount.models.cost import abstract
from headcount.models.precision import REMAT
from headcount.models.transformer import Transformer
from headcount.runtime.sharding import SHARD
from headcount.training.optimizer import SCHEDULES

# What train.best_metric may be.
METRICS = ("dev_loss", "dev_bleu", "dev_chrf", "dev_exact_match")


def check_config(config) -> None:
    """Raise a ValueError for a config that can't be trained, naming its key."""
    model = config.model.to_dict()
    checks.check_counts(flatten_dict(config.to_dict(), sep="."))
    checks.check_encoder_decoder(model)
    checks.choose("train.best_metric", config.train.best_metric, METRICS)
    checks.choose("optimizer.schedule", config.optimizer.schedule, SCHEDULES)
    checks.choose("train.remat", config.train.remat, REMAT)
    checks.choose("mesh.shard", config.mesh.shard, SHARD)
    checks.check_positions(model, config.data.max_length)
    checks.check_bos(model["bos"], config.data.vocab_size)
    # The data may take minutes: do the heads fit the width?
    shallow = model | {"num_encoder_layers": 1, "num_decoder_layers": 1}
    abstract(partial(Transformer, 2, **shallow))
