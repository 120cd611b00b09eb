"""The model: what may depend on what, and packing."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from headcount import attention
from headcount.configs.ablations import equal_gain
from headcount.configs.base import get_config
from headcount.configs.validation import check_values, flat
from headcount.models import precision
from headcount.models.attention import Attention
from headcount.models.cost import abstract, parameters
from headcount.models.positions import BUCKETS, relative_bias, sinusoidal
from headcount.models.transformer import Transformer
from tests.model_cases import ALONE, LOSS, PACKED, VOCAB, build_of, side, tiny


def split(**changes):
    return nnx.split(tiny(**changes)(rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("norm", [pytest.param("post", marks=pytest.mark.slow), "pre"])
def test_packed_loss_and_gradient_equal_one_sentence_per_row(norm):
    graph, params = split(norm=norm)
    loss = jax.jit(
        jax.value_and_grad(lambda p, b: LOSS(nnx.merge(graph, p), b, 0.1), has_aux=True)
    )
    (packed, packed_tokens), packed_gradient = loss(params, PACKED)
    (alone, alone_tokens), alone_gradient = loss(params, ALONE)
    assert packed_tokens == alone_tokens == 11
    np.testing.assert_allclose(packed, alone, rtol=1e-5)
    for left, right in zip(
        jax.tree.leaves(packed_gradient), jax.tree.leaves(alone_gradient), strict=True
    ):
        np.testing.assert_allclose(left, right, atol=2e-5)


@pytest.fixture(scope="module")
def influences():
    """Tokens whose embeddings the hidden state at a target position depends on."""
    graph, params = split()

    @jax.jit
    @jax.grad
    def gradient(params, position):
        hidden = nnx.merge(graph, params).hidden(PACKED)[0, position]
        # by weights of no symmetry, for a norm's outputs sum to 0
        return (hidden * jnp.arange(hidden.size) ** 2).sum()

    def of(position):
        of_table = gradient(params, position)["embedding"][...]
        return set(np.flatnonzero(np.abs(of_table).sum(-1)).tolist())

    return of


@pytest.mark.parametrize(
    "position, seen",
    [
        # source 4 5 6 | 7 8 9 10 11 and target 20 21 22 23 | 24 25; 1 is bos
        (0, {4, 5, 6, 1}),
        (2, {4, 5, 6, 1, 20, 21}),
        (4, {7, 8, 9, 10, 11, 1}),
        (5, {7, 8, 9, 10, 11, 1, 24}),
    ],
)
def test_output_depends_on_source_and_earlier_tokens_alone(influences, position, seen):
    assert influences(position) == seen


def test_embedding_gradients_accumulate_in_float32():
    """In bfloat16 256 + 1 is 256, and a batch has more sentences: each begins alike."""
    graph, params = split(positions="learned", scale_embeddings=False, dtype="bfloat16")
    alike = jnp.zeros((1, 1000), jnp.int32)

    @jax.jit
    @jax.grad
    def gradient(params):
        return precision.model_of(graph, params).embed(alike, alike, 1).sum(dtype=float)

    found = gradient(params)
    for name in ("embedding", "decoder_positions"):
        np.testing.assert_array_equal(found[name][0], 1000.0)

    @jax.jit
    @jax.grad
    def of_bias(table):
        return relative_bias(table, alike, is_causal=True).sum(dtype=float)

    found = of_bias(jnp.zeros((BUCKETS, 2), jnp.bfloat16))
    np.testing.assert_array_equal(found[0].astype(float), 1000.0)


def test_a_source_vocabulary_has_a_table_of_its_own():
    joint = split()[1]
    config = get_config().model
    config.width, config.attention.num_heads = 16, 2
    own = Transformer(VOCAB, 30, **config.to_dict(), rngs=nnx.Rngs(0))
    assert own.source_embedding.shape == (30, 16)
    assert "source_embedding" not in joint


def test_each_side_is_embedded_by_its_own_table():
    model = nnx.merge(*split(positions="none"))
    own = tiny(positions="none")(source_vocab_size=50, rngs=nnx.Rngs(0))
    tokens = jnp.array([[7, 39]])
    for of, table in ((model, model.embedding), (own, own.source_embedding)):
        found = of.embed(tokens, tokens * 0, 1, is_source=True)
        np.testing.assert_allclose(found, 4 * table[...][tokens], rtol=1e-6)
        found = of.embed(tokens, tokens * 0, 1)  # 4, the root of the width
        np.testing.assert_allclose(found, 4 * of.embedding[...][tokens], rtol=1e-6)


def test_the_embeddings_of_features_are_added_to_the_tokens():
    """With the variance of one: divided by the root of their number."""
    model = nnx.merge(*split(positions="none"))
    table, positions = np.array(model.embedding[...]), jnp.zeros((1, 2), jnp.int32)
    ids = [jnp.array([each]) for each in ([3, 4], [5, 6], [7, 7])]
    found = model.embed(ids[0], positions, 2, is_source=True, features=tuple(ids[1:]))
    wanted = sum(table[np.array(each)] for each in ids) * model.scale / np.sqrt(3)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    alone = model.embed(ids[0], positions, 2, is_source=True)
    np.testing.assert_array_equal(alone, table[np.array(ids[0])] * model.scale)


def test_transformer_tiny_has_the_parameters_counted_by_hand():
    """4 + 4 layers, D 128, F 256, counted by hand: every kernel, bias and norm."""
    config = get_config().model
    config.num_encoder_layers = config.num_decoder_layers = 4
    model = abstract(partial(Transformer, 10_000, **config.to_dict()))
    D, F = 128, 256
    attention, mlp, norm = 4 * (D * D + D), 2 * D * F + D + F, 2 * D
    encoder, decoder = attention + mlp + 2 * norm, 2 * attention + mlp + 3 * norm
    expected = 10_000 * D + 4 * (encoder + decoder)
    assert parameters(model) == expected


def test_constructor_defaults_equal_those_of_the_config():
    """Which a run of before some key existed was trained with, and is loaded by."""
    model = get_config().model
    for module, config in ((Transformer, model), (Attention, model.attention)):
        arguments = inspect.signature(module.__init__).parameters
        shared = arguments.keys() & config.keys()
        assert len(shared) > 8
        for name in shared:
            default = arguments[name].default
            is_section = isinstance(config[name], ConfigDict)
            if default is not inspect.Parameter.empty and not is_section:
                assert default == config[name], name


@pytest.mark.parametrize(
    "merge, name, sizes",
    [
        ("concat", "kernel", (96, 64)),
        ("mean", "kernel", (24, 64)),
        ("gated", "gate", (64, 4)),
        ("gated_elementwise", "gate", (64, 96)),
    ],
)
def test_xavier_initialization_counts_all_heads_together(merge, name, sizes):
    """Of what all heads together take and give, so that N alone changes nothing."""
    heads = {"num_heads": 4, "head_dim": 8, "value_dim": 24, "merge": merge}
    layer = Attention(64, **heads, rngs=nnx.Rngs(0))
    for kernel, (into, out) in (
        (layer.query, (64, 32)),
        (layer.value, (64, 96)),
        (layer.merge[name], sizes),
    ):
        bound = np.sqrt(6 / (into + out))
        assert 0.97 * bound < np.abs(kernel[...]).max() <= bound
        assert kernel[...].std() == pytest.approx(bound / np.sqrt(3), rel=0.06)


# The variance of concat's output at the start over the rule's: N = 4 and 16, D = 128,
# and the gain that evens it: the table of docs/research/merge_start.md.
STARTS = {
    "concat": ((1, 1.0), (1, 1.0)),
    "scaled": ((1, 1.0), (1, 1.0)),
    "mean": ((10, 3.16), (136, 11.7)),
    "weighted": ((10, 3.16), (136, 11.7)),
    "dynamic": ((5.3, 2.3), (46, 6.7)),
    "gated": ((3.1, 1.77), (3.2, 1.78)),
    "gated_elementwise": ((3.4, 1.84), (3.4, 1.85)),
    "mixture": ((6.5, 2.54), (69, 8.3)),
}


def begun_variances(init, N, V, D=128):
    """A function: the variance of what a merge rule begins with, by its gain."""
    random = np.random.default_rng(0)
    heads = jnp.asarray(random.normal(size=(1, 128, N, V)), jnp.float32)
    x = jnp.asarray(random.normal(size=(1, 128, D)), jnp.float32)

    def variance(rule, gain=1.0):
        settings = {"num_heads": N, "value_dim": V, "mixture_heads": N // 2}
        settings |= {"merge": rule, "merge_gain": gain, "init": init}
        layers = (Attention(D, **settings, rngs=nnx.Rngs(seed)) for seed in range(2))
        return np.mean([layer.merged(heads, x).var() for layer in layers])

    return variance


@pytest.mark.slow
@pytest.mark.parametrize("column, N", [(0, 4), (1, 16)])
def test_merge_gain_makes_initial_variance_equal_that_of_concat(column, N):
    variance = begun_variances("xavier", N, 128 // N)
    wanted = variance("concat")
    for rule, columns in STARTS.items():
        ratio, gain = columns[column]
        assert equal_gain(rule, N, 128 // N, 128, N // 2) == gain
        assert wanted / variance(rule) == pytest.approx(ratio, rel=0.1)
        assert variance(rule, gain) == pytest.approx(wanted, rel=0.1)


def test_a_rule_whose_gain_is_unknown_is_named():
    with pytest.raises(ValueError, match="of the merge rule 'maximum' is not known"):
        equal_gain("maximum", 4, 32, 128, 2)


@pytest.mark.slow
def test_fan_in_initialization_gives_outputs_variance_1_for_any_heads():
    for N, V in ((1, 8), (4, 32), (16, 64)):
        variance = begun_variances("fan_in", N, V)
        assert variance("concat") == pytest.approx(1, rel=0.1)
    gains = {rule: equal_gain(rule, 4, 32, 128, 2, "fan_in") for rule in STARTS}
    assert gains["mean"] == gains["weighted"] == 2  # the root of N
    variance = begun_variances("fan_in", 4, 32)
    for rule, gain in gains.items():
        assert variance(rule, gain) == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize("N, K, H", [(1, 1, 128), (4, 4, 8), (8, 2, 64)])
def test_fan_in_initialization_gives_logits_variance_1_for_any_heads(N, K, H):
    """Xavier's begin with 4 D² / ((D + NH) (D + KH)): 0.44, 1.78 and 0.15 here."""
    D = 64
    x = jax.random.normal(jax.random.key(0), (1, 256, D))
    shape = {"num_heads": N, "num_kv_heads": K, "head_dim": H}
    for init, wanted in (
        ("fan_in", 1),
        ("xavier", 4 * D**2 / (D + N * H) / (D + K * H)),
    ):
        variances = []
        for seed in range(3):
            layer = Attention(D, **shape, init=init, rngs=nnx.Rngs(seed))
            key = jnp.repeat(layer.keys_values(x)[0], N // K, 2)
            logits = jnp.einsum("BTNH,BSNH->BNTS", layer.queries(x), key) / H**0.5
            variances.append(logits.var())
        assert np.mean(variances) == pytest.approx(wanted, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [None, 0.0, 0.9])
def test_logits_are_multiplied_by_the_layers_scale(scale):
    D, shape = 24, {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "value_dim": 5}
    layer = Attention(D, **shape, scale=scale, sink=True, rngs=nnx.Rngs(0))
    layer.sink[...] = jnp.arange(4.0)
    plain = Attention(D, **shape, rngs=nnx.Rngs(0))  # of the same projections
    x, memory = jax.random.normal(jax.random.key(1), (2, 3, 7, D))
    query, (key, value) = plain.queries(x), plain.keys_values(memory)
    heads = attention.dot_product_attention(
        query, key, value, scale=scale, sink=layer.sink[...], implementation="reference"
    )
    found = layer(x, memory)
    np.testing.assert_allclose(found, layer.merged(heads, x), rtol=1e-5, atol=1e-6)


def test_merge_gain_of_a_shared_kernel_equals_the_formula():
    for N, V, D in ((4, 32, 128), (16, 8, 128), (3, 20, 50)):
        exact = N * np.sqrt((V + D) / (N * V + D))
        for rule in ("mean", "weighted"):
            assert equal_gain(rule, N, V, D, 1) == pytest.approx(
                exact, rel=5e-3
            )  # three digits


def test_merge_gain_scales_the_kernel_of_its_site_alone():
    config = get_config().model
    config.attention.merge = "gated"
    plain = Transformer(VOCAB, **config.to_dict(), rngs=nnx.Rngs(0))
    config.cross_attention.merge_gain = 2.5
    gained = Transformer(VOCAB, **config.to_dict(), rngs=nnx.Rngs(0))
    for layer, other in zip(gained.decoder, plain.decoder, strict=True):
        kernel = layer.cross_attention.merge["kernel"]
        kernel[...] = kernel[...] / 2.5
        np.testing.assert_allclose(
            kernel[...], other.cross_attention.merge["kernel"][...], rtol=1e-5
        )
        kernel[...] = other.cross_attention.merge["kernel"][...]
    jax.tree.map(
        np.testing.assert_array_equal, *(nnx.split(m)[1] for m in (gained, plain))
    )


def test_embeddings_are_initialized_and_scaled_to_the_size_of_positions():
    model = tiny(scale_embeddings=True)(rngs=nnx.Rngs(0))
    table = np.asarray(model.embedding[...])
    assert table.std() == pytest.approx(16**-0.5, rel=0.1)
    tokens, positions = jnp.array([[7, 3, 9]]), jnp.array([[0, 1, 0]])
    found = model.embed(tokens, positions, 3)
    wanted = 4 * table[[7, 3, 9]] + sinusoidal(3, 16)[[0, 1, 0]]
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_heads": 3}, "num_heads must divide model.width.*3 and 16"),
        ({"num_heads": 4, "num_kv_heads": 3}, "multiple of num_kv_heads.*4 and 3"),
        ({"num_heads": 3, "head_dim": 8}, "num_heads must divide .*value_dim is None"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"value_dim": 0}, "value_dim must be at least 1, got 0"),
        ({"merge": "sum"}, "merge must be one of concat.*'sum'; .* --task_file"),
        ({"merge_gain": 0.0}, "model.attention.merge_gain must be from .*got 0.0"),
        ({"merge_gain": -1.0}, "merge_gain must be from 1e-18 to 1e18, got -1.0"),
        ({"merge_gain": float("nan")}, "merge_gain must be .*got nan"),
        ({"merge_gain": float("inf")}, "merge_gain must be .*got inf"),
        ({"scale": -1.0}, "model.attention.scale must be from 0 to 1e6, got -1.0"),
        ({"scale": float("nan")}, "scale must be .*got nan"),
        (
            {"init": "he"},
            "model.attention.init must be one of xavier, fan_in, got 'he'",
        ),
        ({"implementation": "flash"}, "implementation must be one of.*'flash'"),
    ],
)
def test_bad_head_settings_raise_an_error_that_names_the_key(change, message):
    config = get_config().model
    config.width = 16
    config.attention.update(change)
    with pytest.raises(ValueError, match=message):
        Transformer(VOCAB, **config.to_dict(), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("site", ["encoder", "decoder", "cross"])
def test_qk_clip_excludes_learned_biases_in_the_logits(site):
    """Clipping would shrink a head at every update, and its bias would stay."""
    build = build_of("relative", **{f"{site}_attention": {"qk_clip": 9.0}})
    if site == "cross":  # whose logits have no bias
        abstract(build)
        return
    message = f"model.{site}_attention.qk_clip can't be used with model.positions"
    with pytest.raises(ValueError, match=message):
        abstract(build)


@pytest.mark.parametrize(
    "site, without",
    [("encoder", "encoder"), ("decoder", "decoder"), ("cross", "encoder")],
)
def test_settings_of_attention_that_the_model_lacks_raise_an_error(site, without):
    config = get_config().model
    config[f"num_{without}_layers"] = 0
    config[f"{site}_attention"].num_heads = 2
    message = f"model.{site}_attention.num_heads=2 has no effect"
    with pytest.raises(ValueError, match=message):
        Transformer(VOCAB, **config.to_dict(), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "positions, change, message",
    [
        ("none", {"implementation": "cudnn"}, "needs an NVIDIA GPU"),
        (
            "none",
            {"implementation": "xla", "value_dim": 5},
            "query and value of one head size",
        ),
        ("none", {"implementation": "xla", "sink": True}, "no gradient .* sink"),
        ("relative", {"implementation": "tpu_interpret"}, "no gradient.* bias"),
    ],
)
def test_training_by_an_implementation_that_cannot_run_raises_an_error(
    positions, change, message
):
    graph, params = nnx.split(abstract(build_of(positions, "post", change)))
    gradient = jax.grad(lambda p: LOSS(nnx.merge(graph, p), PACKED)[0])
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(gradient, params)


@pytest.mark.parametrize(
    "key", ["model.width", "model.max_positions", "train.eval_every_steps"]
)
def test_counts_below_one_raise_an_error_that_names_the_key(key):
    config = flat(get_config().to_dict())
    check_values(config)
    with pytest.raises(ValueError, match=f"{key} must be at least 1, got 0"):
        check_values(config | {key: 0})


@pytest.mark.parametrize(
    "key, value",
    [
        ("norm", "middle"),
        ("positions", "sinus"),
        ("norm_type", "batch_norm"),
        ("mlp", "moe"),
        ("activation", "swish"),
    ],
)
def test_bad_model_settings_raise_an_error_that_names_the_key(key, value):
    with pytest.raises(ValueError, match=f"model.{key} must be one of.*'{value}'"):
        tiny(**{key: value})(rngs=nnx.Rngs(0))


def test_negative_token_types_raise_an_error_that_names_the_key():
    with pytest.raises(ValueError, match="token_types must be at least 0, got -1"):
        tiny(token_types=-1, num_decoder_layers=0)(rngs=nnx.Rngs(0))


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_dropout_that_is_no_rate_raises_an_error_that_names_the_key(rate):
    with pytest.raises(ValueError, match=f"model.dropout must be .*{rate}"):
        tiny(dropout=rate)(rngs=nnx.Rngs(0))


def test_sinusoidal_positions_have_the_published_wavelengths():
    table = sinusoidal(50, 8)
    position = np.arange(50)
    np.testing.assert_allclose(table[:, 0], np.sin(position), atol=1e-6)
    np.testing.assert_allclose(table[:, 3], np.sin(position / 10_000), atol=1e-6)
    np.testing.assert_allclose(table[:, 7], np.cos(position / 10_000), atol=1e-6)


def float64(params):
    """Return arrays for plain NumPy, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = (
        jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves
    )
    return {
        name.removesuffix(".value"): np.float64(leaf)
        for name, (_, leaf) in zip(names, leaves, strict=True)
    }


def scattered(model):
    """Return a model none of whose parameters is 0 or 1."""
    graph, params = nnx.split(model)
    random = np.random.default_rng(0)

    def move(x):
        return x + 0.3 * random.normal(size=x.shape).astype(np.float32)

    return nnx.merge(graph, jax.tree.map(move, params))


def layer_norm(x, scale, bias=0.0):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale + bias


def rms_norm(x, scale):
    """Zhang & Sennrich 2019, equation 4."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.slow
def test_rms_norm_and_gated_feed_forward_equal_numpy():
    """A decoder of two layers as Llama's but for its positions, in float64.

    Grouped heads, RMSNorm before the sublayers, SwiGLU, no biases, an output table of
    its own.
    """
    changes = {"num_encoder_layers": 0, "positions": "none", "norm": "pre"}
    changes |= {"norm_type": "rms_norm", "mlp": "gated", "activation": "silu"}
    changes |= {"use_bias": False, "tie_embeddings": False}
    config = get_config().model
    config.update(changes | {"width": 16, "mlp_dim": 24})
    config.attention.num_kv_heads, config.attention.use_bias = 2, False
    build = partial(Transformer, VOCAB, **config.to_dict())
    model = scattered(build(rngs=nnx.Rngs(0)))
    batch = side(ALONE, "target")
    p = float64(nnx.split(model)[1])
    assert not any("bias" in name for name in p)

    def attended(x, of):
        query = np.einsum("btd,dnh->bnth", x, p[f"{of}.query"])
        key, value = (
            np.repeat(np.einsum("btd,dkh->bkth", x, p[f"{of}.{name}"]), 2, axis=1)
            for name in ("key", "value")
        )
        logits = query @ key.swapaxes(-1, -2) / 2  # the root of H
        T = x.shape[1]
        logits = np.where(np.tri(T, dtype=bool), logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("bnth,nhd->btd", weights @ value, p[f"{of}.merge.kernel"])

    tokens = np.asarray(batch["target"])
    inputs = np.concatenate([np.ones((3, 1), int), tokens[:, :-1]], axis=1)
    x = 4 * p["embedding"][inputs]
    for i in range(2):
        at = f"decoder.{i}"
        x = x + attended(
            rms_norm(x, p[f"{at}.self_norm.scale"]), f"{at}.self_attention"
        )
        y = rms_norm(x, p[f"{at}.mlp_norm.scale"])
        up, gate, down = (p[f"{at}.mlp.{n}.kernel"] for n in ("up", "gate", "down"))
        x = x + (silu(y @ gate) * (y @ up)) @ down
    wanted = rms_norm(x, p["decoder_norm.scale"]) @ p["output_table"].T
    real = np.asarray(batch["target_segments"]) > 0
    np.testing.assert_allclose(model(batch)[real], wanted[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use_bias", [True, False])
def test_layer_norm_and_plain_feed_forward_equal_numpy(use_bias):
    model = scattered(tiny(use_bias=use_bias)(rngs=nnx.Rngs(0)))
    layer, x = model.encoder[1], np.random.default_rng(0).normal(size=(2, 5, 16)) + 1
    p = float64(nnx.split(layer)[1])
    names = {name.split(".")[-1] for name in p if "attention" not in name}
    assert names == ({"kernel", "scale", "bias"} if use_bias else {"kernel", "scale"})
    norm = layer_norm(x, p["mlp_norm.scale"], p.get("mlp_norm.bias", 0.0))
    hidden = np.maximum(x @ p["mlp.up.kernel"] + p.get("mlp.up.bias", 0.0), 0)
    wanted = hidden @ p["mlp.down.kernel"] + p.get("mlp.down.bias", 0.0)
    x = jnp.float32(x)
    np.testing.assert_allclose(layer.mlp_norm(x), norm, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layer.mlp(x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_untied_output_has_its_own_table_and_gradient():
    """Of the embedding only the tokens that are read have a gradient then."""
    changes = {"num_encoder_layers": 0, "positions": "none"}
    batch, tables = side(ALONE, "target"), {}
    for tied in (True, False):
        model = tiny(tie_embeddings=tied, **changes)(rngs=nnx.Rngs(0))
        graph, params = nnx.split(model)
        gradient = jax.jit(jax.grad(lambda p, g=graph: LOSS(nnx.merge(g, p), batch)[0]))
        tables[tied] = gradient(params)
    assert "output_table" not in tables[True]
    read = set(np.unique(batch["target"][batch["target_segments"] > 0])) - {23, 25, 30}
    moved = set(np.flatnonzero(np.abs(tables[False]["embedding"][...]).sum(1)).tolist())
    assert moved == read | {1}
    assert np.all(np.abs(tables[False]["output_table"][...]).sum(1) > 0)
    assert np.all(np.abs(tables[True]["embedding"][...]).sum(1) > 0)
    hidden = jax.random.normal(jax.random.key(0), (2, 3, 16))
    wanted = np.asarray(hidden) @ np.asarray(model.output_table[...]).T
    np.testing.assert_allclose(model.logits(hidden), wanted, rtol=1e-5, atol=1e-5)
