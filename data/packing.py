"""Pack several examples into each row, to minimize padding.

A row holds S source and T target tokens, so this is two-dimensional bin packing. It is
solved once, for the *lengths* of a corpus. The resulting layout defines the lengths of
the slots in each row. Each epoch then randomly assigns examples to slots of their
length and shuffles the rows, which takes milliseconds and always gives the same number
of rows.
"""

import dataclasses

import numpy as np

from headcount.data.examples import Ragged

ROW_TOKENS = 64  # target tokens in the shortest row


@dataclasses.dataclass(frozen=True)
class Layout:
    """Rows of slots: row r has slots[row_offsets[r]:row_offsets[r + 1]]."""

    slots: np.ndarray  # the example in each slot, int64
    row_offsets: np.ndarray  # int64

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1


def row_shape(source_lengths, target_lengths) -> tuple[int, int]:
    """Choose the row lengths (S, T) so that both sides of a row fill up together.

    S is T times the corpus's ratio of source to target tokens, rounded up to an even
    number. T is the smallest multiple of 8 that is at least ROW_TOKENS, fits the
    longest example, and for which rounding increases S by at most 3.5%. If no T below
    twice the minimum satisfies this, the T with the smallest increase is chosen.
    """
    ratio = source_lengths.sum() / target_lengths.sum()
    longest = max(target_lengths.max(), source_lengths.max() / ratio, ROW_TOKENS)
    targets = 8 * np.arange(np.ceil(longest / 8), np.ceil(longest / 4)).astype(int)
    sources = (2 * np.ceil(np.round(targets * ratio / 2, 6))).astype(int)
    slack = sources / (targets * ratio) - 1
    best = np.argmax(slack <= 0.035) if slack.min() <= 0.035 else np.argmin(slack)
    return int(sources[best]), int(targets[best])


def num_rows(batch_tokens: int, T: int) -> int:
    """Return the number of rows B of a training batch, with T tokens per row.

    If B is at least 32, it is rounded down by at most a sixteenth, to a multiple of a
    power of two of at least B / 32, so that it can be sharded over devices.

    Raises:
        ValueError: batch_tokens is less than one row.
    """
    if batch_tokens < T:
        raise ValueError(
            f"data.batch_tokens={batch_tokens} must be at least one row of {T} tokens"
        )
    B = batch_tokens // T
    bits = max(0, B.bit_length() - 5)
    return B >> bits << bits


