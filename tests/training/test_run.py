"""Loading a run: its parameters, its vocabularies, and errors that name the file."""

import json

import jax
import numpy as np
import pytest

from headcount.data import numbers, tokenizers
from headcount.training.checkpoint import Checkpoints
from headcount.training.restore import READERS
from headcount.training.run import choose_trials, load, read_config


@pytest.fixture
def mesh():
    """`load` sets the mesh of the process; set back what was there."""
    with jax.set_mesh(jax.make_mesh((1,), ("before",))):
        yield


@pytest.mark.parametrize("which", READERS)
def test_a_run_is_loaded_with_the_parameters_that_are_asked_for(trained, which, mesh):
    run = load(trained, which)
    assert run.trials == json.loads((trained / "trials.json").read_text())
    assert run.step == [60, 60] and run.diverged_at == [None, None]
    checkpoints = Checkpoints(trained)
    if which == "last":
        wanted = checkpoints.read(60, "params", run.params)
    elif which == "best":
        wanted = checkpoints.read(60, "best", {"params": run.params})["params"]
    else:
        steps = checkpoints.steps()
        assert len(steps) == 5
        read = [checkpoints.read(step, "params", run.params) for step in steps]
        wanted = jax.tree.map(lambda *x: np.mean(x, axis=0), *read)
    checkpoints.close()
    for one, other in zip(*map(jax.tree.leaves, (run.params, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)


def test_a_loaded_run_gives_the_dev_scores_of_its_training(trained, mesh):
    run = load(trained, "last")
    rows = run.task.evaluate(run, run.task.load("val"), quick=True)
    lines = (trained / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines if "dev_loss" in line]
    for row in logged[-2:]:
        found = rows[row["trial"]]
        assert row["dev_loss"] == pytest.approx(found["loss"], rel=1e-5)
        assert row["dev_bleu"] == pytest.approx(found["bleu"])


def test_a_loaded_run_is_evaluated_on_its_own_mesh(trained, mesh):
    """Another run may have been loaded since."""
    run = load(trained, "last")
    wanted = run.evaluate("val", quick=True)
    with jax.set_mesh(jax.make_mesh((1,), ("after",))):
        assert run.evaluate("val", quick=True) == wanted


def test_a_trial_of_a_loaded_run_has_its_own_parameters(trained, mesh):
    run = load(trained)
    for trial in (0, 1):
        params, gates = run.of(trial)
        assert gates == {}
        for one, every in zip(*map(jax.tree.leaves, (params, run.params)), strict=True):
            np.testing.assert_array_equal(one, every[trial])
    with pytest.raises(ValueError, match="trial must be from 0 to 1, got 2"):
        run.of(2)


class Flag:
    """A flag of the command line."""

    def __init__(self, value=0, present=0):
        self.value, self.present = value, present


def test_diverged_trials_are_scored_only_by_name_or_if_all_are(trained, mesh):
    run = load(trained)._replace(diverged_at=[None, 7])
    assert choose_trials(run, Flag()) == [0]
    assert choose_trials(run, Flag(1, present=1)) == [1]
    assert choose_trials(run._replace(diverged_at=[3, 7]), Flag()) == [0]
    with pytest.raises(ValueError, match="--trial .* 2"):
        choose_trials(run, Flag(2, present=1))


def test_an_unknown_kind_of_parameters_raises(trained):
    with pytest.raises(ValueError, match="best, last, average, got 'worst'"):
        load(trained, "worst")


def test_a_folder_without_a_run_raises_with_its_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} .*config.json"):
        load(tmp_path)
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=f"{tmp_path / 'groups'}"):
        load(tmp_path)


def test_a_key_that_this_version_lacks_raises_with_its_name(workdir):
    """As in a newer version's run."""
    path = workdir / "config.json"
    config = json.loads(path.read_text())
    config["model"]["attention"]["num_hedas"] = 2
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config.json .*num_hedas"):
        read_config(workdir)


@pytest.mark.parametrize("name", ["config.json", "run.json", "trials.json"])
def test_a_damaged_file_of_a_run_raises_with_its_name(workdir, name):
    (workdir / name).write_text("{")
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        load(workdir)


def test_a_vocabulary_of_the_same_size_that_was_replaced_raises(workdir):
    """It would give answers in other words."""
    folder = workdir / "tokenizer"
    sizes = tokenizers.pair_vocab_sizes(tokenizers.load_pair(folder))
    french = numbers.phrases(range(2000), "fr")
    other = tokenizers.train_sentencepiece(french, sizes[0])
    (folder / "joint.model").write_bytes(other)
    assert tokenizers.pair_vocab_sizes(tokenizers.load_pair(folder)) == sizes
    with pytest.raises(ValueError, match=f"{folder} has other vocabularies"):
        load(workdir)


@pytest.mark.parametrize(
    "name, keys, value, culprit",
    [
        ("config.json", ["model", "mlp_dim"], 17, "config.json and .*tokenizer"),
        ("run.json", ["num_parameters"], "9", "run.json says num_parameters: 9"),
        ("run.json", ["trials"], 3, "trials.json lists 2 trials, .* trials: 3"),
        ("run.json", ["task", "name"], "tagging", "task.name=translation.*tagging"),
        ("run.json", ["task"], None, "task.name=translation.*None"),
    ],
)
def test_a_run_of_another_model_or_task_than_was_trained_raises(
    workdir, name, keys, value, culprit
):
    """A task of a model of the same shapes would give answers without a meaning."""
    tree = json.loads((workdir / name).read_text())
    *path, last = keys
    section = tree
    for key in path:
        section = section[key]
    section[last] = value
    (workdir / name).write_text(json.dumps(tree))
    with pytest.raises(ValueError, match=culprit):
        load(workdir)
