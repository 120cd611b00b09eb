"""Statistics of every head of a trained model, and the loss without each head."""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float
from rich.progress import track

from headcount import attention
from headcount.analysis.formatting import grouped
from headcount.attention.masks import EMPTY
from headcount.data.examples import Examples, segments_of
from headcount.models import precision
from headcount.models.attention import Intermediates
from headcount.models.maps import weight_on_special_token
from headcount.runtime import sharding
from headcount.runtime.logging import console
from headcount.tasks import Run

SIDES = {"encoder": "source", "decoder": "target", "cross": "target"}  # of the queries


def output_file(folder: Path, verb: str, *flags: str | None, which: str) -> Path:
    """Return the file for the rows of a verb of heads.py.

    Args:
        flags: values of flags that the file's name shows; None is left out.
        which: the checkpoint, which is shown unless it is the best.
    """
    parts = ["heads", verb, *filter(None, flags), *[which] * (which != "best")]
    return folder / f"{'-'.join(parts)}.json"


def describe(run: Run, examples: Examples, trial: int) -> list[dict]:
    """Return a row of statistics for every head.

    A row has the columns site, layer, head, gate, and

    - the fields of `attention.HeadStatistics`, averaged over all query tokens, except
      for max_logit, which is the maximum. The weight on a learned sink is excluded, and
      the other weights are renormalised. None with talking and differential heads,
      whose maps are not distributions;
    - sink: the mean weight on the source's EOS or, in the decoder, on BOS; None with
      talking and differential heads;
    - learned_sink: the mean weight on `model.attention.sink`; None without one;
    - share: the norm of what the head, times its gate, adds to the layer's output,
      averaged over tokens and divided by the sum over the heads of the layer and site;
    - merge_weight, merge_weight_sd: mean and standard deviation over tokens of the
      factor that the merge rule applies to the head, averaged over elements if each
      has its own. None if the rule has no such factor; merge_weight_sd is also None if
      the factor does not depend on the token.
    """
    params, gates = run.of(trial)
    gates = all_gates(run, params, gates)
    sums = None
    with jax.set_mesh(run.mesh):
        for batch in run.task.evaluation_batches(examples, packed=False):
            batch_sums = observe(run.graph, run.task.loss, params, gates, batch)
            batch_sums = jax.device_get(batch_sums)
            sums = batch_sums if sums is None else added(sums, batch_sums)
    totals_by_site, counts = sums
    rows = []
    for site, layer, head in heads_of(gates):
        totals = totals_by_site[site][layer]
        means = {
            name: float(x[head] / counts[SIDES[site]]) for name, x in totals.items()
        }
        if "max_logit" in totals:
            means["max_logit"] = float(totals["max_logit"][head])
        row = {"site": site, "layer": layer, "head": head}
        row["gate"] = float(gates[site][layer, head])
        row |= {name: means.get(name) for name in attention.HeadStatistics._fields}
        row |= {name: means.get(name) for name in ("sink", "learned_sink")}
        norms = totals["norm"]
        row["share"] = float(norms[head] / norms.sum()) if norms.any() else None
        weight, square = means.get("weight"), means.get("weight_square")
        row |= {"merge_weight": weight, "merge_weight_sd": None}
        if square is not None:
            row["merge_weight_sd"] = max(0.0, square - weight**2) ** 0.5
        rows.append(row)
    return rows


def added(sums, batch_sums):
    """Add results of `observe` for two batches; take the maximum of max_logit."""

    def one(path, x, y):
        largest = path[-1] == jax.tree_util.DictKey("max_logit")
        return np.maximum(x, y) if largest else np.add(x, y)

    return jax.tree_util.tree_map_with_path(one, sums, batch_sums)


