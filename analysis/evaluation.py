"""Held-out loss and translations of every trial of a run."""

from typing import NamedTuple

import jax
import numpy as np

from analysis.scores import scores
from data.pipeline import evaluation_batches
from models.decoding import translate
from training.step import Static, eval_step

METRICS = ("dev_loss", "dev_bleu", "dev_chrf", "dev_exact_match")


class Dev(NamedTuple):
    """A split to score on while training."""

    sources: list[str]
    targets: list[str]
    tokenizers: tuple  # of source and target
    batch_tokens: int


def sentences(encoded) -> list[list[int]]:
    """Token ids a sentence, as `models.decoding.translate` takes them."""
    return [encoded[i].tolist() for i in range(len(encoded))]


def ranking(rows: dict[int, dict], metric: str, num_trials: int) -> np.ndarray:
    """The metric of every trial, so that higher is better; -inf where it has no row."""
    scores = np.full(num_trials, -np.inf)
    for trial, row in rows.items():
        scores[trial] = -row[metric] if metric == "dev_loss" else row[metric]
    return scores


def dev_scores(static: Static, params, dev: Dev, trials) -> dict[int, dict]:
    """Loss (nats a token) and scores of greedy translations, a row for each of trials.

    `params` has the trial axis R in front of every leaf.
    """
    source = dev.tokenizers[0].encode(dev.sources)
    target = dev.tokenizers[1].encode(dev.targets)
    sums = [
        jax.device_get(eval_step(params, batch, static=static))
        for batch in evaluation_batches(source, target, batch_tokens=dev.batch_tokens)
    ]
    loss, tokens = (np.sum(column, axis=0) for column in zip(*sums, strict=True))
    rows = {}
    for trial in trials:
        one = jax.tree.map(lambda leaf, trial=trial: leaf[trial], params)
        tokens_out, _ = translate(static.graph, one, sentences(source))
        found = scores(dev.tokenizers[1].decode_many(tokens_out), dev.targets)
        rows[trial] = {
            "dev_loss": float(loss[trial] / tokens[trial]),
            "dev_bleu": found["bleu"],
            "dev_chrf": found["chrf"],
            "dev_exact_match": found["exact_match"],
        }
    return rows
