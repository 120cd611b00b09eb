"""The schemas of state files, and configs as files have them."""

import copy
import json

import pytest

from headcount.configs import base
from headcount.configs.validation import check_values, flat_config, read_config
from headcount.runtime.schema import Number, Optional, matches, violation
from headcount.runtime.workdir import claim, has_digest, read_json, with_digest
from headcount.training.metrics import parse_row
from headcount.training.trials import check_trials


@pytest.mark.parametrize(
    "value, schema, named",
    [
        (3, int, None),
        (True, int, "a whole number, got True"),
        (3, float, None),
        (3.0, int, "a whole number"),
        (float("nan"), float, "finite"),
        (10**400, int, "finite"),
        (None, Optional(int), None),
        ("a", Optional(int), "a whole number"),
        (-1, Number(0), "at least 0"),
        (0.5, Number(0), "a whole number"),
        (0.5, Number(0, float), None),
        ("b", frozenset("ab"), None),
        (["b"], frozenset("ab"), "one of a, b"),
        ([], [int], "not empty"),
        ([1, "2"], [int], r"[1] must be a whole number"),
        ({"a": {"b": 1}}, {"a": {"b": int}}, None),
        ({"a": {}}, {"a": {"b": int}}, "a.b is missing"),
        ({"a": []}, {"a": {"b": int}}, "a must be an object"),
        ({"config": {}}, {"config": read_config}, "config: It lacks"),
    ],
)
def test_violations_are_named(value, schema, named):
    found = violation(value, schema)
    assert matches(value, schema) == (named is None)
    assert found is None if named is None else named in found


@pytest.mark.parametrize(
    "key, value, named",
    [
        ("model.width", -4, "model.width must be at least 1"),
        ("model.width", True, "model.width must be a whole number"),
        ("model.width", 16.5, "model.width must be a whole number"),
        ("model.width", None, "model.width must have a value"),
        ("model.dropout", float("nan"), "model.dropout must be finite"),
        ("model.attention.merge_gain", 10**400, "merge_gain must be finite"),
        ("model.use_bias", 1, "model.use_bias must be true or false"),
        ("model.num_encoder_layers", 10**8, "model.num_encoder_layers must be at most"),
        ("model.cross_attention.mixture_heads", 0, "cross_attention.mixture_heads"),
        ("data.directory", "a\0b", "data.directory must not contain a NUL"),
        ("model.norm_epsilon", 0.0, "model.norm_epsilon must be above 0"),
    ],
)
def test_a_value_of_a_config_is_named(key, value, named):
    config = flat_config(base.get_config().to_dict())
    check_values(config)
    with pytest.raises(ValueError, match=named):
        check_values(config | {key: value})


def test_a_config_survives_json():
    config = base.get_config().to_dict()
    assert read_config(json.loads(json.dumps(config))).to_dict() == config


@pytest.mark.parametrize(
    "path, value, named",
    [
        (["model"], None, "model must be a section"),
        (["model", "attention"], 3, "model.attention must be a section"),
        (["model", "widht"], 3, "sets model.widht"),
        (["model", "width"], ..., "lacks model.width"),
        (["model", "width"], {"a": 1}, "model.width"),
    ],
)
def test_a_config_of_another_structure_is_named(path, value, named):
    tree = copy.deepcopy(base.get_config().to_dict())
    *sections, last = path
    parent = tree
    for section in sections:
        parent = parent[section]
    if value is ...:
        del parent[last]
    else:
        parent[last] = value
    with pytest.raises(ValueError, match=named):
        read_config(tree)


def test_a_digest_notices_any_change():
    row = {"bleu": 30.123456789, "options": {"beam_size": 5}, "loss": float("nan")}
    kept = json.loads(json.dumps(with_digest(row | {"loss": None})))
    assert with_digest(row)["digest"] == kept["digest"], "as it is written"
    assert has_digest(kept)
    for changed in (
        kept | {"bleu": 30.123456788},
        kept | {"more": 1},
        kept | {"options": {"beam_size": 4}},
        {key: value for key, value in kept.items() if key != "digest"},
    ):
        assert not has_digest(changed)


def test_rows_of_metrics_that_are_not_numbers_are_left_out():
    assert parse_row('{"step": 1, "trial": 0, "loss": null}') is not None
    for row in ('{"step": -1, "trial": 0}', '{"step": 1, "trial": 0, "loss": "x"}'):
        assert parse_row(row) is None
    for number in ("Infinity", "1e999", "1" + "0" * 400, "NaN"):
        assert parse_row(f'{{"step": 1, "trial": 0, "loss": {number}}}') is None


def test_checkpoints_without_a_config_are_another_programs(tmp_path):
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    with (
        pytest.raises(ValueError, match=f"{tmp_path} has checkpoints.*config.json"),
        claim(tmp_path, {}, [{"seed": 0}]),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_trials_of_a_file_are_checked(tmp_path):
    path = tmp_path / "trials.json"
    path.write_text('[{"seed": 0}, {"seed": 1, "head_gates.cross.9.9": 0}]')
    config = flat_config(base.get_config().to_dict())
    with pytest.raises(ValueError, match="trial 1 of .*head_gates.cross.9.9"):
        check_trials(path, read_json(path), config)
