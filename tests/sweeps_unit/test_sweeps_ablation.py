"""Ablations: finding them, their docstrings, and what they yield."""

import pytest
from sweep_fakes import TINY, options, write_ablation

from headcount.configs import ablations, base
from headcount.sweeps.ablation import (
    ablation_names,
    arms_of,
    find_ablation,
    nuisance_keys,
)
from headcount.sweeps.settings import open_sweep


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


def test_functions_with_a_scientific_line_are_ablations():
    names = ablation_names(ablations)
    assert {"heads", "merge", "shazeer"} <= set(names)
    assert not {"over", "grid", "heads_of"} & set(names)


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
    for ablation, key, values in (
        (ablations.heads, "num_heads", heads),
        (ablations.kv_heads, "num_kv_heads", key_heads),
    ):
        found = [arm[f"model.attention.{key}"] for arm in ablation(config)]
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
