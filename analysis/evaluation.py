"""Held-out loss and translations of every trial of a run."""

import json
import zlib
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from headcount.data.batches import evaluation_batches
from headcount.decoding.generate import translate_trials
from headcount.runtime import distributed as hosts
from headcount.runtime import sharding
from headcount.runtime.logging import say
from headcount.tasks.scores import scores, untied
from headcount.training.metrics import spread
from headcount.training.step import eval_step, keep_best

NOTHING = [([], 0.0)]  # the n best translations of a sentence without a token


class Dev(NamedTuple):
    """A split to score on while training."""

    sources: list[str]
    targets: list[str]
    tokenizers: tuple  # of source and target
    batch_tokens: int

    @property
    def crc32(self) -> int:
        """A checksum of the pairs, to tell whether they have changed."""
        return zlib.crc32(json.dumps([self.sources, self.targets]).encode())


def sentences(encoded) -> list[list[int]]:
    """Token ids a sentence, as `decoding.generate.translate` takes them."""
    return [ids.tolist() for ids in encoded]


def ranking(rows: dict[int, dict], metric: str, num_trials: int) -> np.ndarray:
    """The metric of every trial, so that higher is better; -inf where it has no row.

    The loss tells apart what the metric does not, such as the zeros of a first hour.
    """
    scores = np.full(num_trials, -np.inf)
    for trial, row in rows.items():
        loss = row["dev_loss"]
        if metric == "dev_loss":
            scores[trial] = -loss
        else:
            scores[trial] = untied(row[metric], loss)
    return scores


def translations(
    graph,
    params,
    head_gates: dict,
    sources: list[list[int]],
    trials,
    n_best: int | None = None,
    **options,
) -> dict[int, list]:
    """The token ids of every sentence's translation, of each of `trials`.

    Of a sentence without a token it is empty, as in `Trained.translate`. With n_best
    there is a list of (token ids, score) for each sentence.

    Args:
        graph, params, head_gates: see `decoding.generate.translate_trials`. Several
            processes share the sentences of the trials that they hold, and all get all.
        sources: token ids, each ending in EOS.
        trials: which to translate with.
        n_best, options: see `decoding.generate.translate_trials`.
    """
    texts, full = [], [i for i, ids in enumerate(sources) if len(ids) > 1]
    for shares, some in sharding.trials_here(params, jax.sharding.get_mesh()):
        chosen = [
            list(full[share.place :: share.count]) if share.trial in trials else []
            for share in shares
        ]
        rows = np.array([share.trial for share in shares])
        found = translate_trials(
            graph,
            some,
            sources,
            chosen,
            head_gates=jax.tree.map(lambda gates, rows=rows: gates[rows], head_gates),
            n_best=n_best,
            return_scores=n_best is not None,
            **options,
        )
        found = [each[0] for each in found] if n_best is None else found
        texts += [(*s, each) for s, each in zip(shares, found, strict=True)]
    nothing = [] if n_best is None else NOTHING
    whole = {trial: [nothing for _ in sources] for trial in trials}
    for said in hosts.share(texts):
        for trial, place, count, each in said:
            if trial in whole:
                for index, one in zip(full[place::count], each, strict=True):
                    whole[trial][index] = one
    return whole


def losses(
    graph: nnx.GraphDef, params, head_gates: dict, source, target, batch_tokens: int
) -> np.ndarray:
    """Cross-entropy of references, nats a token (EOS counts), of every trial; R.

    Args:
        graph, params, head_gates: see `training.step.eval_step`.
        source, target: encoded sentences, see `data.tokenizer`.
        batch_tokens: target tokens at a time.
    """
    sums = [
        sharding.fetch(eval_step(graph, params, head_gates, batch))
        for batch in evaluation_batches(source, target, batch_tokens=batch_tokens)
    ]
    loss, tokens = (np.sum(column, axis=0) for column in zip(*sums, strict=True))
    return loss / tokens


def dev_scores(
    graph: nnx.GraphDef, params, head_gates: dict, dev: Dev, trials, chrf: bool
) -> dict[int, dict]:
    """Loss (nats a token) and scores of greedy translations, a row for each of trials.

    `params` and `head_gates` have the trial axis R in front of every leaf. `chrf`: with
    this score, too, see `scores`.
    """
    source = dev.tokenizers[0].encode(dev.sources)
    target = dev.tokenizers[1].encode(dev.targets)
    loss = losses(graph, params, head_gates, source, target, dev.batch_tokens)
    found = translations(graph, params, head_gates, sentences(source), trials)
    scored = []
    for trial in trials[jax.process_index() :: jax.process_count()]:
        texts = dev.tokenizers[1].decode_many(found[trial])
        scored.append((trial, scores(texts, dev.targets, chrf)))
    rows = dict(row for said in hosts.share(scored) for row in said)
    names = ("bleu", "chrf", "exact_match") if chrf else ("bleu", "exact_match")
    return {
        trial: {"dev_loss": float(loss[trial])}
        | {f"dev_{name}": rows[trial][name] for name in names}
        for trial in trials
    }


def evaluate(
    config, step: int, state, gates, best: dict, frozen, graph, dev, writer
) -> dict:
    """Score the trials that are not frozen; the best of every trial so far."""
    alive = np.flatnonzero(~frozen).tolist()
    by_chrf = config.train.best_metric == "dev_chrf"
    rows = dev_scores(graph, state.params, gates, dev, alive, by_chrf)
    for trial, row in rows.items():
        writer.write(step, trial, **row)
    names = next(iter(rows.values()), {})
    texts = [spread(name, [row[name] for row in rows.values()]) for name in names]
    if texts:  # none where every trial is frozen
        some = f", {len(rows)} of {len(frozen)} trials" * (len(rows) < len(frozen))
        say(f"step {step}{some}: " + "  ".join(texts))
    ranks = ranking(rows, config.train.best_metric, len(frozen))
    return keep_best(best, state.params, step, ranks)
