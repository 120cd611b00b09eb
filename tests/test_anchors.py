"""Published scores stand beside arms of the same heads, and beside no others."""

import pytest

from headcount.analysis.anchors import published


@pytest.mark.parametrize(
    "ablation, N, K, H, V, score",
    [
        ("heads", 1, 1, None, None, 24.9),
        ("heads", 4, 4, 128, 128, 25.5),
        ("heads", 32, 32, 16, 16, 25.4),
        ("heads", 8, 8, 16, 64, None),  # its keys are narrower than D / N
        ("head_dim", 8, 8, 16, 64, 25.1),
        ("head_dim", 8, 8, 32, 64, 25.4),
        ("head_dim", 8, 8, 16, 16, None),
        ("shazeer", 8, 1, 64, 64, 26.5),
        ("shazeer", 1, 1, 64, 64, 25.8),
        ("shazeer", 2, 2, 32, 32, 26.2),
        ("shazeer", 8, 8, 8, 8, 25.8),
        ("configs/own.py:heads", 4, 4, 128, 128, None),
    ],
)
def test_published_scores_are_of_the_same_heads(ablation, N, K, H, V, score):
    """Of a model that is 512 wide, as theirs are or as many times wider than H."""
    heads = {"num_heads": N, "num_kv_heads": K, "head_dim": H, "value_dim": V}
    assert published(ablation, {"width": 512, "attention": heads}) == score
