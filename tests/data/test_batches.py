"""Training batches as a function of seed and step; evaluation batches."""

import hashlib
import json
import logging
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from headcount.data.batches import (
    PackedBatches,
    dispatch_spans,
    packed_evaluation_batches,
    packed_in_order,
    prefetched,
    stack_steps,
    unpacked_batches,
)
from headcount.data.examples import ArraySpec, Ragged
from tests.data.test_packing import caption_lengths

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEYS = {
    f"{side}{suffix}"
    for side in ("source", "target")
    for suffix in ("", "_segments", "_positions")
}


def corpus(num_pairs: int, seed: int = 0) -> dict[str, Ragged]:
    """Make pairs whose sides both begin with the pair's number."""
    rng = np.random.default_rng(seed)
    sides = []
    for sizes in caption_lengths(num_pairs, rng):
        sides.append(
            Ragged.of(
                [[10 + i, *rng.integers(4, 10, n - 2), 2] for i, n in enumerate(sizes)]
            )
        )
    return dict(zip(("source", "target"), sides, strict=True))


def numbered(batch, side: str) -> list[int]:
    """Return the numbers of a batch's pairs, in order of row and segment."""
    first = (batch[f"{side}_positions"] == 0) & (batch[f"{side}_segments"] > 0)
    return list(batch[side][first] - 10)


def batches_of(num_pairs=3000, **options) -> PackedBatches:
    options = {"batch_tokens": 1024, "seeds": [3]} | options
    return PackedBatches(corpus(num_pairs), **options)


def digest(batch) -> str:
    joined = b"".join(batch[name].tobytes() for name in sorted(batch))
    return hashlib.sha256(joined).hexdigest()


def test_every_batch_has_the_shapes_and_dtypes_of_the_spec():
    batches = batches_of(seeds=[1, 2, 3])
    assert batches.spec.keys() == KEYS
    B, T = batches.spec["target"].shape
    assert B == 1024 // T
    for step in (0, 1, 10**6):
        batch = batches[step]
        found = {name: ArraySpec(x.shape[1:], x.dtype) for name, x in batch.items()}
        assert found == batches.spec
        assert {len(array) for array in batch.values()} == {3}


def test_both_sides_of_a_pair_share_row_and_segment():
    batch = batches_of()[5]
    source, target = numbered(batch, "source"), numbered(batch, "target")
    assert source == target and len(source) > 50
    segments = [batch[f"{side}_segments"].max(-1) for side in ("source", "target")]
    np.testing.assert_array_equal(*segments)


def test_an_epoch_has_every_pair_once_except_for_less_than_a_batch():
    batches = batches_of()
    steps = int(batches.steps_per_epoch)
    assert steps == batches.steps_per_epoch > 20
    left_out = []
    for epoch in range(2):
        seen = []
        for step in range(epoch * steps, (epoch + 1) * steps):
            seen += numbered(batches[step], "source")
        assert len(seen) == len(set(seen))
        left_out.append(set(range(3000)) - set(seen))
        assert len(left_out[-1]) < len(seen) / steps * 1.2
    assert left_out[0] != left_out[1]


def test_rows_are_composed_anew_for_every_epoch_and_seed():
    batches = batches_of(seeds=[3, 4])
    steps = int(batches.steps_per_epoch)
    now, later = batches[0], batches[steps]
    assert digest(now) != digest(later)
    company = [  # rows as the sets of pairs in them
        {
            frozenset(numbered({k: v[r, b] for k, v in batch.items()}, "source"))
            for step in range(steps)
            for batch in [batches[start + step]]
            for b in range(len(batches[0]["source"][0]))
        }
        for start, r in ((0, 0), (0, 1), (steps, 0))
    ]
    for other in company[1:]:
        assert len(company[0] & other) < 0.05 * len(company[0])


def test_a_batch_is_a_function_of_seed_and_step():
    batches = batches_of()
    forward = [digest(batches[step]) for step in range(60)]
    again = batches_of()
    assert [digest(again[step]) for step in reversed(range(60))] == forward[::-1]
    code = (
        "import tests.data.test_batches as t, json\n"
        "b = t.batches_of()\n"
        "print(json.dumps([t.digest(b[step]) for step in range(0, 60, 7)]))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True
    )
    assert json.loads(other.stdout) == forward[::7]


