"""The examples of attention/README.md, as they stand there, beside Flax's own."""

import re

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.processes import ROOT

TEXT = (ROOT / "attention" / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
X = jax.device_put(np.float32(np.random.default_rng(0).normal(size=(2, 9, 16))))
CAUSAL = linen.make_causal_mask(X[..., 0])


def example(name):
    """The names that the block which has this one defines, and the blocks before."""
    names = {}
    for block in BLOCKS:
        exec(block, names)
        if name in block:
            return names
    raise AssertionError(f"no example has {name}")


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_first_example():
    found = example("statistics.max_logit")
    assert found["out"].shape == (2, 128, 8, 64)
    assert found["statistics"].max_logit.shape == (2, 8)


def test_nnx_module():
    module = example("class SelfAttention")["SelfAttention"](16, 4, nnx.Rngs(0))
    theirs = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0))
    for i, name in enumerate(("query", "key", "value")):
        part = getattr(theirs, name)
        part.kernel[...] = module.inputs.kernel[...][:, i]
        part.bias[...] = module.inputs.bias[...][i]
    theirs.out.kernel[...] = module.output.kernel[...]
    close(module(X, is_causal=True), theirs(X, mask=CAUSAL))


def test_attention_fn_of_linen_and_nnx():
    attention_fn = example("def attention_fn")["attention_fn"]
    plain = linen.MultiHeadDotProductAttention(4)
    ours = linen.MultiHeadDotProductAttention(
        4, attention_fn=attention_fn, dropout_rate=0.5
    )
    params = plain.init(jax.random.key(0), X)
    told = {"mask": CAUSAL, "deterministic": True}
    close(ours.apply(params, X, **told), plain.apply(params, X, **told))
    told = {"deterministic": False, "rngs": {"dropout": jax.random.key(1)}}
    dropped = ours.apply(params, X, **told)
    assert (dropped != plain.apply(params, X)).any()
    np.testing.assert_array_equal(dropped, ours.apply(params, X, **told))
    close(
        nnx.MultiHeadAttention(
            4, 16, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0)
        )(X, mask=CAUSAL),
        nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0))(X, mask=CAUSAL),
    )


def test_function_of_parameters():
    names, rng = example("def self_attention"), np.random.default_rng(0)
    inputs, output = rng.normal(size=(3, 16, 4, 4)), rng.normal(size=(4, 4, 16))
    params = {"inputs": jnp.float32(inputs), "output": jnp.float32(output)}
    query, key, value = np.einsum("BTD,ADNH->ABTNH", np.float64(X), inputs)
    weights = np.exp(np.einsum("BTNH,BSNH->BNTS", query, key) / 2)
    weights /= weights.sum(-1, keepdims=True)
    heads = np.einsum("BNTS,BSNH->BTNH", weights, value)
    wanted = np.einsum("BTNH,NHD->BTD", heads, output)
    np.testing.assert_allclose(
        names["batched"](params, X), wanted, rtol=1e-4, atol=1e-4
    )


def test_each_example_of_a_batch_drops_its_own_weights():
    """Both rows are alike."""
    names = example("batched_causal")
    rng = np.random.default_rng(0)
    inputs, output = rng.normal(size=(3, 16, 4, 4)), rng.normal(size=(4, 4, 16))
    params = {"inputs": jnp.float32(inputs), "output": jnp.float32(output)}
    x = jnp.stack([X[0], X[0]])
    same, other = (
        names["batched_causal"](params, x, jnp.uint32(seeds))
        for seeds in ([7, 7], [7, 8])
    )
    np.testing.assert_array_equal(same[0], same[1])
    assert (other[0] != other[1]).any()
    later = names["batched_causal"](params, x.at[:, -1].set(0), jnp.uint32([7, 8]))
    close(later[:, :-1], other[:, :-1])
