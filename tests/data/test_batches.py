import hashlib
import json
import logging
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from tests.test_data_packing import caption_lengths

from headcount.data.batches import (
    Batches,
    evaluation_batches,
    portions,
    training_batches,
)
from headcount.data.packing import Sentences, num_rows

ROOT = pathlib.Path(__file__).parents[2]
KEYS = {
    f"{side}{suffix}"
    for side in ("source", "target")
    for suffix in ("", "_segments", "_positions")
}


def corpus(num_pairs: int, seed: int = 0) -> tuple[Sentences, Sentences]:
    """Pairs of which both sides begin with the pair's number, so that it is known."""
    rng = np.random.default_rng(seed)
    sides = []
    for sizes in caption_lengths(num_pairs, rng):
        sides.append(
            Sentences.of(
                [[10 + i, *rng.integers(4, 10, n - 2), 2] for i, n in enumerate(sizes)]
            )
        )
    return tuple(sides)


def numbered(batch, side: str) -> list[int]:
    """The numbers of a batch's pairs, in order of row and segment."""
    first = (batch[f"{side}_positions"] == 0) & (batch[f"{side}_segments"] > 0)
    return list(batch[side][first] - 10)


def batches_of(num_pairs=3000, **options) -> Batches:
    options = {"batch_tokens": 1024, "seeds": [3]} | options
    return Batches(*corpus(num_pairs), **options)


def digest(batch) -> str:
    joined = b"".join(batch[name].tobytes() for name in sorted(batch))
    return hashlib.sha256(joined).hexdigest()


def test_shapes_and_types_are_those_of_every_step():
    batches = batches_of(seeds=[1, 2, 3])
    B, S, T = batches.shape
    assert B == 1024 // T
    for step in (0, 1, 10**6):
        batch = batches[step]
        assert set(batch) == KEYS
        for name, array in batch.items():
            assert array.dtype == np.int32
            assert array.shape == (3, B, S if name.startswith("source") else T)


def test_translations_share_row_and_segment():
    batch = batches_of()[5]
    source, target = numbered(batch, "source"), numbered(batch, "target")
    assert source == target and len(source) > 50
    segments = [batch[f"{side}_segments"].max(-1) for side in ("source", "target")]
    np.testing.assert_array_equal(*segments)


def test_an_epoch_passes_over_every_pair_once_but_for_less_than_a_batch():
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


def test_composition_is_new_every_epoch_and_for_every_seed():
    batches = batches_of(seeds=[3, 4])
    steps = int(batches.steps_per_epoch)
    now, later = batches[0], batches[steps]
    assert digest(now) != digest(later)
    company = [  # rows as the sets of pairs in them
        {
            frozenset(numbered({k: v[r, b] for k, v in batch.items()}, "source"))
            for step in range(steps)
            for batch in [batches[start + step]]
            for b in range(batches.shape[0])
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
        "import tests.test_data_pipeline as t, json\n"
        "b = t.batches_of()\n"
        "print(json.dumps([t.digest(b[step]) for step in range(0, 60, 7)]))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True
    )
    assert json.loads(other.stdout) == forward[::7]


def test_a_trial_in_a_group_sees_what_it_sees_alone():
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


def test_ten_pairs_fill_whole_batches_each_as_often_as_the_others():
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


def test_what_cannot_be_trained_on_is_dropped_and_counted(caplog):
    source = Sentences.of([[5, 2], [2], [6, 2], [7, 7, 7, 7, 2], [8, 2]])
    target = Sentences.of([[5, 2], [6, 2], [2], [7, 2], [8, 8, 2]])
    with caplog.at_level(logging.INFO):
        batches = Batches(source, target, batch_tokens=64, seeds=[0], max_length=4)
    assert "dropped 2 pairs with an empty side" in caplog.text
    assert "dropped 1 pairs of over 4 tokens" in caplog.text
    assert set(np.unique(batches[0]["source"])) - {0} == {2, 5, 8}


def test_a_pair_as_long_as_is_allowed_is_kept():
    sentences = Sentences.of([[5, 2], [6, 6, 6, 2], [8, 8, 8, 8, 2]])
    batches = Batches(sentences, sentences, batch_tokens=64, seeds=[0], max_length=4)
    seen = {int(token) for step in range(20) for token in batches[step]["source"].flat}
    assert seen - {0} == {2, 5, 6}


def test_no_pair_left_says_why():
    source, target = Sentences.of([[5, 6, 2], [2]]), Sentences.of([[5, 2], [5, 2]])
    with pytest.raises(ValueError, match="no training pair is left of 2: 1 have an"):
        Batches(source, target, batch_tokens=64, seeds=[0], max_length=2)


def test_a_batch_smaller_than_a_row_is_refused():
    with pytest.raises(ValueError, match="data.batch_tokens=32 must hold a row of"):
        batches_of(batch_tokens=32)


def test_prefetched_batches_are_those_of_the_steps():
    batches = batches_of(500)
    todo = portions(17, 45, most=4, intervals=(10,))
    iterator = training_batches(batches, todo, most=4)
    for first, number in todo:
        portion = next(iterator)
        for index in range(4):
            batch = {name: array[:, index] for name, array in portion.items()}
            if index < number:
                assert digest(batch) == digest(batches[first + index])
            else:
                assert not any(array.any() for array in batch.values())
    iterator.close()


def test_rows_of_a_batch_can_be_divided():
    """227 is a prime; no two devices could share its rows."""
    assert [num_rows(8 * B, 8) for B in (1, 13, 31, 32, 37)] == [1, 13, 31, 32, 36]
    assert num_rows(227 * 136 + 135, 136) == 224
    for B in range(32, 3000):
        rows = num_rows(B, 1)
        power = rows & -rows
        assert rows <= B < rows * 17 / 16 and 32 * power > B


def test_portions_end_at_every_interval():
    assert portions(0, 20, 8, (10, 7)) == [(0, 7), (7, 3), (10, 4), (14, 6)]
    assert portions(17, 19, 1, (100,)) == [(17, 1), (18, 1)]
    assert portions(5, 5, 4, (2,)) == []
    assert portions(0, 9, 8, (10,), once=(0, 3)) == [(0, 3), (3, 6)]


def test_a_program_may_end_amid_its_batches():
    code = (
        "import tests.test_data_pipeline as t\n"
        "iterator = t.training_batches(t.batches_of(500), [(0, 1)] * 9)\n"
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
def test_evaluation_covers_every_pair_once(num_pairs):
    batches = evaluation_batches(*corpus(num_pairs), batch_tokens=2048)
    seen = sum((numbered(batch, "source") for batch in batches), [])
    assert sorted(seen) == list(range(num_pairs))
    assert seen == sum((numbered(batch, "target") for batch in batches), [])
    shapes = {tuple(batch[name].shape for name in sorted(KEYS)) for batch in batches}
    assert len(shapes) == 1


def test_evaluation_drops_nothing():
    source, target = corpus(50)
    long = Sentences.of([[9] * 500 + [2], *source])
    empty = Sentences.of([[2], *target])
    batches = evaluation_batches(long, empty, batch_tokens=1024)
    real = sum((batch["source_segments"] > 0).sum() for batch in batches)
    assert real == long.lengths.sum()