def test_batches_of_a_trial_in_a_group_equal_those_of_the_trial_alone():
    group = batches_of(seeds=[7, 8])
    for r, seed in enumerate([7, 8]):
        alone = batches_of(seeds=[seed])
        for step in (0, 33):
            for name in KEYS:
                np.testing.assert_array_equal(
                    group[step][name][r], alone[step][name][0]
                )


def test_batches_are_filled_to_95_percent():
    batches = batches_of(12_000, batch_tokens=4096)
    steps = range(int(batches.steps_per_epoch))
    for side in ("source", "target"):
        share = np.mean([(batches[i][f"{side}_segments"] > 0).mean() for i in steps])
        assert share >= 0.95


def test_a_tiny_corpus_fills_batches_with_every_pair_equally_often():
    batches = batches_of(10, batch_tokens=4096)
    pairs, counts = np.unique(numbered(batches[0], "source"), return_counts=True)
    assert list(pairs) == list(range(10))
    assert (batches[0]["target_segments"] > 0).mean() > 0.9
    assert 0 < batches.steps_per_epoch < 1
    block = sum(
        (numbered(batches[i], "source") for i in range(batches._block_steps)), []
    )
    counts = np.bincount(block)
    assert counts.min() > 0.8 * counts.max()


def test_examples_that_are_empty_or_too_long_are_skipped_and_logged(caplog):
    source = Ragged.of([[5, 2], [2], [6, 2], [7, 7, 7, 7, 2], [8, 2]])
    target = Ragged.of([[5, 2], [6, 2], [2], [7, 2], [8, 8, 2]])
    fields = {"source": source, "target": target}
    with caplog.at_level(logging.INFO):
        batches = PackedBatches(fields, batch_tokens=64, seeds=[0], max_length=4)
    assert "Skipped 2 examples with an empty side" in caplog.text
    assert "Skipped 1 example of over 4 tokens" in caplog.text
    assert set(np.unique(batches[0]["source"])) - {0} == {2, 5, 8}


def test_a_pair_of_max_length_is_kept():
    sentences = Ragged.of([[5, 2], [6, 6, 6, 2], [8, 8, 8, 8, 2]])
    fields = {"source": sentences, "target": sentences}
    batches = PackedBatches(fields, batch_tokens=64, seeds=[0], max_length=4)
    seen = {int(token) for step in range(20) for token in batches[step]["source"].flat}
    assert seen - {0} == {2, 5, 6}


def test_no_example_left_to_train_on_raises_with_the_counts():
    fields = {
        "source": Ragged.of([[5, 6, 2], [2]]),
        "target": Ragged.of([[5, 2], [5, 2]]),
    }
    with pytest.raises(ValueError, match="left of 2: 1 have .*data.max_length=2"):
        PackedBatches(fields, batch_tokens=64, seeds=[0], max_length=2)


def test_a_batch_smaller_than_a_row_raises():
    with pytest.raises(ValueError, match="data.batch_tokens=32 "):
        batches_of(batch_tokens=32)


def test_prefetched_batches_equal_the_batches_of_the_steps():
    batches = batches_of(500)
    todo = dispatch_spans(17, 45, most=4, intervals=(10,))
    iterator = prefetched(batches, todo, most=4)
    for first, number in todo:
        span = next(iterator)
        for index in range(4):
            batch = {name: array[:, index] for name, array in span.items()}
            if index < number:
                assert digest(batch) == digest(batches[first + index])
            else:
                assert not any(array.any() for array in batch.values())
    iterator.close()


def test_dispatch_spans_end_at_every_interval():
    assert dispatch_spans(0, 20, 8, (10, 7)) == [(0, 7), (7, 3), (10, 4), (14, 6)]
    assert dispatch_spans(17, 19, 1, (100,)) == [(17, 1), (18, 1)]
    assert dispatch_spans(5, 5, 4, (2,)) == []
    assert dispatch_spans(0, 9, 8, (10,), once=(0, 3)) == [(0, 3), (3, 6)]


