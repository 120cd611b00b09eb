import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headcount.data.packing import Layout, Sentences, fill_rows, pack, row_shape

lengths = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=300
).map(lambda pairs: np.array(pairs).T)


def sentences_of(sizes, rng) -> Sentences:
    return Sentences.of([rng.integers(4, 1000, size) for size in sizes])


def caption_lengths(num_pairs: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Lengths like Multi30k's: 15 tokens on average, 7 to about 50, correlated."""
    source = np.clip(rng.gamma(9, 1.7, num_pairs), 4, 60).astype(int)
    target = np.clip(source * rng.normal(1.03, 0.2, num_pairs), 3, 62).astype(int)
    return source, target


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(30, 70), st.integers(40, 90))
def test_every_pair_is_packed_once_within_capacity(lengths, S, T):
    source, target = lengths
    layout = pack(source, target, S, T)
    assert sorted(layout.slots) == list(range(len(source)))
    assert (np.diff(layout.row_offsets) > 0).all()
    rows = layout.row_offsets[:-1]
    assert np.add.reduceat(source[layout.slots], rows).max() <= S
    assert np.add.reduceat(target[layout.slots], rows).max() <= T


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(0, 3))
def test_filled_rows_read_back_as_the_sentences(lengths, padding_rows):
    source, target = lengths
    S, T = row_shape(source, target)
    layout = pack(source, target, S, T)
    rng = np.random.default_rng(0)
    num_rows = layout.num_rows + padding_rows
    for sizes, width in ((source, S), (target, T)):
        sentences = sentences_of(sizes, rng)
        tokens, segments, positions = fill_rows(
            sentences, layout.slots, np.diff(layout.row_offsets), num_rows, width
        )
        for row in range(num_rows):
            expected = []  # one sentence after the other, by the definition
            if row < layout.num_rows:
                start, stop = layout.row_offsets[row : row + 2]
                for segment, pair in enumerate(layout.slots[start:stop], 1):
                    sentence = sentences[pair]
                    expected += [
                        (token, segment, position)
                        for position, token in enumerate(sentence)
                    ]
            expected += [(0, 0, 0)] * (width - len(expected))
            got = zip(tokens[row], segments[row], positions[row], strict=True)
            assert list(got) == expected


@pytest.mark.parametrize("seed", range(3))
def test_both_sides_fill_to_95_percent(seed):
    source, target = caption_lengths(20_000, np.random.default_rng(seed))
    S, T = row_shape(source, target)
    num_rows = pack(source, target, S, T).num_rows
    assert source.sum() / (num_rows * S) >= 0.95
    assert target.sum() / (num_rows * T) >= 0.95


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


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="a pair of 9 source and 5 target tokens"):
        pack(np.array([9]), np.array([5]), 8, 8)


def test_packing_nothing_gives_no_rows():
    empty = np.zeros(0, np.int64)
    layout = pack(empty, empty, 8, 8)
    assert isinstance(layout, Layout) and layout.num_rows == 0


def test_sentences_are_a_sequence():
    sentences = Sentences.of([[5, 6, 2], [2], [7, 2]])
    assert [list(sentence) for sentence in sentences] == [[5, 6, 2], [2], [7, 2]]
    assert list(sentences.lengths) == [3, 1, 2]
    assert list(sentences[-1]) == [7, 2]
    with pytest.raises(IndexError):
        sentences[3]
