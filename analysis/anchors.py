"""Published scores of ablations like ours, to stand beside ours: other data, same arms.

Only what the papers print; see the sources for their settings.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Anchor(NamedTuple):
    """One published table."""

    source: str
    unit: str
    key: Callable[[dict], Any]  # from the `model` part of a config to what scores has
    scores: dict


def as_wide_as_the_model(model: dict) -> int | None:
    """N, where N·H is the width."""
    N, H = model["attention"]["num_heads"], model["attention"]["head_dim"]
    return N if H is None or model["width"] == N * H else None


def key_size(model: dict) -> float | None:
    """H / V, where N·V is the width."""
    heads = model["attention"]
    H, V = heads["head_dim"], heads["value_dim"]
    return H / V if H and V and V * heads["num_heads"] == model["width"] else None


def shape(model: dict) -> tuple | None:
    """N, K, and how many times H goes into the width."""
    heads = model["attention"]
    H = heads["head_dim"]
    return (heads["num_heads"], heads["num_kv_heads"], model["width"] / H if H else 0)


ANCHORS = {
    "heads": Anchor(
        "Vaswani et al. 2017, Table 3, rows A",
        "BLEU, WMT14 En→De dev",
        as_wide_as_the_model,
        {1: 24.9, 4: 25.5, 8: 25.8, 16: 25.8, 32: 25.4},
    ),
    "head_dim": Anchor(
        "Vaswani et al. 2017, Table 3, rows B (V = 64, N = 8)",
        "BLEU, WMT14 En→De dev",
        key_size,
        {0.25: 25.1, 0.5: 25.4, 1.0: 25.8},
    ),
    "shazeer": Anchor(
        "Shazeer 2019, Table 1",
        "BLEU, WMT14 En→De dev",
        shape,
        {
            (8, 8, 8): 26.7,
            (8, 1, 8): 26.5,
            (1, 1, 8): 25.8,
            (2, 2, 16): 26.2,
            (4, 4, 32): 26.1,
            (8, 8, 64): 25.8,
        },
    ),
}


def published(ablation: str, model: dict) -> float | None:
    """What was published for an arm like this one, if anything.

    Of the ablations of configs/ablations.py alone: FILE.py:NAME is none of them.
    """
    anchor = ANCHORS.get(ablation)
    return anchor.scores.get(anchor.key(model)) if anchor else None
