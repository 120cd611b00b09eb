"""Configs that raise an error, and what a resumed run logs."""

import pytest

from headcount.configs.base import get_config
from headcount.train import warn_of_new_decay
from headcount.training.checks import check_config


def test_muon_per_head_needs_muon():
    """Otherwise two arms of a sweep would be the same."""
    config = get_config()
    config.optimizer.muon_per_head = True
    with pytest.raises(ValueError, match="muon_per_head needs optimizer.name=muon"):
        check_config(config)
    config.optimizer.name = "muon"
    check_config(config)


def test_a_misspelt_key_of_a_config_made_in_python_is_named():
    """Or else it would do nothing, and the trained run could not be loaded."""
    config = get_config()
    config.train.num_step = 5
    with pytest.raises(ValueError, match="train.num_step, .* mean train.num_steps"):
        check_config(config)


@pytest.mark.parametrize(
    "section, layers, is_wrong",
    [
        ("attention", (1, 1), True),
        ("attention", (2, 1), False),
        ("decoder_attention", (2, 1), True),
        ("cross_attention", (1, 2), False),
    ],
)
def test_value_residuals_need_two_layers(section, layers, is_wrong):
    """Otherwise an arm of a sweep would equal the baseline."""
    config = get_config()
    config.model.num_encoder_layers, config.model.num_decoder_layers = layers
    config.model[section].value_residual = True
    if is_wrong:
        with pytest.raises(ValueError, match=f"model.{section}.value_residual"):
            check_config(config)
    else:
        check_config(config)


def test_value_residuals_of_every_stack_need_two_layers():
    config = get_config()
    config.model.num_encoder_layers, config.model.num_decoder_layers = 1, 2
    for site in ("encoder", "decoder"):
        config.model[f"{site}_attention"].value_residual = True
    with pytest.raises(ValueError, match="model.encoder_attention.value_residual"):
        check_config(config)


@pytest.mark.parametrize(
    "settings, key",
    [
        ({"attention.gate_size": "element"}, "attention.gate_size=element"),
        ({"attention.gate_features": 0}, "attention.gate_features=0"),
        (
            {"cross_attention.gate_on": "values", "attention.gate": "none"},
            "cross_attention.gate_on=values",
        ),
        (
            {"attention.mixture_shared": 2, "attention.merge": "mixture"},
            "attention.mixture_shared=2",
        ),
        ({"attention.mixture_heads": 3}, "attention.mixture_heads=3"),
    ],
)
def test_settings_without_effect_raise_an_error(settings, key):
    """Otherwise one would train plain heads without noticing."""
    config = get_config()
    config.model.update_from_flattened_dict(settings)
    with pytest.raises(ValueError, match=f"model.{key} has no effect without"):
        check_config(config)


@pytest.mark.parametrize("key", ["rotary_dim", "latent_rotary_dim"])
def test_cross_attention_has_no_rotary_positions(key):
    config = get_config()
    config.model.positions = "rotary"
    config.model.cross_attention[key] = 2
    with pytest.raises(ValueError, match=f"model.cross_attention.{key}=2 has no eff"):
        check_config(config)


def test_a_setting_has_an_effect_if_one_site_uses_it():
    config = get_config()
    config.model.attention.gate_size = "element"
    config.model.cross_attention.gate = "sigmoid"
    check_config(config)


@pytest.mark.parametrize(
    "changes, is_told",
    [
        ({"optimizer.schedule": "cosine"}, True),
        ({"optimizer.schedule": "inverse_sqrt"}, False),
        ({"optimizer.schedule": "cosine", "optimizer.decay_steps": 50}, False),
        ({"optimizer.schedule": "linear", "train.num_steps": 100}, False),
    ],
)
def test_a_resumed_run_tells_that_its_learning_rate_decays_later(
    capsys, changes, is_told
):
    before, config = get_config(), get_config()
    before.train.num_steps, config.train.num_steps = 100, 200
    config.update_from_flattened_dict(changes)
    warn_of_new_decay(before.to_dict(), config, [{"seed": 0}])
    assert ("until step 200 instead of 100" in capsys.readouterr().err) == is_told
