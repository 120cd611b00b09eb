"""Published scores of similar ablations: same arms, but other data and larger models.

They contain only numbers printed in the papers; see the sources for their settings.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Anchor(NamedTuple):
    """One published table."""

    ablation: str  # of configs/ablations.py
    task: str  # of the sweep; its data differ
    source: str
    unit: str
    key: Callable[[dict], Any]  # from a config's `model` section to a key of `scores`
    scores: dict
    format: str = ".1f"


def heads_at_model_width(model: dict) -> int | None:
    """Return N if N·H equals the model width, else None."""
    N, H = model["attention"]["num_heads"], model["attention"]["head_dim"]
    return N if H is None or model["width"] == N * H else None


def relative_key_size(model: dict) -> float | None:
    """Return H / V if N·V equals the model width, else None."""
    heads = model["attention"]
    H, V = heads["head_dim"], heads["value_dim"]
    return H / V if H and V and V * heads["num_heads"] == model["width"] else None


def head_shape(model: dict) -> tuple | None:
    """Return N, K, and D / H."""
    heads = model["attention"]
    H = heads["head_dim"]
    return (heads["num_heads"], heads["num_kv_heads"], model["width"] / H if H else 0)


def sharing(model: dict) -> str | int:
    """Return "multi-head", "multi-query", or the number of heads per key/value head."""
    N, K = (model["attention"][key] for key in ("num_heads", "num_kv_heads"))
    K = K or N
    return {N: "multi-head", 1: "multi-query"}.get(K, N // K)


GQA = Anchor(
    "kv_heads",
    "translation",
    "Ainslie et al. 2023, Table 1, T5-XXL; 8 groups of 8 heads",
    "mean score, over summarisation, translation and question answering",
    sharing,
    {"multi-head": 47.2, "multi-query": 46.6, 8: 47.1},
)
ANCHORS = (
    Anchor(
        "heads",
        "translation",
        "Vaswani et al. 2017, Table 3, rows A",
        "BLEU, WMT14 En→De dev",
        heads_at_model_width,
        {1: 24.9, 4: 25.5, 8: 25.8, 16: 25.8, 32: 25.4},
    ),
    Anchor(
        "head_dim",
        "translation",
        "Vaswani et al. 2017, Table 3, rows B (V = 64, N = 8)",
        "BLEU, WMT14 En→De dev",
        relative_key_size,
        {0.25: 25.1, 0.5: 25.4, 1.0: 25.8},
    ),
    Anchor(
        "shazeer",
        "translation",
        "Shazeer 2019, Table 1",
        "BLEU, WMT14 En→De dev",
        head_shape,
        {
            (8, 8, 8): 26.7,
            (8, 1, 8): 26.5,
            (1, 1, 8): 25.8,
            (2, 2, 16): 26.2,
            (4, 4, 32): 26.1,
            (8, 8, 64): 25.8,
        },
    ),
    Anchor(
        "shazeer",
        "language_model",
        "Shazeer 2019, Table 3",
        "perplexity, Billion Word dev",
        head_shape,
        {
            (8, 8, 8): 29.9,
            (8, 1, 8): 30.2,
            (1, 1, 8): 31.2,
            (2, 2, 16): 31.1,
            (4, 4, 32): 31.0,
            (8, 8, 64): 30.9,
        },
    ),
    GQA,
    GQA._replace(task="language_model"),
    Anchor(
        "kv_heads",
        "language_model",
        "Zhou et al. 2025 (2510.23052), by heads per key/value head",
        "training loss of 32 heads",
        sharing,
        {
            "multi-head": 1.846,
            2: 1.849,
            4: 1.851,
            8: 1.856,
            16: 1.855,
            "multi-query": 1.864,
        },
        ".3f",
    ),
)


def find_anchors(ablation: str, task: str) -> list[Anchor]:
    """Return the published tables of an ablation.

    Only ablations in configs/ablations.py have any; FILE.py:NAME never matches.
    """
    return [a for a in ANCHORS if (a.ablation, a.task) == (ablation, task)]


def published_scores(anchors: list[Anchor], model: dict) -> dict[str, float]:
    """Return the published scores of an arm with this `model` section, by source."""
    by_source = {
        anchor.source: anchor.scores.get(anchor.key(model)) for anchor in anchors
    }
    return {source: score for source, score in by_source.items() if score is not None}
