"""Parallel text as batches of packed rows: numpy only, imports nothing of ours.

Ids: pad 0, bos 1, eos 2, unk 3. Segments 1, 2, ..., 0 is padding; positions restart.
"""
