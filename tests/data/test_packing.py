"""Packing of examples into rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headcount.data.examples import Ragged
from headcount.data.packing import Layout, fill_rows, num_rows, pack, row_shape

lengths = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=300
).map(lambda pairs: np.array(pairs).T)


def ragged_of(sizes, rng) -> Ragged:
    return Ragged.of([rng.integers(4, 1000, size) for size in sizes])


def caption_lengths(num_pairs: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Lengths like Multi30k's: 15 tokens on average, 7 to about 50, correlated."""
    source = np.clip(rng.gamma(9, 1.7, num_pairs), 4, 60).astype(int)
    target = np.clip(source * rng.normal(1.03, 0.2, num_pairs), 3, 62).astype(int)
    return source, target


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(30, 70), st.integers(40, 90))
def test_every_example_is_packed_once_within_capacity(lengths, S, T):
    source, target = lengths
    layout = pack(source, target, S, T)
    assert sorted(layout.slots) == list(range(len(source)))
    assert (np.diff(layout.row_offsets) > 0).all()
    rows = layout.row_offsets[:-1]
    assert np.add.reduceat(source[layout.slots], rows).max() <= S
    assert np.add.reduceat(target[layout.slots], rows).max() <= T


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(0, 3))
def test_filled_rows_read_back_as_the_sequences(lengths, padding_rows):
    source, target = lengths
    S, T = row_shape(source, target)
    layout = pack(source, target, S, T)
    rng = np.random.default_rng(0)
    count = layout.num_rows + padding_rows
    for sizes, width in ((source, S), (target, T)):
        sequences = ragged_of(sizes, rng)
        tokens, segments, positions = fill_rows(
            sequences, layout.slots, np.diff(layout.row_offsets), count, width
        )
        for row in range(count):
            expected = []  # one sequence after the other, by the definition
            if row < layout.num_rows:
                start, stop = layout.row_offsets[row : row + 2]
                for segment, example in enumerate(layout.slots[start:stop], 1):
                    sequence = sequences[example]
                    expected += [
                        (token, segment, position)
                        for position, token in enumerate(sequence)
                    ]
            expected += [(0, 0, 0)] * (width - len(expected))
            got = zip(tokens[row], segments[row], positions[row], strict=True)
            assert list(got) == expected


@pytest.mark.parametrize("seed", range(3))
def test_both_sides_fill_to_95_percent(seed):
    source, target = caption_lengths(20_000, np.random.default_rng(seed))
    S, T = row_shape(source, target)
    rows = pack(source, target, S, T).num_rows
    assert source.sum() / (rows * S) >= 0.95
    assert target.sum() / (rows * T) >= 0.95


@pytest.mark.parametrize("ratio", [0.7, 1.0, 1.31])
@pytest.mark.parametrize("longest", [20, 100])
def test_row_shape_holds_the_longest_pair_in_the_corpus_ratio(ratio, longest):
    target = np.arange(2, longest + 1)
    source = np.maximum(1, (target * ratio).astype(int))
    S, T = row_shape(source, target)
    assert source.max() <= S
    assert max(target.max(), 64) <= T
    assert S % 2 == T % 8 == 0
    assert 1 <= (S / T) / (source.sum() / target.sum()) <= 1.036


def test_an_example_longer_than_a_row_raises():
    with pytest.raises(ValueError, match="an example of 9 source and 5"):
        pack(np.array([9]), np.array([5]), 8, 8)


def test_packing_nothing_gives_no_rows():
    empty = np.zeros(0, np.int64)
    layout = pack(empty, empty, 8, 8)
    assert isinstance(layout, Layout) and layout.num_rows == 0


def test_ragged_is_a_sequence():
    ragged = Ragged.of([[5, 6, 2], [2], [7, 2]])
    assert [list(sequence) for sequence in ragged] == [[5, 6, 2], [2], [7, 2]]
    assert list(ragged.lengths) == [3, 1, 2]
    assert list(ragged[-1]) == [7, 2]
    assert [list(sequence) for sequence in ragged.take([2, 0])] == [[7, 2], [5, 6, 2]]
    with pytest.raises(IndexError):
        ragged[3]


def test_rows_of_a_batch_divide_over_devices():
    """227 is a prime; no two devices could share its rows."""
    assert [num_rows(8 * B, 8) for B in (1, 13, 31, 32, 37)] == [1, 13, 31, 32, 36]
    assert num_rows(227 * 136 + 135, 136) == 224
    for B in range(32, 3000):
        rows = num_rows(B, 1)
        power = rows & -rows
        assert rows <= B < rows * 17 / 16 and 32 * power > B
