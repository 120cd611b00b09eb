"""Every ablation on every config: expanded, resolved, built abstractly, matched."""

import importlib
import json
from pathlib import Path

import pytest

from headcount.analysis.budget import TOLERANCE, flops, parameters, solve_mlp_dim
from headcount.configs import ablations, base, modern, numbers, recall, shakespeare
from headcount.configs.ablations import chain, grid, matched, over, seeds, zipped
from headcount.configs.validation import flat
from headcount.configs.variants import VARIANTS as OF_HEADS
from headcount.configs.variants import clip
from headcount.models.cost import LENGTH
from headcount.sweeps.ablation import (
    ablation_names,
    arms_of,
    find_ablation,
    nuisance_keys,
)
from headcount.sweeps.labels import name_arms
from headcount.sweeps.plan import expand, group_trials, program_and_trials
from headcount.sweeps.search import Search, next_trials
from headcount.training import checks

VARIANTS = {  # of config files; None: the default
    "numbers": (None, "short"),
    "multi30k": (None, "short"),
    "shakespeare": (None, "short"),
    "modern": (None, "short"),
    "gpt2": (None, "medium"),
    "presets": ("transformer_tiny",),
}


def all_configs(layers=1):
    """Return every config of configs/, with few layers per stack, which is faster.

    Leave out configs of a run that exists, and those whose model differs from another's
    in dropout and positions alone, or in the size of a large vocabulary.
    """
    found = {}
    for path in sorted(Path(base.__file__).parent.glob("*.py")):
        module = importlib.import_module(f"headcount.configs.{path.stem}")
        if not hasattr(module, "get_config") or path.stem == "run":
            continue
        for variant in VARIANTS.get(path.stem, (None,)):
            arguments = [] if variant is None else [variant]
            config = shallow(module.get_config(*arguments), layers)
            model = config.model.to_dict() | {"dropout": 0.0, "max_positions": 0}
            model["attention"]["dropout"] = 0.0
            has_few_tokens = config.data.vocab_size < 1000
            key = config.task.name, has_few_tokens, json.dumps(model, sort_keys=True)
            found.setdefault(key, config)
    return found.values()


def shallow(config, layers=1):
    """Return a config with few layers per stack: the others only take time to build."""
    config = config.copy_and_resolve_references()
    for stack in ("num_encoder_layers", "num_decoder_layers"):
        config.model[stack] = min(layers, config.model[stack])
    return config


def plan_of(config, arms, num_seeds=2, **options):
    options = {"nuisance": [], "tuned": [{}], "match": None} | options
    plan = expand(
        config.copy_and_resolve_references().lock(), arms, num_seeds, **options
    )
    search = Search(None, {}, [100, 101])
    return plan._replace(trials=next_trials(plan.arms, search, [], propose=False))


def tiny(**model):
    config = base.get_config()
    config.data.vocab_size = 80
    config.update_from_flattened_dict(
        {
            "model.width": 32,
            "model.mlp_dim": 32,
            "model.num_encoder_layers": 1,
            "model.num_decoder_layers": 1,
        }
        | {f"model.{key}": value for key, value in model.items()}
    )
    return config


@pytest.mark.parametrize("name", ablation_names(ablations))
def test_every_ablation_builds_on_every_config(name, monkeypatch):
    """Its keys exist, its models build, its docstring says what varies."""
    generator = find_ablation(name)
    nuisance = nuisance_keys(generator.__doc__)
    # a single layer has no value residual
    for config in all_configs(2 if name == "variants" else 1):
        arms = arms_of(generator, name, config.to_dict())
        if name == "variants":  # those that a config excludes are left out
            settings = [variant.settings(config) for variant in OF_HEADS.values()]
            now = flat(config.to_dict())
            changed = [own for own in settings if own.items() - now.items()]
            missing = [own for own in changed if own not in arms]
            model = config.model
            is_single = max(model.num_encoder_layers, model.num_decoder_layers) < 2
            wanted = [{"model.attention.value_residual": True}] * is_single
            wanted += [clip(config)] * (model.positions == "relative")
            assert missing == wanted
        with monkeypatch.context() as patched:
            # `plan_of` builds every model, too, to count its parameters
            patched.setattr(checks, "abstract", lambda build: None)
            patched.setattr(checks, "_built", set())
            plan = plan_of(config, arms, nuisance=nuisance)
        assert len({arm.name for arm in plan.arms}) == len(plan.arms)
        assert len({trial.id for trial in plan.trials}) == 2 * len(plan.arms)
        (baseline,) = [arm for arm in plan.arms if arm.is_baseline]
        dropped = len(arms) - len(plan.arms)  # those that need no matching
        plain = [arm for arm in plan.arms if "match" not in arm.overrides]
        near = [
            arm
            for arm in plain
            if abs(arm.parameters - baseline.parameters)
            <= TOLERANCE * baseline.parameters
        ]
        assert dropped <= len(near) - 1
        for arm in plan.arms:
            if "match" in arm.overrides:
                cost, goal = arm.parameters, baseline.parameters
                assert abs(cost - goal) <= TOLERANCE * goal
                # 0.5% of a narrow model's parameters leave little choice
                multiple = 8 if config.model.width >= 128 and name != "variants" else 2
                assert arm.config["model"]["mlp_dim"] % multiple == 0
            assert not set(arm.overrides) & set(nuisance)
    assert generator.__doc__.split("\n")[0].endswith("?")


