"""What the heads of a trained model attend to, and what it loses without them."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from rich.progress import track

from headcount import attention
from headcount.attention.masks import EMPTY
from headcount.data.batches import evaluation_batches, sentence_batches
from headcount.data.packing import Sentences
from headcount.models.attention import Seen
from headcount.runtime.logging import console
from headcount.training.run import Pairs, Trained
from headcount.training.step import batch_loss

SIDES = {"encoder": "source", "decoder": "target", "cross": "target"}  # of the queries


def measure(
    graph: nnx.GraphDef,
    params: nnx.State,
    head_gates: dict,
    source: Sentences,
    target: Sentences,
    batch_tokens: int,
    *,
    alone: bool = True,
) -> list[dict]:
    """A row for every head of one trial: site, layer, head, gate, and

    - the fields of `attention.HeadStatistics`, the mean over all tokens of the side
      that asks, of the weights that a learned sink leaves, divided by their sum; None
      where heads talk, whose mixed maps are no distributions;
    - importance (Michel et al. 2019, equation 2): how fast a sentence's loss changes
      with the head's gate, in absolute value, summed over the sentences;
    - added_loss: the loss without this head alone, less that with all;
    - alone (their table 2): the loss with this head as the only one of its layer and
      site, less that with all; None where its gate is 0;
    - sink: the weight on the source's EOS, in the decoder on BOS, the mean over the
      same tokens as that of the statistics; None where heads talk;
    - learned_sink: the weight that `model.attention.sink` takes, likewise; None
      without. The one on EOS or BOS is a share of what is left and it together.
    - share: the norm of what the head, times its gate, adds to the layer's output, the
      mean over the same tokens, divided by the sum over the layer's heads at the site;
      None where all are 0;
    - merge_weight: what the merge rule multiplies the head by, the mean over the same
      tokens, and merge_weight_sd their standard deviation; of a weight an element the
      mean over the head's. None where the rule has no such number, or one for all
      tokens has no deviation.

    Importance and the losses are in nats a target token. Importance is one backward
    pass, added_loss and alone a forward pass a head each: added_loss is the one to
    believe, where it and importance differ.

    Args:
        graph, params: of one trial.
        head_gates: of sites that have others than 1; a head whose gate is 0 adds
            nothing to the loss.
        source, target: encoded sentences, see `data.tokenizer`.
        batch_tokens: target tokens at a time.
        alone: False leaves that None, and half of the forward passes out.
    """
    head_gates = nnx.merge(graph, params).head_gates() | {
        site: jnp.asarray(gates) for site, gates in head_gates.items()
    }
    sums = None
    for _, batch in sentence_batches(source, target, batch_tokens=batch_tokens):
        found = jax.device_get(look(graph, params, head_gates, batch))
        sums = found if sums is None else jax.tree.map(np.add, sums, found)
    slopes, seen, counts = sums
    batches = evaluation_batches(source, target, batch_tokens=batch_tokens)

    def loss(gates):
        gates = head_gates | gates
        total = sum(float(loss_of(graph, params, gates, batch)) for batch in batches)
        return total / float(counts["target"])

    whole, rows = loss({}), []
    heads = [
        (s, *at) for s, gates in head_gates.items() for at in np.ndindex(gates.shape)
    ]
    for site, layer, head in shown(heads):
        row = {"site": site, "layer": layer, "head": head}
        gates = head_gates[site]
        row["gate"] = float(gates[layer, head])
        means = {
            name: float(total[head] / counts[SIDES[site]])
            for name, total in seen[site][layer].items()
        }
        row |= {name: means.get(name) for name in attention.HeadStatistics._fields}
        row["importance"] = float(slopes[site][layer, head] / counts["target"])
        row |= {"added_loss": 0.0, "alone": None}
        if row["gate"]:
            row["added_loss"] = loss({site: gates.at[layer, head].set(0)}) - whole
        if row["gate"] and alone:
            only = gates.at[layer].set(0).at[layer, head].set(row["gate"])
            row["alone"] = loss({site: only}) - whole
        row |= {name: means.get(name) for name in ("sink", "learned_sink")}
        norms = seen[site][layer]["norm"]
        row["share"] = float(norms[head] / norms.sum()) if norms.any() else None
        weight, square = means.get("weight"), means.get("weight_square")
        row |= {"merge_weight": weight, "merge_weight_sd": None}
        if square is not None:
            row["merge_weight_sd"] = max(0.0, square - weight**2) ** 0.5
        rows.append(row)
    return rows


def measure_trials(run: Trained, pairs: Pairs, trials: list[int]) -> Iterator[dict]:
    """The rows of `measure` of each of the trials, with its number."""
    tokens = run.config.data.batch_tokens
    for trial in trials:
        model = run.graph, *run.of(trial)
        for row in measure(*model, pairs.source, pairs.target, tokens):
            yield {"trial": trial} | row


def by_rank(rows: list[dict]) -> dict[tuple, list[list[dict]]]:
    """Heads of several trials side by side: by site, layer and rank a list a trial.

    A head has no identity across seeds: head 0 of one is not head 0 of another. So rank
    1 is the head of a trial's layer whose loss would grow most without it, and heads
    that are gone are the last. The rank "all" has every head of the layer.

    Args:
        rows: of `measure`, with the trial of each.
    """
    layers = {}
    for row in rows:
        trials = layers.setdefault((row["site"], row["layer"]), {})
        trials.setdefault(row["trial"], []).append(row)
    found = {}
    for at, trials in layers.items():
        every = [
            sorted(heads, key=lambda row: (row["gate"] == 0, -row["added_loss"]))
            for heads in trials.values()
        ]
        for rank, heads in enumerate(zip(*every, strict=True), 1):
            found[*at, rank] = [[head] for head in heads]
        found[*at, "all"] = every
    return found


def over_trials(trials: list[list[dict]], name: str) -> np.ndarray:
    """The mean over the heads of each trial, of those that have such a number."""
    values = [[row[name] for row in heads if row[name] is not None] for heads in trials]
    return np.array([np.mean(each) for each in values if each])


def shown(heads: list):
    """The heads, with a bar on a terminal."""
    at = console()
    return track(heads, "heads", console=at, transient=True, disable=not at.is_terminal)


@partial(jax.jit, static_argnames="graph")
def look(graph, params, head_gates: dict, batch: dict):
    """Sums over a batch of sentences, one a row: of the absolute gradients by gates,
    L N by site; of the statistics and of `merging`, N a layer by site; and of the
    tokens, by side.
    """
    B = len(batch["source"])
    counts = {
        side: (batch[f"{side}_segments"] > 0).sum(1) for side in ("source", "target")
    }

    def loss(gates):
        seen = {site: [] for site in gates}

        def watch(site, layer):
            real = batch[f"{SIDES[site]}_segments"] > 0
            sums = {
                name: jnp.where(real[..., None], each, 0).sum((0, 1))
                for name, each in merging(layer).items()
            }
            sink = layer.parameters.get("sink")
            if sink is not None or not layer.parameters:
                arrays, masks = (layer.query, layer.key), layer.masks
                means = attention.head_statistics(*arrays, **masks)._asdict()
                weigh = partial(jnp.matmul, counts[SIDES[site]])
                sums |= jax.tree.map(weigh, means)
                shares = share_on_sink(site, *arrays, sink=sink, **masks)
                sums["sink"] = shares.sum((0, 1))
                if sink is not None:
                    shares = share_on_learned_sink(*arrays, sink, **masks)
                    sums["learned_sink"] = shares.sum((0, 1))
            seen[site].append(sums)

        watches = {site: partial(watch, site) for site in gates}
        total, _ = batch_loss(
            graph, params, batch, 0.0, head_gates=gates, watch=watches
        )
        return total, seen

    # gates of every row: the gradient of the sum is that of each sentence
    rows = {
        site: jnp.repeat(gates[:, None], B, 1) for site, gates in head_gates.items()
    }
    slopes, seen = jax.grad(loss, has_aux=True)(rows)
    slopes = {site: jnp.abs(slope).sum(1) for site, slope in slopes.items()}
    return slopes, seen, {side: count.sum() for side, count in counts.items()}


def merging(layer: Seen) -> dict[str, Float[Array, "B T N"]]:
    """Of every token: the norm of what each head adds, its weight and that squared.

    A rule without weights has no weight, one whose weights know no token no square.
    What a head adds is the merge of this head and zeros.
    """
    rule, arguments = layer.rule, layer.arguments
    heads, x = jax.lax.stop_gradient((layer.heads, layer.x))
    B, T, N, _ = heads.shape

    def norm(head):
        alone = heads * (jnp.arange(N) == head)[:, None].astype(heads.dtype)
        added = rule.function(alone, x, **arguments).astype(jnp.float32)
        return jnp.linalg.norm(added, axis=-1)

    found = {"norm": jnp.moveaxis(jax.lax.map(norm, jnp.arange(N)), 0, -1)}
    if rule.weights is not None:
        arguments = {k: value for k, value in arguments.items() if k != "kernel"}
        weights = rule.weights(x, **arguments).astype(jnp.float32)
        weights = weights.mean(-1) if weights.ndim == 4 else weights
        found["weight"] = jnp.broadcast_to(weights, (B, T, N))
        if weights.ndim == 3:
            found["weight_square"] = weights**2
    return found


def share_on_sink(
    site: str,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    *,
    key_value_segment_ids: Int[Array, "B S"],
    **arguments,
) -> Float[Array, "B T N"]:
    """The weight of each query on the special token of its sentence, in O(T) memory.

    That is EOS, the source's last token; of a decoder BOS, the first that it reads:
    where heads may look that have nothing to look for, a sink (Xiao et al. 2024).
    """
    end = {"prepend": 0} if site == "decoder" else {"append": 0}
    special = jnp.diff(key_value_segment_ids, **end) != 0
    special &= key_value_segment_ids > 0
    query, key = jax.lax.stop_gradient((query, key))
    value = jnp.broadcast_to(special[..., None, None], (*key.shape[:3], 1))
    shares = attention.dot_product_attention(
        query,
        key,
        value.astype(key.dtype),
        key_value_segment_ids=key_value_segment_ids,
        **arguments,
    )
    return shares[..., 0].astype(jnp.float32)


def share_on_learned_sink(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    sink: Float[Array, "N"],
    **arguments,
) -> Float[Array, "B T N"]:
    """The weight of each query on its head's sink, in O(T) memory; 0 of padding."""
    query, key = jax.lax.stop_gradient((query, key))
    _, lse = attention.dot_product_attention(
        query, key, key[..., :1], **arguments, return_residual=True
    )
    return jnp.where(lse > EMPTY, jax.nn.sigmoid(sink - lse), 0)


@partial(jax.jit, static_argnames="graph")
def loss_of(graph, params, head_gates: dict, batch: dict):
    """The summed loss of a batch, nats."""
    return batch_loss(graph, params, batch, 0.0, head_gates=head_gates)[0]
