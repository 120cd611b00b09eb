"""What a config must be, before anything is read or written."""

from functools import partial

from models import checks
from models.counting import abstract
from models.precision import REMAT
from models.transformer import Transformer
from training.optimizer import SCHEDULES
from training.sharding import SHARD


def check_config(config, flat: dict, metrics) -> None:
    """Raise a ValueError for a config that can't be trained, naming its key.

    Args:
        config: the whole.
        flat: the same, as a dict of dotted paths.
        metrics: what train.best_metric may be.
    """
    model = config.model.to_dict()
    checks.check_counts(flat)
    checks.check_encoder_decoder(model)
    checks.choose("train.best_metric", config.train.best_metric, metrics)
    checks.choose("optimizer.schedule", config.optimizer.schedule, SCHEDULES)
    checks.choose("train.remat", config.train.remat, REMAT)
    checks.choose("mesh.shard", config.mesh.shard, SHARD)
    checks.check_positions(model, config.data.max_length)
    checks.check_bos(model["bos"], config.data.vocab_size)
    # The data may take minutes: do the heads fit the width?
    shallow = model | {"num_encoder_layers": 1, "num_decoder_layers": 1}
    abstract(partial(Transformer, 2, **shallow))
