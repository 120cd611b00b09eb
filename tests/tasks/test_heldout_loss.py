"""Sums of losses and tokens over the batches of a split."""

import types

import numpy as np

from headcount.tasks import heldout_loss


def test_sums_of_many_tokens_are_not_rounded_to_float32(monkeypatch):
    """In float32, 2^24 + 1 is 2^24."""
    monkeypatch.setattr(
        heldout_loss, "batch_sums", lambda graph, function, params, gates, batch: batch
    )
    monkeypatch.setattr(heldout_loss.sharding, "over_data", lambda batch: batch)
    run = types.SimpleNamespace(graph=None, params=None, head_gates=None)
    batches = [(np.float32([2**24, 1]), np.float32([1, 1]))] + 10 * [
        (np.float32([1, 1]), np.float32([1, 1]))
    ]
    loss, weight = heldout_loss.heldout_sums(run, None, batches)
    assert loss.tolist() == [2**24 + 10, 11] and weight.tolist() == [11, 11]