def largest_rows(batch_tokens: int, max_length: int) -> tuple[int, int]:
    """Return (B, T) for rows that fit the longest allowed example.

    For the row length that a given corpus needs, see `row_shape`.
    """
    T = max(ROW_TOKENS, -(-max_length // 8) * 8)
    return num_rows(batch_tokens, T), T


def _completion(counts: np.ndarray) -> tuple[int, int] | None:
    """Find two examples that together fill the rest of a row (almost) exactly.

    `counts[s, t]` is the number of remaining examples with these lengths. Returns the
    lengths of one example of the most frequent such pair, or None.
    """
    for slack in ((0, 0), (1, 0), (0, 1), (1, 1)):
        fitting = counts[: counts.shape[0] - slack[0], : counts.shape[1] - slack[1]]
        pairs = fitting * fitting[::-1, ::-1]
        best = int(pairs.argmax()) if pairs.size else 0
        if pairs.size and pairs.flat[best]:
            return divmod(best, fitting.shape[1])
    return None


# The last examples of a row are chosen by the room that is left on the target side, in
# mean lengths: one more fits, or about two.
ROOM_FOR_ONE, ROOM_FOR_TWO = 1.5, 2.6
IMBALANCE = 2.0  # what a pair out of proportion costs, where its size counts 1


def _rows_of_lengths(source_lengths, target_lengths, S: int, T: int):
    """Pack lengths; yield pairs of a row's list of (s, t) and the number of such rows.

    Each row starts with the longest remaining example, and continues with long ones
    that keep the two sides in proportion. When about two more fit, it takes a pair that
    fills the row exactly, preferring the most frequent lengths.
    """
    counts = np.zeros((S + 1, T + 1), np.int64)
    np.add.at(counts, (source_lengths, target_lengths), 1)
    s, t = np.nonzero(counts)
    order = np.argsort(-np.maximum(s / S, t / T), kind="stable")
    s, t = s[order], t[order]
    size, imbalance = s / S + t / T, s / S - t / T
    mean, num_left, first = target_lengths.mean(), len(target_lengths), 0
    while num_left:
        while not counts[s[first], t[first]]:
            first += 1
        pair, room, row = (int(s[first]), int(t[first])), (S, T), []
        while pair:
            counts[pair] -= 1
            row.append(pair)
            room = (room[0] - pair[0], room[1] - pair[1])
            pair = None
            if room[1] < ROOM_FOR_ONE * mean:
                pair = room if counts[room] else None
            elif room[1] < ROOM_FOR_TWO * mean:
                pair = _completion(counts[: room[0] + 1, : room[1] + 1])
            if pair is None:
                tail = slice(first, None)
                score = size[tail].copy()
                if room[1] >= ROOM_FOR_TWO * mean:
                    left_over = room[0] / S - room[1] / T
                    score -= IMBALANCE * np.abs(left_over - imbalance[tail])
                fits = (s[tail] <= room[0]) & (t[tail] <= room[1])
                fits &= counts[s[tail], t[tail]] > 0
                score[~fits] = -np.inf
                best = int(score.argmax())
                if fits[best]:
                    pair = (int(s[first + best]), int(t[first + best]))
        # Use a pattern of common lengths for many rows at once, so that packing
        # millions of examples takes little longer than packing thousands.
        spare = min(counts[pair] // row.count(pair) for pair in row) // 64
        for pair in row:
            counts[pair] -= spare
        num_left -= len(row) * (1 + spare)
        yield row, 1 + int(spare)


def pack(source_lengths, target_lengths, S: int, T: int) -> Layout:
    """Pack each example once into rows of S source and T target tokens.

    The result is deterministic.

    Raises:
        ValueError: a length, in tokens, exceeds S or T.
    """
    if len(source_lengths) == 0:
        return Layout(np.zeros(0, np.int64), np.zeros(1, np.int64))
    if source_lengths.max() > S or target_lengths.max() > T:
        raise ValueError(
            f"an example of {source_lengths.max()} source and {target_lengths.max()} "
            f"target tokens does not fit a row of {S} and {T}"
        )
    classes, sizes = [], []
    for row, repeats in _rows_of_lengths(source_lengths, target_lengths, S, T):
        classes += [s * (T + 1) + t for s, t in row] * repeats
        sizes += [len(row)] * repeats
    slots = np.empty(len(classes), np.int64)
    slots[np.argsort(np.array(classes), kind="stable")] = np.argsort(
        source_lengths * (T + 1) + target_lengths, kind="stable"
    )
    return Layout(slots, np.concatenate([[0], np.cumsum(sizes)]))


def _spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate the ranges start, start + 1, ... of the given lengths."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])


def fill_rows(
    field: Ragged, indices: np.ndarray, sizes: np.ndarray, num_rows: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, segment ids and positions: three int32 arrays (num_rows, width).

    Row r holds the next sizes[r] sequences of `indices`, which refer to the field. Rows
    beyond len(sizes) are padding. Segments count from 1 within a row, positions restart
    at 0 in each segment, and all three arrays are 0 in padding.
    """
    tokens, segments, positions = np.zeros((3, num_rows * width), np.int32)
    if len(indices):
        lengths = field.offsets[indices + 1] - field.offsets[indices]
        preceding = np.cumsum(lengths) - lengths
        first = np.cumsum(sizes) - sizes  # each row's first example
        # An example starts where the one before it in its row ends.
        starts = preceding + np.repeat(
            np.arange(len(sizes)) * width - preceding[first], sizes
        )
        place = _spans(starts, lengths)
        tokens[place] = field.tokens[_spans(field.offsets[indices], lengths)]
        segments[place] = np.repeat(_spans(np.ones_like(sizes), sizes), lengths)
        positions[place] = _spans(np.zeros_like(lengths), lengths)
    shape = (num_rows, width)
    return tokens.reshape(shape), segments.reshape(shape), positions.reshape(shape)
