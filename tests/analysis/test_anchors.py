"""Published scores stand beside arms with the same heads, and beside no others."""

import pytest

from headcount.analysis.anchors import find_anchors, published_scores


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
        ("kv_heads", 8, None, None, None, 47.2),
        ("kv_heads", 8, 8, None, None, 47.2),
        ("kv_heads", 8, 1, None, None, 46.6),
        ("kv_heads", 16, 2, None, None, 47.1),
        ("kv_heads", 8, 2, None, None, None),
        ("configs/own.py:heads", 4, 4, 128, 128, None),
    ],
)
def test_published_scores_are_of_the_same_heads(ablation, N, K, H, V, score):
    """For a model of width 512, as theirs, or with the same ratio to H."""
    heads = {"num_heads": N, "num_kv_heads": K, "head_dim": H, "value_dim": V}
    anchors = find_anchors(ablation, "translation")
    found = published_scores(anchors, {"width": 512, "attention": heads})
    assert list(found.values()) == ([] if score is None else [score])


def test_published_scores_are_of_the_same_task():
    heads = {"num_heads": 8, "num_kv_heads": 1, "head_dim": 64, "value_dim": 64}
    model = {"width": 512, "attention": heads}
    for task, score in (("translation", 26.5), ("language_model", 30.2)):
        (found,) = published_scores(find_anchors("shazeer", task), model).values()
        assert found == score
    assert find_anchors("shazeer", "tagging") == []


@pytest.mark.parametrize(
    "N, K, scores",
    [
        (4, None, [47.2, 1.846]),
        (4, 2, [1.849]),
        (16, 2, [47.1, 1.856]),
        (4, 1, [46.6, 1.864]),
        (12, 4, []),
    ],
)
def test_shared_keys_of_language_models_compare_by_heads_per_key_head(N, K, scores):
    """The papers' models have 64 and 32 heads, and ours have fewer."""
    model = {"attention": {"num_heads": N, "num_kv_heads": K}}
    found = published_scores(find_anchors("kv_heads", "language_model"), model)
    assert list(found.values()) == scores