def test_the_controls_of_recall_have_the_parameters_of_two_layers():
    config = recall.get_config()
    plan = plan_of(config, recall.controls(config))
    two, one, without = plan.arms
    assert two.is_baseline and one.config["model"]["num_decoder_layers"] == 1
    assert abs(one.parameters - two.parameters) <= TOLERANCE * two.parameters
    assert without.config["model"]["positions"] == "none"


def test_the_variants_of_grouped_heads_include_a_latent_of_whole_ones():
    config = modern.get_config("short")
    config.model.attention.num_kv_heads = 2
    arms = arms_of(ablations.variants, "variants", shallow(config).to_dict())
    plan = plan_of(shallow(config), arms)
    attentions = [arm.config["model"]["attention"] for arm in plan.arms]
    latent = [each for each in attentions if each["latent_dim"]]
    assert latent and {each["num_kv_heads"] for each in latent} == {4}


def test_the_arms_of_the_papers():
    config = numbers.get_config()
    plan = plan_of(config, ablations.heads(config))
    assert [a.name for a in plan.arms] == [f"N={N}" for N in (1, 2, 4, 8, 16, 32)]
    assert len({a.parameters for a in plan.arms}) == 1  # rows A: N·H = D
    assert plan.axis == "model.attention.num_heads"
    assert [a.name for a in plan.arms if a.is_baseline] == ["N=4"]

    plan = plan_of(config, ablations.shazeer(config))
    assert plan.arms[0].is_baseline and plan.arms[0].config["model"]["mlp_dim"] == 256
    multi_query, one_head = plan.arms[1:3]
    # 7/8 of two D·D matrices, in 6 attentions, spread over 4 feed-forwards of 2·D·F
    assert abs(multi_query.config["model"]["mlp_dim"] - (256 + 168)) <= 8
    # 7/8 of four
    assert abs(one_head.config["model"]["mlp_dim"] - (256 + 336)) <= 8


def test_the_baseline_has_the_six_heads_of_the_full_shakespeare_recipe():
    config = shallow(shakespeare.get_config())
    for ablation, name in ((ablations.heads, "N=6"), (ablations.kv_heads, "K=6")):
        plan = plan_of(config, ablation(config))
        assert [arm.name for arm in plan.arms if arm.is_baseline] == [name]


def test_matching_flops_is_not_matching_parameters():
    """Relative positions add parameters, but no matrix product."""
    one, other = tiny().to_dict(), tiny(positions="relative").to_dict()
    F = {b: solve_mlp_dim(other, one, b) for b in ("parameters", "flops")}
    assert F["parameters"] < F["flops"] == one["model"]["mlp_dim"]
    other = tiny(width=32).to_dict()
    other["model"]["attention"]["merge"] = "mean"
    F = {b: solve_mlp_dim(other, one, b) for b in ("parameters", "flops")}
    for budget, count in (("parameters", parameters), ("flops", flops)):
        solved = other | {"model": other["model"] | {"mlp_dim": F[budget]}}
        assert abs(count(solved) - count(one)) <= TOLERANCE * count(one)
        assert count(other) < count(one)


@pytest.mark.parametrize("budget", ["parameters", "flops"])
@pytest.mark.parametrize("key", ["model.num_encoder_layers", "model.width"])
def test_arms_of_other_depths_and_widths_are_matched(key, budget):
    """A unit of F costs as much as the arm's own layers and width make it."""
    config = tiny(mlp_dim=256)
    now = flat(config.to_dict())[key]
    more = now + (1 if key == "model.num_encoder_layers" else 8)
    plan = plan_of(config, matched(over(key, now, more), budget))
    one, other = (arm.config for arm in plan.arms)
    count = {"parameters": parameters, "flops": flops}[budget]
    assert other["model"]["mlp_dim"] < 256
    assert abs(count(other) - count(one)) <= TOLERANCE * count(one)


@pytest.mark.parametrize(
    "arms, baseline",
    [
        (over("model.cross_attention.num_heads", 1, 2, 4, 8), "cross N=4"),
        (
            grid(
                over("model.encoder_attention.merge", "mixture"),
                over("model.encoder_attention.mixture_heads", 1, 2),
            ),
            "encoder k=2",
        ),
        (over("train.patience", 3, None), "patience=None"),
        (over("model.attention.num_kv_heads", 1, 4), "K=4"),
        (over("model.cross_attention.num_heads", 2, 8), "cross N=2"),
    ],
)
def test_the_baseline_is_the_arm_that_is_the_base_config(arms, baseline):
    """None in the base config stands for its default, not for any value.

    If no arm is the base config, the first one is the baseline.
    """
    merge = "mixture" if "k=" in baseline else "concat"
    plan = plan_of(tiny(**{"attention.merge": merge}), arms)
    assert [arm.name for arm in plan.arms if arm.is_baseline] == [baseline]


