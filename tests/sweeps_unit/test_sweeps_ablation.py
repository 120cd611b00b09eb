"""Ablations: finding them, their docstrings, and what they yield."""

from pathlib import Path

import pytest
from sweep_fakes import TINY, options, write_ablation

from headcount import attention, tasks
from headcount.configs import ablations, base
from headcount.configs.variants import VARIANTS
from headcount.sweeps import ablation
from headcount.sweeps.ablation import (
    ablation_names,
    arms_of,
    find_ablation,
    nuisance_keys,
)
from headcount.sweeps.settings import open_sweep
from tests.marks import slow_but

OF_PAIRS = "differential", "shared and routed"  # need two heads at least


@pytest.mark.parametrize(
    "name, named",
    [
        ("own.py", "own.py"),
        ("haeds", "heads"),
        ("none.py:x", "none.py"),
        ("configs/ablations.py:over", "Scientific"),
    ],
)
def test_an_ablation_that_is_not_found_is_named(name, named):
    with pytest.raises(ValueError, match=rf"^--ablation.*{named}"):
        find_ablation(name)


@pytest.mark.parametrize(
    "table", ["headcount.tasks.TASKS", "headcount.attention.MERGE_RULES"]
)
def test_a_file_that_adds_a_task_or_a_rule_must_be_the_task_file(
    tmp_path, monkeypatch, table
):
    name = write_ablation(tmp_path, "yield {}")
    file, (module, rules) = name.removesuffix(":sizes"), table.rsplit(".", 1)
    for each in (tasks.TASKS, attention.MERGE_RULES):
        monkeypatch.setitem(each, "own", None)  # to be removed again
        del each["own"]
    with open(file, "a") as text:
        text.write(f"from {module} import {rules}\n{rules}['own'] = None\n")
    with pytest.raises(ValueError, match=f"adds own, .* add --task_file={file}"):
        find_ablation(name)
    tasks.import_file(Path(file))  # as --task_file
    assert find_ablation(name).__name__ == "sizes"


def test_functions_with_a_scientific_line_are_ablations():
    names = ablation_names(ablations)
    assert {"heads", "merge", "shazeer"} <= set(names)
    assert not {"over", "grid", "heads_of"} & set(names)


@pytest.mark.parametrize(
    "values, named",
    [
        # two learning rates are nuisance settings of one arm
        ("(32, 0.1), (32, 0.2), (48, 0.1)", []),
        ("(32, 0.1), (48, 0.1), (48, 0.1)", ["mlp_dim=48, learning_rate=0.1"]),
        # the second spells out what the base config has
        ("(None, 0.1), (32, 0.1), (48, 0.1)", ["mlp_dim=32, learning_rate=0.1"]),
    ],
)
def test_arms_that_repeat_others_are_named(tmp_path, corpus, capsys, values, named):
    body = f"""for F, rate in ({values}):
        width = {{}} if F is None else {{"model.mlp_dim": F}}
        yield width | {{"optimizer.learning_rate": rate}}"""
    given = options(tmp_path / "s", corpus, ablation=write_ablation(tmp_path, body))
    open_sweep(given)
    logged = [x for x in capsys.readouterr().err.splitlines() if "left out" in x]
    assert len(logged) == len(named)
    assert all(name in line for name, line in zip(named, logged, strict=True))


@pytest.mark.parametrize(
    "N, heads, key_heads",
    [
        (4, [1, 2, 4, 8, 16, 32], [4, 2, 1]),
        (8, [1, 2, 4, 8, 16, 32], [8, 4, 2, 1]),
        (6, [1, 2, 4, 6, 8, 16, 32], [6, 3, 2, 1]),
        (12, [1, 2, 4, 8, 12, 16, 32], [12, 6, 4, 3, 2, 1]),
        (5, [1, 2, 4, 8, 16, 32], [5, 1]),  # 5 does not divide the width
    ],
)
def test_heads_and_key_heads_include_those_of_the_base_config(N, heads, key_heads):
    config = base.get_config()
    config.model.width, config.model.attention.num_heads = 384, N
    for function, key, values in (
        (ablations.heads, "num_heads", heads),
        (ablations.kv_heads, "num_kv_heads", key_heads),
    ):
        found = [arm[f"model.attention.{key}"] for arm in function(config)]
        assert found == values


@pytest.mark.parametrize(
    "body, message",
    [
        ("yield {'model.mlp_dim': base.model.atention}", "KeyError: 'atention'"),
        ("return None", "returns None"),
        ("return 3", "TypeError: "),
        ("yield ('model.mlp_dim', 32)", r"dict.*\('model.mlp_dim', 32\)"),
        ("yield {3: 4}", r"dict.*\{3: 4\}"),
        ("yield {'model.mlp_dim': {32}}", "numbers or strings"),
        ("yield {", "not Python"),
        ("yield {'model.attention.num_heads': 'four'}", "model.attention.num_heads"),
        ("yield {'model.mlp_dims': 4}", "model.mlp_dims.* Did you mean"),
        ("yield {'model.attention.num_heads': 5}", "Arm N=5"),
    ],
)
def test_errors_of_an_ablation_name_its_function_and_line(
    tmp_path, corpus, body, message
):
    name = write_ablation(tmp_path, body)
    with pytest.raises(ValueError, match=f"^--ablation={name}(, line 9)?: .*{message}"):
        open_sweep(options(tmp_path / "s", corpus, ablation=name))
    assert not (tmp_path / "s").exists()


