"""Whole training steps through the TPU's and the GPU's compilers, as --dry_run.

By default a few configs stand for those that build the same model in other sizes.
HEADCOUNT_COMPILE=all compiles every one: minutes more.
"""

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from headcount.configs.validation import flat
from headcount.runtime import topology as targets
from headcount.tasks import make_task
from headcount.training import dry_run
from headcount.training.trials import hyperparameters

pytestmark = pytest.mark.usefixtures("compile_fast")
NOT_TRAINED = (
    *("__init__", "ablations", "base", "commandline", "presets", "run"),
    *("validation", "variants"),
)
FOLDER = Path(__file__).parents[2] / "configs"
ALL = os.environ.get("HEADCOUNT_COMPILE") == "all"
PODS = ("v5e:16x16", "v6e:16x16") if ALL else ("v5e:16x16",)
EXPERIMENTS = sorted({path.stem for path in FOLDER.glob("*.py")} - set(NOT_TRAINED))
# a translator, a language model with all that is modern, and an encoder
FEW = ("numbers", "modern", "movie_reviews")


@functools.cache
def planned(name, target, seeds=1, implementation=None, parts=1, variant=None, **mesh):
    """The plan of configs/NAME.py with one layer a stack, for whole ones take minutes.

    Layers repeat: they add memory, and communicate as the first does. With WHOLE=1 in
    the environment they all are compiled.
    """
    module = importlib.import_module(f"headcount.configs.{name}")
    config = module.get_config(*[variant] if variant else [])
    if "WHOLE" not in os.environ:
        for key in ("num_encoder_layers", "num_decoder_layers"):
            config.model[key] = min(1, config.model[key])
    config.mesh.update(mesh)
    if parts is not None:
        config.train.accumulate_steps = parts
    config.model.attention.implementation = implementation
    trials = [{"seed": seed} for seed in range(seeds)]
    arrays = hyperparameters(flat(config.to_dict()), trials)
    return dry_run.plan(config, make_task(config), arrays, target)


def adds_up_gradients_alone(plan):
    """Whether what is sent is the gradients, by its amount.

    They are sent in bfloat16, as they are computed, but for the embedding's: its three
    uses (source, target and output) may be added up apart, in float32.
    """
    assert set(plan.collectives) == {"all-reduce"}
    sent = plan.collectives["all-reduce"][1]
    return plan.parameters / 2 <= sent < 3 * plan.parameters


@pytest.mark.parametrize("name", EXPERIMENTS if ALL else FEW)
def test_data_parallelism_adds_up_gradients_alone(name):
    plan = planned(name, "v5e:2x2")
    assert plan.fits and plan.mesh == {"trial": 1, "data": 4, "model": 1}
    assert adds_up_gradients_alone(plan)


@pytest.mark.parametrize("target", ["v5e:2x2", "h200:4"])
def test_a_state_that_is_divided_is_gathered_and_nothing_else_is(target):
    """ZeRO-1 and FSDP send parameters and gradients, and no activations."""
    whole = planned("modern", target)
    for shard in ("optimizer", "parameters"):
        plan = planned("modern", target, shard=shard)
        assert plan.fits and plan.optimizer < whole.optimizer / 2
        assert {"all-gather"} < set(plan.collectives)
        assert set(plan.collectives) <= {"all-gather", "all-reduce", "reduce-scatter"}
        sent = sum(size for _, size in plan.collectives.values())
        assert sent <= 3 * whole.parameters


def test_a_step_is_planned_for_gpus_that_have_no_fused_kernel():
    assert planned("modern", "a100:1").fits


@pytest.mark.parametrize("target", ["v5e:2x2", "h200:4"])
def test_parts_of_a_batch_are_divided_too(target):
    plan = planned("modern", target, parts=4)
    whole = planned("modern", target)
    assert set(plan.collectives) == {"all-reduce"}
    assert 1 / 2 <= plan.collectives["all-reduce"][1] / plan.parameters < 4 * 3
    assert plan.activations < 0.9 * whole.activations  # gradients do not get smaller


def test_logits_stay_in_a_tpus_fast_memory():
    jax.config.update("jax_exec_time_optimization_effort", 0.0)  # as users compile
    plan = planned("multi30k", "v5e:2x2", seeds=16)
    assert plan.num_trials == 4
    logits = plan.num_trials * np.prod(plan.batch["target"].shape) * 10_000 * 4
    assert plan.traffic < logits  # of all else, too; each is written and read thrice


@pytest.mark.parametrize("pod", PODS)
def test_seeds_of_a_large_config_share_a_pod(pod):
    plan = planned("wmt14", pod, seeds=16)
    assert plan.fits and plan.mesh == {"trial": 16, "data": 16, "model": 1}
    assert adds_up_gradients_alone(plan)


@pytest.mark.parametrize("target, trials", [("v5e:16x16", 16), ("h200:8", 8)])
@pytest.mark.parametrize("variant", ["small", "medium"] if ALL else ["small"])
def test_sixteen_seeds_of_gpt2_train_at_once(variant, target, trials):
    plan = planned("gpt2", target, seeds=16, variant=variant, parts=None)
    assert plan.fits and plan.mesh["trial"] == trials
    assert plan.num_trials == 16 // trials
    assert set(plan.collectives) == ({"all-reduce"} if trials == 16 else set())


@pytest.mark.parametrize("pod", PODS)
@pytest.mark.parametrize("name", ["multi30k", "numbers"] if ALL else ["multi30k"])
def test_trials_on_a_pod_need_no_communication(name, pod):
    plan = planned(name, pod, seeds=256)
    assert plan.fits and plan.mesh == {"trial": 256, "data": 1, "model": 1}
    assert plan.collectives == {} and plan.num_trials == 1


def test_trials_train_with_the_gpu_kernels():
    plan = planned("multi30k", "h200:8", seeds=16, implementation="gpu")
    assert plan.fits and plan.mesh == {"trial": 8, "data": 1, "model": 1}
    assert plan.collectives == {} and plan.num_trials == 2


def test_the_command_prints_a_plan_and_nothing_else():
    """As users call it, who do not name a platform."""
    command = f"{sys.executable} train.py --config=configs/modern.py --dry_run=h200:1"
    command += " --config.model.num_decoder_layers=1"
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        command.split(),
        cwd=FOLDER.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "h200:1, per chip" in done.stdout and "trials on a chip" in done.stdout
    assert "Traceback" not in done.stderr and "cuDNN" not in done.stderr


def test_what_is_too_large_is_told_with_a_mend():
    config = importlib.import_module("headcount.configs.numbers").get_config()
    chip = targets.CHIPS["v5e"]
    mesh = {"trial": 1, "data": 2, "model": 1}
    plan = dry_run.Plan(10, 20, 60, 100, 100, {}, 0, 0, 1.0, chip, 2, mesh, {})
    tight = plan._replace(capacity=99)
    assert plan.fits and dry_run.advice(plan, config) is None
    assert not tight.fits and "mesh.shard=parameters" in dry_run.advice(tight, config)
    alone = tight._replace(mesh=mesh | {"data": 1})
    assert "mesh.shard" not in dry_run.advice(alone, config)
    config.train.accumulate_steps = 4
    assert "accumulate_steps=8" in dry_run.advice(tight, config)
    assert plan.trials_that_fit == 2 and tight.trials_that_fit == 1
