"""What a run says of its device, and the trace that it writes on request."""

import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headcount.configs.base import get_config
from headcount.data.batches import batch_spec
from headcount.models.cost import abstract, update_flops
from headcount.models.transformer import Transformer
from headcount.runtime import platform
from headcount.runtime import topology as targets
from headcount.runtime.profiling import (
    CompileClock,
    Profile,
    peak_flops,
    steps_to_profile,
)
from headcount.tasks import make_task
from headcount.training import dry_run
from tests.processes import ROOT, with_devices
from tests.runs import run


def test_an_update_has_the_flops_of_its_products():
    """Multiplied out by hand: projections, attention, feed-forward, logits."""
    B, S, T, vocab = 2, 6, 5, 50
    model = get_config().model
    D, F, L = model.width, model.mlp_dim, model.num_encoder_layers
    encoder = B * S * (4 * D * D + 2 * D * F) + 2 * B * S * S * D
    decoder = B * T * (6 * D * D + 2 * D * F) + B * S * 2 * D * D
    decoder += 2 * B * (T * T + T * S) * D
    forward = L * (encoder + decoder) + B * T * D * vocab
    built = abstract(partial(Transformer, vocab, **model.to_dict()))
    spec = batch_spec(("source", "target"), B, {"source": S, "target": T})
    assert update_flops(built, spec) == 6 * forward


@pytest.mark.parametrize(
    "parts, sentence",
    [
        (0, "accumulate_steps must divide the 32 rows of a batch, got 0"),
        (3, "accumulate_steps must divide the 32 rows of a batch, got 3"),
        (4, "mesh.data=16 does not divide the 8 rows that are computed at once"),
    ],
)
def test_a_dry_run_refuses_the_parts_that_training_does(monkeypatch, parts, sentence):
    monkeypatch.setattr(targets, "devices", lambda target: np.arange(16))
    config = get_config()
    config.train.accumulate_steps = parts
    with pytest.raises(ValueError, match=sentence):
        dry_run.plan(config, make_task(config), {"seed": np.zeros(1)}, "v5e:4x4")


DRY_RUN = """
from headcount.runtime import topology
from headcount.training import dry_run

chip, mesh = topology.CHIPS["v5e"], {"trial": 1, "data": 1, "model": 3}
plan = dry_run.Plan(10, 20, 60, 100, 100, {}, 0, 0, 1.0, chip, 1, mesh, {})
dry_run.plan = lambda *_: plan
"""


def planned(*flags):
    """A dry run whose plan is made up; nothing is looked at to make it."""
    args = ["train.py", "--config=configs/base.py", "--dry_run=v5e:1x3", *flags]
    return run(args, before=DRY_RUN)


@pytest.mark.parametrize(
    "flag, sentence",
    [
        ("mesh.shard=zero", "mesh.shard must be one of none, optimizer, parameters"),
        ("train.remat=all", "train.remat must be one of none, block, dots"),
        ("optimizer.schedule=cosin", "optimizer.schedule must be one of"),
        ("model.num_decoder_layers=0", "model.num_decoder_layers"),
    ],
)
def test_a_dry_run_refuses_the_configs_that_training_does(flag, sentence):
    ran = planned(f"--config.{flag}")
    (line,) = ran.stderr.splitlines()
    assert (ran.returncode, ran.stdout) == (2, "") and sentence in line


def test_a_dry_run_says_what_its_mesh_leaves_whole():
    ran = planned()
    assert "mesh.model=3 does not divide the 4 heads" in ran.stderr
    assert "trial 1 x data 1 x model 3" in ran.stdout and ran.returncode == 0


class Chip:
    device_kind = "TPU v5 lite"


@pytest.mark.parametrize(
    "kind, tera",
    [
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("Abacus", None),
    ],
)
def test_peaks_are_known_by_kind(monkeypatch, kind, tera):
    monkeypatch.setattr(Chip, "device_kind", kind)
    monkeypatch.setattr(jax, "devices", lambda: [Chip(), Chip()])
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    monkeypatch.setattr(jax, "default_backend", lambda: "other")
    assert peak_flops() == (tera and 2e12 * tera)


def test_a_cpu_is_measured():
    assert 1e8 < peak_flops() < 1e15


def test_compiling_is_timed():
    clock = CompileClock()
    jax.jit(lambda x: jnp.sin(x) * 3)(1.0)
    assert clock.seconds > 0


