"""What `jax.nn.dot_product_attention` takes is taken here too, and means the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headcount import attention
from headcount.attention import masks
from tests.attention_cases import CPU

attend = attention.dot_product_attention
B, T, S, N, K, H = 1, 5, 7, 4, 2, 8


NAMES = "reference", "blockwise", "tpu_interpret"


def normal(seed, *shape):
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape)))


ARRAYS = normal(0, B, T, N, H), normal(1, B, S, K, H), normal(2, B, S, K, H)


def test_a_bias_of_integers():
    bias = jnp.arange(S, dtype=jnp.int32) % 3
    wanted = jax.nn.dot_product_attention(*ARRAYS, bias[None, None, None])
    np.testing.assert_allclose(attend(*ARRAYS, bias), wanted, atol=1e-6)
    seen = attention.head_statistics(*ARRAYS[:2], np.asarray(bias))
    wanted = attention.head_statistics(*ARRAYS[:2], bias.astype(jnp.float32))
    np.testing.assert_array_equal(seen.entropy, wanted.entropy)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_an_empty_batch(implementation):
    """Results of the right shapes and dtypes, and gradients."""
    query, key = jnp.zeros((0, T, N, H), jnp.bfloat16), jnp.zeros((0, S, K, H))
    key = key.astype(query.dtype)
    lengths, told = jnp.zeros(0, int), {"implementation": implementation}
    arguments = told | {"key_value_seq_lengths": lengths, "is_causal": True}

    def run(query):
        return attend(query, key, key[..., :3], **arguments, return_residual=True)

    out, lse = jax.jit(run)(query)
    assert (out.shape, out.dtype) == ((0, T, N, 3), query.dtype)
    assert (lse.shape, lse.dtype) == ((0, T, N), jnp.float32)
    slope = jax.jit(jax.grad(lambda query: run(query)[0].sum()))
    assert slope(query).shape == query.shape
    _, seen = attend(query, key, key, **arguments, return_statistics=True)
    for found in (seen, attention.head_statistics(query, key, **told)):
        assert {x.shape for x in found} == {(0, N)}
    mixes = {"logits_mix": jnp.eye(N), "weights_mix": jnp.eye(N)}
    assert attention.talking_heads_attention(query, key, key, **mixes).shape == (
        query.shape
    )


@pytest.mark.parametrize(
    "sizes, implementation",
    [
        ((0, S), None),
        ((T, 0), None),
        ((T, 0), "blockwise"),
        ((T, 0), "tpu_interpret"),
        ((0, 0), None),
    ],
)
def test_sequences_without_tokens(sizes, implementation):
    """Zeros for queries without keys, nothing without queries; and gradients."""
    t, s = sizes
    query, key = jnp.ones((B, t, N, H)), jnp.ones((B, s, K, H))
    told = {"implementation": implementation, "is_causal": True, "dropout_rate": 0.1}
    told |= {"dropout_seed": 1, "alibi_slopes": jnp.ones(N)}

    def run(*arrays):
        return attend(*arrays, **told, return_residual=True, return_statistics=True)

    out, lse, seen = jax.jit(run)(query, key, key)
    assert out.shape == query.shape and not out.any()
    np.testing.assert_array_equal(lse, np.full((B, t, N), np.float32(masks.EMPTY)))
    assert all(x.shape == (B, N) and not x.any() for x in seen)
    slope = jax.jit(jax.grad(lambda *x: run(*x)[0].sum(), (0, 1, 2)))
    gradients = slope(query, key, key)
    assert [x.shape for x in gradients] == [query.shape, key.shape, key.shape]


@pytest.mark.parametrize("kind, bad", [("lengths", np.nan), ("segments", np.inf)])
@pytest.mark.parametrize("implementation", [*NAMES, CPU])
def test_what_is_padding_never_matters(implementation, kind, bad):
    """Not even infinity there: same results, and gradients of 0."""
    told = {"query_seq_lengths": [3], "key_value_seq_lengths": [4]}
    if kind == "segments":
        told = {"query_segment_ids": [[1, 1, 1, 0, 0]]}
        told["key_value_segment_ids"] = [[1, 1, 1, 1, 0, 0, 0]]
    told = {name: jnp.asarray(x, jnp.int32) for name, x in told.items()}
    clean = ARRAYS[0].at[:, 3:].set(0), *(x.at[:, 4:].set(0) for x in ARRAYS[1:])
    spoilt = ARRAYS[0].at[:, 3:].set(bad), *(x.at[:, 4:].set(bad) for x in ARRAYS[1:])

    @jax.jit
    def run(arrays):
        out, pullback = jax.vjp(
            lambda *x: attend(*x, **told, implementation=implementation), *arrays
        )
        return out, pullback(jnp.ones_like(out))

    for x, y in zip(*map(jax.tree.leaves, map(run, (spoilt, clean))), strict=True):
        np.testing.assert_array_equal(x, y)


def test_segment_ids_of_any_integers_that_fit():
    """Compared as they are: int64 of NumPy, int8, uint16."""
    wanted = attend(*ARRAYS[:1], *(x[:, :T] for x in ARRAYS[1:]), **segments(np.int32))
    for kind in (np.int64, np.int8, np.uint16):
        found = attend(*ARRAYS[:1], *(x[:, :T] for x in ARRAYS[1:]), **segments(kind))
        np.testing.assert_array_equal(found, wanted)


def segments(kind):
    ids = np.asarray([[1, 1, 2, 2, 0]], kind)
    return {"query_segment_ids": ids, "key_value_segment_ids": ids}


def test_causal_as_a_number():
    for number in (0, 1, np.int64(1)):
        wanted = attend(*ARRAYS, is_causal=bool(number))
        arrays, structure, _ = attention.arguments.normalise(
            *ARRAYS, None, None, is_causal=number
        )
        assert structure["is_causal"] is bool(number)
    np.testing.assert_array_equal(attend(*ARRAYS, is_causal=1), wanted)
    with pytest.raises(ValueError, match="is_causal must be True or False.* got 2"):
        attend(*ARRAYS, is_causal=2)


def test_an_array_without_a_batch_beside_others_with_one():
    """Results have query's rank."""
    query, key, value = ARRAYS
    for given in (
        (query[0], key, value),
        (query, key[0], value[0]),
        (query[0], key[0], value),
    ):
        found = attend(*given, return_residual=True)
        wanted = jax.nn.dot_product_attention(*given, return_residual=True)
        for x, y in zip(found, wanted, strict=True):
            assert x.shape == y.shape
            np.testing.assert_allclose(x, y, atol=1e-6)
    with pytest.raises(ValueError, match="key must be .* to fit query"):
        attend(query[0], jnp.concatenate([key, key]), value)


