"""Our attention and layers with torch's weights give what torch's layers give.

All in float32. torch marks padding with True, and its causal masks are True where
nothing may be seen.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from benchmarks.peers_training import Model
from headcount.configs import multi30k
from headcount.models.attention import Attention
from headcount.models.cost import abstract, parameters
from headcount.models.layers import Layer, make_norm
from headcount.models.maps import attention_map
from headcount.models.positions import bucket, rotate
from headcount.models.transformer import Transformer

TOLERANCE = 2e-5  # of sums of 512 products in another order
SIZES = {"small": (3, 7, 5, 24, 4, 40), "large": (32, 100, 60, 512, 8, 2048)}


def numpy(tensor) -> np.ndarray:
    return tensor.detach().numpy()


def randomised(module):
    """Every parameter random: torch's biases and norms begin as 0 and 1."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape)
    return module.eval()


def put(param, tensor):
    """A torch parameter, as inputs × outputs, in the shape of ours."""
    array = numpy(tensor)
    assert array.size == param.size
    param[...] = jnp.asarray(array.T.reshape(param.shape))


def copy_attention(ours: Attention, theirs: torch.nn.MultiheadAttention):
    for name, weight, bias in zip(
        ("query", "key", "value"),
        theirs.in_proj_weight.chunk(3),
        theirs.in_proj_bias.chunk(3),
        strict=True,
    ):
        put(getattr(ours, name), weight)
        put(getattr(ours, f"{name}_bias"), bias)
    put(ours.merge["kernel"], theirs.out_proj.weight)
    put(ours.merge_bias, theirs.out_proj.bias)


def copy_layer(ours: Layer, theirs):
    copy_attention(ours.self_attention, theirs.self_attn)
    norms = [ours.self_norm, ours.mlp_norm]
    if ours.cross_attention is not None:
        copy_attention(ours.cross_attention, theirs.multihead_attn)
        norms.insert(1, ours.cross_norm)
    for number, norm in enumerate(norms, start=1):
        other = getattr(theirs, f"norm{number}")
        put(norm.scale, other.weight)
        put(norm.bias, other.bias)
    for linear, other in (
        (ours.mlp.up, theirs.linear1),
        (ours.mlp.down, theirs.linear2),
    ):
        put(linear.kernel, other.weight)
        put(linear.bias, other.bias)


