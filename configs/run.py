"""The config of another run, to vary it, or to continue from its parameters.

    python train.py --config=configs/run.py:runs/opus --workdir=runs/tuned \\
      --config.train.init_from=runs/opus --config.data.name=multi30k \\
      --config.optimizer.learning_rate=1e-4
"""

import json
from pathlib import Path

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from headcount.configs import base


def get_config(workdir: str = ""):
    """Return the config of the run in a workdir."""
    path = Path(workdir) / "config.json"
    if not workdir or not path.is_file():
        raise ValueError(
            f"configs/run.py needs a run's workdir, as in configs/run.py:runs/numbers, "
            f"and there is no {path}"
        )
    return load_config(path).unlock()


def load_config(path: Path) -> ConfigDict:
    """Read a config.json; the result is locked and has all keys of configs/base.py.

    Raises:
        ValueError: it is damaged, or a key is unknown, missing or of another type.
    """
    config = base.get_config().lock()
    try:
        found = json.loads(path.read_text())
        missing = flatten_dict(config.to_dict()).keys() - flatten_dict(found).keys()
        if missing:
            raise ValueError(f"it has no {'.'.join(min(missing))}")
        config.update(found)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason, *_ = str(error.args[0]).split(". ")  # the rest lists all keys
        raise ValueError(
            f"{path} is damaged, or of another version of Headcount: {reason}"
        ) from error
    return config
