"""The classifier."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from headcount.models.output_heads import Classifier


def test_logits_of_16_bits_are_not_rounded_to_them():
    """Rounded to bfloat16, classes would tie, and the first one would win."""
    classifier = Classifier(64, 5, None, rngs=nnx.Rngs(0))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(classifier))
    nnx.update(classifier, params)
    vectors = jax.random.normal(jax.random.key(1), (200, 64), jnp.bfloat16)
    found = classifier.logits(vectors)
    kernel, bias = (
        np.float64(x) for x in (params.linear.kernel[...], params.linear.bias[...])
    )
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(
        found, np.float64(vectors) @ kernel + bias, rtol=1e-5, atol=1e-5
    )
