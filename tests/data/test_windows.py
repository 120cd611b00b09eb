"""Windows of one stream of tokens: each token scored once, batch = f(seed, step)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headcount.data.examples import ArraySpec, Ragged
from headcount.data.windows import (
    WindowBatches,
    cut_windows,
    evaluation_windows,
    make_stream,
    window_spec,
)

SEPARATOR = 1


def stream_of(*sizes):
    """Return a stream of documents whose tokens are all different: 10, 11, ..."""
    ends = np.cumsum(sizes)
    tokens = np.arange(10, 10 + sum(sizes), dtype=np.int32)
    return make_stream(Ragged(tokens, np.concatenate([[0], ends])), SEPARATOR)


def batches_of(stream, **options):
    options = {"length": 8, "batch_tokens": 32, "seeds": [3]} | options
    return WindowBatches(stream, separator=SEPARATOR, **{"cross": True} | options)


def test_a_separator_precedes_each_document_of_a_stream():
    documents = Ragged.of([[5, 6], [], [7]])
    assert make_stream(documents, SEPARATOR).tolist() == [1, 5, 6, 1, 1, 7]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(2, 90),
    st.integers(1, 16).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    st.integers(1, 100),
    st.booleans(),
)
def test_evaluation_scores_every_token_exactly_once_for_any_stride(
    total, sizes, batch_tokens, cross
):
    """With what the stream has before it as input, and enough of it as context."""
    length, stride = sizes
    stream = np.arange(100, 100 + total, dtype=np.int32)
    options = {"length": length, "stride": stride, "batch_tokens": batch_tokens}
    options |= {"separator": SEPARATOR, "cross": cross}
    batches = list(evaluation_windows(stream, **options))
    assert len({batch["target"].shape for batch in batches}) == 1
    scored = []
    for batch in batches:
        counts = batch["target_weights"] > 0
        assert (batch["target_segments"][counts] > 0).all()
        scored += batch["target"][counts].tolist()
        np.testing.assert_array_equal(
            batch["target_inputs"][counts], batch["target"][counts] - 1
        )
        place, context = batch["target"] - 101, batch["target_positions"]
        enough = np.minimum(place, length - stride)
        assert (context[counts] >= enough[counts]).all()
    assert sorted(scored) == list(range(101, 100 + total))


def test_windows_of_one_stride_have_all_but_the_last_token_as_context():
    """With stride 1 a token past the first window is the last of its window."""
    stream = stream_of(30)
    (batch,) = evaluation_windows(
        stream, length=8, stride=1, batch_tokens=999, separator=SEPARATOR, cross=True
    )
    assert batch["target_weights"].sum() == 30
    assert batch["target_weights"][1:, :-1].sum() == 0


def test_documents_are_segments_of_their_own_unless_they_may_cross():
    stream = stream_of(3, 2)  # 1 10 11 12 1 13 14
    found = cut_windows(stream, np.array([0, 2]), 4, SEPARATOR, cross=False)
    assert found["target_inputs"].tolist() == [[1, 10, 11, 12], [11, 12, 1, 13]]
    assert found["target"].tolist() == [[10, 11, 12, 1], [12, 1, 13, 14]]
    assert found["target_segments"].tolist() == [[1, 1, 1, 1], [1, 1, 2, 2]]
    assert found["target_positions"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    crossing = cut_windows(stream, np.array([0, 2]), 4, SEPARATOR, cross=True)
    assert (crossing["target_segments"] == 1).all()
    assert crossing["target_positions"].tolist() == [[0, 1, 2, 3]] * 2


def test_training_batches_have_the_arrays_of_the_spec():
    batches = batches_of(stream_of(200), seeds=[1, 2, 3])
    assert batches.spec == window_spec(4, 8)
    for step in (0, 1, 10**6):
        found = {
            name: ArraySpec(x.shape[1:], x.dtype) for name, x in batches[step].items()
        }
        assert found == batches.spec


def test_an_epoch_reads_each_token_at_most_once_at_a_random_phase():
    batches = batches_of(stream_of(1000))
    steps = int(batches.steps_per_epoch)
    assert steps == batches.steps_per_epoch > 20
    phases = set()
    for epoch in range(6):
        seen = np.concatenate(
            [batches[epoch * steps + i]["target"].ravel() for i in range(steps)]
        )
        assert len(set(seen.tolist())) == len(seen) > 1000 - 5 * 8
        phases |= {
            int(token) % 8 for token in batches[epoch * steps]["target"][..., 0].flat
        }
    assert len(phases) > 1


@pytest.mark.parametrize("tokens", [23, 24, 31, 52])
def test_all_tokens_are_trained_on_in_some_epoch(tokens):
    batches = batches_of(stream_of(tokens))
    seen = {int(x) for step in range(200) for x in batches[step]["target"].flat}
    assert seen >= set(stream_of(tokens)[1:].tolist())


def test_a_window_batch_is_a_function_of_seed_and_step():
    stream = stream_of(500, 300)
    forward = [batches_of(stream)[step] for step in range(60)]
    again = batches_of(stream)
    for step in reversed(range(60)):
        for name, array in again[step].items():
            np.testing.assert_array_equal(array, forward[step][name])
    group = batches_of(stream, seeds=[7, 3])
    for step in (0, 33):
        for name, array in forward[step].items():
            np.testing.assert_array_equal(group[step][name][1], array[0])
        assert (group[step]["target"][0] != group[step]["target"][1]).any()


def test_part_of_a_window_batch_equals_the_rows_of_the_whole():
    batches = batches_of(stream_of(500), seeds=[1, 2, 3])
    part = batches.part(5, slice(1, 3), slice(1, 3))
    for name, array in batches[5].items():
        np.testing.assert_array_equal(part[name], array[1:3, 1:3])


def test_a_tiny_stream_fills_batches_by_repetition():
    batches = batches_of(stream_of(17))
    assert 0 < batches.steps_per_epoch < 1
    assert batches[0]["target"].shape == (1, 4, 8)


def test_a_stream_shorter_than_two_windows_raises():
    batches_of(stream_of(16))
    with pytest.raises(ValueError, match="data.max_length=8 .* 16"):
        batches_of(stream_of(15))
