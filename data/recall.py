"""Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927), generated.

A document consists of key-value pairs, then the same pairs in another order: "a3 b7 a1
b2 a1 b2 a3 b7". Only the values in the second half are predictable, so only these are
scored.
"""

import numpy as np

SIZES = {"train": 20_000, "val": 500, "test": 1_000}
SEEDS = {"train": 2312, "val": 4927, "test": 4928}
SPECIAL = 4  # special ids of a vocabulary: pad, bos, eos, unk
MOST = 2**14  # largest vocabulary; each document permutes half of it to draw keys


def documents(split: str, length: int, vocab_size: int) -> list[str]:
    """Return the documents of a split.

    Args:
        split: "train", "val" or "test".
        length: words per document, a multiple of 4. There are length / 4 pairs.
        vocab_size: vocabulary size. Half of the words are keys and half are values.

    Raises:
        ValueError: there is no such split, or the sizes do not fit.
    """
    if split not in SIZES:
        raise ValueError(f"recall has no split {split!r}; it has {', '.join(SIZES)}.")
    pairs, words = length // 4, (vocab_size - SPECIAL) // 2
    if length % 4 or pairs < 1:
        raise ValueError(
            f"data.max_length must be a multiple of 4 for recall, got {length}."
        )
    if words < pairs:
        raise ValueError(
            f"data.vocab_size must be at least {2 * pairs + SPECIAL} for recall with "
            f"data.max_length={length}, got {vocab_size}."
        )
    if vocab_size > MOST:
        raise ValueError(
            f"data.vocab_size must be at most {MOST} for recall, got {vocab_size}."
        )
    rng, count = np.random.default_rng([SEEDS[split], length, vocab_size]), SIZES[split]
    keys = np.argsort(rng.random((count, words)), axis=1)[:, :pairs]
    values = rng.integers(words, size=(count, pairs))
    order = np.argsort(rng.random((count, pairs)), axis=1)
    queried = [np.take_along_axis(x, order, axis=1) for x in (keys, values)]
    halves = [
        np.stack(half, axis=-1).reshape(count, -1) for half in ((keys, values), queried)
    ]
    letters = np.array(["a", "b"] * (length // 2), dtype=object)
    table = np.concatenate(halves, axis=1)
    return [
        " ".join(
            f"{letter}{number}" for letter, number in zip(letters, row, strict=True)
        )
        for row in table.tolist()
    ]


def is_scored(length: int) -> np.ndarray:
    """Return which words of a document are scored, `length` booleans."""
    place = np.arange(length)
    return (place >= length // 2) & (place % 2 == 1)


def vocabulary(vocab_size: int) -> list[str]:
    """Return all possible words, so that the vocabulary does not depend on samples."""
    count = (vocab_size - SPECIAL) // 2
    return [f"{letter}{number}" for letter in "ab" for number in range(count)]
