"""What the trials of a group may differ in, and whose a workdir is."""

import json
import subprocess
from datetime import UTC, datetime

import numpy as np
import pytest

from headcount.configs.base import get_config
from headcount.configs.commandline import flat
from headcount.runtime import workdir as workdir_module
from headcount.runtime.workdir import changes, claim, record, write_json
from headcount.training.trials import named, numbers, trials_of

RATE = "optimizer.learning_rate"


def settings(**changes):
    config = get_config()
    config.update_from_flattened_dict(changes)
    return flat(config.to_dict())


def listed(tmp_path, trials):
    path = tmp_path / "trials.json"
    path.write_text(trials if isinstance(trials, str) else json.dumps(trials))
    return path


def test_seeds_count_from_the_seed():
    assert trials_of(settings(seed=4, seeds=3)) == [{"seed": s} for s in (4, 5, 6)]


def test_every_listed_trial_has_its_seed_and_what_the_others_differ_in(tmp_path):
    path = listed(tmp_path, [{"optimizer.warmup_steps": 5}, {"seed": 2}])
    config = settings(seed=1)
    trials = trials_of(config, path)
    assert trials == [
        {"seed": 1, "optimizer.warmup_steps": 5},
        {"seed": 2, "optimizer.warmup_steps": config["optimizer.warmup_steps"]},
    ]
    assert named(trials, 0) == "trial 0 (seed 1, optimizer.warmup_steps 5)"
    arrays = numbers(config, trials)
    assert arrays["seed"].tolist() == [1, 2]
    assert arrays["optimizer"].pop("warmup_steps").tolist() == [5, 400]
    for name, column in arrays.pop("optimizer").items():
        assert column.dtype == np.float32 and column.shape == (2,)
        np.testing.assert_allclose(column, config[f"optimizer.{name}"])
    np.testing.assert_allclose(arrays["dropout"], 0.1)
    np.testing.assert_allclose(arrays["label_smoothing"], 0.1)


def test_a_trial_is_named_by_the_whole_of_its_seed():
    trials = [{"seed": 1234567, RATE: 0.0005}, {"seed": 1234568, RATE: 1e-5}]
    assert named(trials, 0) == f"trial 0 (seed 1234567, {RATE} 0.0005)"
    assert named(trials, 1) == f"trial 1 (seed 1234568, {RATE} 1e-05)"


def test_head_gates_are_one_where_no_trial_sets_them(tmp_path):
    gates = [{"head_gates.cross.1.3": 0}, {"seed": 2, "head_gates.cross.0.0": 0.5}]
    config = settings(**{"model.cross_attention.num_heads": 6})
    trials = trials_of(config, listed(tmp_path, gates))
    assert trials[0] == {
        "seed": 0,
        "head_gates.cross.1.3": 0,
        "head_gates.cross.0.0": 1,
    }
    (site, found), *others = numbers(config, trials)["head_gates"].items()
    assert (site, found.shape, others) == ("cross", (2, 2, 6), [])
    assert (found[0, 1, 3], found[1, 0, 0], found.sum()) == (0, 0.5, 22.5)
    assert numbers(config, [{"seed": 0}])["head_gates"] == {}


