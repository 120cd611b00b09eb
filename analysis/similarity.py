"""Similarity of heads, and how the removal of two heads interacts in the loss."""

from functools import partial
from itertools import combinations

import jax
import numpy as np
from scipy.special import xlogy

from headcount.analysis.heads import (
    SIDES,
    all_gates,
    heads_of,
    summed_loss,
    with_progress,
)
from headcount.analysis.roles import batched
from headcount.data.examples import Examples
from headcount.models import precision
from headcount.models.maps import attention_maps, of_layers
from headcount.runtime import sharding
from headcount.tasks import Run


def similarity(run: Run, sentences: list[dict], trial: int) -> list[dict]:
    """Measure the similarity of every pair of heads of a site.

    A row has the columns site, layer, head, other_layer, other_head, and

    - divergence: the Jensen-Shannon divergence of the two attention maps in bits,
      averaged over query tokens: 0 for equal maps, 1 for disjoint ones. None with
      talking or differential heads or a learned sink, whose maps do not sum to 1;
    - cka: linear centred kernel alignment of the heads' outputs over tokens (Kornblith
      et al. 2019): 1 for outputs that are equal up to rotation and scale.

    Args:
        sentences: token ids by field; see `analysis.roles.first_sentences`.
    """
    params, gates = run.of(trial)
    sums, outputs, count = {}, {}, {}
    with jax.set_mesh(run.mesh):
        for _, batch in batched(sentences):
            maps = attention_maps(run.graph, params, gates, batch)
            heads = jax.device_get(head_outputs(run.graph, params, gates, batch))
            for site, (weights, _) in jax.device_get(maps).items():
                real = np.asarray(batch[f"{SIDES[site]}_segments"]) > 0
                rows = np.moveaxis(weights.astype(np.float64), 3, 2)[:, real]
                rows = np.moveaxis(rows, 2, 1).reshape(-1, real.sum(), rows.shape[-1])
                sums[site] = sums.get(site, 0) + divergences(rows)
                count[site] = count.get(site, 0) + real.sum()
                vectors = heads[site][:, real].transpose(0, 2, 1, 3).astype(np.float64)
                vectors = vectors.reshape(-1, *vectors.shape[2:])
                outputs.setdefault(site, []).append(vectors)
    results = []
    for site, total in sums.items():
        pairs = total / count[site]
        alike = alignments(np.concatenate(outputs[site], axis=1))
        at = [
            (layer, head)
            for s, layer, head in heads_of(all_gates(run, params, {}))
            if s == site
        ]
        for i, j in combinations(range(len(at)), 2):
            row = {"site": site, "layer": at[i][0], "head": at[i][1]}
            row |= {"other_layer": at[j][0], "other_head": at[j][1]}
            share = float(pairs[i, j])
            row["divergence"] = share if np.isfinite(share) else None
            results.append(row | {"cka": float(alike[i, j])})
    return results


def divergences(maps: np.ndarray) -> np.ndarray:
    """Return the Jensen-Shannon divergence of each pair of heads, summed over queries.

    If any row of the maps does not sum to 1, all divergences are NaN.

    Args:
        maps: attention weights, heads x queries x keys.
    """
    count, proper = len(maps), np.allclose(maps.sum(-1), 1, atol=1e-3)
    totals = np.zeros((count, count))
    if not proper:
        return totals * np.nan
    negative_entropy = xlogy(maps, maps).sum(-1)
    for i, j in combinations(range(count), 2):
        mean = (maps[i] + maps[j]) / 2
        nats = (negative_entropy[i] + negative_entropy[j]) / 2
        nats = nats - xlogy(mean, mean).sum(-1)
        bits = nats / np.log(2)
        totals[i, j] = totals[j, i] = np.maximum(bits, 0).sum()
    return totals


def alignments(outputs: np.ndarray) -> np.ndarray:
    """Return the linear CKA of each pair of heads, from outputs heads x tokens x V."""
    centred = outputs - outputs.mean(1, keepdims=True)
    products = np.einsum("itv,jtw->ijvw", centred, centred, optimize=True)
    squares = (products**2).sum((2, 3))
    norms = np.sqrt(np.diag(squares))
    scale = np.outer(norms, norms)
    return squares / np.where(scale > 0, scale, 1.0)


@partial(jax.jit, static_argnames="graph")
def head_outputs(graph, params, head_gates: dict, batch: dict) -> dict:
    """Return the outputs of all heads, of shape L B T N V, by site."""
    model = precision.model_of(graph, params)
    return of_layers(model, batch, head_gates, lambda site, layer: layer.heads)


def interactions(
    run: Run, examples: Examples, trial: int, site: str | None
) -> list[dict]:
    """Measure how the removal of each pair of heads of a site interacts.

    A row has site, layer, head, other_layer, other_head, `added_loss` (the loss without
    both heads, minus the loss with all) and `interaction` (`added_loss` minus the added
    losses of each head alone). If it is positive, the heads can replace each other; if
    negative, they depend on each other. Heads with a gate of 0 are left out.

    Args:
        site: consider only this site; None considers the pairs of each site.
    """
    params, gates = run.of(trial)
    gates = all_gates(run, params, gates)
    with jax.set_mesh(run.mesh):
        batches = run.task.evaluation_batches(examples)
        batches = [sharding.over_data(batch) for batch in batches]

        def without(*heads):
            changed = dict(gates)
            for at, layer, head in heads:
                changed[at] = changed[at].at[layer, head].set(0)
            return summed_loss(run, params, changed, batches)

        loss_with_all, weight = without()
        heads = [
            (s, layer, head)
            for s, layer, head in heads_of(gates)
            if site in (None, s) and gates[s][layer, head]
        ]
        alone = {head: (without(head)[0] - loss_with_all) / weight for head in heads}
        results = []
        pairs = [(a, b) for a, b in combinations(heads, 2) if a[0] == b[0]]
        for first, second in with_progress(pairs):
            added = (without(first, second)[0] - loss_with_all) / weight
            row = {"site": first[0], "layer": first[1], "head": first[2]}
            row |= {"other_layer": second[1], "other_head": second[2]}
            row["added_loss"] = added
            results.append(row | {"interaction": added - alone[first] - alone[second]})
    return results
