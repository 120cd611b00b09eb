"""Batches of windows of one token stream, for language models.

The stream consists of documents with a separator before each. Token i + 1 is predicted
from tokens up to i. A batch has `target` (labels), `target_inputs`, `target_segments`
and `target_positions`, and in evaluation also `target_weights`.
"""

import functools
from collections.abc import Iterator

import numpy as np

from headcount.data.batches import BLOCK_BATCHES
from headcount.data.examples import ArraySpec, Ragged
from headcount.data.packing import num_rows

FIELDS = ("target", "target_inputs", "target_segments", "target_positions")


def make_stream(documents: Ragged, separator: int) -> np.ndarray:
    """Concatenate documents, with a separator before each."""
    starts = documents.offsets[:-1]
    return np.insert(documents.tokens, starts, separator).astype(np.int32)


def window_spec(num_rows: int, length: int) -> dict[str, ArraySpec]:
    """Return the shapes of a training batch's arrays."""
    return {name: ArraySpec((num_rows, length)) for name in FIELDS}


def cut_windows(
    stream: np.ndarray, starts: np.ndarray, length: int, separator: int, cross: bool
) -> dict[str, np.ndarray]:
    """Cut windows from a stream, as arrays of rows x length.

    Args:
        stream: see `make_stream`.
        starts: index of the first input of each window. start + length must not exceed
            the index of the last token.
        length: tokens per window.
        separator: the token before each document.
        cross: whether tokens may attend to previous documents in the window. Otherwise,
            every document is a separate segment.
    """
    index = starts[:, None] + np.arange(length)
    inputs, target = stream[index], stream[index + 1]
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), index.shape)
    segments = np.ones(index.shape, np.int32)
    if not cross:
        begins = inputs == separator
        begins[:, 0] = True
        segments = begins.cumsum(1, dtype=np.int32)
        first = np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
        positions = (positions - first).astype(np.int32)
    return dict(zip(FIELDS, (target, inputs, segments, positions), strict=True))


class WindowBatches:
    """The training batches of R trials; see `data.batches.PackedBatches`.

    In each epoch, the stream is cut into windows that do not overlap, with a new random
    offset, and the windows are shuffled. So every token is seen about once per epoch,
    each time with another context.

    Args:
        stream: see `make_stream`.
        length: tokens per window.
        batch_tokens: tokens per batch and trial.
        seeds: one per trial.
        separator, cross: see `cut_windows`.

    Raises:
        ValueError: the stream has fewer tokens than two windows.
    """

    def __init__(
        self, stream, *, length: int, batch_tokens: int, seeds, separator, cross: bool
    ):
        per_pass = (len(stream) - 1) // length - 1  # for any offset
        if per_pass < 1:
            raise ValueError(
                f"The training split has {len(stream) - 1} tokens, too few for windows "
                f"of data.max_length={length} tokens: it needs {2 * length}."
            )
        self._stream, self._length = stream, length
        self._separator, self._cross = separator, cross
        self._B = B = num_rows(batch_tokens, length)
        self.spec = window_spec(B, length)
        self._seeds = tuple(seeds)
        self._per_pass = per_pass
        self._passes = max(1, -(-BLOCK_BATCHES * B // per_pass))
        self._block_steps = self._passes * per_pass // B
        self._starts = functools.lru_cache(maxsize=2 * len(self._seeds))(self._starts)

    @property
    def steps_per_epoch(self) -> float:
        """Steps per pass over the data; below 1 for a tiny corpus."""
        return self._block_steps / self._passes

    def _starts(self, seed: int, block: int) -> np.ndarray:
        rng = np.random.default_rng([seed, block])
        last = len(self._stream) - 1 - self._length * self._per_pass
        phases = rng.integers(last, size=self._passes, endpoint=True)
        starts = phases[:, None] + self._length * np.arange(self._per_pass)
        return rng.permutation(starts.reshape(-1))

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return self.part(step)

    def part(
        self, step: int, trials: slice = slice(None), rows: slice = slice(None)
    ) -> dict[str, np.ndarray]:
        """Return some trials' rows of a batch, arrays R B T."""
        block, index = divmod(step, self._block_steps)
        first, last, _ = rows.indices(self._B)
        chosen = slice(index * self._B + first, index * self._B + last)
        starts = [self._starts(seed, block)[chosen] for seed in self._seeds[trials]]
        windows = cut_windows(
            self._stream,
            np.concatenate(starts),
            self._length,
            self._separator,
            self._cross,
        )
        shape = len(starts), last - first, self._length
        return {name: array.reshape(shape) for name, array in windows.items()}


def evaluation_windows(
    stream, *, length: int, stride: int, batch_tokens: int, separator, cross: bool
) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches in which `target_weights` is 1 exactly once per predicted token.

    Windows start every `stride` tokens, and score only tokens that previous windows did
    not score. With stride = length, tokens have 0 to length - 1 tokens of context. With
    a smaller stride, those after the first window have at least length - stride tokens
    of context, or all before them in their document. All batches have the same shape.
    """
    total = len(stream) - 1
    starts = np.arange(0, max(1, total - length + stride), stride)
    padded = np.concatenate([stream, np.full(length, separator, np.int32)])
    B = max(1, min(batch_tokens // length, len(starts)))
    starts = np.append(starts, np.full(-len(starts) % B, total))
    reached = 0
    for chosen in starts.reshape(-1, B):
        batch = cut_windows(padded, np.minimum(chosen, total), length, separator, cross)
        place = chosen[:, None] + np.arange(length)
        ends = np.minimum(chosen + length, total)
        scored_to = np.concatenate([[reached], np.maximum.accumulate(ends)[:-1]])
        real = place < total
        batch["target_weights"] = (real & (place >= scored_to[:, None])).astype(
            np.int32
        )
        batch["target_segments"] = batch["target_segments"] * real
        reached = max(reached, int(ends.max()))
        yield batch
