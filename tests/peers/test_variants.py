"""Variants of heads beside other implementations: same weights, output and gradients.

Weights are mapped to ours by reshaping and reordering alone, so the same map takes
their gradients to ours. Where code bases differ, a test shows by how much.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.bloom.configuration_bloom import BloomConfig
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.diffllama import modeling_diffllama as diffllama
from transformers.models.diffllama.configuration_diffllama import DiffLlamaConfig
from transformers.models.gpt_neox import modeling_gpt_neox as neox
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from x_transformers.x_transformers import AlibiPositionalBias, orthog_project
from x_transformers.x_transformers import Attention as XAttention

from headcount.attention import variants
from headcount.configs.base import get_config
from headcount.exchange.huggingface import named, unnamed
from headcount.models.attention import Attention
from headcount.models.positions import alibi_slopes
from headcount.training.optimizer import make_optimizer

TOLERANCE = 1e-5  # times the largest: both in float32; torch sums in another order
B, T, D, N, H = 2, 7, 16, 4, 6
RNG = np.random.default_rng(0)
X, COTANGENT = (RNG.normal(size=(B, T, D)).astype(np.float32) for _ in range(2))
LENGTHS = np.array([T, 4])
REAL = np.arange(T) < LENGTHS[:, None]
POSITIONS = jnp.broadcast_to(jnp.arange(T), (B, T))
CAUSAL = {"is_causal": True, "key_value_seq_lengths": jnp.asarray(LENGTHS)}
# what theirs adds to the logits
BIAS = torch.where(
    torch.tensor(np.tri(T, dtype=bool) & REAL[:, None])[:, None], 0.0, -1e30
)


def randomised(module):
    """Random weights, also where they start at 0 or 1, so that each counts."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    return module.train(False)


