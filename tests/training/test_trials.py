"""Trials of a group, and the files that say which run a workdir holds."""

import json
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version

import numpy as np
import pytest

from headcount.configs.base import get_config
from headcount.configs.validation import flat
from headcount.runtime import workdir as workdir_module
from headcount.runtime.workdir import (
    claim,
    differences,
    environment,
    read_json,
    record,
    set_status,
    write_json,
)
from headcount.training.trials import describe_trial, hyperparameters, make_trials

RATE = "optimizer.learning_rate"


def settings(**changes):
    config = get_config()
    config.update_from_flattened_dict(changes)
    return flat(config.to_dict())


def listed(tmp_path, trials):
    path = tmp_path / "trials.json"
    path.write_text(trials if isinstance(trials, str) else json.dumps(trials))
    return path


def test_seeds_are_counted_from_the_first():
    assert make_trials(settings(seed=4, seeds=3)) == [{"seed": s} for s in (4, 5, 6)]


def test_listed_trials_all_get_the_same_keys(tmp_path):
    path = listed(tmp_path, [{"optimizer.warmup_steps": 5}, {"seed": 2}])
    config = settings(seed=1)
    trials = make_trials(config, path)
    assert trials == [
        {"seed": 1, "optimizer.warmup_steps": 5},
        {"seed": 2, "optimizer.warmup_steps": config["optimizer.warmup_steps"]},
    ]
    assert describe_trial(trials, 0) == "trial 0 (seed 1, optimizer.warmup_steps 5)"
    arrays = hyperparameters(config, trials)
    assert arrays["seed"].tolist() == [1, 2]
    assert arrays["optimizer"].pop("warmup_steps").tolist() == [5, 400]
    assert arrays["optimizer"].pop("decay_steps").tolist() == [1000, 1000]
    for name, column in arrays.pop("optimizer").items():
        assert column.dtype == np.float32 and column.shape == (2,)
        np.testing.assert_allclose(column, config[f"optimizer.{name}"])
    np.testing.assert_allclose(arrays["dropout"], 0.1)
    np.testing.assert_allclose(arrays["label_smoothing"], 0.1)


def test_describe_trial_has_every_digit_of_the_seed():
    trials = [{"seed": 1234567, RATE: 0.0005}, {"seed": 1234568, RATE: 1e-5}]
    assert describe_trial(trials, 0) == f"trial 0 (seed 1234567, {RATE} 0.0005)"
    assert describe_trial(trials, 1) == f"trial 1 (seed 1234568, {RATE} 1e-05)"


def test_head_gates_are_one_where_no_trial_sets_them(tmp_path):
    gates = [{"head_gates.cross.1.3": 0}, {"seed": 2, "head_gates.cross.0.0": 0.5}]
    config = settings(**{"model.cross_attention.num_heads": 6})
    trials = make_trials(config, listed(tmp_path, gates))
    assert trials[0] == {
        "seed": 0,
        "head_gates.cross.1.3": 0,
        "head_gates.cross.0.0": 1,
    }
    (site, found), *others = hyperparameters(config, trials)["head_gates"].items()
    assert (site, found.shape, others) == ("cross", (2, 2, 6), [])
    assert (found[0, 1, 3], found[1, 0, 0], found.sum()) == (0, 0.5, 22.5)
    assert hyperparameters(config, [{"seed": 0}])["head_gates"] == {}
    pairs = settings(**{"model.attention.differential": True})  # 2 of 4 heads
    trials = make_trials(pairs, listed(tmp_path, [{"head_gates.cross.1.1": 0}]))
    assert hyperparameters(pairs, trials)["head_gates"]["cross"].shape == (1, 2, 2)
    with pytest.raises(ValueError, match="2 layers of 2 heads"):
        make_trials(pairs, listed(tmp_path, [{"head_gates.cross.1.2": 0}]))


