"""Batches of packed rows: batch = f(seed, step), prefetched in the background."""

import functools
import zlib

import numpy as np
from absl import logging

from headcount.data.packing import (
    Layout,
    Sentences,
    fill_rows,
    num_rows,
    pack,
    row_shape,
)

# A block of the step sequence passes over the data once or, where that makes fewer
# batches than this, several times: what is left out at its end is then little.
BLOCK_BATCHES = 8


def _select(sentences: Sentences, keep: np.ndarray) -> Sentences:
    if keep.all():
        return sentences
    return Sentences.of([sentences[i] for i in np.flatnonzero(keep)])


def _usable(source: Sentences, target: Sentences, max_length: int | None):
    """The pairs to train on: neither side empty (eos alone) nor over-long."""
    shorter = np.minimum(source.lengths, target.lengths)
    longer = np.maximum(source.lengths, target.lengths)
    empty = shorter <= 1
    keep = ~empty
    if empty.any():
        logging.info("dropped %d pairs with an empty side", empty.sum())
    if max_length is not None:
        long = keep & (longer > max_length)
        keep &= ~long
        if long.any():
            logging.info("dropped %d pairs of over %d tokens", long.sum(), max_length)
    if not keep.any():
        raise ValueError(
            f"no training pair is left of {len(source)}: {empty.sum()} have an empty "
            f"side, the others have more than data.max_length={max_length} tokens"
        )
    return _select(source, keep), _select(target, keep)


def _assemble(source, target, pairs, sizes, shape) -> dict[str, np.ndarray]:
    B, S, T = shape
    batch = {}
    for name, sentences, width in (("source", source, S), ("target", target, T)):
        arrays = fill_rows(sentences, pairs, sizes, B, width)
        for suffix, array in zip(("", "_segments", "_positions"), arrays, strict=True):
            batch[name + suffix] = array
    return batch


class Batches:
    """The training batches of R trials: `batches[step]`, for any step from 0 on.

    Each is a dict of int32 arrays: source, source_segments, source_positions of shape
    (R, B, S) and target, ... of (R, B, T), a function of the seeds and the step alone,
    the same for a trial in a group and by itself. An epoch passes over every pair
    once, in a new composition, less what is short of a whole batch at its end: other
    pairs each time. A corpus too small for BLOCK_BATCHES batches is repeated first.

    Args:
      source, target: Sentences, each ending in eos; sentence i of one is the
        translation of sentence i of the other.
      batch_tokens: target tokens a batch and trial; B: see `num_rows`.
      seeds: one a trial.
      max_length: longer pairs (in tokens, eos included, on either side) are dropped,
        as are those with an empty side; the log says how many.
    """

    def __init__(
        self,
        source: Sentences,
        target: Sentences,
        *,
        batch_tokens: int,
        seeds,
        max_length: int | None = None,
    ):
        if len(source) != len(target):
            raise ValueError(f"{len(source)} sources but {len(target)} targets")
        self._source, self._target = _usable(source, target, max_length)
        s, t = self._source.lengths, self._target.lengths
        S, T = row_shape(s, t)
        B = num_rows(batch_tokens, T)
        self.shape = (B, S, T)
        self._seeds = tuple(seeds)
        passes_rows = max(s.sum() / S, t.sum() / T)  # the fewest that a pass can take
        self._passes = max(1, int(np.ceil(BLOCK_BATCHES * B / passes_rows)))
        self._layout = pack(np.tile(s, self._passes), np.tile(t, self._passes), S, T)
        self._block_steps = self._layout.num_rows // B
        # Of each slot and each pair (both sorted by lengths): which go together.
        classes = np.tile(s * (T + 1) + t, self._passes)
        self._classes = np.unique(classes, return_inverse=True)[1].astype(np.int32)
        slot_classes = self._classes[self._layout.slots]
        self._slots_by_class = np.argsort(slot_classes, kind="stable")
        self._plan = functools.lru_cache(maxsize=2 * len(self._seeds))(self._plan)

    @property
    def steps_per_epoch(self) -> float:
        """Steps that one pass over the data takes; below 1 for a tiny corpus."""
        return self._block_steps / self._passes

    @property
    def crc32(self) -> int:
        """A checksum of the pairs, to tell whether they have changed."""
        checksum = 0
        for sentences in (self._source, self._target):
            for array in (sentences.tokens, sentences.offsets):
                checksum = zlib.crc32(array.tobytes(), checksum)
        return checksum

    def _plan(self, seed: int, block: int) -> Layout:
        """A block's rows in order: pairs of equal lengths dealt out anew, rows
        shuffled."""
        rng = np.random.default_rng([seed, block])
        order = rng.permutation(len(self._classes))
        order = order[np.argsort(self._classes[order], kind="stable")]
        pairs = np.empty_like(order)
        pairs[self._slots_by_class] = order % len(self._source)
        rows = rng.permutation(self._layout.num_rows)
        starts = self._layout.row_offsets[rows]
        sizes = self._layout.row_offsets[rows + 1] - starts
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        slots = np.repeat(starts - offsets[:-1], sizes) + np.arange(offsets[-1])
        return Layout(pairs[slots], offsets)

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return self.part(step)

    def part(
        self, step: int, trials: slice = slice(None), rows: slice = slice(None)
    ) -> dict[str, np.ndarray]:
        """Some trials' rows of a batch, and nothing done for the others."""
        B, S, T = self.shape
        block, index = divmod(step, self._block_steps)
        first, last, _ = rows.indices(B)
        pairs, sizes = [], []
        for seed in self._seeds[trials]:
            plan = self._plan(seed, block)
            offsets = plan.row_offsets[index * B + first : index * B + last + 1]
            pairs.append(plan.slots[offsets[0] : offsets[-1]])
            sizes.append(np.diff(offsets))
        shape = len(pairs), last - first
        batch = _assemble(
            self._source,
            self._target,
            np.concatenate(pairs),
            np.concatenate(sizes),
            (shape[0] * shape[1], S, T),
        )
        return {name: array.reshape(*shape, -1) for name, array in batch.items()}


