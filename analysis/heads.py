"""What the heads of a trained model attend to, and what it loses without them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from rich.progress import track

import attention
from data.packing import Sentences
from data.pipeline import evaluation_batches, sentence_batches
from training.metrics import console
from training.step import batch_loss

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
      that asks; None where heads talk, whose mixed maps are no distributions;
    - importance (Michel et al. 2019, equation 2): how fast a sentence's loss changes
      with the head's gate, in absolute value, summed over the sentences;
    - added_loss: the loss without this head alone, less that with all;
    - alone (their table 2): the loss with this head as the only one of its layer and
      site, less that with all; None where its gate is 0;
    - sink: the weight on the source's EOS, in the decoder on BOS, the mean over the
      same tokens as that of the statistics; None where heads talk.

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
        rows.append(row | {"sink": means.get("sink")})
    return rows


def shown(heads: list):
    """The heads, with a bar on a terminal."""
    at = console()
    return track(heads, "heads", console=at, transient=True, disable=not at.is_terminal)


@partial(jax.jit, static_argnames="graph")
def look(graph, params, head_gates: dict, batch: dict):
    """Sums over a batch of sentences, one a row: of the absolute gradients by gates,
    L N by site; of the statistics, N a layer by site; and of the tokens, by side.
    """
    B = len(batch["source"])
    counts = {
        side: (batch[f"{side}_segments"] > 0).sum(1) for side in ("source", "target")
    }

    def loss(gates):
        seen = {site: [] for site in gates}

        def watch(site, query, key, **arguments):
            sums = {}
            if "logits_mix" not in arguments:
                means = attention.head_statistics(query, key, **arguments)._asdict()
                weigh = partial(jnp.matmul, counts[SIDES[site]])
                sums = jax.tree.map(weigh, means)
                shares = share_on_sink(site, query, key, **arguments)
                sums["sink"] = shares.sum((0, 1))
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


@partial(jax.jit, static_argnames="graph")
def loss_of(graph, params, head_gates: dict, batch: dict):
    """The summed loss of a batch, nats."""
    return batch_loss(graph, params, batch, 0.0, head_gates=head_gates)[0]