@pytest.mark.parametrize(
    "trials, sentence",
    [
        ([{"model.width": 64}], r"trial 0 .*model.width changes the program"),
        ([{}, {"optimizer.schedule": 1}], "trial 1 .*optimizer.schedule changes"),
        ([{"model.dropuot": 0.1}], r"key model.dropuot. Did you mean model.dropout\?"),
        ([{"model.dropout": "high"}], "model.dropout must be a number, got 'high'"),
        ([{"model.dropout": 1.0}], "model.dropout must be from 0 to below 1, got 1"),
        ([{"model.dropout": True}], "model.dropout must be a number, got True"),
        ([{"optimizer.clip_norm": float("nan")}], "clip_norm must be from 0 .* nan"),
        ([{"seed": 0.5}], "seed must be a whole number, got 0.5"),
        ([{"seed": -1}], "seed must be from 0"),
        ([{"head_gates.cross.0": 0}], "must be head_gates.SITE.LAYER.HEAD"),
        ([{"head_gates.crss.0.0": 0}], "must be head_gates.SITE.LAYER.HEAD"),
        ([{"head_gates.cross.2.0": 0}], "no head: cross has 2 layers of 4 heads"),
        ([{"head_gates.encoder.0.4": 0}], "no head: encoder has 2 layers of 4 heads"),
        ([{"head_gates.encoder.0.0": -1}], "head_gates.encoder.0.0 must be from 0"),
        ([{"seed": 0}, {}], "trial 1 .*is the same as trial 0"),
        ([], "must hold a list of trials"),
        ({"seed": 1}, "must hold a list of trials"),
        ([3], "trial 0 .*must be an object .* got 3"),
        ("[{", "can't be read as JSON"),
        ("[" * 10**5, "trials.json can't be read as JSON: it is nested too deeply"),
        ('[{"seed": 1, "seed": 2}]', "an object has the key seed twice"),
        ([{RATE: 1e39}], r"learning_rate must be from 0 to below 3.4e\+38, got 1e"),
        ([{RATE: 10**400}], "learning_rate must be from 0 to below 3.4"),
        ([{RATE: 1e-50}], "learning_rate must .* in float32 too, and 1e-50 is 0.0"),
        ([{"optimizer.beta2": 1 - 1e-12}], "below 1 in float32 too, and .* is 1.0"),
        ([{"head_gates.encoder.0.0": 1e39}], "head_gates.encoder.0.0 must be from 0"),
        ([{"head_gates.cross.00.3": 0}], "must be head_gates.SITE.LAYER.HEAD"),
        ([{"head_gates.cross.0.٣": 0}], "must be head_gates.SITE.LAYER.HEAD"),
    ],
)
def test_a_trial_that_cannot_be_is_named(tmp_path, trials, sentence):
    with pytest.raises(ValueError, match=sentence):
        trials_of(settings(), listed(tmp_path, trials))


