"""Checkpoints: what is read equals what was written, or it raises."""

import errno
import json
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headcount.configs.base import get_config
from headcount.configs.validation import flat
from headcount.models.cost import abstract
from headcount.runtime import distributed
from headcount.training.checkpoint import Checkpoints, Damaged, SaveError
from headcount.training.restore import (
    parameters_to_start_from,
    restore_parameters,
    with_parameters,
)
from headcount.training.step import TrainState, init, make_static
from headcount.training.trials import hyperparameters
from tests.model_cases import build_of
from tests.runs import run

TREE = {
    "kernel": jnp.arange(5000.0).reshape(50, 100),
    "inner": (jnp.ones(3), np.int32(7)),
}


def of(step):
    return {"kernel": TREE["kernel"] * step, "inner": (jnp.ones(3), np.int32(step))}


@pytest.fixture
def saved(tmp_path):
    """Save checkpoints of the steps 1, 2 and 3; return the workdir."""
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, params=of(step), more={"step": np.int32(step)})
    checkpoints.wait()
    checkpoints.close()
    return tmp_path


def largest_file(workdir, step, item="params"):
    files = (workdir / "checkpoints" / str(step) / item).rglob("*")
    return max((f for f in files if f.is_file()), key=lambda f: f.stat().st_size)


def reopen(workdir, **abstract):
    checkpoints = Checkpoints(workdir, keep=3)
    try:
        return checkpoints.restore_last(**abstract)
    finally:
        checkpoints.close()


def test_a_checkpoint_round_trips(saved):
    step, items = reopen(saved, params=TREE, more={"step": np.int32(0)})
    assert step == 3 and items["more"]["step"] == 3
    np.testing.assert_array_equal(items["params"]["kernel"], of(3)["kernel"])
    assert items["params"]["inner"][1] == 3


@pytest.mark.slow
def test_the_state_of_an_optimizer_with_two_groups_round_trips(tmp_path):
    config = get_config()
    arrays = hyperparameters(
        flat(config.to_dict()), [{"seed": 0}, {"seed": 1, "optimizer.muon_beta": 0.5}]
    )
    config.optimizer.name = "muon"
    build = build_of()
    static = make_static(abstract(build), config, loss=None)
    state = init(arrays, static=static, build=build)
    leaves, structure = jax.tree.flatten(state.opt_state)
    leaves = [x + i for i, x in enumerate(leaves, 1)]
    state = state._replace(opt_state=jax.tree.unflatten(structure, leaves))
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, optimizer=state.opt_state)
    checkpoints.wait()
    checkpoints.close()
    _, found = reopen(tmp_path, optimizer=jax.eval_shape(lambda: state.opt_state))
    assert jax.tree.structure(found["optimizer"]) == structure
    for old, new in zip(leaves, jax.tree.leaves(found["optimizer"]), strict=True):
        np.testing.assert_array_equal(old, new)


def test_only_the_last_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, params=of(step))
    checkpoints.wait()
    assert checkpoints.steps() == [3, 4]
    checkpoints.close()


def test_a_checkpoint_left_by_a_signal_displaces_none_that_was_due(tmp_path):
    for steps in ((10, 20, 25), (30, 32), (40, 50, 52)):  # three starts of a run
        checkpoints = Checkpoints(tmp_path, keep=3, every=10)
        for step in steps:
            checkpoints.save(step, params=of(step))
        checkpoints.wait()
        kept = checkpoints.steps()
        checkpoints.close()
        assert kept == {25: [10, 20, 25], 32: [20, 30, 32], 52: [40, 50, 52]}[step]


def test_a_checkpoint_left_before_the_first_update_is_not_averaged(tmp_path):
    for step in (0, 10, 20):
        checkpoints = Checkpoints(tmp_path, keep=3, every=10)
        checkpoints.save(step, params=of(step))
        checkpoints.wait()
        kept = checkpoints.steps()
        checkpoints.close()
        assert kept == {0: [0], 10: [10], 20: [10, 20]}[step]