@pytest.mark.slow
def test_a_trace_is_written(tmp_path):
    profile = Profile(tmp_path, steps_to_profile("2:3", 9))
    for step in range(9):
        profile.at(step, jnp.ones(3) + step)
        assert profile.running == (2 <= step < 5)
    profile.close()
    assert list(tmp_path.glob("profile/**/*.xplane.pb"))
    assert list(tmp_path.glob("profile/**/perfetto_trace.json.gz"))


MEASURED = """
import jax
from headcount.runtime import profiling
jax.set_mesh(jax.sharding.Mesh(jax.devices(), ("data",)))
here, original, placed = jax.devices()[:2], jax.device_put, []
jax.local_devices = lambda: here
def put(x, where):
    placed.append((where.device_set, x.shape))
    return original(x, where)
jax.device_put = put
assert profiling.measured_flops() > 0
rows, whole = placed
assert rows == (set(here), (2 * profiling.SIZE, profiling.SIZE)), rows
assert whole == (set(here), (profiling.SIZE, profiling.SIZE)), whole
"""


def test_the_peak_is_measured_on_the_devices_of_this_process():
    """Also where training's mesh has those of others."""
    command = [sys.executable, "-c", MEASURED]
    subprocess.run(command, cwd=ROOT, env=with_devices(4), check=True)


@pytest.mark.slow
def test_a_run_that_goes_on_traces_what_is_left(tmp_path, capsys):
    profile = Profile(tmp_path, steps_to_profile("2:3", 9))
    assert profile.ends(4) == [2, 5] and not capsys.readouterr().err
    for step in range(4, 9):
        profile.at(step, jnp.ones(3) + step)
        assert profile.running == (step == 4)
    assert list(tmp_path.glob("profile/**/*.xplane.pb"))
    profile.ends(5)
    assert "No trace" in capsys.readouterr().err


@pytest.mark.slow
def test_training_outlives_a_trace_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "profile").write_text("a file")
    profile = Profile(tmp_path, (0, 1))
    profile.at(0, jnp.ones(3))
    profile.at(1, jnp.ones(3))
    assert str(tmp_path / "profile") in capsys.readouterr().err
    assert (tmp_path / "profile").read_text() == "a file"


@pytest.mark.parametrize("text", ["20", "a:3", "1:2:3", "-1:2", "5:0", "9:1"])
def test_steps_to_profile_are_checked(text):
    with pytest.raises(ValueError, match="--profile must .*got"):
        steps_to_profile(text, 9)


SETUP = """
import os
from headcount.runtime import platform
platform.setup()
names = "JAX_COMPILATION_CACHE_DIR", "XLA_CLIENT_MEM_FRACTION"
print(*(os.environ.get(name, "none") for name in names))
"""


@pytest.mark.parametrize(
    "given, wanted",
    [
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/headcount/[0-9a-f]{12} 0.9"),
        ({"HOME": "/me", "XDG_CACHE_HOME": ""}, "/me/.cache/headcount/.* 0.9"),
        ({"JAX_COMPILATION_CACHE_DIR": "/here"}, "/here 0.9"),
        ({"HOME": "/me", "XLA_CLIENT_MEM_FRACTION": "0.5"}, "/me/.* 0.5"),
        ({"HOME": "/me", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, "/me/.* none"),
    ],
)
def test_what_the_environment_says_comes_first(given, wanted):
    ran = subprocess.run(
        [sys.executable, "-c", SETUP],
        cwd=ROOT,
        env=given,
        capture_output=True,
        text=True,
    )
    assert re.fullmatch(wanted, ran.stdout.strip()), ran.stderr


@pytest.mark.parametrize(
    "script, wanted", [("train.py", None), ("sweep.py", None), ("eval.py", "false")]
)
def test_scripts_that_need_little_leave_a_gpus_memory(script, wanted, monkeypatch):
    """Of sweep.py, train.py inherits the environment."""
    environment = {"XDG_CACHE_HOME": "/cache"}
    monkeypatch.setattr(platform.os, "environ", environment)
    monkeypatch.setattr(platform.sys, "argv", [f"/somewhere/{script}"])
    monkeypatch.setattr(platform, "keep_memory", lambda: None)
    platform.setup()
    assert environment.get("XLA_PYTHON_CLIENT_PREALLOCATE") == wanted


def test_a_user_without_a_home_folder_has_no_cache(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(platform.Path, "home", home)
    environment = {}
    monkeypatch.setattr(platform.os, "environ", environment)
    monkeypatch.setattr(platform, "keep_memory", lambda: None)
    platform.setup()
    assert environment and "JAX_COMPILATION_CACHE_DIR" not in environment
