"""The environment of every test, and the runs that many tests look at."""

import atexit
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from absl import flags
from absl.testing import flagsaver

from tests.runs import (
    ROOT,
    arguments,
    exclusively,
    start,
    succeed,
    text_keys,
    training,
    write_corpus,
)

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # workers have their session's
    folder = tempfile.mkdtemp(prefix="headcount-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Where tests run in the background these may be ignored, which programs inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Cache fast compilations too: several processes compile thousands of small programs.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("TFDS_DATA_DIR", str(ROOT / ".cache" / "tfds"))


# Tracing makes many objects; the defaults search them all for garbage too often.
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish():
    """Leave what is imported out of the search for garbage."""
    gc.freeze()


def pytest_runtest_setup():
    """Leave out what is left at the time in HEADCOUNT_UNTIL (.ci/run), and say so."""
    if time.time() > float(os.environ.get("HEADCOUNT_UNTIL", "inf")):
        pytest.skip("the machine was too slow for all tests in CI's time")


def pytest_collection_modifyitems(items):
    """Mark what lies in tests/slow, so that -m slow chooses it with the others."""
    for item in items:
        if item.path.parent.name == "slow":
            item.add_marker(pytest.mark.slow)


NO_CROSS = {"head_gates.cross.0.0": 0, "head_gates.cross.0.1": 0}


@pytest.fixture(scope="session")
def shared(tmp_path_factory, worker_id):
    """A folder that all workers of this test session share."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def corpus(shared):
    """Config keys of a corpus that is small enough to be read and scored at once."""
    from headcount.data import numbers

    with exclusively(shared / "corpus.lock"):
        if not (shared / "corpus").exists():
            texts = (numbers.phrases(range(2000), name) for name in ("en", "de"))
            write_corpus(shared / "corpus", *texts, held_out=200)
    return text_keys(shared / "corpus")


@pytest.fixture(scope="session")
def trained(shared, corpus, tmp_path_factory):
    """The workdir of an uninterrupted run of two trials; each worker has a copy."""
    first = shared / "trained"
    with exclusively(shared / "trained.lock"):
        if not (first / "log.txt").exists():
            environment = os.environ | {"JAX_LOG_COMPILES": "1"}
            process = start(training(first, **corpus), env=environment)
            log = process.communicate()[1]
            assert process.returncode == 0, log
            (first / "log.txt").write_text(log)
    return shutil.copytree(first, tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture
def workdir(shared, trained, tmp_path):
    """A copy of `trained`, as it was left, that a test may change."""
    return shutil.copytree(shared / "trained", tmp_path / "run")


@pytest.fixture(scope="session")
def initialized(shared, trained, corpus):
    """The workdir of a run that starts from `trained` and learns nothing.

    Its second trial has no cross-attention. log.txt has what it logged.
    """
    workdir = shared / "initialized"
    with exclusively(shared / "initialized.lock"):
        if not (workdir / "log.txt").exists():
            path = shared / "initialized.json"
            path.write_text(json.dumps([{"seed": 7}, {"seed": 8, **NO_CROSS}]))
            changes = {
                "seeds": 1,
                "model.dropout": 0.3,
                "optimizer.learning_rate": 0,
                "train.init_from": trained,
                "train.num_steps": 20,
                "train.eval_every_steps": 2,
                "train.patience": 2,
            }
            args = training(workdir, **corpus | changes)
            ran = succeed([*args, f"--trials={path}"])
            (workdir / "log.txt").write_text(ran.stderr)
    return workdir


SCRIPTS = {}  # the modules of scripts, each with the flags that it defines
NAMES = ("train", "eval", "predict", "heads", "sweep", "weights")


def load_script(name: str):
    """Import a script, and keep its flags apart from those of the other scripts."""
    if name not in SCRIPTS:
        for library in ("decoding.flags", "runtime.cluster", "training.run"):
            importlib.import_module(f"headcount.{library}")  # flags that scripts share
        take_flags()  # of scripts that tests import themselves
        module = importlib.import_module(f"headcount.{name.removesuffix('.py')}")
        take_flags()
        SCRIPTS[name] = module, TAKEN[module.__name__]
    return SCRIPTS[name]


TAKEN = {}  # flags by the script that defined them


def take_flags():
    """Move the flags of all scripts from absl's table to ours."""
    for module in (f"headcount.{name}" for name in (*NAMES, "models.describe")):
        for flag in list(flags.FLAGS.flags_by_module_dict().get(module, ())):
            TAKEN.setdefault(module, {})[flag.name] = flag
            delattr(flags.FLAGS, flag.name)


@pytest.fixture
def call(capfd, monkeypatch):
    """Run a script in this process, so that it traces and compiles its programs once.

    call(script, *words, **flags) takes what `tests.runs.arguments` takes and returns
    what `tests.runs.run` does.
    """

    def call(*words, **given):
        args = list(map(str, arguments(*words, **given)))
        module, own = load_script(args[0])
        monkeypatch.setattr(module, "show_log", lambda: None)  # changes the process
        monkeypatch.setattr(sys, "argv", args)
        for name, flag in own.items():
            flags.FLAGS[name] = flag
        code = 0
        try:
            with flagsaver.flagsaver():
                module.cli()
        except SystemExit as stopped:
            code = stopped.code
        finally:
            for name in own:
                delattr(flags.FLAGS, name)
        return subprocess.CompletedProcess(args, code, *capfd.readouterr())

    return call
