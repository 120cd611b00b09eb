"""Examples of the documents that are whole programs run."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest

from tests.runs import fails, run, status, succeed, training

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
    flag = f"--task_file={tmp_path / 'repeats.py'}"
    ran = succeed([*command, flag])
    assert status(tmp_path / "run") == "finished"
    (line,) = [x for x in ran.stderr.splitlines() if "Next: python eval.py" in x]
    assert flag in line.split()


@pytest.mark.slow
def test_a_run_of_a_task_in_its_config_file_is_scored_by_the_command_shown(tmp_path):
    task, config = example("contributing.md", "TASKS["), tmp_path / "repeats.py"
    config.write_text(
        f"{task}\nfrom headcount.configs import ewt\n"
        "def get_config(size):\n    return ewt.get_config()\n"
    )
    changes = {"task.name": "repeats", "data.tokenizer": "words", "train.num_steps": 2}
    changes |= {"model.num_decoder_layers": 0, "train.eval_every_steps": 2}
    ran = succeed(training(tmp_path / "run", config=f"{config}:small", **changes))
    (line,) = [x for x in ran.stderr.splitlines() if "Next: python eval.py" in x]
    succeed(shlex.split(line.partition("Next: python ")[2]))


RULE = """
from headcount.attention import MERGE_RULES
from headcount.attention.merge import entry

def maximum(heads, x, *, kernel):
    return heads.max(2) @ kernel

MERGE_RULES["maximum"] = entry(maximum, {"kernel": "V D"})
"""


@pytest.mark.slow
def test_a_merge_rule_in_a_file_of_its_own_trains(tmp_path, corpus):
    (tmp_path / "rule.py").write_text(RULE)
    changes = {"model.attention.merge": "maximum", "train.num_steps": 2}
    changes |= {"train.eval_every_steps": 2, "train.best_metric": "loss"}
    command = training(tmp_path / "run", **corpus | changes)
    fails(run(command), "merge must be one of", "--task_file=FILE.py")
    succeed([*command, f"--task_file={tmp_path / 'rule.py'}"])
    assert status(tmp_path / "run") == "finished"


@pytest.mark.slow
def test_an_untrained_model_has_logits():
    names = {}
    exec(example("guides/python.md", "Transformer("), names)
    assert names["logits"].shape == (1, 16, 1000)
