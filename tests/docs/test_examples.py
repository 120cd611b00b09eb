"""Examples of the documents that are whole programs run."""

import re
import textwrap
from pathlib import Path

import pytest

from tests.runs import status, succeed, training

DOCS = Path(__file__).resolve().parents[2] / "docs"


def example(page, words):
    """Return the Python block of a page that contains certain words."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    (found,) = (textwrap.dedent(block) for block in blocks if words in block)
    return found


@pytest.mark.slow
def test_the_task_in_one_file_trains(tmp_path):
    (tmp_path / "repeats.py").write_text(example("contributing.md", "TASKS["))
    changes = {"task.name": "repeats", "data.tokenizer": "words", "train.num_steps": 2}
    changes |= {"model.num_decoder_layers": 0, "train.eval_every_steps": 2}
    command = training(tmp_path / "run", config="configs/ewt.py", **changes)
    succeed([*command, f"--task_file={tmp_path / 'repeats.py'}"])
    assert status(tmp_path / "run") == "finished"


@pytest.mark.slow
def test_an_untrained_model_has_logits():
    names = {}
    exec(example("guides/python.md", "Transformer("), names)
    assert names["logits"].shape == (1, 16, 1000)
