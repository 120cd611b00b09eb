"""From arms to trials: names, the baseline, matched arms, nuisance settings."""

import pytest
from sweep_fakes import RATE, TINY, options, write_ablation

from headcount.analysis.budget import flops, solve_mlp_dim
from headcount.configs import base
from headcount.configs.ablations import chain, matched, over
from headcount.sweeps.labels import name_arms
from headcount.sweeps.plan import expand, make_trials
from headcount.sweeps.settings import open_sweep


def plan_of(arms, num_seeds=2, *, changes=None, **more):
    """Return the plan of a tiny config."""
    config = base.get_config()
    config.update_from_flattened_dict(TINY | (changes or {}))
    given = {"nuisance": [], "tuned": [{}], "match": None} | more
    return expand(config.lock(), arms, num_seeds, **given)


def baseline(plan):
    (found,) = [arm.name for arm in plan.arms if arm.is_baseline]
    return found


def test_an_arm_with_settings_is_not_named_baseline():
    arms = chain(
        over("model.attention.merge", "concat", "gated"),
        over("model.positions", "rotary"),
    )
    assert name_arms(arms) == (["concat", "gated", "rotary"], None)
    assert name_arms([{}, *arms[1:]]) == (["baseline", "gated", "rotary"], None)


@pytest.mark.parametrize("key", ["name", "source", "target", "directory"])
def test_arms_of_another_corpus_are_an_error(key):
    """Their scores would be of other examples than the report shows."""
    message = rf"^Arm .* sets data\.{key}"
    with pytest.raises(ValueError, match=message):
        plan_of([{}, {f"data.{key}": "fr"}])
    with pytest.raises(ValueError, match=message):
        plan_of([{}, {f"data.{key}": "fr"}], nuisance=[f"data.{key}"])
    same = [{"data.target": "de"}, {"data.vocab_size": 90}, {"data.max_length": 64}]
    assert len(plan_of(same).arms) == 3


def test_arms_of_another_task_are_an_error():
    with pytest.raises(ValueError, match=r"^Arm .* sets task\.name"):
        plan_of([{}, {"task.name": "other"}])


def test_the_flops_of_a_training_are_six_per_multiply_add_and_token():
    (arm,) = plan_of([{}], changes={"train.num_steps": 7, "data.batch_tokens": 50}).arms
    assert arm.training_flops == 6 * flops(arm.config) * 7 * 50


def test_the_baseline_is_the_arm_that_spells_out_defaults_of_the_model():
    arms = [{"model.mlp_dim": 64}, {"model.attention.num_kv_heads": 4}]
    assert baseline(plan_of(arms)) == "K=4"
    other = [{"model.mlp_dim": 64}, {"model.attention.num_kv_heads": 2}]
    assert baseline(plan_of(other)) == "F=64"
    gains = over("model.encoder_attention.merge_gain", 2.0, 1.0)
    assert baseline(plan_of(gains)) == "encoder merge_gain=1"


def test_a_setting_of_training_is_never_a_default():
    arms = [{"model.mlp_dim": 64}, {"train.patience": 3}]
    assert baseline(plan_of(arms)) == "F=64"


def test_the_baseline_stays_if_another_arm_is_matched_to_it():
    plan = plan_of(matched(over("model.mlp_dim", 64, 32, 16)))
    assert baseline(plan) == "F=32"
    first = plan_of([{"model.mlp_dim": 48, "match": "parameters"}, {}])
    assert [arm.name for arm in first.arms] == ["baseline"] == [baseline(first)]


def test_settings_that_resolve_to_the_same_config_are_tried_once():
    arms = [{}, {RATE: 0.001}, {RATE: 0.003}]  # the config's own is 0.003
    (arm,) = plan_of(arms, nuisance=[RATE]).arms
    assert arm.candidates == [{}, {RATE: 0.001}]
    trials = make_trials(arm, arm.candidates, arm.seeds)
    assert len({trial.id for trial in trials}) == len(trials) == 4


def test_more_seeds_keep_the_trials_of_a_plan():
    few, more = (plan_of([{}], seeds).arms[0] for seeds in (2, 5))
    ids = [
        {trial.id for trial in make_trials(arm, arm.candidates, arm.seeds)}
        for arm in (few, more)
    ]
    assert len(ids[0]) == 2 and len(ids[1]) == 5 and ids[0] < ids[1]


def test_an_arm_that_has_the_budget_keeps_its_mlp_dim():
    config = base.get_config()
    config.model.mlp_dim = 1000
    same = config.to_dict()
    same["model"]["norm"] = "pre"
    for budget in ("parameters", "flops"):
        assert solve_mlp_dim(config.to_dict(), config.to_dict(), budget) == 1000
    assert solve_mlp_dim(same, config.to_dict(), "flops") == 1000


@pytest.mark.parametrize(
    "key, value",
    [
        ("train.best_metric", "rouge"),
        ("train.remat", "all"),
        ("mesh.shard", "zero"),
        ("optimizer.schedule", "cosin"),
        ("model.num_decoder_layers", 0),
    ],
)
def test_a_config_that_train_would_reject_fails_before_anything_trains(
    tmp_path, corpus, key, value
):
    given = options(tmp_path / "s", corpus)
    given.config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=key):
        open_sweep(given)
    assert not (tmp_path / "s").exists()


def test_a_nuisance_setting_that_train_would_reject_fails_too(tmp_path, corpus):
    body = """for norm in ("pre", "pots"):
        yield {"model.mlp_dim": 32, "model.norm": norm}"""
    name = write_ablation(tmp_path, body)
    path = tmp_path / "own.py"
    path.write_text(path.read_text().replace(RATE, "model.norm"))
    with pytest.raises(ValueError, match="Arm F=32 .*'pots'"):
        open_sweep(options(tmp_path / "s", corpus, ablation=name))
