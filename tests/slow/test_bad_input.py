"""Bad input, as a table: what is wrong, and what the one sentence names."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from headcount.configs import base
from headcount.configs.validation import flat
from headcount.training.trials import hyperparameters, make_trials
from tests.runs import arguments, fails, read, run, start, training

CONFIG = """
from headcount.configs import base

def get_config():
    config = base.get_config()
    {}
    return config
"""


@pytest.mark.parametrize(
    "line, culprits",
    [
        ("1 / 0", ["line 6", "ZeroDivisionError"]),
        ("import not_there", ["line 6", "not_there"]),
        ("get_config()", ["RecursionError"]),
        ("config.model.width = 'a'", ["line 6", "width"]),
        ("config.model.width = None", ["model.width"]),
        ("config.model.width = -4", ["model.width", "-4"]),
        ("config.model = None", ["model"]),
        ("config.optimizer.learning_rate = float('nan')", ["optimizer.learning_rate"]),
        ("config.modle.width = 3", ["line 6", "modle"]),
        ("open('/not/there')", ["line 6", "/not/there"]),
        ("assert config is None", ["line 6", "AssertionError"]),
        ("raise SystemExit(3)", ["line 6", "SystemExit"]),
        ("config = None", ["ConfigDict", "None"]),
        ("config = {'a': 3}", ["ConfigDict", "dict"]),
        ("1 +", ["line 6", "not Python"]),
        ("\0", ["config.py", "not Python"]),
    ],
)
def test_a_config_file_that_fails_is_named_with_its_line(tmp_path, line, culprits):
    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(line))
    fails(run(arguments("train.py", config=path, workdir=tmp_path)), *culprits)


@pytest.mark.parametrize(
    "key, value",
    [
        ("model.width", 10**9),
        ("model.attention.head_dim", 10**8),
        ("model.attention.latent_dim", 0),
        ("model.mlp_dim", 2**31 - 1),
        ("model.num_encoder_layers", 10**8),
        ("data.batch_tokens", 2**31 - 1),
        ("train.steps_per_dispatch", 2**31 - 1),
        ("seeds", 10**9),
        ("train.num_steps", "None"),
        ("model.encoder_attention.mixture_heads", 0),
        ("data.stride", -1),
        ("data.fold", 10),
    ],
)
def test_a_value_that_cannot_be_trained_with_is_named(corpus, tmp_path, key, value):
    """Also what fits no memory, before anything of it is allocated."""
    line = fails(run(training(tmp_path / "run", **corpus | {key: value}), timeout=120))
    assert key in line or ("GiB" in line and "devices" in line)


EDITS = [
    ("config.json", ["model", "attention"], None, "model.attention"),
    ("config.json", ["model", "attention"], ..., "config.json"),
    ("config.json", ["model", "width"], -4, "width"),
    ("config.json", ["model", "width"], "16", "width"),
    ("config.json", ["model", "width"], True, "width"),
    ("config.json", ["model", "num_encoder_layers"], 10**8, "num_encoder_layers"),
    ("config.json", ["model", "dropout"], None, "model.dropout"),
    ("config.json", ["model", "norm_epsilon"], float("inf"), "norm_epsilon"),
    ("config.json", ["task", "pooling"], 5, "task.pooling"),
    ("config.json", ["modle"], 3, "modle"),
    ("config.json", [], [], "config.json"),
    ("trials.json", [], [], "trials.json"),
    ("trials.json", [], [1, 2], "trials.json"),
    ("trials.json", [1], {"seed": -1}, "seed"),
    ("trials.json", [1], {"seed": 1, "head_gates.cross.9.9": 0}, "cross.9.9"),
    ("trials.json", [1], {"seed": 1, "head_gates.cross.0.0": "x"}, "head_gates"),
    ("trials.json", [1], {"seed": 1, "model.width": 3}, "model.width"),
    ("run.json", ["format_version"], 2, "format_version 2"),
    ("run.json", ["format_version"], "1", "format_version"),
    ("run.json", ["status"], "done", "status"),
    ("run.json", [], [], "run.json"),
]


@pytest.fixture(scope="module")
def edited(trained, tmp_path_factory):
    """A copy of a run whose files are edited, and put back after a test."""
    return shutil.copytree(trained, tmp_path_factory.mktemp("edited") / "run")


@pytest.mark.parametrize("name, keys, value, culprit", EDITS)
def test_an_edited_file_of_a_run_is_named_by_every_script(
    trained, edited, corpus, call, name, keys, value, culprit
):
    (edited / name).write_text(json.dumps(edit(read(trained, name), keys, value)))
    try:
        for script, words, given in (
            ("eval.py", (), {"split": "val", "beam_size": 1}),
            ("predict.py", (), {}),
            ("heads.py", ("describe",), {}),
        ):
            ran = call(script, *words, workdir=edited, **given)
            assert ran.returncode == 2, ran.stderr
            assert culprit in ran.stderr.strip().splitlines()[-1], ran.stderr
        fails(run(training(edited, **corpus)), edited)
    finally:
        shutil.copy(trained / name, edited / name)


def edit(tree, keys: list, value):
    """Return a JSON tree with another value at a path; ...: without it."""
    if not keys:
        return value
    tree, (first, *rest) = tree.copy(), keys
    if value is ... and not rest:
        del tree[first]
    else:
        old = tree[first] if not isinstance(tree, dict) else tree.get(first)
        tree[first] = edit(old, rest, value)
    return tree


@pytest.mark.parametrize("text", ["", "{", "[" * 10**5, '{"a": 1, "a": 2}', "\udcff"])
@pytest.mark.parametrize("name", ["config.json", "trials.json", "run.json"])
def test_a_damaged_file_of_a_run_is_named(trained, edited, call, name, text):
    (edited / name).write_bytes(text.encode(errors="surrogateescape"))
    try:
        ran = call("predict.py", workdir=edited)
        assert ran.returncode == 2 and name in ran.stderr, ran.stderr
    finally:
        shutil.copy(trained / name, edited / name)


@pytest.mark.parametrize(
    "variables, culprit",
    [
        ({"JAX_DISABLE_JIT": "1"}, "JAX_DISABLE_JIT"),
        ({"XDG_CACHE_HOME": "cache"}, "XDG_CACHE_HOME=cache"),
        ({"JAX_COMPILATION_CACHE_DIR": "cache"}, "JAX_COMPILATION_CACHE_DIR=cache"),
        ({"JAX_PLATFORMS": "cuda"}, "JAX_PLATFORMS=cuda"),
    ],
)
def test_an_environment_that_cannot_work_is_named(trained, variables, culprit):
    process = start(
        arguments("eval.py", workdir=trained, split="val"), env=os.environ | variables
    )
    log = process.communicate(timeout=120)[1]
    assert process.returncode == 2, log
    assert "Traceback" not in log and culprit in log.strip().splitlines()[-1]


LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))"


def test_too_few_open_files_are_named():
    """A limit that may be raised is."""
    code = (
        f"{LIMIT.format(100)}; from headcount.runtime import platform; "
        f"print(platform.unusable_environment())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "100 files" in ran.stdout and "ulimit -n" in ran.stdout, ran.stderr


@pytest.mark.parametrize(
    "script, flag, culprits",
    [
        ("train.py", "--seeds=3", ["no flag --seeds", "Did you mean --config.seeds?"]),
        ("train.py", "--wrokdir=x", ["Did you mean --workdir?"]),
        ("eval.py", "--max_new_tokens=3", ["no flag --max_new_tokens", "--help"]),
        ("heads.py", "--trial=-1", ["--trial", "-1"]),
        ("predict.py", "lines.txt", ["'lines.txt'", "standard input: < FILE"]),
    ],
)
def test_a_wrong_flag_is_named_with_the_right_one(tmp_path, script, flag, culprits):
    verb = ["describe"] if script == "heads.py" else []
    fails(run([script, *verb, f"--workdir={tmp_path}", flag]), *culprits)


def test_the_file_among_the_parents_of_a_path_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    ran = run(training(tmp_path / "file" / "run"))
    fails(ran, f": {tmp_path / 'file'} is a file where a folder is needed")


def test_a_flag_file_that_is_missing_is_named(tmp_path):
    process = start(["train.py", f"--flagfile={tmp_path / 'none'}"])
    log = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and "Traceback" not in log
    assert "--flagfile" in log and str(tmp_path / "none") in log


def test_a_workdir_that_is_not_utf_8_is_named(corpus, tmp_path):
    """Orbax would only fail at the first checkpoint."""
    workdir = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    fails(run(training(workdir, **corpus)), "--workdir", "UTF-8")
    assert not os.path.exists(workdir)


def test_hundreds_of_thousands_of_trials_are_read_in_seconds(tmp_path):
    path = tmp_path / "trials.json"
    gates = {"head_gates.cross.0.0": 0}
    path.write_text(json.dumps([{"seed": seed} | gates for seed in range(100_000)]))
    config = flat(base.get_config().to_dict())
    made = hyperparameters(config, make_trials(config, path))
    assert made["head_gates"]["cross"].shape == (100_000, 2, 4)
    assert (made["head_gates"]["cross"][:, 0, 0] == 0).all()