def test_flops_agree_with_the_formula():
    config = tiny()
    D, F, L = 32, 32, LENGTH
    attention = 4 * D * D + 2 * D * L
    forward = 3 * attention + 2 * (2 * D * F) + D * 80
    assert flops(config.to_dict()) == forward
    config.data.joint_vocabulary = False
    assert flops(config.to_dict()) == forward
    assert parameters(config.to_dict()) == parameters(tiny().to_dict()) + 80 * D


def test_a_budget_that_cannot_be_reached_is_an_error():
    arms = over("model.attention.num_heads", 4, 64)
    arms[1] |= {"model.attention.head_dim": 64, "model.attention.value_dim": 64}
    with pytest.raises(ValueError, match="^Arm N=64 .*model.mlp_dim"):
        plan_of(tiny(), matched(arms))


@pytest.mark.parametrize(
    "arms, named",
    [
        ([], "0 arms and 2 seeds"),
        (
            over("model.num_heads", 1),
            "^Arm N=1 sets model.num_heads.*mean model.attention.num_heads",
        ),
        (over("model.attention.num_heads", 4, 3), "^Arm N=3 .*num_heads"),
        (over("model.width", "wide"), "^Arm D=wide .*model.width"),
        (over("model.width", 0), "^Arm D=0 .*width"),
        (over("model.attention.merge", "sum"), "^Arm sum .*'sum'"),
        (matched(over("model.width", 32, 64), "time"), "match must be .*'time'"),
    ],
)
def test_an_arm_that_cannot_be_built_is_named(arms, named):
    with pytest.raises(ValueError, match=named):
        plan_of(tiny(), arms)


@pytest.mark.parametrize(
    "arms, names, axis",
    [
        (
            [{"model.mlp_dim": 8}, {"model.mlp_dim": 16}],
            ["F=8", "F=16"],
            "model.mlp_dim",
        ),
        (
            grid(over("model.mlp_dim", 8), over("model.norm", "pre", "post")),
            ["norm=pre", "norm=post"],
            None,
        ),
        (
            [{}, {"model.cross_attention.merge": "mean"}],
            ["baseline", "cross mean"],
            None,
        ),
        ([{"a.x": "mean"}, {"b.x": "mean"}], ["a.x=mean", "b.x=mean"], None),
        (
            over("model.dropout", 0.1, 0.25),
            ["dropout=0.1", "dropout=0.25"],
            "model.dropout",
        ),
    ],
)
def test_arms_have_short_names_that_tell_them_apart(arms, names, axis):
    assert name_arms(arms) == (names, axis)


def test_combinators():
    a, b = over("a", 1, 2), over("b", 3, 4)
    assert grid(a, b) == [
        {"a": 1, "b": 3},
        {"a": 1, "b": 4},
        {"a": 2, "b": 3},
        {"a": 2, "b": 4},
    ]
    assert zipped(a, b) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    assert chain(a, b) == [*a, *b]
    assert seeds(a, 2, first=5) == grid(a, [{"seed": 5}, {"seed": 6}])
    with pytest.raises(ValueError):
        zipped(a, over("b", 3))


def test_trials_of_one_program_are_a_group():
    """Learning rates and seeds are data; other heads are another program."""
    key = "optimizer.learning_rate"
    rates = over(key, 0.001, 0.003)
    arms = over("model.attention.num_heads", 2, 4)
    plan = plan_of(tiny(), arms, 3, nuisance=[key], tuned=rates)
    assert [arm.name for arm in plan.arms] == ["N=2", "N=4"]
    groups = group_trials(plan.trials, size=16)
    assert [len(group) for group in groups] == [4, 4]  # two rates, two seeds to try
    assert [len(group) for group in group_trials(plan.trials, size=3)] == [3, 1, 3, 1]
    program, numbers_of = program_and_trials(groups[0], tiny().to_dict())
    assert program == {"model.attention.num_heads": 2}
    assert [n["seed"] for n in numbers_of] == [100, 101, 100, 101]
    assert [n.get(key) for n in numbers_of] == [0.001] * 2 + [None] * 2  # the default


def test_trial_ids_depend_on_what_results_depend_on():
    def ids(config, **options):
        arms = over("model.attention.num_heads", 2, 4)
        return [t.id for t in plan_of(config, arms, **options).trials]

    elsewhere = tiny()
    elsewhere.data.directory = "elsewhere"
    assert ids(elsewhere) == ids(tiny())
    assert set(ids(tiny())) < set(ids(tiny(), num_seeds=3))
    longer = tiny()
    longer.train.num_steps += 1
    assert not set(ids(longer)) & set(ids(tiny()))


def test_the_command_line_of_a_group_resolves_to_its_trials():
    config = tiny()
    plan = plan_of(config, ablations.sites(config))
    for group in group_trials(plan.trials, 16):
        program, each = program_and_trials(group, config.to_dict())
        for numbers_of, trial in zip(each, group, strict=True):
            made = flat(config.to_dict()) | program | numbers_of
            assert made == flat(trial.config)