@pytest.mark.parametrize("scale", [0.3, jnp.float32(0.3)])
@pytest.mark.parametrize("talking", [False, True])
def test_a_traced_scale_of_16_bit_arrays(scale, talking):
    """Its gradient is near that of float32, and the output keeps its dtype."""
    arrays = [
        normal(seed, 2, 64, N, 16).astype(jnp.bfloat16) + jnp.bfloat16(1)
        for seed in (10, 11, 12)
    ]
    mixes = {"logits_mix": jnp.eye(N), "weights_mix": jnp.eye(N)}

    def slope(arrays, implementation):
        def number(scale):
            if talking and implementation is None:
                out = attention.talking_heads_attention(*arrays, scale=scale, **mixes)
            else:
                out = attend(*arrays, scale=scale, implementation=implementation)
            assert out.dtype == arrays[0].dtype
            return out.astype(jnp.float32).sum()

        return jax.jit(jax.grad(number))(scale)

    wanted = slope([x.astype(jnp.float32) for x in arrays], "reference")
    np.testing.assert_allclose(slope(arrays, None), wanted, rtol=1e-3)


def test_xla_in_float16_on_a_cpu():
    """It runs as it is called, but cannot be compiled."""
    half = [x.astype(jnp.float16) for x in ARRAYS]

    def run(*arrays):
        return attend(*arrays, implementation="xla")

    np.testing.assert_allclose(run(*half), run(*ARRAYS), atol=5e-3)
    with pytest.raises(NotImplementedError, match="cannot be compiled for a CPU"):
        jax.jit(run)(*half)
