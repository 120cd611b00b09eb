"""Figures of attention maps and of pruning."""

from pathlib import Path

import jax
import matplotlib
import numpy as np

from headcount.analysis.significance import summary
from headcount.analysis.tables import heads_label, scores_without
from headcount.models.maps import attention_maps, single_example
from headcount.tasks import Metric, Run

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402  after the backend is chosen


def plot_example(run: Run, trial: int, fields: dict, site: str, path: Path) -> None:
    """Save the attention maps of a site's heads for one example.

    Args:
        fields: the example's token ids by field.
        site: "encoder" (from source to source), "decoder" (to the decoder's input: BOS
            and the target without its last token), or "cross".
        path: path of the image; its suffix determines the format.
    """
    with jax.set_mesh(run.mesh):
        batch = single_example(fields)
        maps_by_site = attention_maps(run.graph, *run.of(trial), batch)
    maps, labels = np.asarray(maps_by_site[site][0][:, 0]), run.task.labels(fields)
    axes = {
        "encoder": ("source", "source"),
        "decoder": ("target", "decoder input"),
        "cross": ("target", "source"),
    }[site]
    plot_maps(maps, *(labels[axis] for axis in axes), axes, path)


def plot_maps(
    maps: np.ndarray, queries: list[str], keys: list[str], axes: tuple, path: Path
) -> None:
    """Save a grid of attention maps, with one row per layer and one column per head.

    Args:
        maps: attention weights, of shape L N T S.
        queries, keys: T and S labels.
        axes: labels of the query axis and the key axis.
        path: path of the image; its suffix determines the format.
    """
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


def plot_pruning(rows: list[dict], metric: Metric, path: Path) -> None:
    """Plot scores against the number of removed heads, with one line per order.

    Args:
        rows: rows from `analysis.pruning.curve`. Means are drawn with their 95%
            intervals over the trials or, with one trial, over its random orders.
        metric: the score to plot.
        path: path of the image; its suffix determines the format.
    """
    figure, ax = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    counts = list(dict.fromkeys(row["removed"] for row in rows))
    for order in dict.fromkeys(row["order"] for row in rows):
        scores = [scores_without(rows, order, count, metric) for count in counts]
        mean, _, low, high = summary(np.array(scores))
        style = "--" if order == "random" else "-"
        label = order.replace("_", " ")
        (line,) = ax.plot(counts, mean, style, marker="o", ms=3, label=label)
        ax.fill_between(counts, low, high, color=line.get_color(), alpha=0.15, lw=0)
    ax.set(xlabel=f"{heads_label(rows)} removed, of {rows[0]['heads']}", ylim=(0, None))
    ax.set_ylabel(f"{metric.label}, {metric.unit}" if metric.unit else metric.label)
    ax.set_title(f"{rows[0]['split']}, by order of removal", fontsize=9)
    ax.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
