"""Dropout on the weights of a layer: by a key, in training only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headcount.attention import dot_product_attention
from headcount.configs import base
from headcount.models.attention import Attention
from headcount.models.transformer import Transformer

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9, 8)), jnp.float32)
KEY = jax.random.key(3)


def layer(**options):
    return Attention(8, num_heads=2, rngs=nnx.Rngs(0), **options)


def test_a_layer_drops_weights_where_it_gets_a_key():
    """What `dot_product_attention` does with the key's bits as the seed."""
    dropping, plain = layer(dropout=0.4), layer()
    np.testing.assert_array_equal(dropping(X), plain(X))
    np.testing.assert_array_equal(plain(X, dropout_key=KEY), plain(X))
    query, (key, value) = dropping.queries(X), dropping.keys_values(X)
    seed = jax.random.bits(KEY, dtype=jnp.uint32)
    heads = dot_product_attention(
        query, key, value, dropout_rate=0.4, dropout_seed=seed
    )
    wanted = dropping.merged(heads, X)
    found = dropping(X, dropout_key=KEY)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert (found != plain(X)).mean() > 0.9


@pytest.mark.parametrize("rate", [1.0, -0.1])
def test_bad_rates_name_the_key(rate):
    with pytest.raises(ValueError, match="model.attention.dropout must be from 0 to"):
        layer(dropout=rate)


@pytest.mark.slow
def test_every_site_and_layer_of_a_model_drops_by_a_key_of_its_own(monkeypatch):
    seeds = []
    original = Attention.dropout_arguments

    def spy(self, key):
        found = original(self, key)
        seeds.append(found.get("dropout_seed"))
        return found

    config = base.get_config().model
    config.width, config.mlp_dim, config.attention.dropout = 8, 8, 0.3
    model = Transformer(11, **config.to_dict(), rngs=nnx.Rngs(0))
    monkeypatch.setattr(Attention, "dropout_arguments", spy)
    ids = jnp.ones((1, 4), jnp.int32)
    batch = {}
    for side in ("source", "target"):
        batch |= {side: ids, f"{side}_segments": ids, f"{side}_positions": ids - 1}
    model.hidden(batch, key=KEY)
    assert len(seeds) == 6 and len({int(seed) for seed in seeds}) == 6
    seeds.clear()
    model.hidden(batch)
    assert seeds == [None] * 6