@pytest.mark.parametrize(
    "trials, sentence",
    [
        ([{"model.width": 64}], r"trial 0 .*model.width changes the program"),
        ([{}, {"optimizer.schedule": 1}], "trial 1 .*optimizer.schedule changes"),
        ([{"optimizer.name": 1}], "trial 0 .*optimizer.name changes the program"),
        ([{"optimizer.muon_beta": 1.0}], "muon_beta must be from 0 to below 1, got 1"),
        ([{"model.dropuot": 0.1}], r"key model.dropuot. Did you mean model.dropout\?"),
        ([{"optimizer.lr": 1}], r"lr. Did you mean optimizer.learning_rate\?"),
        ([{"model.num_layers": 1}], r"num_encoder_layers or model.num_decoder_layers"),
        ([{"model.dropout": "high"}], "model.dropout must be a number, got 'high'"),
        ([{"model.dropout": 1.0}], "model.dropout must be from 0 to below 1, got 1"),
        ([{"model.dropout": True}], "model.dropout must be a number, got True"),
        ([{"optimizer.clip_norm": float("nan")}], "clip_norm must be from 0 .* nan"),
        ([{"seed": 0.5}], "seed must be a whole number, got 0.5"),
        ([{"seed": -1}], "seed must be from 0"),
        ([{"head_gates.cross.0": 0}], "must be head_gates.SITE.LAYER.HEAD"),
        ([{"head_gates.crss.0.0": 0}], "must be head_gates.SITE.LAYER.HEAD"),
        ([{"head_gates.cross.2.0": 0}], "head_gates.cross.2.0 .*2 layers of 4 heads"),
        (
            [{"head_gates.encoder.0.4": 0}],
            "head_gates.encoder.0.4 .*2 layers of 4 heads",
        ),
        ([{"head_gates.encoder.0.0": -1}], "head_gates.encoder.0.0 must be from 0"),
        ([{"seed": 0}, {}], "trial 1 .*is the same as trial 0"),
        ([], "trials.json must contain a list"),
        ({"seed": 1}, "trials.json must contain a list"),
        ([3], "trial 0 .*must be an object .* got 3"),
        ("[{", "trials.json can't be read"),
        ("[" * 10**5, "trials.json .*nested too deeply"),
        ('[{"seed": 1, "seed": 2}]', "trials.json .*key seed twice"),
        ([{RATE: 1e39}], r"learning_rate must be from 0 to below 3.4e\+38, got 1e"),
        ([{RATE: 10**400}], "learning_rate must be from 0 to below 3.4"),
        ([{RATE: 1e-50}], "learning_rate must .*float32.* 1e-50 becomes 0.0"),
        (
            [{"optimizer.beta2": 1 - 1e-12}],
            "optimizer.beta2 must .*float32.* becomes 1.0",
        ),
        ([{"head_gates.encoder.0.0": 1e39}], "head_gates.encoder.0.0 must be from 0"),
        ([{"head_gates.cross.00.3": 0}], "must be head_gates.SITE.LAYER.HEAD"),
        ([{"head_gates.cross.0.٣": 0}], "must be head_gates.SITE.LAYER.HEAD"),
    ],
)
def test_an_invalid_trial_raises_with_its_key(tmp_path, trials, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_trials(settings(), listed(tmp_path, trials))


def test_a_model_without_an_encoder_has_no_cross_attention_to_gate(tmp_path):
    config = settings(**{"model.num_encoder_layers": 0})
    with pytest.raises(ValueError, match="head_gates.cross.0.0 .*cross has 0 layers"):
        make_trials(config, listed(tmp_path, [{"head_gates.cross.0.0": 0}]))


def test_seeds_with_a_list_of_trials_raises(tmp_path):
    path = listed(tmp_path, [{"seed": 1}])
    with pytest.raises(ValueError, match="config.seeds .*1, got 2"):
        make_trials(settings(seeds=2), path)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"optimizer.label_smoothing": 1.0}, "config.optimizer.label_smoothing must"),
        ({"optimizer.epsilon": 0.0}, "config.optimizer.epsilon must be from 1e-37"),
        ({"seed": 2**32 - 1, "seeds": 2}, "the last seed must be .* below 4294967296"),
    ],
)
def test_a_config_number_out_of_range_raises_with_its_key(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_trials(settings(**change))


@pytest.mark.parametrize(
    "begun",
    [
        lambda workdir: (workdir / "metrics.jsonl").write_text("{}\n"),
        lambda workdir: (workdir / "checkpoints" / "7").mkdir(parents=True),
    ],
)
def test_a_workdir_with_another_config_raises_with_the_differences(tmp_path, begun):
    config = get_config().to_dict()
    trials = [{"seed": 0, "c": 1}, {"seed": 1, "c": 1}]
    with claim(tmp_path, config, trials):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    record(tmp_path, config, trials, {})
    with claim(tmp_path, config, trials[:1]):  # nothing is trained yet
        pass
    record(tmp_path, config, trials[:1], {})
    (tmp_path / "metrics.jsonl").touch()  # before the first step
    with claim(tmp_path, config, trials[:1]):
        pass
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


def test_a_missing_or_unknown_key_is_a_difference(tmp_path):
    config, trials = get_config().to_dict(), [{"seed": 0}]
    for there, words in (
        (config | {"x": 3}, r"x \(there 3, now 'unset'\)"),
        ({k: v for k, v in config.items() if k != "seeds"}, r"seeds \(there 'unset'"),
    ):
        record(tmp_path, there, trials, {})
        (tmp_path / "metrics.jsonl").write_text("{}\n")
        with pytest.raises(ValueError, match=words), claim(tmp_path, config, trials):
            pass


def test_another_numpy_affects_bits(tmp_path, monkeypatch):
    """Its generators shuffle the examples, and may change between versions."""
    arguments = tmp_path, get_config().to_dict(), [{"seed": 0}]
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert not record(*arguments, environment())
    versions = {"numpy": "9"}
    monkeypatch.setattr(
        workdir_module, "version", lambda name: versions.get(name) or version(name)
    )
    assert record(*arguments, environment()).startswith("versions.numpy (there")


def test_another_format_version_raises_with_both_versions(tmp_path):
    config, trials = get_config().to_dict(), [{"seed": 0}]
    record(tmp_path, config, trials, {})
    path = tmp_path / "run.json"
    path.write_text(
        path.read_text().replace('"format_version": 1', '"format_version": 9')
    )
    with (
        pytest.raises(ValueError, match=r"run\.json has format_version 9.* 1;"),
        claim(tmp_path, config, trials),
    ):
        pass


def test_set_status_changes_nothing_else_in_run_json(tmp_path):
    record(tmp_path, get_config().to_dict(), [{"seed": 0}], {"commit": "c"})
    before = read_json(tmp_path / "run.json")
    assert before["status"] == "running"
    set_status(tmp_path, "finished")
    assert read_json(tmp_path / "run.json") == before | {"status": "finished"}


def test_decay_steps_of_zero_are_the_number_of_updates():
    config = settings(**{"train.num_steps": 70})
    trials = [{"seed": 0}, {"seed": 1, "optimizer.decay_steps": 30}]
    arrays = hyperparameters(config, trials)
    assert arrays["optimizer"]["decay_steps"].tolist() == [70, 30]


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("config.json", '{"seed": ', "is damaged .*; restore it"),
        ("config.json", "", "is damaged .*; restore it"),
        ("config.json", "[" * 10**5, "is damaged .*too deeply.*; restore it"),
        ("trials.json", '[{"seed": 0, "seed": 1}]', "is damaged .*seed twice"),
        ("config.json", "{}", "is not a file that train.py writes; restore it"),
        ("config.json", "[]", "is not a file that train.py writes; restore it"),
        ("config.json", '{"model_type": "bert"}', "is not .* choose another --workdir"),
        ("trials.json", "[]", "is not a file that train.py writes"),
        ("trials.json", '{"seed": 0}', "is not a file that train.py writes"),
        ("trials.json", '[{"seed": "0"}]', "is not a file that train.py writes"),
    ],
)
def test_a_damaged_or_foreign_file_raises_with_its_name_and_is_left(
    tmp_path, name, text, words
):
    """No lock is left beside it."""
    (tmp_path / name).write_text(text)
    config = get_config().to_dict()
    with (
        pytest.raises(ValueError, match=f"{name} {words}"),
        claim(tmp_path, config, [{"seed": 0}]),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == text


def test_a_resumed_run_keeps_the_time_of_its_first_start(tmp_path):
    config, trials = get_config().to_dict(), [{"seed": 0}]

    def recorded(facts):
        record(tmp_path, config, trials, facts)
        return read_json(tmp_path / "run.json")

    def start(time):
        found = read_json(tmp_path / "run.json")
        write_json(tmp_path / "run.json", found | {"started": time})

    recorded({})
    start("of a start that failed before anything was trained")
    age = datetime.now(UTC) - datetime.fromisoformat(recorded({})["started"])
    assert -1 <= age.total_seconds() < 60
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    start("2026-01-01T00:00:00+00:00")
    found = recorded({"commit": "c"})
    assert found["started"] == "2026-01-01T00:00:00+00:00" and found["commit"] == "c"


def test_record_reports_changes_that_affect_bits(tmp_path):
    config, trials = get_config().to_dict(), [{"seed": 0}]
    facts = {"attention": {"encoder": "cpu"}, "dtype": "float32", "cores": 2}
    facts |= {"devices": ["cpu: a"], "xla_flags": ""}
    assert record(tmp_path, config, trials, facts) == ""
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert record(tmp_path, config, trials, facts | {"commit": "b"}) == ""
    changed = facts | {"attention": {"encoder": "blockwise"}, "cores": 4}
    told = record(tmp_path, config, trials, changed)
    assert "attention.encoder (there 'cpu', now 'blockwise')" in told
    assert "cores (there 2, now 4)" in told
    told = record(tmp_path, config, trials, changed | {"xla_flags": "--x"})
    assert "xla_flags (there '', now '--x')" in told
    told = record(tmp_path, config, trials, changed | {"devices": ["cpu: b"]})
    assert "devices" in told


def test_a_number_that_is_not_finite_becomes_null(tmp_path):
    write_json(tmp_path / "a.json", [{"loss": float("nan"), "bleu": (1.5, -np.inf)}])
    found = json.loads((tmp_path / "a.json").read_text())
    assert found == [{"loss": None, "bleu": [1.5, None]}]


def test_commit_tells_uncommitted_changes_apart(tmp_path, monkeypatch):
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


def test_data_directory_may_change_in_a_resumed_run(tmp_path):
    config, trials = get_config().to_dict(), [{"seed": 0}]
    record(tmp_path, config, trials, {})
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    moved = config | {"data": config["data"] | {"directory": "there"}}
    assert differences(config, moved) == []
    with claim(tmp_path, moved, trials):
        pass
    with pytest.raises(ValueError, match="data.name"):
        other = config | {"data": config["data"] | {"name": "text"}}
        claim(tmp_path, other, trials).__enter__()
