"""Heads in the model: every merge rule and kind of positions, gates, and sites."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headcount.attention import talking_heads_attention, talking_heads_weights
from headcount.attention.kernels import cpu_build
from headcount.attention.merge import MERGE_RULES
from headcount.attention.reference import attend
from headcount.configs.base import get_config
from headcount.configs.validation import flat
from headcount.models.attention import Attention
from headcount.models.cost import abstract, parameters
from headcount.models.positions import POSITIONS, bucket, relative_bias, rotate
from headcount.models.transformer import implementations
from headcount.training.step import init, make_static, train_steps
from headcount.training.trials import hyperparameters
from tests.model_cases import (
    ALONE,
    LOSS,
    PACKED,
    SETTINGS,
    SPEC,
    VOCAB,
    build_of,
    made,
)


def test_settings_cover_all_merge_rules_and_positions():
    assert {s[2].get("merge", "concat") for s in SETTINGS.values()} == set(MERGE_RULES)
    assert {s[0] for s in SETTINGS.values()} == set(POSITIONS)


@pytest.mark.parametrize("name", SETTINGS)
def test_packing_equals_one_sentence_per_row_and_gates_of_one_change_nothing(name):
    model = made(*SETTINGS[name])
    graph, params = nnx.split(model)
    if "relative" in SETTINGS[name]:  # at first all biases are 0
        model.encoder_positions[...] += jnp.arange(128.0).reshape(32, 4) / 64
        params = nnx.split(model)[1]
    run = jax.jit(lambda params, batch, **kw: nnx.merge(graph, params)(batch, **kw))
    packed = run(params, PACKED, head_gates=model.head_gates())
    alone = run(params, ALONE)
    for row, start, length, of in ((0, 0, 4, 0), (0, 4, 2, 1), (1, 0, 5, 2)):
        np.testing.assert_allclose(
            packed[row, start : start + length], alone[of, :length], atol=2e-5
        )


@pytest.mark.parametrize("name", ["concat, talking", "differential", "clipped"])
def test_training_overfits_a_handful_of_pairs(name):
    build = build_of(*SETTINGS[name])
    config = get_config()
    config.optimizer.schedule = "constant"
    static = make_static(abstract(build), config, LOSS)
    settings = {"seed": 0, "optimizer.label_smoothing": 0.0, "model.dropout": 0.0}
    arrays = hyperparameters(
        flat(config.to_dict()),
        [settings | {"optimizer.learning_rate": 1e-2, "optimizer.warmup_steps": 2}],
    )
    state = init(arrays, static=static, build=build)
    batches = jax.tree.map(lambda x: jnp.broadcast_to(x, (1, 150, *x.shape)), PACKED)
    _, metrics = train_steps(state, arrays, batches, 150, static=static)
    assert metrics["loss"][0, -1] < 0.05


def test_a_gate_of_zero_removes_the_head():
    # gone: the second head's rows of every kernel, in all three sites
    run = nnx.jit(lambda model, gates: model(PACKED, head_gates=gates))
    for merge in ("concat", "gated_elementwise"):
        settings = {"merge": merge, "head_dim": 4, "value_dim": 4}
        model = made("relative", "post", settings)
        model.encoder_positions[...] += jnp.arange(128.0).reshape(32, 4) / 64
        gates = {k: v.at[:, 1].set(0.0) for k, v in model.head_gates().items()}
        smaller = made("relative", "post", settings | {"num_heads": 3})

        def without(leaf, like):
            axes = [a for a, n in enumerate(leaf.shape) if n != like.shape[a]]
            assert len(axes) <= 1
            return jnp.delete(leaf, 1, axis=axes[0]) if axes else leaf

        graph, like = nnx.split(smaller)
        params = jax.tree.map(without, nnx.split(model)[1], like)
        wanted = run(nnx.merge(graph, params), None)
        np.testing.assert_allclose(run(model, gates), wanted, atol=2e-5)


@pytest.mark.parametrize("merge", ["mean", "weighted", "dynamic", "mixture"])
def test_a_gate_of_zero_equals_a_head_of_zero_values(merge):
    model = made("none", "post", {"merge": merge})
    gates = {k: v.at[:, 2].set(0.0) for k, v in model.head_gates().items()}
    gated = model(PACKED, head_gates=gates)
    layers = [*model.encoder, *model.decoder]
    parts = [x for y in layers for x in (y.self_attention, y.cross_attention) if x]
    for part in parts:
        part.value[...] = part.value[...].at[:, 2].set(0.0)
        part.value_bias[...] = part.value_bias[...].at[2].set(0.0)
    np.testing.assert_allclose(gated, model(PACKED), atol=2e-5)
    assert len(parts) == 3


def test_gradient_by_a_gate_equals_finite_differences():
    model = made()
    gates = model.head_gates()
    gates = {site: gate * 0.9 for site, gate in gates.items()}

    @jax.jit
    def loss(gates):
        return jax.nn.log_softmax(model(PACKED, head_gates=gates))[..., 4].sum()

    gradient = jax.grad(loss)(gates)
    for site in gates:
        step = jnp.zeros((1, 4)).at[0, 3].set(1e-2)
        up, down = (loss(gates | {site: gates[site] + s}) for s in (step, -step))
        slope = (up - down) / 2e-2
        np.testing.assert_allclose(gradient[site][0, 3], slope, rtol=2e-2)


def test_gates_per_row_apply_to_that_row_alone():
    model = made()
    gates = {k: jnp.stack([v, v * 0.5], axis=1) for k, v in model.head_gates().items()}
    assert gates["cross"].shape == (1, 2, 4)
    found = model(PACKED, head_gates=gates)
    half = {k: v * 0.5 for k, v in model.head_gates().items()}
    np.testing.assert_allclose(found[0], model(PACKED)[0], atol=1e-5)
    np.testing.assert_allclose(found[1], model(PACKED, head_gates=half)[1], atol=1e-5)


@pytest.mark.parametrize(
    "gates, message",
    [
        ({"self": jnp.ones((1, 4))}, "may have encoder, decoder, cross, got 'self'"),
        ({"cross": jnp.ones((1, 3))}, r"must be 1 layers by 4 heads.*\(1, 3\)"),
        ({"encoder": jnp.ones(4)}, r"must be 1 layers by 4 heads.*\(4,\)"),
    ],
)
def test_gates_of_the_wrong_shape_raise_an_error_that_names_the_site(gates, message):
    with pytest.raises(ValueError, match=message):
        made()(PACKED, head_gates=gates)


def test_sites_have_head_shapes_of_their_own():
    sites = {
        "cross_attention": {"num_heads": 8, "merge": "mean"},
        "encoder_attention": {"num_heads": 2, "value_dim": 5},
    }
    model = abstract(build_of(**sites))
    layer = model.decoder[0]
    assert model.encoder[0].self_attention.value.shape == (16, 2, 5)
    assert layer.self_attention.query.shape == (16, 4, 4)
    assert layer.cross_attention.query.shape == (16, 8, 2)
    assert layer.cross_attention.merge["kernel"].shape == (2, 16)
    assert {k: v.shape for k, v in model.head_gates().items()} == {
        "encoder": (1, 2),
        "decoder": (1, 4),
        "cross": (1, 8),
    }
    graph, params = nnx.split(model)
    logits = jax.eval_shape(lambda params: nnx.merge(graph, params)(PACKED), params)
    assert logits.shape == (*PACKED["target"].shape, VOCAB)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"cross_attention": {"num_heads": 3}}, "model.cross_attention.num_heads must"),
        ({"attention": {"merge": "mixture", "mixture_heads": 5}}, "from 1 to .*4, got"),
        (
            {"positions": "rotary", "attention": {"head_dim": 5}},
            "head_dim must be even",
        ),
        (
            {"attention": {"talking_heads": True, "implementation": "gpu"}},
            "must be None or 'reference' with talking_heads.*'gpu'",
        ),
        (
            {
                "attention": {"sink": True},
                "cross_attention": {"talking_heads": True},
            },
            "model.cross_attention.sink can.t be used with talking_heads",
        ),
    ],
)
def test_bad_settings_raise_an_error_that_names_the_key(changes, message):
    with pytest.raises(ValueError, match=message):
        made(**changes)


@pytest.mark.parametrize("merge", MERGE_RULES)
def test_merge_rules_have_the_parameters_counted_by_hand(merge):
    D, N, V = 16, 4, 5
    counts = {
        "concat": N * V * D,
        "scaled": N * V * D + N,
        "mean": V * D,
        "weighted": V * D + N,
        "dynamic": V * D + D * N,
        "gated": N * V * D + D * N,
        "gated_elementwise": N * V * D + D * N * V,
        "mixture": N * V * D + D * N,
        "shared_mixture": N * V * D + D * N + D,
    }
    layer = abstract(partial(Attention, D, num_heads=N, value_dim=V, merge=merge))
    assert parameters(nnx.state(layer.merge)) == counts[merge]


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_talking_heads_with_identity_mixes_equal_attention():
    query, key, value = normal(2, 5, 4, 6), normal(2, 5, 2, 6), normal(2, 5, 2, 3)
    segments = jnp.array([[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]])
    masks = {
        "is_causal": True,
        "query_segment_ids": segments,
        "key_value_segment_ids": segments,
    }
    structure = dict.fromkeys(
        ("query_seq_lengths", "key_value_seq_lengths", "local_window_size")
    )
    wanted, _ = attend(
        query, key, value, None, None, scale=6**-0.5, **masks, **structure
    )
    eye = {"logits_mix": jnp.eye(4), "weights_mix": jnp.eye(4)}
    found = talking_heads_attention(query, key, value, **masks, **eye)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_talking_heads_by_hand():
    query, key, value = normal(1, 3, 2, 4), normal(1, 5, 2, 4), normal(1, 5, 2, 3)
    before, after = normal(2, 2, seed=1), normal(2, 2, seed=2)
    logits = np.einsum("tnh,snh->nts", query[0], key[0]) / 2
    mixed = [sum(before[n, m] * logits[n] for n in range(2)) for m in range(2)]
    weights = [np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in mixed]
    weights = [sum(after[n, m] * weights[n] for n in range(2)) for m in range(2)]
    mixes = {"logits_mix": before, "weights_mix": after}
    found = talking_heads_weights(query, key, **mixes)
    np.testing.assert_allclose(found[0], np.stack(weights), rtol=1e-4, atol=1e-5)
    out = talking_heads_attention(query, key, value, **mixes)
    for n in range(2):
        wanted = weights[n] @ np.asarray(value[0, :, n])
        np.testing.assert_allclose(out[0, :, n], wanted, rtol=1e-4, atol=1e-5)


def test_rotary_depends_on_the_distance_alone():
    query, key = normal(1, 1, 2, 6), normal(1, 1, 2, 6, seed=1)

    def product(i, j):
        at = (jnp.array([[n]]) for n in (i, j))
        return sum(a * b for a, b in zip(*map(rotate, (query, key), at), strict=True))

    np.testing.assert_allclose(
        product(3, 5).sum(-1), product(10, 12).sum(-1), rtol=1e-4
    )
    assert not np.allclose(product(3, 5).sum(-1), product(3, 6).sum(-1), rtol=1e-2)
    np.testing.assert_array_equal(rotate(query, jnp.array([[0]])), query)


def test_rotary_by_hand():
    x, angle = normal(1, 1, 1, 4), 7 * 10_000.0 ** (-2 / 4)
    found = rotate(x, jnp.array([[7]]))[0, 0, 0]
    second = complex(x[0, 0, 0, 1], x[0, 0, 0, 3]) * np.exp(1j * angle)
    np.testing.assert_allclose(found[1], second.real, rtol=1e-4)
    np.testing.assert_allclose(found[3], second.imag, rtol=1e-4)


def test_relative_position_buckets_are_fine_near_and_wide_far():
    past = np.asarray(bucket(-jnp.arange(300), is_causal=True))
    assert past[:16].tolist() == list(range(16)) and past[127:].min() == 31
    assert (np.diff(past) >= 0).all() and set(past) == set(range(32))
    both = np.asarray(bucket(jnp.arange(-300, 301), is_causal=False))
    assert both[300] == 0 and both[299] == 1 and both[301] == 17
    assert set(both) == set(range(32)) - {16}
    assert (np.asarray(bucket(jnp.arange(5), is_causal=True)) == 0).all()


def test_relative_bias_is_a_row_of_its_table():
    table = normal(32, 3)
    bias = relative_bias(table, jnp.array([[0, -1], [2, -2]]), is_causal=True)
    np.testing.assert_array_equal(bias[:, 0, 1], table[1])
    np.testing.assert_array_equal(bias[:, 1, 0], table[0])


def test_implementations_are_listed_by_site():
    model = abstract(build_of("relative", cross_attention={"talking_heads": True}))
    ours = "cpu" if cpu_build.unavailable() is None else "blockwise"
    assert implementations(model, SPEC) == {
        "encoder": ours,
        "decoder": ours,
        "cross": "talking_heads_attention",
    }
