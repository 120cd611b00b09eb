"""A split of a corpus: token ids by field, end to end, beside the raw text."""

import dataclasses
import itertools
import zlib

import numpy as np


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Sequences of token ids: number i is tokens[offsets[i]:offsets[i+1]]."""

    tokens: np.ndarray  # int32
    offsets: np.ndarray  # int64, one more than there are sequences

    @classmethod
    def of(cls, sequences) -> "Ragged":
        """Join sequences of token ids."""
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
        """Tokens of each sequence."""
        return np.diff(self.offsets)

    def take(self, indices) -> "Ragged":
        """The sequences of these indices, in their order."""
        return Ragged.of([self[i] for i in indices])


@dataclasses.dataclass(frozen=True)
class Examples:
    """The examples of a split: example i is sequence i of every field."""

    split: str
    fields: dict[str, Ragged]  # token ids
    text: dict[str, list[str]]  # as read, for scores and for people

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    @property
    def crc32(self) -> int:
        """A checksum of the tokens, to tell whether they have changed."""
        checksum = 0
        for field in self.fields.values():
            for array in (field.tokens, field.offsets):
                checksum = zlib.crc32(array.tobytes(), checksum)
        return checksum


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an array that need not exist yet."""

    shape: tuple[int, ...]
    dtype: np.dtype = np.dtype(np.int32)
