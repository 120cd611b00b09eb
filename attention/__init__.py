"""Multi-head attention as functions on arrays: exact, any head shape, O(T) memory."""

from headcount.attention.api import (
    IMPLEMENTATIONS,
    attention_weights,
    dot_product_attention,
    head_gated,
    head_statistics,
    resolve_implementation,
)
from headcount.attention.kernels.cpu_build import unavailable as cpu_kernel_unavailable
from headcount.attention.merge import MERGE_RULES, MergeRule
from headcount.attention.statistics import HeadStatistics
from headcount.attention.talking_heads import (
    talking_heads_attention,
    talking_heads_weights,
)

__all__ = [
    "IMPLEMENTATIONS",
    "MERGE_RULES",
    "HeadStatistics",
    "MergeRule",
    "attention_weights",
    "cpu_kernel_unavailable",
    "dot_product_attention",
    "head_gated",
    "head_statistics",
    "resolve_implementation",
    "talking_heads_attention",
    "talking_heads_weights",
]