def portions(
    start: int, end: int, most: int, intervals, once=()
) -> list[tuple[int, int]]:
    """Cut the steps from start to end into (first, number) of at most `most` steps.

    Each multiple of an interval ends a portion, and so does each step in `once`.
    """
    found = []
    while start < end:
        due = [start - start % interval + interval for interval in intervals]
        due += [step for step in once if step > start]
        number = min(most, min(due) - start, end - start)
        found.append((start, number))
        start += number
    return found


def stacked(batches: Batches, first: int, number: int, most: int, *part: slice):
    """Batches of successive steps, (R, most, B, S) and (R, most, B, T).

    Those beyond the number are padding. `part` is of trials and rows, see
    `Batches.part`; R and B are then as many as these.
    """
    out = {}
    for index in range(number):
        for name, array in batches.part(first + index, *part).items():
            if index == 0:
                R, *rest = array.shape
                out[name] = np.zeros((R, most, *rest), array.dtype)
            out[name][:, index] = array
    return out


def training_batches(
    batches: Batches,
    portions: list[tuple[int, int]],
    most: int = 1,
    part: tuple[slice, slice] = (slice(None), slice(None)),
):
    """Iterates over portions of batches, see `stacked`, made ahead in the background.

    `.close()` ends the threads; so does the end of the program.
    """
    import grain  # half a second that evaluation need not wait for

    dataset = grain.MapDataset.range(len(portions)).map(
        lambda index: stacked(batches, *portions[index], most, *part)
    )
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    return iter(dataset.to_iter_dataset(options))


def sentence_batches(
    source: Sentences, target: Sentences, *, batch_tokens: int
) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Every pair once, one a row, without a trial axis; the shortest first.

    Each batch has the numbers of its pairs beside it. The keys are those of a training
    batch, the shapes (B, T) on both sides, where T is a multiple of 32 and B the most
    rows that batch_tokens hold, of fewer pairs the next power of 2. The last batch of a
    T is filled up with padding.
    """
    longest = np.maximum(source.lengths, target.lengths)
    sizes = -(-longest // 32) * 32
    batches = []
    for T in np.unique(sizes):
        pairs = np.flatnonzero(sizes == T)
        B = min(max(1, batch_tokens // T), 1 << (len(pairs) - 1).bit_length())
        for start in range(0, len(pairs), B):
            chosen = pairs[start : start + B]
            ones = np.ones_like(chosen)
            batch = _assemble(source, target, chosen, ones, (B, T, T))
            batches.append((chosen, batch))
    return batches


def evaluation_batches(
    source: Sentences, target: Sentences, *, batch_tokens: int
) -> list[dict[str, np.ndarray]]:
    """Every pair once in packed batches of one shape, without a trial axis.

    The keys are those of a training batch, the shapes (B, S) and (B, T). Nothing is
    dropped: rows hold the longest pair. The last batch is filled up with padding.
    """
    s, t = source.lengths, target.lengths
    S, T = row_shape(s, t)
    layout = pack(s, t, S, T)
    B = min(max(1, batch_tokens // T), layout.num_rows)
    batches = []
    for row in range(0, layout.num_rows, B):
        offsets = layout.row_offsets[row : row + B + 1]
        pairs = layout.slots[offsets[0] : offsets[-1]]
        batches.append(_assemble(source, target, pairs, np.diff(offsets), (B, S, T)))
    return batches