def importance(
    run: Run, examples: Examples, trial: int, is_full: bool = True
) -> list[dict]:
    """Return a row of importance measures for every head.

    A row has the columns site, layer, head, gate, and

    - importance (Michel et al. 2019, equation 2): the absolute derivative of an
      example's loss with respect to the head's gate, summed over the examples and
      divided by their total weight;
    - added_loss: the loss without this head, minus the loss with all heads;
    - noise_loss: the loss with noise on this head's output, minus the loss with all
      heads. The output is multiplied by a normal number of mean 1 and standard
      deviation 1 for every example, the same numbers for every head;
    - alone (their table 2): the loss with this head as the only one of its layer and
      site, minus the loss with all heads; None if its gate is 0.

    All are in the unit of the task's loss. Importance takes one backward pass over the
    examples in total; the others take one forward pass per head. If importance and
    added_loss disagree, trust added_loss.

    Args:
        is_full: whether to compute noise_loss and alone, which need two thirds of the
            forward passes.
    """
    params, gates = run.of(trial)
    gates = all_gates(run, params, gates)
    slopes, weight = None, 0.0
    with jax.set_mesh(run.mesh):
        one_per_row = list(run.task.evaluation_batches(examples, packed=False))
        for batch in one_per_row:
            batch_slopes = slopes_of(run.graph, run.task.loss, params, gates, batch)
            batch_slopes, of_batch = jax.device_get(batch_slopes)
            weight += float(of_batch)
            slopes = (
                batch_slopes
                if slopes is None
                else jax.tree.map(np.add, slopes, batch_slopes)
            )
        batches = run.task.evaluation_batches(examples)
        batches = [sharding.over_data(batch) for batch in batches]

        def loss(changed):
            # Not the weight above: masked language models mask packed rows differently.
            total, weight = summed_loss(run, params, gates | changed, batches)
            return total / weight

        def added_by_noise(site, layer, head):
            rng, total = np.random.default_rng(0), 0.0
            for batch in one_per_row:
                site_gates = for_each_row(gates[site], batch)
                noise = rng.normal(1, 1, site_gates.shape[1])
                noisy = {site: site_gates.at[layer, :, head].multiply(noise)}
                total += summed_loss(run, params, gates | noisy, [batch])[0]
            return (total - without_noise) / weight

        loss_with_all, rows = loss({}), []
        if is_full:
            without_noise, _ = summed_loss(run, params, gates, one_per_row)
        for site, layer, head in with_progress(heads_of(gates)):
            row = {"site": site, "layer": layer, "head": head}
            site_gates = gates[site]
            row["gate"] = float(site_gates[layer, head])
            row["importance"] = float(slopes[site][layer, head] / weight)
            row |= {"added_loss": 0.0, "noise_loss": None, "alone": None}
            if row["gate"]:
                row["added_loss"] = (
                    loss({site: site_gates.at[layer, head].set(0)}) - loss_with_all
                )
            if row["gate"] and is_full:
                row["noise_loss"] = added_by_noise(site, layer, head)
                only = site_gates.at[layer].set(0).at[layer, head].set(row["gate"])
                row["alone"] = loss({site: only}) - loss_with_all
            rows.append(row)
    return rows


def summed_loss(
    run: Run, params, gates: dict, batches: Iterable[dict]
) -> tuple[float, float]:
    """Return one trial's loss summed over batches, and the weight to divide it by."""
    pairs = [
        loss_of(run.graph, run.task.loss, params, gates, batch) for batch in batches
    ]
    loss, weight = (sum(map(float, column)) for column in zip(*pairs, strict=True))
    return loss, weight


def all_gates(run: Run, params, gates: dict) -> dict:
    """Return the gates of all heads of one trial, of shape L N by site."""
    ones = nnx.merge(run.graph, params).head_gates()
    return ones | {site: jnp.asarray(values) for site, values in gates.items()}


def open_heads(run: Run, trial: int) -> int | None:
    """Count the heads of a trial with open gates; return None if no gate is learned.

    In a multi-process run, every process must call this.
    """
    params, gates = run.of(trial)
    gates, count, is_learned = all_gates(run, params, gates), 0, False
    for site, attention_site in nnx.merge(run.graph, params).sites().items():
        for layer_gates, layer in zip(
            gates[site], attention_site.attentions, strict=True
        ):
            is_open, learned = sharding.fetch(layer_gates) > 0, layer.learned_gates()
            if learned is not None:
                is_open, is_learned = is_open & (sharding.fetch(learned) > 0), True
            count += is_open.sum()
    return int(count) if is_learned else None


def heads_of(gates: dict) -> list[tuple[str, int, int]]:
    """List the site, layer and index of every head."""
    return [(s, *at) for s, values in gates.items() for at in np.ndindex(values.shape)]


def by_rank(rows: list[dict], key: str) -> dict[tuple, list[list[dict]]]:
    """Match heads of several trials by rank.

    Head 0 of one seed does not correspond to head 0 of another, so heads are sorted
    within each trial's layer: rank 1 has the highest value of `key`, and heads with a
    gate of 0 come last. The rank "all" has every head of the layer.

    Args:
        rows: rows of `describe` or `importance`, with a column `trial`.

    Returns:
        For each site, layer and rank, the heads of each trial.
    """
    ranks = {}
    for at, layer_rows in grouped(rows, "site", "layer").items():
        ranked = [
            sorted(heads, key=lambda row: (row["gate"] == 0, -(row[key] or 0)))
            for heads in grouped(layer_rows, "trial").values()
        ]
        for rank, heads in enumerate(zip(*ranked, strict=True), 1):
            ranks[*at, rank] = [[head] for head in heads]
        ranks[*at, "all"] = ranked
    return ranks


def mean_per_trial(trials: list[list[dict]], name: str) -> np.ndarray:
    """Return each trial's mean over its heads, ignoring heads without a value."""
    values = [[row[name] for row in heads if row[name] is not None] for heads in trials]
    return np.array([np.mean(numbers) for numbers in values if numbers])