def compare(theirs, run, weights, settings, constants=None, **call):
    """Assert that a layer of ours has their output, and gradients by x and weights.

    Args:
        theirs: a module of torch.
        run: from x to its output.
        weights: from a function that returns an array by the name of their weight, to
            ours by name: linear, as it takes gradients, too.
        settings: of our layer.
        constants: what else is added to our weights, by name; a name that is here
            alone is of a weight that theirs lacks.
        call: arguments of our call.
    """
    theirs, constants = randomised(theirs), constants or {}
    x = torch.tensor(X, requires_grad=True)
    wanted = run(x)
    wanted.backward(torch.tensor(COTANGENT))
    params = dict(theirs.named_parameters())
    used = set()

    def value(name):
        used.add(name)
        return params[name].detach().numpy()

    settings = {"num_heads": N, "implementation": "reference"} | settings
    layer = Attention(D, **settings, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    mapped = weights(value)
    assert used == params.keys()
    ours = {name: mapped.get(name, 0) + constants.get(name, 0) for name in named(state)}
    assert mapped.keys() | constants.keys() == ours.keys()
    for name, array in named(state).items():
        assert np.shape(ours[name]) in (array.shape, ()), name
        ours[name] = jnp.broadcast_to(jnp.float32(ours[name]), array.shape)

    @jax.jit
    def forward_and_backward(state, x):
        def forward(state, x):
            return nnx.merge(graph, state)(x, **call)

        out, pullback = jax.vjp(forward, state, x)
        return out, *pullback(jnp.asarray(COTANGENT))

    found, of_state, of_x = forward_and_backward(unnamed(ours, state), X)
    close(found, wanted)
    close(of_x, x.grad)
    slopes = named(of_state)
    for name, slope in weights(lambda name: params[name].grad.numpy()).items():
        close(slopes[name], slope)
        # else the bound says little; what is added to all keys shifts all logits
        assert np.abs(slope).max() > 1e-3 or name == "key_bias"


def close(found, wanted):
    """Assert equality to `TOLERANCE`."""
    wanted = wanted.detach().numpy() if torch.is_tensor(wanted) else wanted
    bound = TOLERANCE * max(1, np.abs(wanted).max())
    np.testing.assert_allclose(found, wanted, atol=bound)


def kernel(matrix, *sizes):
    """Theirs, outputs by inputs, as ours: inputs by `sizes`."""
    return matrix.T.reshape(-1, *sizes)


def merge(matrix, size=H):
    """Theirs, of concatenated heads, as ours: N V D."""
    return matrix.T.reshape(-1, size, D)


def plain(get, heads=N, names=("q_proj", "k_proj", "v_proj", "o_proj")):
    """The four kernels of most code bases."""
    query, key, value, out = (get(f"{name}.weight") for name in names)
    return {
        "query": kernel(query, N, H),
        "key": kernel(key, heads, H),
        "value": kernel(value, heads, H),
        "merge.kernel": merge(out),
    }


def rotary(embedding, config):
    """Cosines and sines of `POSITIONS`."""
    return embedding(config)(torch.tensor(X), torch.arange(T)[None])


def halves(x, size):
    """Reorder pairs (2i, 2i + 1) of the last `size` elements as (i, i + size / 2)."""
    rest, last = x[..., :-size], x[..., -size:]
    return np.concatenate([rest, last[..., 0::2], last[..., 1::2]], axis=-1)


def test_latent_attention_is_that_of_deepseek_v3():
    """Which turns elements 2i and 2i + 1 together, where ours turns i and i + r / 2."""
    c, r, V = 5, 4, 3
    config = DeepseekV3Config(
        hidden_size=D,
        num_attention_heads=N,
        num_key_value_heads=N,
        q_lora_rank=None,
        kv_lora_rank=c,
        qk_rope_head_dim=r,
        qk_nope_head_dim=H,
        v_head_dim=V,
        attn_implementation="eager",
    )
    layer = deepseek.DeepseekV3Attention(config, 0)
    places = rotary(deepseek.DeepseekV3RotaryEmbedding, config)

    def weights(get):
        up = kernel(get("kv_b_proj.weight"), N, H + V)
        return {
            "query": halves(kernel(get("q_proj.weight"), N, H + r), r),
            "latent.down": halves(get("kv_a_proj_with_mqa.weight").T, r),
            "latent.norm.scale": get("kv_a_layernorm.weight"),
            "latent.key": up[..., :H],
            "latent.value": up[..., H:],
            "merge.kernel": merge(get("o_proj.weight"), V),
        }

    sizes = {"latent_dim": c, "latent_rotary_dim": r, "head_dim": H, "value_dim": V}
    settings = sizes | {"rotary": True, "use_bias": False}
    run = lambda x: layer(x, places, BIAS)[0]  # noqa: E731
    compare(layer, run, weights, settings, positions=POSITIONS, **CAUSAL)


def test_differential_attention_is_that_of_diffllama():
    """Whose norm has no scale; Ye et al.'s own code has one, as ours."""
    K = 2
    config = DiffLlamaConfig(
        hidden_size=D,
        num_attention_heads=N,
        num_key_value_heads=K,
        head_dim=H,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
    )
    layer = diffllama.DiffLlamaAttention(config, layer_idx=2)
    places = rotary(diffllama.DiffLlamaRotaryEmbedding, config)

    def weights(get):
        names = {"query": "q", "key": "k"}
        return plain(get, K) | {
            "merge.kernel": merge(get("o_proj.weight"), 2 * H),
            **{
                f"difference.vectors.{ours}{i}": get(f"lambda_{own}{i}")
                for ours, own in names.items()
                for i in (1, 2)
            },
        }

    sizes = {"head_dim": H, "value_dim": H, "num_kv_heads": K}
    settings = sizes | {"differential": True, "layer": 2, "rotary": True}
    scale = {"difference.norm.scale": np.ones(2 * H)}
    run = lambda x: layer(x, places, BIAS)[0]  # noqa: E731
    settings |= {"use_bias": False}
    compare(layer, run, weights, settings, scale, positions=POSITIONS, **CAUSAL)


def test_gate_norm_and_partial_rotation_are_those_of_qwen3_next():
    """Grouped heads, each element gated, RMS norm of queries and keys, then rotation.

    OLMo 2 normalises all heads together, and Qwen3's scales start at 1, not at 0.
    """
    K, part = 2, 4
    config = Qwen3NextConfig(
        hidden_size=D,
        num_attention_heads=N,
        num_key_value_heads=K,
        head_dim=H,
        partial_rotary_factor=(part + 0.1) / H,
        attn_implementation="eager",
    )
    layer = qwen.Qwen3NextAttention(config, 0)
    places = rotary(qwen.Qwen3NextRotaryEmbedding, config)
    assert places[0].shape[-1] == part

    def weights(get):
        both = kernel(get("q_proj.weight"), N, 2 * H)
        rest = {name: get(f"{name}.weight") for name in ("k_proj", "v_proj", "o_proj")}
        return {
            "query": both[..., :H],
            "output_gate.kernel": both[..., H:],
            "key": kernel(rest["k_proj"], K, H),
            "value": kernel(rest["v_proj"], K, H),
            "merge.kernel": merge(rest["o_proj"]),
            "query_norm.scale": get("q_norm.weight"),
            "key_norm.scale": get("k_norm.weight"),
        }

    sizes = {"head_dim": H, "value_dim": H, "num_kv_heads": K, "rotary_dim": part}
    gate = {"gate": "sigmoid", "gate_size": "element", "qk_norm": True}
    settings = sizes | gate | {"rotary": True, "use_bias": False}
    ones = {"query_norm.scale": 1, "key_norm.scale": 1}
    run = lambda x: layer(x, places, BIAS)[0]  # noqa: E731
    compare(layer, run, weights, settings, ones, positions=POSITIONS, **CAUSAL)


def fused(get, size, name="query_key_value"):
    """Kernels and biases of a projection with each head's query, key and value."""
    heads = kernel(get(f"{name}.weight"), N, 3, size)
    biases = get(f"{name}.bias").reshape(N, 3, size)
    named = enumerate(("query", "key", "value"))
    found = {ours: heads[:, :, i] for i, ours in named}
    named = enumerate(("query_bias", "key_bias", "value_bias"))
    found |= {ours: biases[:, i] for i, ours in named}
    return found | {
        "merge.kernel": merge(get("dense.weight"), size),
        "merge_bias": get("dense.bias"),
    }


def test_partial_rotation_is_that_of_gpt_neox():
    size = D // N
    config = GPTNeoXConfig(
        hidden_size=D,
        num_attention_heads=N,
        rotary_pct=0.5,
        attn_implementation="eager",
    )
    layer = neox.GPTNeoXAttention(config, 0)
    places = rotary(neox.GPTNeoXRotaryEmbedding, config)
    settings = {"rotary": True, "rotary_dim": size // 2}
    run = lambda x: layer(x, BIAS, position_embeddings=places)[0]  # noqa: E731
    arguments = {"positions": POSITIONS} | CAUSAL
    compare(layer, run, lambda get: fused(get, size), settings, **arguments)


def test_alibi_is_that_of_bloom():
    size = D // N
    config = BloomConfig(hidden_size=D, n_head=N)
    layer = BloomAttention(config, 0)
    places = build_alibi_tensor(torch.ones(B, T, dtype=torch.long), N, torch.float32)
    zeros = torch.zeros(B, T, D)
    run = lambda x: layer(x, zeros, places, BIAS)[0]  # noqa: E731
    slopes = jnp.asarray(alibi_slopes(N))
    arguments = {"alibi_slopes": slopes} | CAUSAL
    compare(layer, run, lambda get: fused(get, size), {}, **arguments)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20])
