"""The config of another run, to modify it or to continue from its parameters.

    python train.py --config=configs/run.py:runs/opus --workdir=runs/tuned \\
      --config.train.init_from=runs/opus --config.data.name=multi30k \\
      --config.optimizer.learning_rate=1e-4
"""

import json
import os
from pathlib import Path

from ml_collections import ConfigDict

from headcount.configs.validation import read_config


def get_config(workdir: str = ""):
    """Return the config of the run in a workdir."""
    path = Path(os.path.expanduser(workdir)) / "config.json"
    if not workdir or not path.is_file():
        raise ValueError(
            f"configs/run.py needs a run's workdir, as in configs/run.py:runs/numbers, "
            f"and there is no {path}"
        )
    return load_config(path).unlock()


def load_config(path: Path) -> ConfigDict:
    """Read a config.json; the result is locked and has all keys of configs/base.py.

    Raises:
        ValueError: the file is damaged, a key is unknown or missing, or a value has a
            wrong type or is out of range.
    """
    try:
        return read_config(json.loads(path.read_text()))
    except RecursionError:
        reason = "It is nested too deeply."
    except ValueError as error:
        reason = str(error)
    raise ValueError(f"{path} is damaged, or of another version of Headcount: {reason}")
