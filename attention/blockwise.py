"""Online softmax over blocks in XLA, O(T) memory."""

from attention.reference import attend, head_statistics

__all__ = ["attend", "head_statistics"]
