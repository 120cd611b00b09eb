"""Corpora, tokenizers, packing and batches, in NumPy; imports nothing of ours."""
