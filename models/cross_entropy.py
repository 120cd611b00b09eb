"""Label-smoothed cross-entropy over a large vocabulary, without storing the logits.

The product with the vocabulary is over half of a small Transformer's arithmetic, and
the logits are a step's largest array: 131 MB for 4096 tokens and a vocabulary of 8000.
So tokens are processed in chunks whose logits fit into the cache. A chunk's gradient is
computed together with its loss, so logits are neither stored nor computed twice.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headcount.attention.platform import platform
from headcount.models.trial_axis import TRIALS

MIB = 2**20
# Bytes of one chunk's logits. On a CPU they should fit into the last-level cache; on a
# GPU a few large products are faster than many small ones. For TPUs, see
# _chunk_tokens_tpu.
CHUNK_BYTES = {"cpu": 16 * MIB, "gpu": 512 * MIB}


def cross_entropy(
    hidden: Float[Array, "T D"],
    table: Float[Array, "vocab D"],
    labels: Int[Array, "T"],
    weights: Float[Array, "T"],
    label_smoothing: Float[Array, ""] | float = 0.0,
    chunk_tokens: int | None = None,
) -> Float[Array, ""]:
    """Sum weight times label-smoothed cross-entropy over tokens, in nats, float32.

    The logits are `hidden @ table.T`, where table is the shared embedding. The target
    distribution has label_smoothing / vocab for every token of the vocabulary, plus
    1 - label_smoothing for the label, as in Szegedy et al. 2016 and PyTorch. Padding
    has weight 0. Differentiable in hidden, table, weights and label_smoothing.
    """
    chunk_tokens = chunk_tokens or _chunk_tokens(*table.shape)
    num_chunks = _num_chunks(labels.size, chunk_tokens, _num_devices())
    smoothing = jnp.asarray(label_smoothing, jnp.float32)
    weights = weights.astype(jnp.float32)
    excess = -labels.size % num_chunks
    if excess:
        hidden, labels, weights = (
            jnp.pad(x, ((0, excess),) + ((0, 0),) * (x.ndim - 1))
            for x in (hidden, labels, weights)
        )
    return _cross_entropy(hidden, table, labels, weights, smoothing, num_chunks)


def _chunk_tokens(vocab: int, width: int) -> int:
    if platform() == "cpu":  # whose devices share a cache
        return max(1, CHUNK_BYTES["cpu"] // (4 * vocab))
    mesh = dict(jax.sharding.get_abstract_mesh().shape)
    num_trials = max(1, _num_trials() // mesh.get("trial", 1))  # on each device
    if platform() == "gpu":
        of_device = max(1, CHUNK_BYTES["gpu"] // (4 * vocab * num_trials))
    else:
        of_device = _chunk_tokens_tpu(vocab, width, num_trials)
    return of_device * _num_devices()


def _chunk_tokens_tpu(vocab: int, width: int, num_trials: int) -> int:
    """Return tokens per trial such that a chunk's logits fit into VMEM.

    VMEM is 128 MiB on v5e and v6e. If possible, the table (bfloat16) and its gradient
    (float32) fit, too. Otherwise, every chunk moves these two, so it should have no
    fewer tokens than the width.
    """
    a_token = 4 * vocab * num_trials
    if 6 * vocab * width * num_trials <= 48 * MIB:
        return max(1, 32 * MIB // a_token)
    return max(width, 128 * MIB // a_token)


def _num_trials() -> int:
    """Return how many trials are computed in parallel; see `models.trial_axis`."""
    try:
        return jax.lax.axis_size(TRIALS)
    except NameError:  # trials are computed in turn
        return 1


def _num_chunks(tokens: int, chunk_tokens: int, num_devices: int) -> int:
    """Return the smallest number of chunks of at most `chunk_tokens` tokens.

    Fewer than twice as many are allowed if that makes chunks equal, preferably with
    equal shares per device. Padding the last chunk, or unequal shares, would move
    tokens between devices.
    """
    fewest = -(-tokens // chunk_tokens)
    equal = [n for n in range(fewest, 2 * fewest) if tokens % n == 0]
    shared = [n for n in equal if tokens // n % num_devices == 0]
    return next(iter(shared + equal), fewest)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _cross_entropy(hidden, table, labels, weights, smoothing, num_chunks):
    def step(_, chunk):
        top, _, total = _softmax_parts(chunk, table)
        return None, top + jnp.log(total)

    _, lse = jax.lax.scan(step, None, _split(hidden, num_chunks))
    per_token, _ = _per_token(_join(lse), hidden, table, table[labels], smoothing)
    return jnp.vdot(weights, per_token)


def _forward(hidden, table, labels, weights, smoothing, num_chunks):
    # The gradient of the logits is weights · (softmax - target), where only softmax is
    # dense. It is e · r with e = exp(logits - top), r = weights / sum(e). Scaling the
    # smaller operand of each product by r avoids another array of the size of e.
    def step(softmax_by_table, chunk):
        hidden, weights = chunk
        top, exps, total = _softmax_parts(hidden, table)
        scale = (weights / total)[:, None]
        by_hidden = _dot("Tv,vD->TD", exps, table) * scale
        # D x vocab, because vocab x D takes twice as long if vocab is a power of 2.
        left = _by_device((hidden * scale).astype(exps.dtype), num_devices)
        by_table = _dot("nTD,nTv->nDv", left, _by_device(exps, num_devices))
        return softmax_by_table + by_table, (top + jnp.log(total), by_hidden)

    chunks = tuple(_split(x, num_chunks) for x in (hidden, weights))
    num_devices = _num_devices()
    if labels.size // num_chunks % num_devices:  # devices have unequal shares
        num_devices = 1
    start = jnp.zeros((num_devices, *table.shape[::-1]), jnp.float32)
    softmax_by_table, parts = jax.lax.scan(step, start, chunks)
    softmax_by_table = softmax_by_table.sum(0)
    lse, softmax_by_hidden = (_join(x) for x in parts)
    at_labels = table[labels]
    per_token, by_smoothing = _per_token(lse, hidden, table, at_labels, smoothing)

    # The target's part: a constant for every token of the vocabulary, and the label.
    constant = weights[:, None] * (smoothing / table.shape[0])
    label = weights[:, None] * (1 - smoothing)
    by_hidden = softmax_by_hidden - constant * table.sum(0) - label * at_labels
    by_table = softmax_by_table.T - (constant * hidden).sum(0)
    by_table = by_table.at[labels].add(-label * hidden)
    gradients = (
        by_hidden.astype(hidden.dtype),
        by_table.astype(table.dtype),
        per_token,
        jnp.vdot(weights, by_smoothing),
    )
    return jnp.vdot(weights, per_token), gradients


def _backward(num_chunks, gradients, cotangent):
    hidden, table, weights, smoothing = (
        (cotangent * x).astype(x.dtype) for x in gradients
    )
    return hidden, table, None, weights, smoothing


_cross_entropy.defvjp(_forward, _backward)


def _softmax_parts(hidden, table):
    """Return the largest logit, exp(logits - largest) and its sum."""
    logits = _dot("TD,vD->Tv", hidden, table)
    top = logits.max(-1)
    exps = jnp.exp(logits - top[:, None])
    return top, exps.astype(hidden.dtype), exps.sum(-1)


def _per_token(lse, hidden, table, at_labels, smoothing):
    """Return each token's smoothed cross-entropy, and its derivative by smoothing."""
    # The mean logit is hidden times the mean embedding, and the label's logit is hidden
    # times its embedding, so no pass over the logits is needed.
    at_label = _dot("TD,TD->T", hidden, at_labels)
    by_smoothing = at_label - _dot("TD,D->T", hidden, table.mean(0))
    return lse - at_label + smoothing * by_smoothing, by_smoothing


def _dot(equation, left, right):
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def _num_devices() -> int:
    """Return how many devices the tokens are sharded over."""
    return dict(jax.sharding.get_abstract_mesh().shape).get("data", 1)


def _by_device(x, num_devices):
    # Each device accumulates its own sum; they are added after the last chunk.
    return x.reshape(num_devices, -1, x.shape[-1])


def _split(x, num_chunks):
    # Strided, so that every chunk has an equal share of each device's tokens.
    return x.reshape(-1, num_chunks, *x.shape[1:]).swapaxes(0, 1)


def _join(x):
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
