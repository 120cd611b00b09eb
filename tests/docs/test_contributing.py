"""The task of docs/contributing.md is a whole file, and trains."""

import re
import textwrap
from pathlib import Path

from tests.runs import status, succeed, training

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "contributing.md").read_text()


def test_the_task_of_the_documents_trains(tmp_path):
    blocks = re.findall(r"   ```python\n(.*?)   ```", TEXT, re.DOTALL)
    (task,) = (textwrap.dedent(block) for block in blocks if "TASKS[" in block)
    (tmp_path / "repeats.py").write_text(task)
    changes = {"task.name": "repeats", "data.tokenizer": "words", "train.num_steps": 2}
    changes |= {"model.num_decoder_layers": 0, "train.eval_every_steps": 2}
    command = training(tmp_path / "run", config="configs/ewt.py", **changes)
    succeed([*command, f"--task_file={tmp_path / 'repeats.py'}"])
    assert status(tmp_path / "run") == "finished"