def test_a_program_may_exit_while_batches_are_prefetched():
    code = (
        "import tests.data.test_batches as t\n"
        "iterator = t.prefetched(t.batches_of(500), [(0, 1)] * 9)\n"
        "next(iterator), next(iterator)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("num_pairs", [1, 10, 700])
def test_packed_evaluation_has_every_pair_once(num_pairs):
    batches = packed_evaluation_batches(corpus(num_pairs), batch_tokens=2048)
    seen = sum((numbered(batch, "source") for batch in batches), [])
    assert sorted(seen) == list(range(num_pairs))
    assert seen == sum((numbered(batch, "target") for batch in batches), [])
    shapes = {tuple(batch[name].shape for name in sorted(KEYS)) for batch in batches}
    assert len(shapes) == 1


@pytest.mark.parametrize("num_examples", [1, 10, 300])
def test_tokens_of_packed_examples_are_found_again_by_their_order(num_examples):
    source = corpus(num_examples)["source"]
    fields = {"source": source, "tags": Ragged(source.tokens + 100, source.offsets)}
    order, batches = packed_in_order(
        fields, batch_tokens=512, aligned={"tags": "source"}
    )
    found = [batch["tags"][batch["source_segments"] > 0] for batch in batches]
    wanted = [fields["tags"][index] for index in order]
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(wanted))
    assert sorted(order) == list(range(num_examples))
    ((rows, width),) = {batch["source"].shape for batch in batches}
    assert width % 64 == 0 and rows in (1, 2, 4, 8) and rows * width <= 512


def test_evaluation_skips_neither_long_nor_empty_examples():
    pairs = corpus(50)
    fields = {
        "source": Ragged.of([[9] * 500 + [2], *pairs["source"]]),
        "target": Ragged.of([[2], *pairs["target"]]),
    }
    packed = packed_evaluation_batches(fields, batch_tokens=1024)
    unpacked = [batch for _, batch in unpacked_batches(fields, batch_tokens=1024)]
    for batches in (packed, unpacked):
        for side, field in fields.items():
            real = sum((batch[f"{side}_segments"] > 0).sum() for batch in batches)
            assert real == field.lengths.sum()


@pytest.mark.parametrize("num_pairs", [1, 10, 700])
def test_unpacked_batches_hold_every_example_once_one_per_row(num_pairs):
    fields = corpus(num_pairs)
    seen = []
    for indices, batch in unpacked_batches(fields, batch_tokens=512):
        seen += indices.tolist()
        for row, index in enumerate(indices):
            for side, field in fields.items():
                real = batch[f"{side}_segments"][row] > 0
                np.testing.assert_array_equal(batch[side][row][real], field[index])
        assert not batch["source_segments"][len(indices) :].any()
        assert batch["source"].size <= 512 and batch["source"].shape[1] % 32 == 0
    assert sorted(seen) == list(range(num_pairs))


def test_a_field_aligned_with_a_side_stays_at_its_tokens():
    """Each label is its token plus 100, so that a label at another place shows."""
    source = corpus(40)["source"]
    fields = {"source": source, "tags": Ragged(source.tokens + 100, source.offsets)}
    options = {"batch_tokens": 256, "aligned": {"tags": "source"}}
    training = PackedBatches(fields, seeds=[0, 1], **options)
    found = [training[0], *packed_evaluation_batches(fields, **options)]
    found += [batch for _, batch in unpacked_batches(fields, **options)]
    for batch in found:
        assert batch.keys() == {
            *("source", "source_segments", "source_positions"),
            "tags",
        }
        real = batch["source_segments"] > 0
        np.testing.assert_array_equal(batch["tags"][real], batch["source"][real] + 100)
        assert not batch["tags"][~real].any()


def test_part_of_a_batch_equals_the_rows_of_the_whole():
    """As computed by one of several processes."""
    batches = batches_of(seeds=[3, 4, 5])
    whole = stack_steps(batches, 6, 2, 3)
    part = stack_steps(batches, 6, 2, 3, slice(1, 3), slice(4, 9))
    for name, array in part.items():
        assert array.shape[:3] == (2, 3, 5)
        np.testing.assert_array_equal(array, whole[name][1:3, :, 4:9])
