"""Which attention sites a model has, and with which settings."""

import pytest

from headcount.configs.base import get_config
from headcount.configs.sites import at_site, layers_of


@pytest.mark.parametrize(
    "encoder, decoder, sites",
    [
        (2, 3, {"encoder": 2, "decoder": 3, "cross": 3}),
        (0, 4, {"decoder": 4}),
        (4, 0, {"encoder": 4}),
    ],
)
def test_a_model_has_cross_attention_if_it_has_both_stacks(encoder, decoder, sites):
    model = get_config().model
    model.num_encoder_layers, model.num_decoder_layers = encoder, decoder
    assert layers_of(model) == layers_of(model.to_dict()) == sites


def test_a_site_has_its_own_settings_where_it_has_any():
    general = {"num_heads": 4, "sink": True, "head_dim": None}
    own = {"num_heads": 8, "sink": None, "head_dim": None}
    assert at_site(general, own) == {"num_heads": 8, "sink": True, "head_dim": None}
    assert at_site(general, {"sink": False})["sink"] is False
    assert at_site(general, None) == at_site(general, {}) == general
