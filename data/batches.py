"""Training and evaluation batches: batch = f(seed, step), prefetched in the background.

A batch is a dict of int32 arrays. For each side of the examples (such as "source" and
"target") it has the tokens, `SIDE_segments` (1, 2, ... within a row; 0 is padding) and
`SIDE_positions`. It also has the fields that are aligned with a side.
"""

import functools

import numpy as np
from absl import logging

from headcount.data.examples import ArraySpec, Ragged
from headcount.data.packing import (
    ROW_TOKENS,
    Layout,
    fill_rows,
    num_rows,
    pack,
    row_shape,
)

# Steps are laid out in blocks of at least this many batches. A small corpus is repeated
# within a block, so that few examples are dropped at its end.
BLOCK_BATCHES = 8


def assemble(fields, aligned, indices, sizes, num_rows, widths) -> dict:
    """Fill rows of every field with examples; see `data.packing.fill_rows`."""
    batch = {}
    for name, field in fields.items():
        side = aligned.get(name, name)
        arrays = fill_rows(field, indices, sizes, num_rows, widths[side])
        if name in aligned:
            batch[name] = arrays[0]
            continue
        for suffix, array in zip(("", "_segments", "_positions"), arrays, strict=True):
            batch[name + suffix] = array
    return batch


def batch_spec(
    fields, num_rows: int, widths: dict[str, int], aligned: dict[str, str] | None = None
) -> dict[str, ArraySpec]:
    """Return the shapes of a batch's arrays by name; `fields` may be just names."""
    aligned, spec = aligned or {}, {}
    for name in fields:
        shape = num_rows, widths[aligned.get(name, name)]
        for suffix in ("",) if name in aligned else ("", "_segments", "_positions"):
            spec[name + suffix] = ArraySpec(shape)
    return spec


def _count(chosen) -> str:
    number = int(chosen.sum())
    return f"{number} example{'s' * (number != 1)}"


def _select(fields, aligned, max_length, min_length):
    """Drop examples with a side that is too short or too long.

    Raises:
        ValueError: no example is left.
    """
    lengths = np.stack([f.lengths for name, f in fields.items() if name not in aligned])
    empty = lengths.min(0) < min_length
    keep = ~empty
    if empty.any():
        logging.info("Skipped %s with an empty side.", _count(empty))
    if max_length is not None:
        long = keep & (lengths.max(0) > max_length)
        keep &= ~long
        if long.any():
            logging.info("Skipped %s of over %d tokens.", _count(long), max_length)
    if not keep.any():
        raise ValueError(
            f"no training example is left of {keep.size}: {empty.sum()} have an empty "
            f"side, and the others have more than data.max_length={max_length} tokens"
        )
    if keep.all():
        return fields
    return {name: field.take(np.flatnonzero(keep)) for name, field in fields.items()}