def test_seeds_and_a_list_do_not_mix(tmp_path):
    path = listed(tmp_path, [{"seed": 1}])
    with pytest.raises(ValueError, match="config.seeds must stay 1, got 2"):
        trials_of(settings(seeds=2), path)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"optimizer.label_smoothing": 1.0}, "config.optimizer.label_smoothing must"),
        ({"optimizer.epsilon": 0.0}, "config.optimizer.epsilon must be from 1e-37"),
        ({"seed": 2**32 - 1, "seeds": 2}, "the last seed must be .* below 4294967296"),
    ],
)
def test_a_number_of_the_config_out_of_range_is_named(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        trials_of(settings(**change))


@pytest.mark.parametrize(
    "begun",
    [
        lambda workdir: (workdir / "metrics.jsonl").touch(),
        lambda workdir: (workdir / "checkpoints" / "7").mkdir(parents=True),
    ],
)
def test_a_workdir_keeps_its_trials(tmp_path, begun):
    config = get_config().to_dict()
    trials = [{"seed": 0, "c": 1}, {"seed": 1, "c": 1}]
    with claim(tmp_path, config, trials):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    record(tmp_path, config, trials, {})
    with claim(tmp_path, config, trials[:1]):  # nothing is trained yet
        pass
    record(tmp_path, config, trials[:1], {})
    begun(tmp_path)
    for now, words in (
        ([{"seed": 0, "c": 2}], r"trials\[0\].c \(there 1, now 2\)"),
        (trials, r"trials\[1\] \(there 'unset', now \{'seed': 1"),
        ([{"seed": s} for s in range(9)], "and 4 more"),
    ):
        with pytest.raises(ValueError, match=words), claim(tmp_path, config, now):
            pass
    with (
        pytest.raises(ValueError, match=r"seeds \(there 1, now 2\)"),
        claim(tmp_path, config | {"seeds": 2}, trials[:1]),
    ):
        pass
    assert json.loads((tmp_path / "trials.json").read_text()) == trials[:1]


def test_a_run_of_before_a_key_existed_is_the_same(tmp_path):
    """And what it has, or was not its default, differs as ever."""
    config = get_config().to_dict()
    before = get_config().to_dict()
    del before["model"]["attention"]["talking_heads"], before["mesh"]
    before["model"]["cross_attention"].pop("talking_heads")
    record(tmp_path, before, [{"seed": 0}], {})
    (tmp_path / "metrics.jsonl").touch()
    assert changes(tmp_path, config, [{"seed": 0}], get_config().to_dict()) == []
    config["model"]["attention"]["talking_heads"] = True
    for now, there, words in (
        (config, before, r"talking_heads \(there False, now True\)"),
        (get_config().to_dict(), before | {"x": 3}, r"x \(there 3, now 'unset'\)"),
    ):
        record(tmp_path, there, [{"seed": 0}], {})
        held = claim(tmp_path, now, [{"seed": 0}], get_config().to_dict())
        with pytest.raises(ValueError, match=words), held:
            pass


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("config.json", '{"seed": ', "is damaged .*; restore it"),
        ("config.json", "", "is damaged .*; restore it"),
        ("config.json", "[" * 10**5, "is damaged .*too deeply.*; restore it"),
        ("trials.json", '[{"seed": 0, "seed": 1}]', "is damaged .*seed twice"),
        ("config.json", "{}", "is not what train.py writes there; restore it"),
        ("config.json", "[]", "is not what train.py writes there; restore it"),
        ("config.json", '{"model_type": "bert"}', "is not .* choose another --workdir"),
        ("trials.json", "[]", "is not what train.py writes there"),
        ("trials.json", '{"seed": 0}', "is not what train.py writes there"),
        ("trials.json", '[{"seed": "0"}]', "is not what train.py writes there"),
    ],
)
def test_a_file_that_is_not_ours_is_named_and_left(tmp_path, name, text, words):
    """Nor is a lock left beside it."""
    (tmp_path / name).write_text(text)
    config = get_config().to_dict()
    with (
        pytest.raises(ValueError, match=f"{name} {words}"),
        claim(tmp_path, config, [{"seed": 0}]),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == text


def test_a_run_keeps_the_time_of_its_first_start(tmp_path):
    config, trials = get_config().to_dict(), [{"seed": 0}]
    path = tmp_path / "run.json"

    def recorded(facts):
        record(tmp_path, config, trials, facts)
        return json.loads(path.read_text())

    path.write_text('{"started": "of a start that failed"}')
    started = recorded({})["started"]
    age = datetime.now(UTC) - datetime.fromisoformat(started)
    assert -1 <= age.total_seconds() < 60
    (tmp_path / "metrics.jsonl").touch()
    path.write_text('{"started": "2026-01-01T00:00:00+00:00"}')
    assert recorded({"commit": "c"}) == {
        "started": "2026-01-01T00:00:00+00:00",
        "commit": "c",
    }
    path.write_text("{}")  # a run of before starts were recorded goes on
    assert recorded({})["started"] is None


def test_what_changes_the_bits_of_a_run_is_told_at_its_next_start(tmp_path):
    config, trials = get_config().to_dict(), [{"seed": 0}]
    facts = {"attention": {"encoder": "cpu"}, "dtype": "float32", "commit": "a"}
    assert record(tmp_path, config, trials, facts) == ""
    (tmp_path / "metrics.jsonl").touch()
    assert record(tmp_path, config, trials, facts | {"commit": "b", "cores": 2}) == ""
    changed = facts | {"attention": {"encoder": "blockwise"}, "cores": 4}
    told = record(tmp_path, config, trials, changed)
    assert "attention.encoder (there 'cpu', now 'blockwise')" in told
    assert "cores (there 2, now 4)" in told


def test_a_number_that_is_not_finite_is_null(tmp_path):
    write_json(tmp_path / "a.json", [{"loss": float("nan"), "bleu": (1.5, -np.inf)}])
    found = json.loads((tmp_path / "a.json").read_text())
    assert found == [{"loss": None, "bleu": [1.5, None]}]


def test_changed_code_is_told_apart(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "training").mkdir()
    monkeypatch.setattr(workdir_module, "__file__", str(tmp_path / "training/x.py"))
    file = tmp_path / "code.py"
    file.write_text("1")
    for line in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *line], cwd=tmp_path, check=True)
    clean = workdir_module.commit()
    told = {clean}
    for text in ("2", "3"):
        file.write_text(text)
        told.add(workdir_module.commit())
        assert workdir_module.commit().startswith(f"{clean}-dirty-")
    assert len(told) == 3


def test_a_folder_of_other_data_may_be_of_the_same_run(tmp_path):
    config, trials = get_config().to_dict(), [{"seed": 0}]
    record(tmp_path, config, trials, {})
    moved = config | {"data": config["data"] | {"directory": "there"}}
    assert changes(tmp_path, moved, trials) == []
