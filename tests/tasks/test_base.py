"""What all tasks share: checks of what a task of one's own returns."""

import importlib
import json

import pytest

from headcount.configs.base import get_config
from headcount.tasks import LOSS, TASKS, Task, import_file, make_task
from headcount.tasks.language_model import LanguageModel
from headcount.tasks.masked_language_model import MaskedLanguageModel
from headcount.tasks.translation import Translation
from tests.tasks.untrained import DECODER_ONLY, ENCODER_ONLY, small_task

MASKED = ENCODER_ONLY | {"task.name": "masked_language_model"}
STACKS = {LanguageModel: DECODER_ONLY, MaskedLanguageModel: MASKED}


def own_task(base, folder, **members):
    """Return a task of a subclass, which is not in the table of tasks."""
    config = small_task(folder, **STACKS.get(base, {})).config
    return type("Own", (base,), members)(config, folder)


@pytest.mark.parametrize(
    "base, wanted, text, found",
    [
        (LanguageModel, "text", {"target": ["a", "b"]}, r"target \(2\)"),
        (LanguageModel, "text", ["a", "b"], "list"),
        (MaskedLanguageModel, "text", {"source": ["a"]}, r"source \(1\)"),
        (
            *(Translation, "source and target", {"source": ["a"], "target": []}),
            r"source \(1\), target \(0\)",
        ),
    ],
)
def test_a_task_whose_read_returns_something_else_is_named(
    tmp_path, base, wanted, text, found
):
    task = own_task(base, tmp_path, read=lambda self, split: text)
    match = f"`read` of the task .* {wanted}, .* 'train' it returns {found}"
    with pytest.raises(ValueError, match=match):
        task.load("train")


@pytest.mark.parametrize("lines, kind", [("a text", "str"), (iter("ab"), "iterator")])
def test_a_field_that_is_no_list_is_named(tmp_path, lines, kind):
    task = own_task(LanguageModel, tmp_path, read=lambda self, split: {"text": lines})
    with pytest.raises(ValueError, match=f"`read` of .* text of 'train' is a .*{kind}"):
        task.load("train")


@pytest.mark.parametrize("base", [LanguageModel, MaskedLanguageModel])
def test_a_subclass_sets_corpus_keys_and_test_split(tmp_path, base):
    task = own_task(base, tmp_path, corpus_keys=("name", "fold"), test_split="val")
    assert (task.corpus_keys, task.test_split) == (("name", "fold"), "val")


@pytest.mark.parametrize(
    "members, named",
    [
        ({}, r"`metrics` .* \(LOSS,\), got None"),
        ({"metrics": ()}, r"`metrics` .* got \(\)"),
        ({"metrics": LOSS}, r"`metrics` .* got Metric"),
        ({"metrics": ("loss",)}, r"`metrics` .* got \('loss',\)"),
        ({"metrics": (LOSS,)}, "`load`"),
        ({"metrics": (LOSS,), "load": print}, "`loss`"),
        ({"metrics": (LOSS,), "load": print, "loss": print}, "`evaluate`"),
    ],
)
def test_a_class_without_a_member_that_training_needs_is_named(
    monkeypatch, members, named
):
    monkeypatch.setitem(TASKS, "own", type("Own", (Task,), members))
    config = get_config()
    config.task.name = "own"
    with pytest.raises(
        ValueError, match=f"^The class Own of the task own must .*{named}"
    ):
        make_task(config)


@pytest.mark.parametrize("member", ["read", "predict", "encode_text"])
def test_a_member_that_a_class_lacks_is_named_when_it_is_needed(tmp_path, member):
    task = Task(small_task(tmp_path).config)
    with pytest.raises(NotImplementedError, match=f"^The class Task .* `{member}`"):
        getattr(task, member)(*["x"] * (1 + (member == "predict")))


def test_a_task_file_may_have_dataclasses_with_postponed_annotations(tmp_path):
    """Python looks these up in `sys.modules`."""
    lines = "from __future__ import annotations", "import dataclasses"
    lines += "@dataclasses.dataclass", "class Own:", "    size: int = 3"
    path = tmp_path / "json.py"  # must not replace Python's own
    path.write_text("\n".join(lines))
    import_file(path)
    assert importlib.import_module("json") is json
