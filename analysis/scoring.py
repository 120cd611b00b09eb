"""The log-probability that a model gives to translations that are there."""

from functools import partial

import jax
import numpy as np
from flax import nnx

from headcount.data.batches import sentence_batches
from headcount.data.packing import Sentences
from headcount.training.step import batch_loss

BATCH_TOKENS = 2048  # whose logits are held at once: 66 MB of 8000 pieces


@partial(jax.jit, static_argnames="graph")
def row_losses(graph: nnx.GraphDef, params: nnx.State, head_gates: dict, batch: dict):
    """Summed cross-entropy (nats) and tokens of every row of a batch, by one trial."""

    def one(row):
        batch = jax.tree.map(lambda x: x[None], row)
        return batch_loss(graph, params, batch, 0.0, head_gates=head_gates)

    return jax.vmap(one)(batch)


def log_probs(
    graph: nnx.GraphDef,
    params: nnx.State,
    head_gates: dict,
    source: Sentences,
    target: Sentences,
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability (nats) of every target given its source, and its tokens.

    EOS counts in both.

    Args:
        graph, params, head_gates: of one trial.
        source, target: encoded sentences, see `data.tokenizer`.
    """
    found = np.zeros((2, len(source)))
    batches = sentence_batches(source, target, batch_tokens=BATCH_TOKENS)
    for numbers, batch in batches:
        sums = row_losses(graph, params, head_gates, batch)
        found[:, numbers] = np.stack(sums)[:, : len(numbers)]
    return -found[0], found[1].astype(int)
