"""The package, installed from a wheel into an environment of its own."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.processes import ROOT

OWN_PROJECT = """
import data, models  # the user's own, with names that ours have too
import importlib.resources, importlib.util
import jax
import jax.numpy as jnp
import numpy as np
from headcount import attention

assert (models.NAME, data.NAME) == ("mine", "mine")
assert importlib.util.find_spec("flax") is None
assert importlib.resources.files(attention).joinpath("py.typed").is_file()
x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 4, 8)), jnp.float32)
found = attention.dot_product_attention(x, x, x, is_causal=True)
wanted = jax.nn.dot_product_attention(x, x, x, is_causal=True)
np.testing.assert_allclose(found, wanted, atol=1e-5)
print(attention.__file__)
"""
README = (ROOT / "attention" / "README.md").read_text()


def run(*command, cwd, **environment):
    """Run a command outside of the repository; return its output."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ran = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip = sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"
    run(*pip, "-w", folder, ROOT, cwd=folder)
    (found,) = folder.glob("headcount-*.whl")
    return found


def test_attention_alone_in_another_project_with_the_same_folder_names(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", wheel, cwd=tmp_path)
    project = tmp_path / "project"
    for name in ("models", "data"):
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text('NAME = "mine"\n')
    example = README.split("```python\n")[1].split("```")[0]
    script = OWN_PROJECT + example
    out = run(python, "-c", script, cwd=project, JAX_PLATFORMS="cpu")
    assert str(tmp_path / "env") in out
    ran = subprocess.run(
        [tmp_path / "env" / "bin" / "headcount", "train"],
        cwd=project,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2 and "headcount[lab]" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_command_trains_and_scores_from_another_folder(tmp_path):
    command = Path(sys.executable).with_name("headcount")
    small = ["--config.model.width=16", "--config.train.num_steps=4", "--workdir=run"]
    config = "--config=configs/stories.py"
    run(command, "train", config, *small, cwd=tmp_path, JAX_PLATFORMS="cpu")
    scored = run(
        command,
        "eval",
        "--workdir=run",
        "--split=val",
        cwd=tmp_path,
        JAX_PLATFORMS="cpu",
    )
    assert "loss" in scored
    assert (tmp_path / "run" / "result-val.json").exists()