def with_progress(heads: list) -> Iterator:
    """Iterate over heads, showing a progress bar if on a terminal."""
    on = console()
    return track(heads, "heads", console=on, transient=True, disable=not on.is_terminal)


@partial(jax.jit, static_argnames=("graph", "loss"))
def observe(graph, loss, params, head_gates: dict, batch: dict):
    """Sum the statistics of every head over the tokens of a batch.

    The batch must have one example per row.

    Returns:
        A list over layers by site, with sums (for max_logit, maxima) of the statistics
        and `contributions`, each of shape N; and the number of tokens by side.
    """
    counts = {side: (array > 0).sum(1) for side, array in segments_of(batch).items()}
    by_site = {site: [] for site in head_gates}

    def add(site, layer):
        real = batch[f"{SIDES[site]}_segments"] > 0
        sums = {
            name: jnp.where(real[..., None], values, 0).sum((0, 1))
            for name, values in contributions(layer).items()
        }
        sink = layer.parameters.get("sink")
        if layer.is_distribution:
            arrays, masks = (layer.query, layer.key), layer.masks
            means = attention.head_statistics(*arrays, **masks)._asdict()
            count, largest = counts[SIDES[site]], means.pop("max_logit")
            sums |= jax.tree.map(partial(jnp.matmul, count), means)
            largest = jnp.where(count[:, None] > 0, largest, -jnp.inf)
            sums["max_logit"] = largest.max(0)
            shares = weight_on_special_token(site, *arrays, sink=sink, **masks)
            sums["sink"] = shares.sum((0, 1))
            if sink is not None:
                shares = weight_on_learned_sink(*arrays, sink, **masks)
                sums["learned_sink"] = shares.sum((0, 1))
        by_site[site].append(sums)

    observers = {site: partial(add, site) for site in head_gates}
    model = precision.model_of(graph, params)
    loss(model, batch, head_gates=head_gates, observe=observers)
    return by_site, {side: count.sum() for side, count in counts.items()}


@partial(jax.jit, static_argnames=("graph", "loss"))
def slopes_of(graph, loss, params, head_gates: dict, batch: dict):
    """Sum the absolute gradients with respect to the gates over the examples.

    The batch must have one example per row.

    Returns:
        The sums, of shape L N by site, and the total weight of the batch.
    """

    def total(gates):
        model = precision.model_of(graph, params)
        return loss(model, batch, head_gates=gates)

    # separate gates for each row, so that one backward pass gives per-example gradients
    repeated = {
        site: for_each_row(site_gates, batch) for site, site_gates in head_gates.items()
    }
    slopes, weight = jax.grad(total, has_aux=True)(repeated)
    return {site: jnp.abs(slope).sum(1) for site, slope in slopes.items()}, weight


def for_each_row(gates: Float[Array, "L N"], batch: dict) -> Float[Array, "L B N"]:
    """Repeat gates for every row of a batch."""
    return jnp.repeat(gates[:, None], len(jax.tree.leaves(batch)[0]), 1)


@partial(jax.jit, static_argnames=("graph", "loss"))
def loss_of(graph, loss, params, head_gates: dict, batch: dict):
    """Return the summed loss of a batch, and its weight."""
    return loss(precision.model_of(graph, params), batch, head_gates=head_gates)


def contributions(layer: Intermediates) -> dict[str, Float[Array, "B T N"]]:
    """Return each head's `norm`, `weight` and `weight_square`.

    `norm` is the norm of what a head adds to the output: the merge of this head with
    zeros for the others. `weight` is its merge weight, if the rule has weights.
    `weight_square` is its square, if the weight depends on the token.
    """
    rule, arguments = layer.rule, layer.arguments
    heads, x = jax.lax.stop_gradient((layer.heads, layer.x))
    B, T, N, _ = heads.shape

    def norm(head):
        alone = heads * (jnp.arange(N) == head)[:, None].astype(heads.dtype)
        added = rule.function(alone, x, **arguments).astype(jnp.float32)
        return jnp.linalg.norm(added, axis=-1)

    results = {"norm": jnp.moveaxis(jax.lax.map(norm, jnp.arange(N)), 0, -1)}
    if rule.weights is not None:
        arguments = {k: value for k, value in arguments.items() if k != "kernel"}
        weights = rule.weights(x, **arguments).astype(jnp.float32)
        weights = weights.mean(-1) if weights.ndim == 4 else weights
        results["weight"] = jnp.broadcast_to(weights, (B, T, N))
        if weights.ndim == 3:
            results["weight_square"] = weights**2
    return results


def weight_on_learned_sink(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    sink: Float[Array, "N"],
    **arguments,
) -> Float[Array, "B T N"]:
    """Return the weight of each query on its head's learned sink, in O(T) memory."""
    query, key = jax.lax.stop_gradient((query, key))
    _, lse = attention.dot_product_attention(
        query, key, key[..., :1], **arguments, return_residual=True
    )
    return jnp.where(lse > EMPTY, jax.nn.sigmoid(sink - lse), 0)
