"""A split of a corpus: concatenated token ids by field, and the raw text."""

import dataclasses
import itertools
import zlib

import numpy as np


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Sequences of token ids: sequence i is tokens[offsets[i]:offsets[i+1]]."""

    tokens: np.ndarray  # int32
    offsets: np.ndarray  # int64, one more than the number of sequences

    @classmethod
    def of(cls, sequences) -> "Ragged":
        """Concatenate sequences of token ids."""
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
        """Number of tokens of each sequence."""
        return np.diff(self.offsets)

    def take(self, indices) -> "Ragged":
        """Return the sequences with these indices, in this order."""
        return Ragged.of([self[i] for i in indices])


@dataclasses.dataclass(frozen=True)
class Examples:
    """The examples of a split: example i is sequence i of every field."""

    split: str
    fields: dict[str, Ragged]  # token ids
    text: dict[str, list[str]]  # as read, for scoring and display

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def take(self, indices) -> "Examples":
        """Return the examples with these indices, in this order."""
        fields = {name: field.take(indices) for name, field in self.fields.items()}
        text = {name: [lines[i] for i in indices] for name, lines in self.text.items()}
        return Examples(self.split, fields, text)

    @property
    def crc32(self) -> int:
        """Checksum of the tokens, to detect changes."""
        checksum = 0
        for field in self.fields.values():
            for array in (field.tokens, field.offsets):
                checksum = zlib.crc32(array.tobytes(), checksum)
        return checksum


def segments_of(batch: dict) -> dict:
    """Return the arrays of segment ids of a batch, or of its spec, by field."""
    suffix = "_segments"
    return {k.removesuffix(suffix): x for k, x in batch.items() if k.endswith(suffix)}


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an array, without its values."""

    shape: tuple[int, ...]
    dtype: np.dtype = np.dtype(np.int32)