class PackedBatches:
    """The training batches of R trials, with several examples packed into each row.

    Batches depend only on the seeds and the step. A trial gets the same batches in a
    group as alone. An epoch uses every example once, except for a few that are dropped
    at its end, and packs examples in new combinations. The dropped examples vary.

    Args:
        fields: one or two sides of the examples, and fields aligned with a side.
            `batch_tokens` counts the tokens of the last side.
        aligned: for each other field, the side that it is aligned with, token by token.
        batch_tokens: tokens per batch and trial; see `data.packing.num_rows`.
        seeds: one per trial.
        max_length, min_length: examples with a side longer or shorter than this many
            tokens are dropped, and their number is logged.

    Raises:
        ValueError: no example is left.
    """

    def __init__(
        self,
        fields: dict[str, Ragged],
        *,
        batch_tokens: int,
        seeds,
        max_length: int | None = None,
        min_length: int = 2,
        aligned: dict[str, str] | None = None,
    ):
        self._aligned = aligned or {}
        self._fields = _select(fields, self._aligned, max_length, min_length)
        sides = [name for name in fields if name not in self._aligned]
        s, t = (self._fields[sides[i]].lengths for i in (0, -1))
        S, T = row_shape(s, t)
        self._widths = dict(zip((sides[0], sides[-1]), (S, T), strict=True))
        self._B = B = num_rows(batch_tokens, T)
        self.spec = batch_spec(fields, B, self._widths, self._aligned)
        self._seeds = tuple(seeds)
        passes_rows = max(s.sum() / S, t.sum() / T)  # lower bound of rows per pass
        self._passes = max(1, int(np.ceil(BLOCK_BATCHES * B / passes_rows)))
        self._layout = pack(np.tile(s, self._passes), np.tile(t, self._passes), S, T)
        self._block_steps = self._layout.num_rows // B
        # Examples of equal lengths can be exchanged, so each class has its slots.
        classes = np.tile(s * (T + 1) + t, self._passes)
        self._classes = np.unique(classes, return_inverse=True)[1].astype(np.int32)
        slot_classes = self._classes[self._layout.slots]
        self._slots_by_class = np.argsort(slot_classes, kind="stable")
        self._num_examples = len(s)
        self._order = functools.lru_cache(maxsize=2 * len(self._seeds))(self._order)

    @property
    def steps_per_epoch(self) -> float:
        """Steps per pass over the data; below 1 for a tiny corpus."""
        return self._block_steps / self._passes

    def _order(self, seed: int, block: int) -> Layout:
        """Return a block's layout with reassigned examples and shuffled rows."""
        rng = np.random.default_rng([seed, block])
        order = rng.permutation(len(self._classes))
        order = order[np.argsort(self._classes[order], kind="stable")]
        indices = np.empty_like(order)
        indices[self._slots_by_class] = order % self._num_examples
        rows = rng.permutation(self._layout.num_rows)
        starts = self._layout.row_offsets[rows]
        sizes = self._layout.row_offsets[rows + 1] - starts
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        slots = np.repeat(starts - offsets[:-1], sizes) + np.arange(offsets[-1])
        return Layout(indices[slots], offsets)

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return self.part(step)

    def part(
        self, step: int, trials: slice = slice(None), rows: slice = slice(None)
    ) -> dict[str, np.ndarray]:
        """Return some trials' rows of a batch, arrays R B ..., computing only these."""
        block, index = divmod(step, self._block_steps)
        first, last, _ = rows.indices(self._B)
        indices, sizes = [], []
        for seed in self._seeds[trials]:
            layout = self._order(seed, block)
            ends = index * self._B + first, index * self._B + last + 1
            offsets = layout.row_offsets[slice(*ends)]
            indices.append(layout.slots[offsets[0] : offsets[-1]])
            sizes.append(np.diff(offsets))
        R, B = len(indices), last - first
        batch = assemble(
            self._fields,
            self._aligned,
            np.concatenate(indices),
            np.concatenate(sizes),
            R * B,
            self._widths,
        )
        return {name: array.reshape(R, B, -1) for name, array in batch.items()}


def dispatch_spans(
    start: int, end: int, most: int, intervals, once=()
) -> list[tuple[int, int]]:
    """Divide the steps from start to end into spans (first, number of steps).

    A span has at most `most` steps. It ends at each multiple of an interval, and at
    each step in `once`.
    """
    spans = []
    while start < end:
        due = [start - start % interval + interval for interval in intervals]
        due += [step for step in once if step > start]
        number = min(most, *(step - start for step in (*due, end)))
        spans.append((start, number))
        start += number
    return spans


def stack_steps(batches, first: int, number: int, most: int, *part: slice) -> dict:
    """Stack the batches of `number` successive steps: arrays R `most` B ...

    Entries beyond `number` are padding. `part` are slices of trials and rows.
    """
    out = {}
    for index in range(number):
        for name, array in batches.part(first + index, *part).items():
            if index == 0:
                R, *rest = array.shape
                out[name] = np.zeros((R, most, *rest), array.dtype)
            out[name][:, index] = array
    return out


