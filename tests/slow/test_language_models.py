"""predict.py with a trained language model: streamed, in batches, scored."""

import json

import numpy as np
import pytest

from headcount.training.run import load
from tests.runs import SMALL, arguments, fails, run, succeed, training

KEYS = SMALL | {
    "task.name": "language_model",
    "data.name": "text",
    "data.tokenizer": "characters",
    "data.max_length": 24,
    "model.num_encoder_layers": 0,
    "model.positions": "learned",
    "model.max_positions": 24,
    "seeds": 1,
}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language_model")
    for split, count in (("train", 200), ("val", 20)):
        texts = [f"{i * 7919 % 1000} – über {i}" for i in range(count)]
        (folder / f"{split}.txt").write_text("\n\n".join(texts))
    keys = KEYS | {"data.directory": folder}
    succeed(training(folder / "run", "configs/base.py", **keys))
    return folder / "run"


def test_a_streamed_continuation_is_that_of_a_batch(workdir):
    flags = {"max_new_tokens": 8, "temperature": 1.0, "seed": 3}
    prompts = b"12 \n3 \xe2\x80\x93\n"
    together = succeed(arguments("predict.py", workdir=workdir, **flags), stdin=prompts)
    one_by_one = arguments("predict.py", workdir=workdir, batch_size=1, **flags)
    streamed = succeed(one_by_one, stdin=prompts)
    assert streamed.stdout == together.stdout
    lines = streamed.stdout.splitlines()
    assert [line[:3] for line in lines] == ["12 ", "3 –"]
    assert max(map(len, lines)) > 3


def test_prompts_as_json_may_have_line_breaks(workdir):
    flags = {"max_new_tokens": 6, "temperature": 1.0, "samples": 2, "batch_size": 2}
    prompts = ["12\n3 –", "7"]
    stdin = "".join(json.dumps(prompt) + "\n" for prompt in prompts).encode()
    ran = succeed(
        arguments("predict.py", "--json", workdir=workdir, **flags), stdin=stdin
    )
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [row["prompt"] for row in found] == [prompts[0]] * 2 + [prompts[1]] * 2
    del flags["batch_size"]
    task = (loaded := load(workdir)).task
    wanted = list(task.predict(loaded, prompts, **flags))
    assert [row["prompt"] + row["text"] for row in found] == wanted
    assert any(row["text"] for row in found)
    args = arguments("predict.py", "--json", "--score", workdir=workdir)
    ran = succeed(args, stdin=stdin)
    assert ran.stdout.splitlines() == list(task.score_lines(loaded, prompts))


@pytest.mark.parametrize("line", ["12", '"open', '["12"]', '"\\ud800"', ""])
def test_a_prompt_that_is_no_json_string_is_named_by_its_line(workdir, line):
    stdin = f'"12"\n{line}\n'.encode()
    ran = run(arguments("predict.py", "--json", workdir=workdir), stdin=stdin)
    fails(ran, "Line 2 is not a JSON string")


@pytest.mark.parametrize("lines", [1, 2])
def test_a_prompt_without_room_fails_before_it_is_printed(workdir, lines):
    stdin = b"1" * 24 + b"\n" + b"12\n" * (lines - 1)
    ran = run(arguments("predict.py", workdir=workdir), stdin=stdin)
    fails(ran, "Line 1 has 24 tokens", "model.max_positions=24")
    assert ran.stdout == ""


def test_tokens_are_scored_as_in_python(workdir):
    args = arguments("predict.py", "--score_tokens", workdir=workdir)
    ran = succeed(args, stdin="12 – ü\n\n".encode())
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    task = (loaded := load(workdir)).task
    (ids, wanted), _ = task.log_probabilities(loaded, ["12 – ü", ""], 0, 0)
    assert found[0]["tokens"] == task.tokenizer.pieces(ids)
    np.testing.assert_allclose(found[0]["log_probabilities"], wanted, atol=1e-4)
    assert found[1] == {"tokens": [], "log_probabilities": []}
