"""The config of a run, to vary it, or to go on from its parameters with other data.

    python train.py --config=configs/run.py:runs/opus --workdir=runs/tuned \\
      --config.train.init_from=runs/opus --config.data.name=multi30k \\
      --config.optimizer.learning_rate=1e-4
"""

import json
from pathlib import Path

from headcount.configs import base


def get_config(workdir: str = ""):
    """What the config.json of a workdir says."""
    path = Path(workdir) / "config.json"
    if not workdir or not path.is_file():
        raise ValueError(
            f"configs/run.py takes a run's workdir, as in configs/run.py:runs/numbers, "
            f"and there is no {path}"
        )
    config = base.get_config().lock()
    try:
        config.update(json.loads(path.read_text()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        said, *_ = str(error.args[0]).split(". ")  # they would list all that there is
        raise ValueError(f"{path} is no config of today's: {said}") from error
    return config.unlock()
