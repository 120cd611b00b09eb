"""Several sentence pairs in a row: which go together, and the arrays they make.

A row holds S source and T target tokens. Both sides must fill, so this is bin packing
in two dimensions. It is solved once for the *lengths* of a corpus: the result, a
layout, says for every row which lengths it holds. Each epoch then deals the pairs of
equal lengths out to the slots of their lengths at random and shuffles the rows, in a
few milliseconds, always with the same number of rows.
"""

import dataclasses
import itertools

import numpy as np

ROW_TOKENS = 64  # target tokens of the shortest row


@dataclasses.dataclass(frozen=True)
class Sentences:
    """Tokenized sentences end to end: sentence i is tokens[offsets[i]:offsets[i+1]]."""

    tokens: np.ndarray  # int32
    offsets: np.ndarray  # int64, one more than there are sentences

    @classmethod
    def of(cls, sequences) -> "Sentences":
        """Joins sequences of token ids."""
        sizes = np.fromiter((len(s) for s in sequences), np.int64, len(sequences))
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        flat = itertools.chain.from_iterable(sequences)
        return cls(np.fromiter(flat, np.int32, offsets[-1]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Rows of slots: `slots[row_offsets[r]:row_offsets[r + 1]]` are row r's pairs."""

    slots: np.ndarray  # the pair in each slot, int64
    row_offsets: np.ndarray  # int64

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1


def row_shape(source_lengths, target_lengths) -> tuple[int, int]:
    """Chooses the row lengths (S, T) so that both sides of a row fill together.

    T is the first multiple of 8 from ROW_TOKENS on that holds the longest pair and
    whose S, in the corpus's ratio of source to target tokens and rounded up to an even
    number, exceeds that ratio by at most 3.5 %; the best one below 2 T if none does.
    """
    ratio = source_lengths.sum() / target_lengths.sum()
    longest = max(target_lengths.max(), source_lengths.max() / ratio, ROW_TOKENS)
    targets = 8 * np.arange(np.ceil(longest / 8), np.ceil(longest / 4)).astype(int)
    sources = (2 * np.ceil(np.round(targets * ratio / 2, 6))).astype(int)
    slack = sources / (targets * ratio) - 1
    best = np.argmax(slack <= 0.035) if slack.min() <= 0.035 else np.argmin(slack)
    return int(sources[best]), int(targets[best])


def num_rows(batch_tokens: int, T: int) -> int:
    """Rows B of a training batch: as many of T tokens as batch_tokens hold.

    From 32 on less up to a sixteenth, so that a power of two of at least B / 32 divides
    them, as devices are to.

    Raises:
        ValueError: batch_tokens hold no row.
    """
    if batch_tokens < T:
        raise ValueError(
            f"data.batch_tokens={batch_tokens} must hold a row of {T} target tokens"
        )
    B = batch_tokens // T
    bits = max(0, B.bit_length() - 5)
    return B >> bits << bits


def largest_rows(batch_tokens: int, max_length: int) -> tuple[int, int]:
    """(B, T) of a batch whose rows are as long as the longest sentence may be.

    What a corpus needs is only known with it: see `row_shape`.
    """
    T = max(ROW_TOKENS, -(-max_length // 8) * 8)
    return num_rows(batch_tokens, T), T


def _completion(counts: np.ndarray) -> tuple[int, int] | None:
    """The most plentiful pair of lengths that fills a remainder (almost) exactly,
    as one of the two; the other fills it too. `counts[s, t]` are those that fit."""
    for slack in ((0, 0), (1, 0), (0, 1), (1, 1)):
        fitting = counts[: counts.shape[0] - slack[0], : counts.shape[1] - slack[1]]
        both = fitting * fitting[::-1, ::-1]
        best = int(both.argmax()) if both.size else 0
        if both.size and both.flat[best]:
            return divmod(best, fitting.shape[1])
    return None


def _rows_of_lengths(source_lengths, target_lengths, S: int, T: int):
    """Packs lengths, yielding (the (s, t) of a row, how many rows are filled so).

    The longest first; then long ones that keep the two sides in proportion; when about
    two are still missing, the two that fill the row exactly and of which most are left.
    """
    counts = np.zeros((S + 1, T + 1), np.int64)
    np.add.at(counts, (source_lengths, target_lengths), 1)
    s, t = np.nonzero(counts)
    order = np.argsort(-np.maximum(s / S, t / T), kind="stable")
    s, t = s[order], t[order]
    size, slant = s / S + t / T, s / S - t / T
    mean, left, first = target_lengths.mean(), len(target_lengths), 0
    while left:
        while not counts[s[first], t[first]]:
            first += 1
        pair, room, row = (int(s[first]), int(t[first])), (S, T), []
        while pair:
            counts[pair] -= 1
            row.append(pair)
            room = (room[0] - pair[0], room[1] - pair[1])
            pair = None
            if room[1] < 1.5 * mean:
                pair = room if counts[room] else None
            elif room[1] < 2.6 * mean:
                pair = _completion(counts[: room[0] + 1, : room[1] + 1])
            if pair is None:
                tail = slice(first, None)
                score = size[tail].copy()
                if room[1] >= 2.6 * mean:
                    score -= 2 * np.abs(room[0] / S - room[1] / T - slant[tail])
                fits = (s[tail] <= room[0]) & (t[tail] <= room[1])
                fits &= counts[s[tail], t[tail]] > 0
                score[~fits] = -np.inf
                best = int(score.argmax())
                if fits[best]:
                    pair = (int(s[first + best]), int(t[first + best]))
        # A pattern of plentiful lengths serves many rows: millions of pairs take
        # little longer than thousands.
        spare = min(counts[pair] // row.count(pair) for pair in row) // 64
        for pair in row:
            counts[pair] -= spare
        left -= len(row) * (1 + spare)
        yield row, 1 + int(spare)


def pack(source_lengths, target_lengths, S: int, T: int) -> Layout:
    """Packs all pairs into rows of S source and T target tokens; every pair once.

    The lengths are in tokens, eos included, and may not exceed S and T. Deterministic.
    """
    if len(source_lengths) == 0:
        return Layout(np.zeros(0, np.int64), np.zeros(1, np.int64))
    if source_lengths.max() > S or target_lengths.max() > T:
        raise ValueError(
            f"a pair of {source_lengths.max()} source and {target_lengths.max()} "
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
    """The indices start, start + 1, ..., of `lengths` each, end to end."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])


def fill_rows(
    sentences: Sentences, pairs: np.ndarray, sizes: np.ndarray, num_rows: int, width
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, segments and positions of rows: three int32 arrays (num_rows, width).

    Row r takes the next sizes[r] of `pairs` (indices of sentences); rows beyond
    len(sizes) are padding. Segments count 1, 2, ... in a row and positions restart at
    each; all three are 0 where a row is empty.
    """
    tokens, segments, positions = np.zeros((3, num_rows * width), np.int32)
    if len(pairs):
        lengths = sentences.offsets[pairs + 1] - sentences.offsets[pairs]
        before = np.cumsum(lengths) - lengths
        first = np.cumsum(sizes) - sizes  # each row's first pair
        # A pair starts where those before it in its row end.
        starts = before + np.repeat(
            np.arange(len(sizes)) * width - before[first], sizes
        )
        place = _spans(starts, lengths)
        tokens[place] = sentences.tokens[_spans(sentences.offsets[pairs], lengths)]
        segments[place] = np.repeat(_spans(np.ones_like(sizes), sizes), lengths)
        positions[place] = _spans(np.zeros_like(lengths), lengths)
    shape = (num_rows, width)
    return tokens.reshape(shape), segments.reshape(shape), positions.reshape(shape)