def test_slopes_of_alibi_are_those_of_bloom_and_x_transformers(heads):
    bloom = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)
    ours = alibi_slopes(heads)
    np.testing.assert_allclose(ours, bloom[:, 0, 1], rtol=1e-6)
    np.testing.assert_allclose(ours, AlibiPositionalBias._get_slopes(heads), rtol=1e-6)


def x_layer(**settings):
    """An attention of x-transformers, and what runs it."""
    settings = {"dim": D, "dim_head": H, "heads": N, "causal": True} | settings
    layer = XAttention(**settings)
    mask = torch.tensor(REAL)

    def run(x):  # theirs zeroes what is padding: its queries are ours alone
        return layer(x, context_mask=mask)

    return layer, run


X_NAMES = "to_q", "to_k", "to_v", "to_out"
X_VARIANTS = {  # settings of theirs and ours, and our weights beside the four kernels
    "plain": ({}, {}, lambda get: {}),
    "gate, elementwise": (
        {"gate_values": True},
        {"gate": "sigmoid", "gate_size": "element"},
        lambda get: {"output_gate.kernel": kernel(get("to_v_gate.weight"), N, H)},
    ),
    "gate": (
        {"gate_values": True, "gate_values_headwise": True},
        {"gate": "sigmoid"},
        lambda get: {"output_gate.kernel": kernel(get("to_v_gate.weight"), N)},
    ),
    "scaled": (
        {"head_scale": True},
        {"merge": "scaled"},
        lambda get: {"merge.scale": get("head_scale_params").reshape(N)},
    ),
    "sink": (
        {"head_learned_sink": True},
        {"sink": True},
        lambda get: {"sink": get("attend.head_attn_sink")},
    ),
    "talking heads": (
        {"pre_talking_heads": True, "post_talking_heads": True},
        {"talking_heads": True},
        lambda get: {
            "talking_heads.logits_mix": get_mix(get, "pre"),
            "talking_heads.weights_mix": get_mix(get, "post"),
        },
    ),
}
X_CONSTANTS = {
    "scaled": {"merge.scale": -1},  # theirs is the factor itself
    # theirs adds the mixed logits to the others
    "talking heads": {"talking_heads.logits_mix": np.eye(N)},
}