def inputs(B, T, S, D):
    """x, memory, and their segments: the last sentences are shorter."""
    rng = np.random.default_rng(0)
    x, memory = (rng.normal(size=(B, n, D)).astype(np.float32) for n in (T, S))
    segments, memory_segments = np.ones((B, T), np.int32), np.ones((B, S), np.int32)
    segments[-1, T // 2 :] = 0
    memory_segments[-2:, S // 2 + 1 :] = 0
    return x, memory, segments, memory_segments


@pytest.fixture(scope="module")
def attentions():
    theirs = randomised(torch.nn.MultiheadAttention(24, 4, batch_first=True))
    ours = Attention(24, num_heads=4, rngs=nnx.Rngs(0))
    copy_attention(ours, theirs)
    return ours, theirs


@pytest.mark.parametrize("kind", ["self", "cross", "causal"])
@pytest.mark.parametrize("padded", [False, True])
def test_attention(attentions, kind, padded):
    ours, theirs = attentions
    x, memory, segments, memory_segments = inputs(3, 7, 5, 24)
    if kind != "cross":
        memory, memory_segments = x, segments
    masks = {"is_causal": kind == "causal"}
    arguments = {}
    if padded:
        masks["mask"] = jnp.asarray(memory_segments[:, None, None] > 0)
        arguments["key_padding_mask"] = torch.tensor(memory_segments == 0)
    if kind == "causal":
        arguments["attn_mask"] = torch.ones(7, 7, dtype=torch.bool).triu(1)
    maps = []
    got = ours(
        jnp.asarray(x),
        None if kind != "cross" else jnp.asarray(memory),
        observe=lambda seen: maps.append(attention_map(seen)),
        **masks,
    )
    sides = (torch.tensor(x), torch.tensor(memory), torch.tensor(memory))
    wanted, weights = theirs(*sides, **arguments, average_attn_weights=False)
    np.testing.assert_allclose(got, numpy(wanted), atol=TOLERANCE)
    np.testing.assert_allclose(maps[0], numpy(weights), atol=TOLERANCE)
    _, average = theirs(*sides, **arguments, average_attn_weights=True)
    np.testing.assert_allclose(maps[0].mean(1), numpy(average), atol=TOLERANCE)


@pytest.mark.parametrize(
    "size, norm, activation",
    [
        ("small", "post", "relu"),
        ("small", "post", "gelu"),
        ("small", "pre", "relu"),
        ("small", "pre", "gelu"),
        ("large", "post", "relu"),
        ("large", "pre", "gelu"),
    ],
)
@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
def test_layer(size, norm, activation, decoder):
    B, T, S, D, N, F = SIZES[size]
    make = (
        torch.nn.TransformerDecoderLayer
        if decoder
        else torch.nn.TransformerEncoderLayer
    )
    theirs = randomised(
        make(
            *(D, N, F),
            dropout=0.0,
            activation=activation,
            batch_first=True,
            norm_first=norm == "pre",
        )
    )
    ours = Layer(
        D,
        F,
        norm=norm,
        make_norm=partial(make_norm, D, "layer_norm", 1e-5, True),  # torch's epsilon
        activation=activation,
        gated=False,
        use_bias=True,
        self_attention={"num_heads": N},
        cross_attention={"num_heads": N} if decoder else None,
        rngs=nnx.Rngs(0),
    )
    copy_layer(ours, theirs)
    x, memory, segments, memory_segments = inputs(B, T, S, D)
    run = nnx.jit(lambda layer, *arrays, **kw: layer(*arrays, **kw))
    with torch.no_grad():
        if decoder:
            got, _ = nnx.jit(
                lambda layer, x, memory, segments, memory_segments: layer(
                    x,
                    memory,
                    segments=segments,
                    memory_segments=memory_segments,
                    is_causal=True,
                )
            )(ours, x, memory, segments, memory_segments)
            wanted = theirs(
                torch.tensor(x),
                torch.tensor(memory),
                tgt_mask=torch.ones(T, T, dtype=torch.bool).triu(1),
                tgt_key_padding_mask=torch.tensor(segments == 0),
                memory_key_padding_mask=torch.tensor(memory_segments == 0),
            )
        else:
            got, _ = run(ours, x, segments=segments)
            wanted = theirs(
                torch.tensor(x), src_key_padding_mask=torch.tensor(segments == 0)
            )
    real = segments > 0  # a padded query sees nothing here, something there
    difference = np.abs(np.asarray(got) - numpy(wanted))[real]
    assert difference.max() < (1e-4 if size == "large" else TOLERANCE)


def test_flax_attention():
    """flax.nnx.MultiHeadAttention, where it is right: no row that sees nothing."""
    theirs = nnx.MultiHeadAttention(
        num_heads=4, in_features=24, decode=False, rngs=nnx.Rngs(1)
    )
    ours = Attention(24, num_heads=4, rngs=nnx.Rngs(0))
    for name in ("query", "key", "value"):
        getattr(ours, name)[...] = getattr(theirs, name).kernel[...]
        bias = jax.random.normal(jax.random.key(2), (4, 6))
        getattr(ours, f"{name}_bias")[...] = bias
        getattr(theirs, name).bias[...] = bias
    ours.merge["kernel"][...] = theirs.out.kernel[...]
    x, memory, _, memory_segments = inputs(3, 7, 5, 24)
    mask = jnp.asarray(memory_segments[:, None, None] > 0)
    got = ours(jnp.asarray(x), jnp.asarray(memory), mask=mask)
    wanted = theirs(jnp.asarray(x), jnp.asarray(memory), mask=mask)
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE)
    got = ours(jnp.asarray(x), is_causal=True)
    causal = nnx.make_causal_mask(jnp.ones((3, 7)))
    wanted = theirs(jnp.asarray(x), mask=causal)
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE)


@pytest.mark.parametrize("is_causal", [False, True])
def test_relative_buckets_are_those_of_t5(is_causal):
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = np.arange(-400, 401)
    wanted = T5Attention._relative_position_bucket(
        torch.tensor(distance),
        bidirectional=not is_causal,
        num_buckets=32,
        max_distance=128,
    )
    got = bucket(jnp.asarray(distance), is_causal=is_causal)
    np.testing.assert_array_equal(got, numpy(wanted))


def test_rotary_is_that_of_llama():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import (
        LlamaRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    config = LlamaConfig(hidden_size=32, num_attention_heads=2)
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 3, 2, 9, 16)).astype(np.float32)  # B N T H
    positions = np.stack([np.arange(9), np.arange(5, 14), np.arange(9) * 7])
    cosine, sine = LlamaRotaryEmbedding(config)(
        torch.tensor(query), torch.tensor(positions)
    )
    wanted = apply_rotary_pos_emb(torch.tensor(query), torch.tensor(key), cosine, sine)
    for array, other in zip((query, key), wanted, strict=True):
        got = rotate(jnp.asarray(array.swapaxes(1, 2)), jnp.asarray(positions))
        np.testing.assert_allclose(got.swapaxes(1, 2), numpy(other), atol=1e-5)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # of the pre-norm one
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_peer_of_the_training_benchmark_is_the_same_model(norm):
    """As many parameters, and dropout after the embeddings and sublayers alone."""
    config = multi30k.get_config().model
    config.norm = norm
    ours = abstract(partial(Transformer, 50, **config.to_dict()))
    theirs = Model(50, config, longest=9)
    count = parameters(nnx.state(ours, nnx.Param))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == count
    layers = 2 * config.num_encoder_layers + 3 * config.num_decoder_layers
    dropping = [
        module
        for module in theirs.modules()
        if isinstance(module, torch.nn.Dropout) and module.p
    ]
    assert len(dropping) == 1 + layers  # both embeddings share one
    for module in theirs.modules():
        if isinstance(module, torch.nn.MultiheadAttention):
            assert module.dropout == 0
