"""Variants of heads: the identities that define them, gradients, and bad settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads

from headcount.attention import MERGE_RULES, dot_product_attention, variants
from headcount.configs.base import get_config
from headcount.configs.variants import VARIANTS, claim_of
from headcount.models.attention import Attention
from headcount.models.cost import parameters
from headcount.models.maps import single_example
from headcount.models.variants import Difference
from tests import model_cases
from tests.marks import slow_but

# Variants whose gradients COMBINED covers, in the same code.
IN_COMBINED = {"gate", "gate, shared", "gate, from 1", "gate on values", "exclusive"}
IN_COMBINED |= {"differential", "latent", "knocking, MLP", "value residual"}
B, T, N, D = 2, 5, 4, 16
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)
POSITIONS = jnp.broadcast_to(jnp.arange(T), (B, T))
SEGMENTS = jnp.ones((B, T), jnp.int32)
CAUSAL = {
    "is_causal": True,
    "query_segment_ids": SEGMENTS,
    "key_value_segment_ids": SEGMENTS,
}
PADDED = dict.fromkeys(
    ("query_segment_ids", "key_value_segment_ids"), SEGMENTS.at[:, 3:].set(0)
)


def layer(seed=0, **settings):
    settings = {"num_heads": N, "implementation": "reference"} | settings
    return Attention(D, **settings, rngs=nnx.Rngs(seed))


def settings_of(variant):
    base = get_config()
    base.model.width, base.model.num_encoder_layers = D, 0
    found = VARIANTS[variant].settings(base).items()
    return {key.removeprefix("model.attention."): value for key, value in found}


def stirred(module, scale=0.3):
    """Move every parameter away from its start, at which many variants do nothing."""
    random, (graph, params) = np.random.default_rng(1), nnx.split(module)
    moved = jax.tree.map(lambda x: x + scale * random.normal(size=x.shape), params)
    return nnx.merge(graph, moved)


def close(found, wanted, **options):
    np.testing.assert_allclose(found, wanted, **{"rtol": 1e-5, "atol": 1e-5} | options)


@pytest.mark.parametrize(
    "settings",
    [
        {"gate": "double_sigmoid"},
        {"gate": "double_sigmoid", "gate_size": "element", "gate_features": 3},
        {"gate": "double_sigmoid", "gate_size": "shared"},
        {"gate": "double_sigmoid", "gate_size": "element", "gate_features": 0},
        {"gate": "double_sigmoid", "gate_on": "values", "num_kv_heads": 2},
        {"gate": "hard_concrete", "gate_features": 0},
        {"knocking": "linear", "knocking_all": True},
        {"knocking": "mlp"},
    ],
)
def test_a_neutral_start_is_concat_bit_for_bit(settings):
    heads = {k: v for k, v in settings.items() if k == "num_kv_heads"}
    np.testing.assert_array_equal(layer(**settings)(X), layer(**heads)(X))


def test_learned_gates_are_open_as_often_as_expected_and_closed_for_good_at_last():
    """By 4,000 draws of gates with other chances; the last ones are without noise."""
    values = jnp.asarray([-3.0, -1.0, 0.0, 1.0, 3.0]) / variants.STEP
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = jax.vmap(lambda key: variants.hard_concrete(values, key))(keys)
    assert drawn.min() == 0 and drawn.max() == 1
    each = jnp.stack([variants.expected_heads(value[None]) for value in values])
    np.testing.assert_allclose((drawn > 0).mean(0), each, atol=0.03)
    assert each[0] < 0.3 and each[-1] > 0.95
    for low, high in zip(drawn.mean(0)[:-1], drawn.mean(0)[1:], strict=True):
        assert low < high
    final = variants.hard_concrete(values)
    assert (final[0], final[-1]) == (0, 1) and 0 < final[2] < 1


def test_learned_gates_are_noisy_in_training_alone():
    one = layer(gate="hard_concrete", gate_features=0, gate_penalty=0.1)
    gate = one.output_gate.kernel
    gate[...] = jnp.asarray([0.0, -9.0, 0.0, 9.0]) / variants.STEP
    noisy = [one(X, dropout_key=jax.random.key(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(noisy[0], noisy[1])
    assert jnp.abs(noisy[0] - noisy[2]).max() > 1e-3
    learned = np.asarray(one.learned_gates())
    assert (learned[1], learned[3]) == (0, 1) and 0 < learned[0] == learned[2] < 1
    plain = layer()
    close(one(X), plain(X, gate=jnp.asarray(learned)))


def test_variants_leave_the_initial_values_of_the_rest_as_they_are():
    plain = layer()
    for name in VARIANTS:
        settings = settings_of(name)
        if "merge" in settings or name == "latent":
            continue
        other = layer(**settings)
        np.testing.assert_array_equal(other.value[...], plain.value[...])
        np.testing.assert_array_equal(other.query[...], plain.query[...])


def test_exclusive_outputs_are_orthogonal_to_the_own_value():
    module = layer(exclusive=True, num_kv_heads=2)
    query, key, value = module.queries_keys_values(X, None)
    heads = dot_product_attention(query, key, value, implementation="reference")
    own = jnp.repeat(value, 2, axis=2)
    found = module.transform_heads(heads, X, value)
    close((found * own).sum(-1), 0)
    parallel = found - heads  # what was removed lies along the value
    share = (parallel * own).sum(-1, keepdims=True) / (own**2).sum(-1, keepdims=True)
    close(parallel, share * own)
    close(variants.exclusive(heads, 0 * value), heads)


def test_differential_without_the_second_map_is_the_first_half_of_the_heads():
    module = layer(differential=True, layer=2)
    assert module.num_merged_heads == N // 2
    # Ye et al. 2024: 0.8 - 0.6 exp(-0.3 (l - 1)) of the layer l, here the third
    assert module.difference.initial == pytest.approx(0.8 - 0.6 * np.exp(-0.6))
    for vector in module.difference.vectors.values():
        vector[...] = jnp.zeros(N)
    close(module.difference.factor(), module.difference.initial)
    query, key, value = module.queries_keys_values(X, None)
    joint = jnp.concatenate([value[:, :, :2], value[:, :, 2:]], axis=-1)
    first, second = (
        dot_product_attention(query[:, :, at], key[:, :, at], joint)
        for at in (slice(0, 2), slice(2, 4))
    )
    heads = dot_product_attention(query, key, variants.paired(value))
    close(variants.difference(heads, jnp.zeros(())), first)
    norm = Difference.__call__(module.difference, heads)
    wanted = first - module.difference.initial * second
    wanted /= jnp.sqrt((wanted**2).mean(-1, keepdims=True) + 1e-5)
    close(norm, wanted * (1 - module.difference.initial))


def test_a_latent_of_full_rank_without_norm_and_positions_is_concat():
    settings = {"use_bias": False}
    plain = layer(**settings)
    module = layer(latent_dim=D, latent_norm=False, **settings)
    module.latent.down[...] = jnp.eye(D)
    module.latent.key[...], module.latent.value[...] = plain.key[...], plain.value[...]
    module.query[...] = plain.query[...]
    module.merge["kernel"][...] = plain.merge["kernel"][...]
    close(module(X, **CAUSAL), plain(X, **CAUSAL))


def test_value_residual_mixes_the_values_of_two_layers():
    first, other = layer(value_residual=True), layer(1, value_residual=True, layer=1)
    assert first.value_share is None and other.value_share[...] == 0.5
    leading, own = first.keys_values(X)[1], layer(1, layer=1).keys_values(X)[1]
    other.value_share[...] = 0.25
    close(other.keys_values(X, None, leading)[1], 0.75 * own + 0.25 * leading)


def test_knocking_maps_all_heads_by_one_matrix():
    module = layer(knocking="linear")
    matrix = jnp.asarray(np.random.default_rng(2).normal(size=(4, 4)), jnp.float32)
    module.knocking.value[...] = matrix
    plain = layer().keys_values(X)[1]
    close(module.keys_values(X)[1], np.einsum("bsnv,vw->bsnw", plain, matrix))


def test_partial_rotation_leaves_the_rest_of_a_head():
    whole, part = layer(rotary=True), layer(rotary=True, rotary_dim=2)
    plain = layer().queries(X)
    found = part.queries(X, POSITIONS)
    np.testing.assert_array_equal(found[..., 2:], plain[..., 2:])
    assert (found[:, 1:, :, :2] != plain[:, 1:, :, :2]).any()
    four = layer(rotary=True, rotary_dim=4)
    np.testing.assert_array_equal(
        four.queries(X, POSITIONS), whole.queries(X, POSITIONS)
    )


@pytest.mark.slow
def test_qk_clip_brings_the_largest_logit_to_the_threshold():
    for settings in ({}, {"num_kv_heads": 2}, {"latent_dim": 6, "rotary": True}):
        module = layer(qk_clip=0.2, **settings)
        module.query[...] *= 3.0
        positions = POSITIONS if settings.get("rotary") else None

        before = largest_logits(module, positions)
        assert (before > 0.2).all()
        module.clip(before)
        close(largest_logits(module, positions), 0.2)
        module.clip(largest_logits(module, positions) / 2)  # nothing is above it
        close(largest_logits(module, positions), 0.2)


def largest_logits(module, positions=None):
    """What the layer's attention says they were."""
    seen = []
    module(X, positions=positions, observe=seen.append, **CAUSAL)
    return module.auxiliary(*seen)["largest"]