def get_mix(get, place):
    """A 1 × 1 convolution over heads, outputs by inputs, as our inputs by outputs."""
    return get(f"attend.{place}_softmax_talking_heads.weight")[:, :, 0, 0].T


@pytest.mark.parametrize("name", X_VARIANTS)
def test_variants_are_those_of_x_transformers(name):
    theirs, ours, weights = X_VARIANTS[name]
    layer, run = x_layer(**theirs)
    settings = {"head_dim": H, "value_dim": H, "use_bias": False} | ours
    compare(
        *(layer, run),
        lambda get: plain(get, names=X_NAMES) | weights(get),
        settings,
        X_CONSTANTS.get(name),
        **CAUSAL,
    )


def test_grouped_heads_of_x_transformers_take_every_other_key():
    """Head n has key n mod K; in Llama, and here, n // (N / K)."""
    K = 2
    layer, run = x_layer(kv_heads=K)
    order = np.arange(N).reshape(-1, K).T.reshape(-1)  # by key, then by head

    def weights(get):
        found = plain(get, K, X_NAMES)
        return found | {
            "query": found["query"][:, order],
            "merge.kernel": found["merge.kernel"][order],
        }

    sizes = {"head_dim": H, "value_dim": H, "num_kv_heads": K}
    compare(layer, run, weights, sizes | {"use_bias": False}, **CAUSAL)


def test_latent_values_of_x_transformers_are_those_without_norm_and_positions():
    c = 5
    layer, run = x_layer(use_latent_kv=True, dim_latent_kv=c)

    def weights(get):
        found = plain(get, names=X_NAMES)
        return {
            "query": found["query"],
            "latent.down": get("to_latent_kv.weight").T,
            "latent.key": found["key"],
            "latent.value": found["value"],
            "merge.kernel": found["merge.kernel"],
        }

    sizes = {"head_dim": H, "value_dim": H, "latent_dim": c, "latent_norm": False}
    compare(layer, run, weights, sizes | {"use_bias": False}, **CAUSAL)


def test_value_residual_of_x_transformers_is_ours_at_the_start():
    """A half of each; what it may learn is a sigmoid of x, ours a number per layer."""
    layer, _ = x_layer()
    first = RNG.normal(size=(B, T, N, H)).astype(np.float32)
    before, mask = torch.tensor(first).transpose(1, 2), torch.tensor(REAL)

    def run(x):
        return layer(x, context_mask=mask, value_residual=before)

    sizes = {"head_dim": H, "value_dim": H, "use_bias": False}
    settings = sizes | {"value_residual": True, "layer": 1}
    ours = Attention(D, num_heads=N, **settings, rngs=nnx.Rngs(0))
    share = {"value_share": ours.value_share[...]}
    weights = partial(plain, names=X_NAMES)
    arguments = {"first": jnp.asarray(first)} | CAUSAL
    compare(layer, run, weights, settings, share, **arguments)


def test_exclusion_of_a_vector_is_that_of_x_transformers():
    """Output and gradients, where theirs gets one token's head at a time."""
    heads, values = (RNG.normal(size=(B, T, N, H)).astype(np.float32) for _ in "ab")
    tensors = [torch.tensor(x, requires_grad=True) for x in (heads, values)]
    rows = (x.reshape(-1, H) for x in tensors)
    wanted = orthog_project(*rows).reshape(B, T, N, H)
    cotangent = RNG.normal(size=wanted.shape).astype(np.float32)
    wanted.backward(torch.tensor(cotangent))
    found, pullback = jax.vjp(jax.jit(variants.exclusive), heads, values)
    close(found, wanted)
    for slope, tensor in zip(pullback(cotangent), tensors, strict=True):
        close(slope, tensor.grad)