def test_an_ablation_may_ignore_the_base_config(tmp_path):
    name = write_ablation(tmp_path, 'yield {"model.mlp_dim": 32}')
    path = tmp_path / "own.py"
    path.write_text(path.read_text().replace("sizes(base)", "sizes()"))
    assert arms_of(find_ablation(name), name, {}) == [{"model.mlp_dim": 32}]


def test_arms_are_as_json_has_them():
    config = base.get_config()
    config.update_from_flattened_dict(TINY)
    arms = arms_of(lambda: [{"model.dropout": 0.1, "a": (1, 2)}], "f", config.to_dict())
    assert arms == [{"model.dropout": 0.1, "a": [1, 2]}]


def tiny(**model):
    config = base.get_config()
    config.update_from_flattened_dict(TINY)
    config.update_from_flattened_dict({f"model.{k}": v for k, v in model.items()})
    return config


def arms_over(config, name, monkeypatch):
    """Return an ablation's arms over a config, and what is logged."""
    logged = []
    monkeypatch.setattr(ablation, "say", logged.append)
    return arms_of(find_ablation(name), name, config.to_dict()), logged


EXCLUDED = [  # settings of a base config, and the variants they exclude
    ({"num_decoder_layers": 2}, ()),
    ({"attention.sink": True}, ("value residual", "talking heads")),
    (
        {"attention.talking_heads": True},
        ("value residual", "differential", "sink", "QK clip"),
    ),
    (
        {"num_decoder_layers": 2, "attention.value_residual": True},
        ("latent",),
    ),
    ({"attention.knocking": "mlp"}, ("value residual", "latent")),
    (
        {"attention.differential": True, "attention.num_heads": 2},
        ("value residual", "latent", "shared and routed", "talking heads"),
    ),
    (
        {"attention.latent_dim": 8, "num_decoder_layers": 2},
        ("gate on values", "differential", "knocking", "knocking, MLP")
        + ("value residual", "QK norm"),
    ),
    ({"attention.num_heads": 1}, ("value residual",) + OF_PAIRS),
    ({"positions": "relative"}, ("value residual", "QK clip")),
]


@pytest.mark.parametrize("settings, excluded", slow_but(EXCLUDED[:1], EXCLUDED))
def test_variants_that_the_base_config_excludes_are_left_out(
    settings, excluded, monkeypatch
):
    config = tiny(**settings)
    arms, logged = arms_over(config, "variants", monkeypatch)
    assert arms[0] == {} and len(logged) == len(excluded)
    own = [arm for arm in arms[1:] if "match" not in arm]
    left = [name for name, v in VARIANTS.items() if v.settings(config) not in own]
    assert sorted(left) == sorted(excluded)
    assert [arm | {"match": "parameters"} for arm in own] == arms[1 + len(own) :]


def test_an_ablation_over_a_base_config_that_is_wrong_keeps_its_arms(monkeypatch):
    """The sweep then names what is wrong."""
    arms, logged = arms_over(
        tiny(**{"attention.merge": "sum"}), "variants", monkeypatch
    )
    assert len(arms) == 1 + 2 * len(VARIANTS) and not logged


def test_widths_whose_heads_can_not_be_rotated_are_left_out(monkeypatch):
    arms, logged = arms_over(tiny(positions="rotary"), "width_heads", monkeypatch)
    sizes = {(arm["model.width"], arm["model.attention.head_dim"]) for arm in arms}
    assert sizes == {(16, 8), (16, 4), (16, 2), (32, 16), (32, 8), (32, 4), (32, 2)} | {
        (64, 32),
        (64, 16),
        (64, 8),
        (64, 4),
    }
    (line,) = logged
    assert "N=16" in line and "head_dim must be even" in line


@pytest.mark.parametrize(
    "after",
    [
        "Fixed: model.width.",
        "Scientific: model.positions.",
        "\n    Compare model.positions too.",
        "",
    ],
)
def test_nuisance_keys_end_where_the_next_item_starts(after):
    docstring = f"""A question?

    Nuisance: optimizer.learning_rate,
    model.dropout.
    {after}
    """
    assert nuisance_keys(docstring) == ["optimizer.learning_rate", "model.dropout"]


def test_nuisance_settings_must_be_config_keys(tmp_path):
    """Otherwise their values would be arms, each one more comparison."""
    name = write_ablation(tmp_path, 'yield {"model.mlp_dim": 32}')
    path, key = tmp_path / "own.py", "optimizer.learning_rate"
    path.write_text(path.read_text().replace(key, "the learning rate"))
    with pytest.raises(ValueError, match="Nuisance"):
        find_ablation(name)
    in_words = path.read_text()
    for nothing in ("none", "None", ""):
        path.write_text(in_words.replace("the learning rate.", nothing))
        find_ablation(name)
    path.write_text(in_words.replace("the learning rate", "optimizer.learning_rat"))
    with pytest.raises(ValueError, match="optimizer.learning_rat after"):
        find_ablation(name)