@pytest.mark.parametrize("implementation", ["reference", None])
def test_largest_logits_by_hand(implementation):
    module = layer(qk_clip=1.0, implementation=implementation)
    query, key = module.queries(X), module.keys_values(X)[0]
    logits = np.einsum("btnh,bsnh->bnts", query, key) / 2
    logits = np.where(np.tri(T, dtype=bool), logits, -np.inf)
    close(largest_logits(module), logits.max((0, 2, 3)))


WITH_OWN_MAPS = "gate", "talking heads", "differential", "latent"


@pytest.mark.parametrize("variant", WITH_OWN_MAPS)
def test_every_variant_drops_weights(variant):
    """Where a call gives a key, and other ones by another key."""
    module = layer(**settings_of(variant) | {"dropout": 0.4})
    plain = module(X, **CAUSAL)
    close(plain, layer(**settings_of(variant))(X, **CAUSAL))
    first, again, other = (
        module(X, dropout_key=jax.random.key(seed), **CAUSAL) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    for found in (plain, other):
        assert (found != first).mean() > 0.5


def test_balance_loss_of_even_and_of_one_sided_use():
    shares = jnp.full((1, 4, 4), 0.25)
    even = jnp.eye(4, dtype=bool)[None]
    one = jnp.zeros((1, 4, 4), bool).at[..., 0].set(True)
    real = jnp.ones((1, 4), jnp.int32)
    close(variants.balance_loss(shares, even, real), 0.25)
    certain = one.astype(jnp.float32)
    close(variants.balance_loss(certain, one, real), 1.0)
    # padding counts for nothing
    padded = jnp.array([[1, 0, 0, 0]])
    first = jnp.eye(4)[None, :, :]
    close(variants.balance_loss(first, first > 0, padded), 1.0)


COMBINED = {
    "exclusive, gated, residual": {
        "exclusive": True,
        "gate": "sigmoid",
        "value_residual": True,
        "layer": 1,
        "num_kv_heads": 2,
    },
    "differential, exclusive, knocking": {
        "differential": True,
        "exclusive": True,
        "knocking": "mlp",
        "gate": "sigmoid",
        "gate_on": "values",
        "num_kv_heads": 2,
    },
    "latent, shared gate": {
        "latent_dim": 6,
        "rotary": True,
        "exclusive": True,
        "gate": "sigmoid",
        "gate_size": "shared",
    },
}


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["QK norm", "differential, exclusive, knocking"],
        [*sorted(VARIANTS.keys() - IN_COMBINED), *COMBINED],
    ),
)
def test_gradients_causality_and_padding(name):
    """Every parameter by finite differences; no token sees a later one, or padding."""
    settings = COMBINED[name] if name in COMBINED else settings_of(name)
    module = stirred(layer(**settings))
    graph, params = nnx.split(module)
    positions = POSITIONS if settings.get("rotary") else None
    first = None
    if "value_residual" in settings:
        first = layer(3, **settings | {"layer": 0}).keys_values(X)[1]
    weight = jnp.asarray(np.random.default_rng(3).normal(size=X.shape))

    def out(params, x, first, mask=CAUSAL):
        layer = nnx.merge(graph, params)
        return layer(x, positions=positions, first=first, **mask)

    def total(params, x, first):
        return (out(params, x, first) * weight).sum()

    with jax.enable_x64(True):
        arguments = jax.tree.map(jnp.float64, (params, X, first))
        jitted = jax.jit(total)
        check_grads(jitted, arguments, order=1, modes=["rev"], rtol=1e-3, atol=1e-4)

    @jax.jit
    def by_inputs(x):
        """Of token 2 under a causal mask, and of token 0 before two of padding."""
        of_two = jax.grad(lambda x: out(params, x, first)[0, 2].sum())
        of_zero = jax.grad(lambda x: out(params, x, first, PADDED)[0, 0].sum())
        return of_two(x), of_zero(x)

    for gradient in by_inputs(X):
        seen = np.abs(gradient).sum(-1) > 0
        np.testing.assert_array_equal(seen[0], [True] * 3 + [False] * 2)
        assert not seen[1].any()


