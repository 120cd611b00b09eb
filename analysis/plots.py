"""Pictures of what heads attend to."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from headcount.analysis.formatting import heads_of, score_without
from headcount.analysis.significance import summary
from headcount.data.tokenizer import EOS
from headcount.models.attention import full_map
from headcount.training.run import Trained


def attention_maps(
    graph: nnx.GraphDef,
    params: nnx.State,
    head_gates: dict,
    source: list[int],
    target: list[int],
    site: str,
) -> np.ndarray:
    """Weights of every layer and head of a site, L N T S, of one pair of sentences.

    Args:
        graph, params, head_gates: of one trial.
        source, target: both end in EOS.
        site: "encoder" (from source to source), "decoder" (to what the decoder reads:
            BOS and the target but for its end), or "cross".
    """

    @jax.jit
    def maps_of(params, gates, source, target):
        model = nnx.merge(graph, params)
        made = {
            "": jnp.asarray,
            "_segments": jnp.ones_like,
            "_positions": lambda x: jnp.arange(x.size)[None],
        }
        batch = {
            f"{side}{what}": make(tokens)
            for side, tokens in (("source", source), ("target", target))
            for what, make in made.items()
        }
        maps = []

        def watch(seen):
            maps.append(full_map(seen))

        model.hidden(batch, head_gates=gates, watch={site: watch})
        return jnp.concatenate(maps)

    def row(tokens):
        return jnp.asarray([tokens], jnp.int32)

    return np.asarray(maps_of(params, head_gates, row(source), row(target)))


def plot_sentence(
    run: Trained, trial: int, ids: list[int], translation: list[int], site: str, path
) -> None:
    """Save what the heads of a site attend to in a sentence and its translation.

    Args:
        trial: whose heads.
        ids, translation: of the sentence, ending in EOS, and of its translation, not.
        site: see `attention_maps`.
        path: where the picture goes.
    """
    translation = [*translation, EOS]
    maps = attention_maps(run.graph, *run.of(trial), ids, translation, site)
    source, target = run.tokenizers
    sides = {
        "source": source.pieces(ids),
        "translation": target.pieces(translation),
        "before it": target.pieces([run.config.model.bos, *translation[:-1]]),
    }
    axes = {
        "encoder": ("source", "source"),
        "decoder": ("translation", "before it"),
        "cross": ("translation", "source"),
    }[site]
    plot_maps(maps, *(sides[axis] for axis in axes), axes, path)


def plot_maps(
    maps: np.ndarray, queries: list[str], keys: list[str], axes: tuple, path: Path
) -> None:
    """Save a grid of maps, a row a layer and a column a head.

    Args:
        maps: L N T S, as of `attention_maps`.
        queries, keys: T and S labels.
        axes: what the queries are, and the keys.
        path: where the picture goes; its suffix says the format.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    queries, keys = (
        [p.replace("▁", "") or p for p in side] for side in (queries, keys)
    )
    L, N, T, S = maps.shape
    size = (1.2 + N * (0.4 + 0.16 * S), 0.8 + L * (0.5 + 0.18 * T))
    figure, grid = plt.subplots(
        L,
        N,
        figsize=size,
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for layer in range(L):
        for head in range(N):
            ax = grid[layer, head]
            image = ax.imshow(maps[layer, head], cmap="Greys", vmin=0, vmax=1)
            ax.set_title(f"layer {layer}, head {head}", fontsize=8)
            ax.set_xticks(range(S), keys, rotation=90, fontsize=7)
            ax.set_yticks(range(T), queries, fontsize=7)
            ax.tick_params(length=0)
    figure.supylabel(axes[0], fontsize=8)
    figure.supxlabel(axes[1], fontsize=8)
    bar = figure.colorbar(image, ax=grid, shrink=0.6, aspect=30)
    bar.set_label("attention weight", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_pruning(rows: list[dict], metric: str, path: Path) -> None:
    """Save the scores with ever fewer heads, a line an order.

    Args:
        rows: of `analysis.pruning.curve`. Means are drawn, with their 95 % interval
            over the trials; of one trial, over its random orders.
        metric: which score.
        path: where the picture goes; its suffix says the format.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    counts = list(dict.fromkeys(row["removed"] for row in rows))
    for order in dict.fromkeys(row["order"] for row in rows):
        scores = [score_without(rows, order, count, metric) for count in counts]
        mean, _, low, high = summary(np.array(scores))
        style = "--" if order == "random" else "-"
        label = order.replace("_", " ")
        (line,) = ax.plot(counts, mean, style, marker="o", ms=3, label=label)
        ax.fill_between(counts, low, high, color=line.get_color(), alpha=0.15, lw=0)
    ax.set(xlabel=f"{heads_of(rows)} removed, of {rows[0]['heads']}", ylim=(0, None))
    unit = ", %" if metric == "exact_match" else ""
    ax.set_ylabel(metric.replace("_", " ") + unit)
    ax.set_title(f"{rows[0]['split']}, by order of removal", fontsize=9)
    ax.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
