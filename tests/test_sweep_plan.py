"""From an ablation to the arms of a sweep: their names, baseline and settings."""

import pytest

from headcount.analysis.budget import flops, solve_mlp_dim
from headcount.configs import base
from headcount.configs.ablations import chain, matched, over
from headcount.sweeps.opening import open_sweep
from headcount.sweeps.plan import expand, name_arms, nuisance_keys, trials_of
from tests.test_sweeps import RATE, options, own, three_splits


@pytest.fixture
def corpus(tmp_path):
    return three_splits(tmp_path / "corpus")


def plan_of(arms, num_seeds=2, *, changes=None, **more):
    """The plan of a tiny config."""
    config = base.get_config()
    tiny = {"data.vocab_size": 80, "model.width": 32, "model.mlp_dim": 32}
    tiny |= {"model.num_encoder_layers": 1, "model.num_decoder_layers": 1}
    config.update_from_flattened_dict(tiny | (changes or {}))
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
def test_arms_of_other_sentences_are_refused(key):
    """Their scores would be of other references than the report has."""
    sentence = f"^Arm .* sets data.{key}, and scores of other sentences can't be comp"
    with pytest.raises(ValueError, match=sentence):
        plan_of([{}, {f"data.{key}": "fr"}])
    with pytest.raises(ValueError, match=sentence):
        plan_of([{}, {f"data.{key}": "fr"}], nuisance=[f"data.{key}"])
    same = [{"data.target": "de"}, {"data.vocab_size": 90}, {"data.max_length": 64}]
    assert len(plan_of(same).arms) == 3


@pytest.mark.parametrize(
    "after",
    [
        "Fixed: model.width.",
        "Scientific: model.positions.",
        "\n    Compare model.positions too.",
        "",
    ],
)
def test_what_follows_the_nuisance_settings_is_none(after):
    told = f"""A question?

    Nuisance: optimizer.learning_rate,
    model.dropout.
    {after}
    """
    assert nuisance_keys(told) == ["optimizer.learning_rate", "model.dropout"]


def test_an_ablation_of_ones_own_may_take_no_base(tmp_path, corpus):
    name = own(tmp_path, 'yield {"model.mlp_dim": 32}')
    path = tmp_path / "own.py"
    path.write_text(path.read_text().replace("sizes(base)", "sizes()"))
    (arm,) = open_sweep(options(tmp_path / "s", corpus, ablation=name)).plan.arms
    assert arm.name == "F=32"


def test_nuisance_settings_in_words_alone_are_refused(tmp_path, corpus):
    """Their values would be arms, each one more comparison."""
    name = own(tmp_path, 'yield {"model.mlp_dim": 32}')
    path, key = tmp_path / "own.py", "optimizer.learning_rate"
    path.write_text(path.read_text().replace(key, "the learning rate"))
    with pytest.raises(ValueError, match='name config keys after "Nuisance:", such as'):
        open_sweep(options(tmp_path / "s", corpus, ablation=name))
    in_words = path.read_text()
    for number, none in enumerate(("none", "None", "")):
        path.write_text(in_words.replace("the learning rate.", none))
        open_sweep(options(tmp_path / f"s{number}", corpus, ablation=name))


def test_the_flops_of_a_training_are_six_a_multiply_add_and_token():
    (arm,) = plan_of([{}], changes={"train.num_steps": 7, "data.batch_tokens": 50}).arms
    assert arm.training_flops == 6 * flops(arm.config) * 7 * 50


def test_no_value_of_how_to_train_counts_as_a_default():
    arms = [{"model.mlp_dim": 64}, {"train.patience": 3}]
    assert baseline(plan_of(arms)) == "F=64"
    default = [{"model.mlp_dim": 64}, {"model.attention.num_kv_heads": 4}]
    assert baseline(plan_of(default)) == "K=4"


def test_the_baseline_is_not_left_out_for_an_arm_that_is_solved_to_it():
    plan = plan_of(matched(over("model.mlp_dim", 64, 32, 16)))
    assert baseline(plan) == "F=32"
    first = plan_of([{"model.mlp_dim": 48, "match": "parameters"}, {}])
    assert [arm.name for arm in first.arms] == ["baseline"] == [baseline(first)]


def test_settings_that_come_to_the_same_are_tried_once():
    arms = [{}, {RATE: 0.001}, {RATE: 0.003}]  # the config's own is 0.003
    (arm,) = plan_of(arms, nuisance=[RATE]).arms
    assert arm.candidates == [{}, {RATE: 0.001}]
    trials = trials_of(arm, arm.candidates, arm.seeds)
    assert len({trial.id for trial in trials}) == len(trials) == 4


def test_what_has_the_budget_is_left_as_it_is():
    config = base.get_config()
    config.model.mlp_dim = 1000
    same = config.to_dict()
    same["model"]["norm"] = "pre"
    for budget in ("parameters", "flops"):
        assert solve_mlp_dim(config.to_dict(), config.to_dict(), budget) == 1000
    assert solve_mlp_dim(same, config.to_dict(), "flops") == 1000


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"train.best_metric": "bleu"}, "train.best_metric must be one of .* 'bleu'"),
        ({"train.remat": "all"}, "train.remat must be one of .* 'all'"),
        ({"mesh.shard": "zero"}, "mesh.shard must be one of .* 'zero'"),
        ({"optimizer.schedule": "cosin"}, "optimizer.schedule must be .* 'cosin'"),
        ({"model.bos": 99}, "model.bos must be from 0 to below 80"),
        ({"model.num_decoder_layers": 0}, "Only encoder-decoder models"),
    ],
)
def test_what_train_would_refuse_is_refused_at_first(
    tmp_path, corpus, changes, sentence
):
    opened = options(tmp_path / "s", corpus)
    opened.config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=f"Arm K=4 can't be built: {sentence}"):
        open_sweep(opened)
    assert not (tmp_path / "s").exists()


def test_nuisance_settings_that_train_would_refuse_are_too(tmp_path, corpus):
    body = """for norm in ("pre", "pots"):
        yield {"model.mlp_dim": 32, "model.norm": norm}"""
    name = own(tmp_path, body)
    path = tmp_path / "own.py"
    path.write_text(path.read_text().replace(RATE, "model.norm"))
    with pytest.raises(ValueError, match="Arm F=32 can't be built: .*'pots'"):
        open_sweep(options(tmp_path / "s", corpus, ablation=name))