@pytest.mark.slow
def test_layers_of_a_site_can_share_their_knocking_maps():
    """The gradient of the shared map is the sum of those of maps of their own."""
    build = model_cases.tiny()
    batch = single_example({"source": [4, 9, 8, 2], "target": [7, 5, 4, 6, 2]})
    found = {}
    for shared in (False, True):
        knocking = {"knocking": "linear", "knocking_shared": shared}
        attention = build.keywords["attention"] | knocking
        graph, params = nnx.split(build(attention=attention, rngs=nnx.Rngs(0)))

        def loss(params, graph=graph):
            return (nnx.merge(graph, params)(batch) ** 2).sum()

        maps = [
            [layer.knocking.value for layer in about.attentions]
            for about in nnx.merge(graph, jax.grad(loss)(params)).sites().values()
        ]
        found[shared] = loss(params), maps, parameters(params)
    assert found[True][0] == found[False][0]  # all maps are the identity
    V = D // 2
    assert found[False][2] - found[True][2] == 3 * V * V
    for own, same in zip(found[False][1], found[True][1], strict=True):
        assert same[0] is same[1] and own[0] is not own[1]
        close(same[0][...], own[0][...] + own[1][...])


@pytest.mark.parametrize(
    "settings, keys",
    [
        ({"differential": True, "num_heads": 1}, "num_heads .* even"),
        ({"differential": True, "num_kv_heads": 1}, "num_kv_heads .* even"),
        ({"differential": True, "talking_heads": True}, "talking_heads .*differential"),
        ({"latent_dim": 0}, "latent_dim must be at least 1"),
        ({"latent_dim": 4, "num_kv_heads": 2}, "num_kv_heads .* latent_dim"),
        ({"latent_dim": 4, "value_residual": True}, "value_residual .* latent_dim"),
        ({"latent_dim": 4, "qk_norm": True}, "qk_norm .* latent_dim"),
        ({"latent_dim": 4, "knocking": "mlp"}, "knocking .* latent_dim"),
        ({"latent_dim": 4, "latent_rotary_dim": 2}, "latent_rotary_dim .* rotary"),
        ({"latent_rotary_dim": 2}, "latent_rotary_dim must be None"),
        ({"latent_norm": False}, "latent_norm must be True without latent_dim"),
        ({"qk_clip": 9.0, "implementation": "xla"}, "qk_clip must .*='xla'"),
        ({"dropout": 0.1, "implementation": "cudnn"}, "dropout must .*='cudnn'"),
        ({"rotary_dim": 3, "rotary": True}, "rotary_dim must be even"),
        ({"rotary_dim": 6, "rotary": True}, "rotary_dim must be from 2 to head_dim"),
        ({"rotary_dim": 2}, "rotary_dim must be None .*rotary"),
        ({"gate": "tanh"}, "gate must be one of none, sigmoid"),
        ({"gate_features": 17}, "gate_features .*model.width = 16"),
        ({"knocking": "soft"}, "knocking must be one of"),
        ({"knocking_all": True}, "knocking_all must be False with knocking='none'"),
        (
            {"knocking_shared": True},
            "knocking_shared must be False with knocking='none'",
        ),
        ({"gate": "hard_concrete"}, "gate_features must be 0 with gate"),
        ({"gate": "sigmoid", "gate_penalty": 0.1}, "gate_penalty must be 0 with gate"),
        ({"qk_clip": 0.0}, "qk_clip must be above 0"),
        ({"qk_clip": 9.0, "qk_norm": True}, "qk_norm .* qk_clip"),
        ({"mixture_balance": 0.1}, "mixture_balance .* merge"),
        (
            {"merge": "shared_mixture", "mixture_heads": 4},
            "mixture_shared and mixture_heads .* num_heads = 4",
        ),
        (
            {"merge": "mixture", "mixture_heads": 3, "differential": True},
            "mixture_heads .* num_heads / 2 = 2",
        ),
        ({"exclusive": True, "is_cross": True}, "exclusive is for self-attention"),
    ],
)
def test_settings_that_do_not_fit_raise_an_error_that_names_the_keys(settings, keys):
    with pytest.raises(ValueError, match=f"model.attention.{keys}"):
        layer(**settings)


@pytest.mark.parametrize("variant", [*VARIANTS, *MERGE_RULES])
def test_what_a_variant_adds_shifts_no_initial_value(variant):
    """Neither those that it shares with plain heads, nor those of later layers."""

    def initial(settings):
        rngs = nnx.Rngs(0)
        module = Attention(D, **{"num_heads": N} | settings, rngs=rngs)
        return nnx.to_flat_state(nnx.state(module)), rngs.params()

    is_rule = variant in MERGE_RULES
    plain, plain_next = initial({})
    found, found_next = initial({"merge": variant} if is_rule else settings_of(variant))
    assert jax.random.key_data(found_next).tolist() == (
        jax.random.key_data(plain_next).tolist()
    )
    for path, param in found:
        other = dict(plain).get(path)
        if other is not None and other.shape == param.shape:
            np.testing.assert_array_equal(param[...], other[...])


def test_claims_are_found_by_what_an_arm_sets():
    base = get_config()
    for variant in VARIANTS.values():
        own = variant.settings(base)
        assert claim_of(own, base.to_dict()) == variant.claim
        matched = own | {"match": "parameters"}
        assert claim_of(matched, base.to_dict()) == variant.claim
    assert claim_of({"model.attention.num_heads": 2}, base.to_dict()) is None