def prefetched(
    batches,
    spans: list[tuple[int, int]],
    most: int = 1,
    part: tuple[slice, slice] = (slice(None), slice(None)),
):
    """Iterate over `stack_steps` of the spans, prepared in background threads.

    `.close()` ends the threads; so does the end of the program.
    """
    import grain  # takes half a second, and evaluation does not need it

    dataset = grain.MapDataset.range(len(spans)).map(
        lambda index: stack_steps(batches, *spans[index], most, *part)
    )
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    return iter(dataset.to_iter_dataset(options))


def unpacked_batches(
    fields: dict[str, Ragged],
    *,
    batch_tokens: int,
    aligned: dict[str, str] | None = None,
) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Batch every example once, one per row, the shortest first.

    All sides have the width T, a multiple of 32. B is the largest number of rows that
    batch_tokens allows. The last batch of each T is padded.

    Returns:
        For each batch, the indices of its examples and the batch.
    """
    aligned = aligned or {}
    longest = np.max([field.lengths for field in fields.values()], axis=0)
    sizes = -(-np.maximum(longest, 1) // 32) * 32
    batches = []
    for T in np.unique(sizes):
        examples = np.flatnonzero(sizes == T)
        B = min(max(1, batch_tokens // T), 1 << (len(examples) - 1).bit_length())
        for start in range(0, len(examples), B):
            chosen = examples[start : start + B]
            ones, widths = np.ones_like(chosen), dict.fromkeys(fields, T)
            batch = assemble(fields, aligned, chosen, ones, B, widths)
            batches.append((chosen, batch))
    return batches


def packed_evaluation_batches(
    fields: dict[str, Ragged],
    *,
    batch_tokens: int,
    aligned: dict[str, str] | None = None,
) -> list[dict[str, np.ndarray]]:
    """Batch every example once, packed into rows that fit the longest example.

    No example is dropped. All batches have the same shape; the last one is padded.
    """
    aligned = aligned or {}
    sides = [name for name in fields if name not in aligned]
    S, T = row_shape(*(fields[sides[i]].lengths for i in (0, -1)))
    return _packed(fields, aligned, S, T, batch_tokens)[1]


def packed_in_order(
    fields: dict[str, Ragged], *, batch_tokens: int, aligned: dict[str, str]
) -> tuple[np.ndarray, list[dict[str, np.ndarray]]]:
    """Pack every example of one side once; return their order and the batches.

    Read row by row, the tokens of the batches without padding are those of the examples
    in this order. To limit the number of shapes, row lengths are multiples of 64, and
    the number of rows is the maximum that batch_tokens allows or a power of two.
    """
    (lengths,) = (f.lengths for name, f in fields.items() if name not in aligned)
    T = max(1, -(-lengths.max() // ROW_TOKENS)) * ROW_TOKENS
    layout, batches = _packed(fields, aligned, T, T, batch_tokens, power=True)
    return layout.slots, batches


def _packed(fields, aligned, S: int, T: int, batch_tokens: int, power: bool = False):
    """Pack all examples into rows of S and T tokens; return layout and batches."""
    sides = [name for name in fields if name not in aligned]
    layout = pack(*(fields[sides[i]].lengths for i in (0, -1)), S, T)
    widths = dict(zip((sides[0], sides[-1]), (S, T), strict=True))
    rows = 1 << (layout.num_rows - 1).bit_length() if power else layout.num_rows
    B = min(max(1, batch_tokens // T), rows)
    batches = []
    for row in range(0, layout.num_rows, B):
        offsets = layout.row_offsets[row : row + B + 1]
        chosen, sizes = layout.slots[offsets[0] : offsets[-1]], np.diff(offsets)
        batches.append(assemble(fields, aligned, chosen, sizes, B, widths))
    return layout, batches