def test_last_parameters_of_a_trial_that_ended_early_have_the_step_of_its_end(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    marks = {"step": np.array([40, 25]), "diverged_at": np.zeros(2)}
    params = {"kernel": np.ones((2, 3), np.float32)}
    checkpoints.save(40, params=params, trials=marks)
    checkpoints.wait()
    checkpoints.close()
    one = {"kernel": jax.ShapeDtypeStruct((3,), np.float32)}
    assert restore_parameters(tmp_path, "last", 2, one)[1].tolist() == [40, 25]


def test_average_of_a_trial_that_ended_early_counts_its_end_once(tmp_path, capsys):
    """The checkpoints after its end hold copies of what it ended as."""
    checkpoints = Checkpoints(tmp_path, keep=4)
    ends = np.array([40.0, 25.0, 5.0])  # of three trials
    for step in (10, 20, 30, 40):
        kernel = np.minimum(step, ends)[:, None] * np.ones((3, 2), np.float32)
        marks = {"step": np.minimum(step, ends), "diverged_at": np.zeros(3)}
        checkpoints.save(step, params={"kernel": kernel}, trials=marks)
    checkpoints.wait()
    checkpoints.close()
    one = {"kernel": jax.ShapeDtypeStruct((2,), np.float32)}
    params, steps, _ = restore_parameters(tmp_path, "average", 3, one)
    means = [(10 + 20 + 30 + 40) / 4, (10 + 20 + 25) / 3, 5]
    np.testing.assert_allclose(params["kernel"][:, 0], means, rtol=1e-6)
    assert params["kernel"].dtype == np.float32 and steps.tolist() == [40, 25, 5]
    said = capsys.readouterr().err
    assert "Averaged 4 checkpoints" in said
    for trial, end, count in ((1, 25, 3), (2, 5, 1)):
        assert f"Trial {trial} ended at step {end}: " in said
        assert f"only {count} of these checkpoints count" in said


def trained(workdir, best, score=None, diverged_at=0):
    """Save a run whose best parameters, one number per trial, are of steps 5, 6, ..."""
    count = len(best)
    score = np.arange(1.0, count + 1) if score is None else np.array(score)
    at = np.where(np.isfinite(score), np.arange(5, 5 + count), 0)
    kept = {"params": {"kernel": np.outer(best, np.ones(3, np.float32))}}
    checkpoints = Checkpoints(workdir, keep=2)
    for step in (10, 20):
        checkpoints.save(
            step,
            params={"kernel": np.full((count, 3), step, np.float32)},
            trials={
                "step": np.full(count, step),
                "diverged_at": np.zeros(count) + diverged_at,
            },
            best=kept | {"score": score, "step": at},
        )
    checkpoints.wait()
    checkpoints.close()
    (workdir / "config.json").write_text(json.dumps(get_config().to_dict()))
    (workdir / "trials.json").write_text(
        json.dumps([{"seed": i} for i in range(count)])
    )


@pytest.mark.parametrize(
    "which, values, at",
    [
        ("best", [7, 8], [5, 6]),
        ("last", [20, 20], [20, 20]),
        ("average", [15, 15], [20, 20]),
    ],
)
def test_best_last_and_average_parameters_have_their_own_steps(
    tmp_path, which, values, at
):
    trained(tmp_path, [7, 8])
    one = {"kernel": jax.ShapeDtypeStruct((3,), np.float32)}
    params, steps, _ = restore_parameters(tmp_path, which, 2, one)
    np.testing.assert_array_equal(params["kernel"], np.outer(values, np.ones(3)))
    assert steps.tolist() == at


@pytest.mark.parametrize(
    "score, before, diverged_at",
    [
        ([1.0, -np.inf], 0, [0, 20]),
        ([-np.inf, -np.inf], 0, None),
        ([-np.inf, -np.inf], [0, 3], None),  # the first has not been evaluated yet
        ([-np.inf, -np.inf], [2, 3], [2, 3]),
    ],
)
def test_a_trial_without_a_finite_score_counts_as_diverged(
    tmp_path, score, before, diverged_at
):
    """The others of its group can be scored all the same."""
    trained(tmp_path, [7, 8], score, before)
    one = {"kernel": jax.ShapeDtypeStruct((3,), np.float32)}
    if diverged_at is None:
        with pytest.raises(ValueError, match="has no evaluated checkpoint yet"):
            restore_parameters(tmp_path, "best", 2, one)
    else:
        assert restore_parameters(tmp_path, "best", 2, one)[2].tolist() == diverged_at


@pytest.mark.parametrize("best, values", [([7, 8], [7, 8]), ([7], [7, 7])])
def test_a_run_starts_from_the_best_parameters_of_another(
    tmp_path, best, values, capsys
):
    """Each trial with its own, or all with the only one."""
    trained(tmp_path, best)
    head = "head_gates.cross.0.1"
    theirs = [{"seed": 0, head: 0}, {"seed": 1, head: 1}][: len(best)]
    (tmp_path / "trials.json").write_text(json.dumps(theirs))
    state = TrainState(None, {"kernel": jnp.zeros((2, 3))}, None, None, None)
    ours, config = [{"seed": 0}, {"seed": 1, head: 0}], get_config()
    params = parameters_to_start_from(str(tmp_path), config, ours, state.params)
    found = with_parameters(state, params).params["kernel"]
    np.testing.assert_array_equal(found, np.outer(values, np.ones(3)))
    logged = capsys.readouterr().err
    assert f"Trial 0 starts from parameters that were trained with {head}=0" in logged
    assert (f"trained with {head}=1, and has 0" in logged) == (len(best) == 2)
    assert "model." not in logged  # the configs are equal


def test_starting_from_another_model_logs_the_differences(tmp_path, capsys):
    trained(tmp_path, [7])
    config = get_config()
    config.model.norm = "pre"
    params = {"kernel": jnp.zeros((1, 3))}
    parameters_to_start_from(str(tmp_path), config, [{"seed": 0}], params)
    assert "model.norm (there 'post', now 'pre')" in capsys.readouterr().err


def test_starting_from_parameters_that_do_not_fit_raises_with_the_reason(tmp_path):
    trained(tmp_path, [7, 8])
    config, trials = get_config(), [{"seed": 0}, {"seed": 1}]
    config.model.width = 64
    start = partial(parameters_to_start_from, str(tmp_path), config)
    with pytest.raises(ValueError, match=r"train.init_from=.*kernel.*model\.width"):
        start(trials, {"kernel": jnp.zeros((2, 4))})
    with pytest.raises(ValueError, match="train.init_from=.* 2 trials .* 3;"):
        start([*trials, {"seed": 2}], {"kernel": jnp.zeros((3, 3))})


def test_starting_from_a_trial_without_an_evaluation_raises_with_its_number(tmp_path):
    trained(tmp_path, [7, 8], score=[1.0, -np.inf], diverged_at=[0, 3])
    trials, params = [{"seed": 0}, {"seed": 1}], {"kernel": jnp.zeros((2, 3))}
    with pytest.raises(ValueError, match="train.init_from=.*trials 1 diverged"):
        parameters_to_start_from(str(tmp_path), get_config(), trials, params)


def cut_short(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut_short, flip_a_bit, os.unlink])
def test_a_damaged_checkpoint_is_logged_and_the_one_before_restored(
    saved, damage, capsys
):
    damage(largest_file(saved, 3))
    step, items = reopen(saved, params=TREE)
    assert step == 2
    np.testing.assert_array_equal(items["params"]["kernel"], of(2)["kernel"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "step 3 is damaged" in line and "kernel" in line
    assert (saved / "damaged" / "3").is_dir(), "nothing on disk may be lost"


@pytest.mark.parametrize(
    "which, item, step",
    [("best", "best", 20), ("last", "params", 20), ("average", "params", 10)],
)
def test_scores_are_not_of_another_checkpoint_than_a_damaged_one(
    tmp_path, which, item, step
):
    trained(tmp_path, [7, 8])
    cut_short(largest_file(tmp_path, step, item))
    one = {"kernel": jax.ShapeDtypeStruct((3,), np.float32)}
    folder = tmp_path / "checkpoints" / str(step)
    with pytest.raises(ValueError, match=f"^{folder} is damaged .* Restore it .*train"):
        restore_parameters(tmp_path, which, 2, one)
    assert folder.is_dir() and not (tmp_path / "damaged").exists()


def test_training_does_not_start_over_if_all_checkpoints_are_damaged(saved):
    """Not at the next start either, which would drop the metrics so far.

    They stay where they are: they may be another program's.
    """
    for step in (1, 2, 3):
        cut_short(largest_file(saved, step))
    for _ in range(2):
        with pytest.raises(ValueError, match="no intact checkpoint .*damaged"):
            reopen(saved, params=TREE)
    assert {"1", "2", "3"} <= {p.name for p in (saved / "checkpoints").iterdir()}
    assert not (saved / "damaged").exists()


def test_every_flipped_byte_is_detected(saved):
    """Also where Orbax does not check: in the numbers and in the checksums."""
    path = largest_file(saved, 3)
    whole = path.read_bytes()
    reader = Checkpoints(saved)
    got = reader.read(3, "params", TREE)  # the file as it is
    np.testing.assert_array_equal(got["kernel"], of(3)["kernel"])
    damaged = 0
    for at in np.linspace(0, len(whole) - 1, 25).astype(int):
        content = bytearray(whole)
        content[at] ^= 0x10
        path.write_bytes(content)
        try:
            got = reader.read(3, "params", TREE)
        except Damaged:
            damaged += 1
            continue
        np.testing.assert_array_equal(got["kernel"], of(3)["kernel"])
    reader.close()
    assert damaged > 12, "most of the file are numbers"


def test_a_checkpoint_of_another_model_raises_with_the_leaf(saved):
    reader = Checkpoints(saved)
    with pytest.raises(ValueError, match=r"kernel has shape \(50, 100\), .*\(2, 2\)"):
        reader.read(3, "params", {"kernel": jnp.ones((2, 2)), "inner": TREE["inner"]})
    with pytest.raises(ValueError, match="has no bias"):
        reader.read(3, "params", TREE | {"bias": jnp.ones(1)})
    reader.close()
    with pytest.raises(ValueError, match="of another model"):
        reopen(saved, params=TREE | {"bias": jnp.ones(1)})
    assert not (saved / "damaged").exists()


FULL_DISK = """
import pathlib, resource, sys
import numpy as np
from headcount.training.checkpoint import Checkpoints, SaveError
checkpoints = Checkpoints(pathlib.Path(sys.argv[1]), keep=3)
params = {"kernel": np.random.default_rng(0).normal(size=(300, 300))}
checkpoints.save(1, params=params)
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # of bytes a file
try:
    checkpoints.save(2, params=params)
    checkpoints.wait()
except SaveError as error:
    print(error)
    sys.exit(3)
sys.exit(0)  # before eval.py starts
"""


def test_a_full_disk_leaves_the_previous_checkpoint_intact(tmp_path):
    """Files cannot grow past a limit, which to the writer is the same."""
    ran = run(["eval.py", tmp_path], before=FULL_DISK)
    assert ran.returncode == 3, ran.stderr
    assert "could not be written" in ran.stdout and "step 1 is intact" in ran.stdout
    reader = Checkpoints(tmp_path)
    assert reader.steps() == [1]
    like = {"kernel": np.zeros((300, 300))}
    expected = np.random.default_rng(0).normal(size=(300, 300))
    np.testing.assert_array_equal(reader.read(1, "params", like)["kernel"], expected)
    reader.close()


@pytest.mark.parametrize("keep", [3, None])
def test_a_file_in_place_of_the_checkpoint_folder_raises(tmp_path, keep):
    (tmp_path / "checkpoints").write_text("precious")
    with pytest.raises(ValueError, match="checkpoints is a file"):
        Checkpoints(tmp_path, keep)


def test_save_error_names_the_reason_and_the_intact_step(saved):
    checkpoints = Checkpoints(saved, keep=3)
    error = checkpoints.save_error(OSError("No space left on device"))
    checkpoints.close()
    assert isinstance(error, SaveError)
    assert "No space left on device; step 3 is intact" in str(error)


def test_processes_restore_a_checkpoint_that_all_of_them_see(tmp_path, monkeypatch):
    """Another process has listed the folder before the last save ended."""
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        kernel = step * np.ones((2, 4), np.float32)
        marks = {"step": np.array([step, step]), "diverged_at": np.zeros(2)}
        checkpoints.save(step, params={"kernel": kernel}, trials=marks)
    checkpoints.wait()
    checkpoints.close()

    def gather(value):
        return [value, [1, 2]] if value == [1, 2, 3] else [value]

    monkeypatch.setattr(distributed, "gather", gather)
    one = {"kernel": jax.ShapeDtypeStruct((4,), np.float32)}
    for which, wanted in (("last", 2.0), ("average", 1.5)):
        params, steps, _ = restore_parameters(tmp_path, which, 2, one)
        assert np.unique(params["kernel"]) == wanted and steps.tolist() == [2, 2]


def test_all_processes_fail_where_one_has_no_run_to_start_from(tmp_path, monkeypatch):
    shared = []

    def gather(value):
        shared.append(value)
        return [value]

    monkeypatch.setattr(distributed, "gather", gather)
    for folder in (str(tmp_path), "~nobody1/x"):  # there is no such user
        with pytest.raises(FileNotFoundError, match="train.init_from=.*config.json"):
            parameters_to_start_from(folder, None, [{}], None)
        assert "config.json" in shared.pop()  # what the others raise


def test_a_damaged_checkpoint_is_moved_across_file_systems(saved, monkeypatch):
    """The folder of the checkpoints may be a link."""
    rename = os.rename

    def of_one_file_system(source, target, **options):
        if "damaged" in str(target):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return rename(source, target, **options)

    cut_short(largest_file(saved, 3))
    monkeypatch.setattr(os, "rename", of_one_file_system)
    assert reopen(saved, params=TREE)[0] == 2
    assert (saved / "damaged" / "3").is_dir()
    assert not (saved / "checkpoints" / "3").exists()
