"""Tokenizers for encoders: those of documents, words with affixes, BERT's WordPiece.

In addition to token ids, a tokenizer may have features of every token: further ids,
whose embeddings the model adds to the token's own (see `features`).
"""

import json
from collections import Counter
from pathlib import Path

import numpy as np

from headcount.data import tokenizers
from headcount.data.examples import Ragged
from headcount.data.tokenizers import (
    NUM_SPECIAL,
    UNK,
    TableTokenizer,
    train_sentencepiece,
)

PREFIXES, SUFFIXES = (1, 2, 3), (1, 2, 3, 4)  # characters


def parts_of(word: str) -> list[str]:
    """Return a word's parts: the word, its lower case, its affixes and its shape."""
    lower = word.lower()
    parts = [f"word {word}", f"lower {lower}"]
    parts += [f"prefix {lower[:n]}" for n in PREFIXES]
    parts += [f"suffix {lower[-n:]}" for n in SUFFIXES]
    return [*parts, f"shape {shape(word)}"]


def shape(word: str) -> str:
    """Return a word's shape: A, a, 9 for runs of letters and digits; others kept."""
    kinds = []
    for character in word:
        kind = character
        if character.isdigit():
            kind = "9"
        elif character.isalpha():
            kind = "a" if character.islower() else "A"
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    return "".join(kinds)


class AffixTokenizer(TableTokenizer):
    """Word tokenizer whose features are the word's affixes and shape.

    An unknown word can still have known affixes (compare the character n-grams of
    Bojanowski et al. 2017).

    Args:
        units: parts of words, in the notation of `parts_of`.
    """

    num_features = 2 + len(PREFIXES) + len(SUFFIXES)

    def __init__(self, units: list[str]):
        super().__init__(units, " ")

    def encode(self, texts: list[str], eos: bool = True) -> Ragged:
        """See `SentencePieceTokenizer.encode`; words are separated by whitespace."""
        end = [tokenizers.EOS] if eos else []
        return Ragged.of(
            [[self._ids.get(f"word {w}", UNK) for w in x.split()] + end for x in texts]
        )

    def features(self, texts: list[str]) -> np.ndarray:
        """Return the features of all texts' tokens, concatenated; none for EOS."""
        words = [word for text in texts for word in text.split()]
        features_of = {word: self._features(word) for word in set(words)}
        table = np.array([features_of[word] for word in words], np.int32)
        return table.reshape(-1, self.num_features)

    def _features(self, word: str) -> list[int]:
        return [self._ids.get(part, UNK) for part in parts_of(word)[1:]]

    def pieces(self, ids) -> list[str]:
        """See `SentencePieceTokenizer.pieces`."""
        return [piece.removeprefix("word ") for piece in super().pieces(ids)]

    def decode(self, ids) -> str:
        """See `SentencePieceTokenizer.decode`."""
        return " ".join(self.pieces(tokenizers.until_eos(ids)))


def make_affixes(texts: list[str], vocab_size: int) -> bytes:
    """Collect the most frequent parts of words in texts, as JSON."""
    words = Counter(word for text in texts for word in text.split())
    counts = Counter()
    for word, count in words.items():
        for part in parts_of(word):
            counts[part] += count
    if vocab_size <= NUM_SPECIAL:
        raise ValueError(
            f"data.vocab_size must be above {NUM_SPECIAL}, the special tokens alone, "
            f"got {vocab_size}."
        )
    if not counts:
        raise ValueError(
            "There is no text to make a vocabulary of: every line is empty."
        )
    units = sorted(counts, key=lambda part: (-counts[part], part))
    return json.dumps(units[: vocab_size - NUM_SPECIAL], ensure_ascii=False).encode()


def read_affixes(path: Path) -> AffixTokenizer:
    """Read a tokenizer from a file."""
    return AffixTokenizer(tokenizers.read_units(path))


class WordPieceTokenizer(tokenizers.JsonTokenizer):
    """BERT's WordPiece with its own ids, as it comes with imported weights."""

    def __init__(self, path: Path):
        super().__init__(path)
        names = ("[CLS]", "[SEP]", "[UNK]", "[MASK]")
        ids = [self._tokenizer.token_to_id(name) for name in names]
        if None in ids or self._tokenizer.token_to_id("[PAD]") != 0:
            raise ValueError(f"{path} lacks a special token of BERT's.")
        self.bos, self.eos, self.unk, self.mask = ids

    def pieces(self, ids) -> list[str]:
        """See `SentencePieceTokenizer.pieces`."""
        return [self._tokenizer.id_to_token(int(i)) or "?" for i in ids]


def wordpiece_of(vocabulary: Path, lowercase: bool) -> str:
    """Convert BERT's vocab.txt to a tokenizer.json."""
    from tokenizers import BertWordPieceTokenizer

    return BertWordPieceTokenizer(str(vocabulary), lowercase=lowercase).to_str()


KINDS = {k: v for k, v in tokenizers.KINDS.items() if k != "gpt2"} | {
    "sentencepiece": (*tokenizers.KINDS["sentencepiece"][:2], train_sentencepiece),
    "affixes": ("affixes.json", read_affixes, make_affixes),
    "wordpiece": ("wordpiece.json", WordPieceTokenizer, None),
}
