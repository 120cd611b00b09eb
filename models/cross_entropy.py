"""The label-smoothed cross-entropy of a large vocabulary, without its logits.

The vocabulary product is over half of a small Transformer's arithmetic, and its
logits are the largest array of a step: 131 MB for 4096 tokens and 8000 pieces. So
the tokens are taken in chunks whose logits stay in the cache, and a chunk's gradient
is computed beside its loss: nothing is held, and nothing computed twice.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headcount.attention.platform import platform
from headcount.models.trial_axis import TRIALS

MIB = 2**20
# Bytes of one chunk's logits: on a CPU they should stay in the last-level cache; on a
# GPU a few large products beat many small ones. For a TPU see _chunk_tokens_tpu.
CHUNK_BYTES = {"cpu": 16 * MIB, "gpu": 512 * MIB}


def cross_entropy(
    hidden: Float[Array, "T D"],
    table: Float[Array, "vocab D"],
    labels: Int[Array, "T"],
    weights: Float[Array, "T"],
    label_smoothing: Float[Array, ""] | float = 0.0,
    chunk_tokens: int | None = None,
) -> Float[Array, ""]:
    """Sum over tokens of weight times label-smoothed cross-entropy, in nats, float32.

    The logits are `hidden @ table.T`, where table is the shared embedding. The target
    distribution gives every piece label_smoothing / vocab and the label the rest on
    top, as Szegedy et al. 2016 and PyTorch do. Padding has the weight 0.
    Differentiable in hidden, table, weights and label_smoothing.
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
    if platform() == "gpu":
        of_device = max(1, CHUNK_BYTES["gpu"] // (4 * vocab))
    else:
        mesh = dict(jax.sharding.get_abstract_mesh().shape)
        num_trials = _num_trials() // mesh.get("trial", 1)
        of_device = _chunk_tokens_tpu(vocab, width, max(1, num_trials))
    return of_device * _num_devices()


def _chunk_tokens_tpu(vocab: int, width: int, num_trials: int) -> int:
    """So many of each trial that a chunk's logits stay in VMEM, of 128 MiB on v5e, v6e.

    They do beside the table (bfloat16) and its gradient (float32), or alone. Then each
    chunk moves the other two, and should have many tokens beside the width.
    """
    a_token = 4 * vocab * num_trials
    if 6 * vocab * width * num_trials <= 48 * MIB:
        return max(1, 32 * MIB // a_token)
    return max(width, 128 * MIB // a_token)


def _num_trials() -> int:
    """How many trials are computed side by side, see `models.trial_axis`."""
    try:
        return jax.lax.axis_size(TRIALS)
    except NameError:  # they take turns
        return 1


def _num_chunks(tokens: int, chunk_tokens: int, num_devices: int = 1) -> int:
    """The fewest chunks of at most so many tokens, equal ones if that is nearly so.

    To fill up the last chunk would shift tokens from each device of a mesh to the next;
    so would chunks of which the devices have unequal shares.
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
    # The gradient of the logits is weights · (softmax - target). Only its softmax is
    # dense: with e = exp(logits - top) and r = weights / sum(e), r enters on the small
    # side of each product, so e is read as it is and no other array of its size made.
    def step(softmax_by_table, chunk):
        hidden, weights = chunk
        top, exps, total = _softmax_parts(hidden, table)
        scale = (weights / total)[:, None]
        by_hidden = _dot("Tv,vD->TD", exps, table) * scale
        # D x vocab, because vocab x D is at half speed where vocab is a power of 2.
        left = _by_device((hidden * scale).astype(exps.dtype), num_devices)
        by_table = _dot("nTD,nTv->nDv", left, _by_device(exps, num_devices))
        return softmax_by_table + by_table, (top + jnp.log(total), by_hidden)

    chunks = tuple(_split(x, num_chunks) for x in (hidden, weights))
    num_devices = _num_devices()
    if labels.size // num_chunks % num_devices:  # unequal shares of a chunk
        num_devices = 1
    start = jnp.zeros((num_devices, *table.shape[::-1]), jnp.float32)
    softmax_by_table, parts = jax.lax.scan(step, start, chunks)
    softmax_by_table = softmax_by_table.sum(0)
    lse, softmax_by_hidden = (_join(x) for x in parts)
    at_labels = table[labels]
    per_token, by_smoothing = _per_token(lse, hidden, table, at_labels, smoothing)

    # What target adds: a constant of every piece, and one row of the label.
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
    """The largest logit, exp(logits - largest) and its sum."""
    logits = _dot("TD,vD->Tv", hidden, table)
    top = logits.max(-1)
    exps = jnp.exp(logits - top[:, None])
    return top, exps.astype(hidden.dtype), exps.sum(-1)


def _per_token(lse, hidden, table, at_labels, smoothing):
    """The smoothed cross-entropy of every token, and its derivative by smoothing."""
    # The logits' mean is the logit of the mean embedding, and the label's is of its
    # embedding: no pass over the logits.
    at_label = _dot("TD,TD->T", hidden, at_labels)
    by_smoothing = at_label - _dot("TD,D->T", hidden, table.mean(0))
    return lse - at_label + smoothing * by_smoothing, by_smoothing


def _dot(equation, left, right):
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def _num_devices() -> int:
    """How many devices share the tokens, one after another."""
    return dict(jax.sharding.get_abstract_mesh().shape).get("data", 1)


def _by_device(x, num_devices):
    # Each adds up its own over the chunks: no communication but after the last.
    return x.reshape(num_devices, -1, x.shape[-1])


def _split(x, num_chunks):
    # Strided, so that every chunk has an equal share of each device's tokens.
    return x.reshape(-1, num_chunks, *x.shape[1:]).swapaxes(0, 1)


def _join(x):
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
