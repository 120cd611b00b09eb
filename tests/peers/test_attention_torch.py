"""The reference means what torch means, where both have a meaning."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from headcount import attention

# Both in float32; torch sums in another order.
TOLERANCE = 1e-5


def inputs(T, S, N, K, H, V):
    rng = np.random.default_rng(0)
    sizes = ((2, T, N, H), (2, S, K, H), (2, S, K, V), (2, T, N, V))
    return [rng.normal(size=size).astype(np.float32) for size in sizes]


@pytest.mark.parametrize("implementation", ["reference", "blockwise", "cpu"])
@pytest.mark.parametrize(
    ("sizes", "arguments"),
    [
        ((9, 13, 4, 4, 16, 16), {}),
        ((9, 13, 4, 4, 16, 24), {}),  # V > H
        ((13, 13, 4, 2, 16, 16), {"is_causal": True}),  # grouped heads
        ((9, 13, 2, 2, 8, 8), {"mask": True}),
        ((9, 13, 2, 2, 8, 8), {"bias": True, "scale": 0.2}),
        ((200, 150, 2, 1, 8, 8), {"mask": True}),
    ],
)
def test_scaled_dot_product_attention(implementation, sizes, arguments):
    """Output and gradients."""
    T, S, N, K = sizes[:4]
    query, key, value, cotangent = inputs(*sizes)
    ours = {name: x for name, x in arguments.items() if name not in ("mask", "bias")}
    theirs = dict(ours, enable_gqa=N != K)
    rng = np.random.default_rng(1)
    if "mask" in arguments:
        mask = rng.random((2, 1, T, S)) < 0.6
        mask[..., 0] = True  # torch gives NaN or not, by version, to an empty row
        ours["mask"], theirs["attn_mask"] = jnp.asarray(mask), torch.tensor(mask)
    if "bias" in arguments:
        bias = rng.normal(size=(1, N, T, S)).astype(np.float32)
        ours["bias"], theirs["attn_mask"] = jnp.asarray(bias), torch.tensor(bias)

    def run(*x):
        return attention.dot_product_attention(
            *x, implementation=implementation, **ours
        )

    out, pullback = jax.vjp(run, *map(jnp.asarray, (query, key, value)))
    tensors = [
        torch.tensor(x).transpose(1, 2).requires_grad_() for x in (query, key, value)
    ]
    attend = torch.nn.functional.scaled_dot_product_attention
    want = attend(*tensors, **theirs)
    gradients = torch.autograd.grad(
        want, tensors, torch.tensor(cotangent).transpose(1, 2)
    )
    got = (out, *pullback(jnp.asarray(cotangent)))
    for x, y in zip(got, (want, *gradients), strict=True):
        y = y.detach().transpose(1, 2).numpy()
        np.testing.assert_allclose(x, y, atol=TOLERANCE * max(1, abs(y).max()))


@pytest.mark.parametrize("implementation", ["reference", "blockwise", "cpu"])
def test_a_sink_is_that_of_gpt_oss(implementation):
    """Output and gradients, also by the sink, of grouped heads and a mask."""
    T, S, N, K = 9, 13, 4, 2
    *arrays, cotangent = inputs(T, S, N, K, 16, 16)
    arrays.append(np.random.default_rng(1).normal(size=N).astype(np.float32))
    mask = np.random.default_rng(2).random((2, 1, T, S)) < 0.6
    mask[0, 0, 3] = False  # theirs gives all of the weight to the sink, ours as well

    def run(query, key, value, sink):
        return attention.dot_product_attention(
            *(query, key, value), mask=mask, sink=sink, implementation=implementation
        )

    out, pullback = jax.vjp(run, *map(jnp.asarray, arrays))
    tensors = [torch.tensor(x).requires_grad_() for x in arrays]
    *heads, sinks = tensors
    layer = SimpleNamespace(num_key_value_groups=N // K, sinks=sinks, training=False)
    bias = torch.where(torch.tensor(mask), 0.0, -torch.inf)
    heads = (x.transpose(1, 2) for x in heads)
    want, _ = eager_attention_forward(layer, *heads, bias, scaling=0.25)
    gradients = torch.autograd.grad(want, tensors, torch.tensor(cotangent))
    got = (out, *pullback(jnp.asarray(cotangent)))
    for x, y in zip(got, (want, *gradients), strict=True):
        y = y.detach().numpy()
        np.testing.assert_allclose(x, y, atol=TOLERANCE * max(1, abs(y).max()))


def test_multi_head_attention():
    """torch.nn.MultiheadAttention's weights, projections apart, and its output."""
    N, H, T, S = 4, 8, 9, 13
    layer = torch.nn.MultiheadAttention(N * H, N, bias=False, batch_first=True)
    rng = np.random.default_rng(2)
    x, memory = (rng.normal(size=(2, n, N * H)).astype(np.float32) for n in (T, S))
    padding = np.zeros((2, S), bool)
    padding[1, 9:] = True  # torch: True is left out
    want, want_weights = layer(
        torch.tensor(x),
        torch.tensor(memory),
        torch.tensor(memory),
        key_padding_mask=torch.tensor(padding),
        average_attn_weights=False,
    )
    kernels = np.split(layer.in_proj_weight.detach().numpy(), 3)
    query, key, value = (
        jnp.asarray((source @ kernel.T).reshape(2, -1, N, H))
        for source, kernel in zip((x, memory, memory), kernels, strict=True)
    )
    lengths = {"key_value_seq_lengths": jnp.array([13, 9])}
    out = attention.dot_product_attention(query, key, value, **lengths)
    merged = np.asarray(out).reshape(2, T, N * H)
    got = merged @ layer.out_proj.weight.detach().numpy().T
    np.testing.assert_allclose(got, want.detach().numpy(), atol=TOLERANCE)
    weights = attention.attention_weights(query, key, **lengths)
    np.testing.assert_allclose(weights, want_weights.detach(), atol=TOLERANCE)