def test_exclusion_in_x_transformers_sees_later_tokens():
    """It flattens all but the batch, so that one factor serves all tokens and heads.

    Shown for `orthog_projected_values_per_head`, which is causal in ours.
    """
    layer, run = x_layer(orthog_projected_values_per_head=True)
    x = torch.tensor(X, requires_grad=True)
    randomised(layer)
    run(x)[0, 2].sum().backward()
    assert x.grad[0, 3:].abs().max() > 1e-3
    settings = {"num_heads": N, "head_dim": H, "value_dim": H, "exclusive": True}
    ours = Attention(D, **settings, rngs=nnx.Rngs(0))
    slope = jax.jit(jax.grad(lambda x: ours(x, **CAUSAL)[0, 2].sum()))(X)
    assert np.abs(slope[0, :3]).max() > 1e-3 and not slope[0, 3:].any()


def test_qk_clip_of_x_transformers_scales_inputs_in_place_of_heads():
    """So only square kernels can be clipped, and logits stay above the threshold."""
    threshold, size = 0.5, D // N
    layer, _ = x_layer(dim_head=size)
    randomised(layer)
    ours = Attention(D, num_heads=N, qk_clip=threshold, rngs=nnx.Rngs(0))

    def largest():
        _, seen = layer(torch.tensor(X), return_intermediates=True)
        return seen, seen.pre_softmax_attn.amax((0, 2, 3)).detach().numpy()

    seen, before = largest()
    assert (before > threshold).all()
    kernels = {"query": layer.to_q.weight, "key": layer.to_k.weight}
    for name, matrix in kernels.items():
        getattr(ours, name)[...] = jnp.asarray(kernel(matrix.detach().numpy(), N, size))
    ours.clip(jnp.asarray(before))
    layer.qk_clip_(seen, tau=threshold)
    assert (np.abs(largest()[1] - threshold) > 0.01).any()
    with torch.no_grad():
        for name, matrix in kernels.items():
            clipped = np.asarray(getattr(ours, name)[...])
            matrix.copy_(torch.tensor(clipped.reshape(D, -1).T))
    close(largest()[1], np.full(N, threshold))


@pytest.mark.parametrize("per_head", [False, True])
def test_the_first_update_of_muon_is_that_of_torch(per_head, monkeypatch):
    """In float32, in which theirs does not iterate by itself.

    From the second on they differ: optax corrects the bias of the momentum.
    """
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    config = get_config().optimizer
    config.update({"name": "muon", "schedule": "constant", "learning_rate": 0.01})
    config.update({"warmup_steps": 0, "clip_norm": 0.0, "weight_decay": 0.1})
    settings = {k: v for k, v in config.to_dict().items() if k != "label_smoothing"}
    settings |= {"muon_per_head": per_head, "width": D}
    layer = Attention(D, num_heads=N, head_dim=H, value_dim=H, rngs=nnx.Rngs(0))
    params = {"decoder": {"0": nnx.split(layer)[1]}}
    draw = np.random.default_rng(1)
    gradients = jax.tree.map(lambda x: jnp.float32(draw.normal(size=x.shape)), params)
    optimizer = make_optimizer(**settings)
    update = jax.jit(optimizer.update)
    changes = named(update(gradients, optimizer.init(params), params)[0])
    for name, axis in (("query", 1), ("value", 1), ("merge.kernel", 0)):
        of = (named(tree)[f"decoder.0.{name}"] for tree in (params, gradients))
        start, slope = (np.moveaxis(np.asarray(x), axis, 0) for x in of)
        found = np.moveaxis(np.asarray(changes[f"decoder.0.{name}"]), axis, 0)
        if not per_head:  # inputs by outputs, of all heads
            start, slope, found = (
                np.concatenate(list(x), axis=axis)[None] for x in (start, slope, found)
            )
        for matrix, gradient, change in zip(start, slope, found, strict=True):
            tensor = torch.tensor(matrix, requires_grad=True)
            tensor.grad = torch.tensor(gradient)
            own = {"lr": 0.01, "weight_decay": 0.1, "momentum": settings["muon_beta"]}
            torch.optim.Muon([tensor], **own, adjust_lr_fn="match_rms_adamw").step()
            wanted = tensor.detach().numpy() - matrix
            np.testing.assert_allclose(change, wanted, atol=1e-6)
