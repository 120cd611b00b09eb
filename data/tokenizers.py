"""Tokenizers: convert text to token ids and back; stored in WORKDIR/tokenizer.

Translation uses SentencePiece models (Kudo & Richardson 2018) with byte-pair encoding
and case, by default one model for both languages. Tokenizers of documents are listed in
`KINDS`. Vocabularies are made from the training split, except for imported ones. Ids
are pad 0, bos 1, eos 2, unk 3, then the vocabulary. GPT-2's tokenizer has its own ids.
"""

import contextlib
import io
import json
import os
import re
import zlib
from pathlib import Path

import sentencepiece
from absl import logging

from headcount.data.cache import write
from headcount.data.examples import Ragged

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]  # names of these ids
NUM_SPECIAL = len(SPECIAL)


class SentencePieceTokenizer:
    """A SentencePiece model.

    Args:
        model: the model's bytes.
    """

    bos, eos, unk, mask = BOS, EOS, UNK, UNK

    def __init__(self, model: bytes):
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self._processor.vocab_size()

    @property
    def vocabulary(self):
        """Meaning of the ids; equal for tokenizers that can share an embedding."""
        return self._processor.serialized_model_proto()

    def encode(self, texts: list[str], eos: bool = True) -> Ragged:
        """Return the token ids of each text, followed by EOS unless `eos` is False."""
        threads = min(16, os.cpu_count() or 1)
        return Ragged.of(
            self._processor.encode(texts, add_eos=eos, num_threads=threads)
        )

    def pieces(self, ids) -> list[str]:
        """Return the text of every token, including EOS, for use as labels."""
        return [self._processor.id_to_piece(int(i)) for i in ids]

    def decode(self, ids) -> str:
        """Return the text of token ids up to the first EOS, without PAD and BOS."""
        return self._processor.decode(
            [i for i in until_eos(ids) if i not in (PAD, BOS)]
        )


class TableTokenizer:
    """A tokenizer with a table of units: characters or words.

    Args:
        units: all units, in the order of their ids, which start at NUM_SPECIAL.
        separator: separator of units: "" for characters, " " for words.
    """

    bos, eos, unk, mask = BOS, EOS, UNK, UNK

    def __init__(self, units: list[str], separator: str):
        self.units, self.separator = units, separator
        self._ids = {unit: NUM_SPECIAL + i for i, unit in enumerate(units)}
        self._names = [*SPECIAL, *units]

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self._names)

    @property
    def vocabulary(self):
        """Meaning of the ids."""
        return self.units

    def encode(self, texts: list[str], eos: bool = True) -> Ragged:
        """See `SentencePieceTokenizer.encode`; unknown units become UNK."""
        end = [EOS] if eos else []
        split = list if self.separator == "" else str.split
        return Ragged.of(
            [[self._ids.get(u, UNK) for u in split(x)] + end for x in texts]
        )

    def pieces(self, ids) -> list[str]:
        """See `SentencePieceTokenizer.pieces`."""
        return [self._names[int(i)] for i in ids]

    def decode(self, ids) -> str:
        """See `SentencePieceTokenizer.decode`."""
        units = [self._names[i] for i in until_eos(ids) if i >= UNK]
        return self.separator.join(units)


class ByteTokenizer:
    """UTF-8 bytes: 256 ids after the special ids."""

    bos, eos, unk, mask = BOS, EOS, UNK, UNK
    vocab_size = NUM_SPECIAL + 256
    vocabulary = "bytes"

    def encode(self, texts: list[str], eos: bool = True) -> Ragged:
        """See `SentencePieceTokenizer.encode`."""
        end = [EOS] if eos else []
        return Ragged.of(
            [[byte + NUM_SPECIAL for byte in text.encode()] + end for text in texts]
        )

    def pieces(self, ids) -> list[str]:
        """See `SentencePieceTokenizer.pieces`."""
        names = [*SPECIAL, *map(chr, range(256))]  # bytes as Latin-1
        return [names[int(i)] for i in ids]

    def decode(self, ids) -> str:
        """See `SentencePieceTokenizer.decode`; broken UTF-8 becomes U+FFFD."""
        values = [i - NUM_SPECIAL for i in until_eos(ids) if i >= NUM_SPECIAL]
        return bytes(values).decode(errors="replace")


class JsonTokenizer:
    """A tokenizer.json of the library `tokenizers`, with ids of its own.

    Subclasses set `eos`.
    """

    def __init__(self, path: Path):
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no other type
            raise ValueError(f"{path}: {error}") from error
        # the file has the padding and truncation of transformers' last call
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self._tokenizer.get_vocab_size()

    @property
    def vocabulary(self):
        """Meaning of the ids."""
        return self._tokenizer.to_str()

    def encode(self, texts: list[str], eos: bool = True) -> Ragged:
        """See `SentencePieceTokenizer.encode`."""
        end = [self.eos] if eos else []
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return Ragged.of([x.ids + end for x in encoded])

    def decode(self, ids) -> str:
        """Return the text of token ids up to the first EOS."""
        return self._tokenizer.decode(until_eos(ids, self.eos))


class ByteLevelBPE(JsonTokenizer):
    """GPT-2's byte-level BPE with its own ids; BOS and EOS are <|endoftext|>."""

    unk = None  # every byte has an id

    def __init__(self, path: Path):
        super().__init__(path)
        self.bos = self.eos = self._tokenizer.token_to_id("<|endoftext|>")
        self._tokenizer.encode_special_tokens = True  # as text, if a text names one

    def pieces(self, ids) -> list[str]:
        """See `SentencePieceTokenizer.pieces`."""
        return [
            self._tokenizer.decode([int(i)], skip_special_tokens=False) for i in ids
        ]


def max_vocab_size(data) -> int:
    """Return the largest vocabulary that the section `data` of a config allows."""
    return ByteTokenizer.vocab_size if data.tokenizer == "bytes" else data.vocab_size


def until_eos(ids, eos: int = EOS) -> list[int]:
    """Return token ids up to the first EOS, without it."""
    ids = [int(i) for i in ids]
    return ids[: ids.index(eos)] if eos in ids else ids


class MarianTokenizer:
    """Marian's tokenizer: tokens of a SentencePiece model, with ids from a file.

    A source may start with the code of the target language, such as `>>fra<<`.

    Args:
        model: the bytes of a SentencePiece model, whose own ids are not used.
        vocabulary: Marian's id of each token; see `marian_order`.
    """

    unk = UNK

    def __init__(self, model: bytes, vocabulary: dict[str, int]):
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocabulary = vocabulary
        names = {number: piece for piece, number in vocabulary.items()}
        self._pieces = ["<pad>", *(names[i] for i in marian_order(vocabulary))]
        self._ids = {piece: i for i, piece in enumerate(self._pieces) if i > BOS}

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self._pieces)

    def encode(self, texts: list[str]) -> Ragged:
        """See `SentencePieceTokenizer.encode`."""
        return Ragged.of([self._encode(text) for text in texts])

    def _encode(self, sentence: str) -> list[int]:
        code = re.match(r">>.*?<<", sentence)
        start = code.end() if code else 0
        pieces = self._processor.encode(sentence[start:], out_type=str)
        pieces = [code.group(), *pieces] if code else pieces
        return [*(self._ids.get(piece, UNK) for piece in pieces), EOS]

    def pieces(self, ids) -> list[str]:
        """See `SentencePieceTokenizer.pieces`."""
        return [self._pieces[int(i)] for i in ids]

    def decode(self, ids) -> str:
        """See `SentencePieceTokenizer.decode`."""
        pieces = self.pieces(i for i in until_eos(ids) if i not in (PAD, BOS, UNK))
        return self._processor.decode_pieces(pieces)


def marian_order(vocabulary: dict[str, int]) -> list[int]:
    """Return Marian's ids in the order of our ids from 1.

    Marian's padding, with which it starts decoding, becomes our BOS. EOS and UNK
    follow, then all others.

    Raises:
        ValueError: a special token is missing, or the ids are not 0, 1, 2, ...
    """
    special = ("<pad>", "</s>", "<unk>")
    for piece in special:
        if piece not in vocabulary:
            raise ValueError(f"vocab.json has no {piece}.")
    numbers = sorted(vocabulary.values())
    if numbers != list(range(len(numbers))):
        raise ValueError(
            f"vocab.json must number its {len(numbers)} pieces 0 to "
            f"{len(numbers) - 1}, each once."
        )
    first = [vocabulary[piece] for piece in special]
    return first + [number for number in numbers if number not in first]


def pair_vocab_sizes(pair: tuple) -> list[int]:
    """Return the target vocabulary's size, and the source vocabulary's if different."""
    source, target = pair
    if source.vocabulary == target.vocabulary:
        return [target.vocab_size]
    return [target.vocab_size, source.vocab_size]


# Without these, SentencePiece normalises Unicode and joins runs of white space.
LOSSLESS = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "user_defined_symbols": ["\n"],
}


def train_on_documents(texts: list[str], vocab_size: int) -> bytes:
    """Train a BPE model that keeps newlines and all other white space."""
    return train_sentencepiece(texts, vocab_size, **LOSSLESS)


def train_sentencepiece(sentences: list[str], vocab_size: int, **settings) -> bytes:
    """Train a BPE model; the same input gives the same bytes.

    If the corpus does not support `vocab_size` tokens, the vocabulary is smaller, and a
    warning is logged.

    Args:
        settings: further options of SentencePiece's trainer.

    Raises:
        ValueError: there is no text, or it has more characters than `vocab_size`.
    """
    lines = [sentence for sentence in sentences if sentence.strip()]
    if not lines:
        raise ValueError(
            "There is no text to train a vocabulary on: every line is empty."
        )
    needed = len(set("".join(lines))) + NUM_SPECIAL + 1  # one for the space
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            max_sentence_length=1 << 30,  # bytes; longer lines would be ignored
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            minloglevel=2,
            **settings,
        )
    except RuntimeError as error:
        raise ValueError(
            f"No vocabulary can be trained with data.vocab_size={vocab_size}: the text "
            f"needs about {needed} for its characters alone."
        ) from error
    trained = SentencePieceTokenizer(model.getvalue()).vocab_size
    if trained != vocab_size:
        logging.warning(
            "The corpus supports a vocabulary of %d, not %d.", trained, vocab_size
        )
    return model.getvalue()


def load_pair(folder: Path) -> tuple:
    """Load the tokenizers of source and target from a folder.

    Raises:
        FileNotFoundError: there are none.
        ValueError: a file is damaged.
    """
    joint = folder / "joint.model"
    if joint.is_file():
        tokenizer = _read(SentencePieceTokenizer, joint)
        return tokenizer, tokenizer
    sides = [folder / "source.model", folder / "target.model"]
    numbered = folder / "vocab.json"
    for path in sides:
        if not path.is_file():
            raise FileNotFoundError(f"There is no tokenizer in {folder}; train first.")
    if numbered.is_file():
        try:
            vocabulary = json.loads(numbered.read_text())
        except (ValueError, RecursionError):
            raise _damaged(numbered) from None
        return tuple(_read(MarianTokenizer, path, vocabulary) for path in sides)
    return tuple(_read(SentencePieceTokenizer, path) for path in sides)


def _read(kind, path: Path, *vocabulary):
    try:
        tokenizer = kind(path.read_bytes(), *vocabulary)
    except (RuntimeError, AttributeError, TypeError):  # the last two: of vocab.json
        tokenizer = None
    if tokenizer is None or not tokenizer.vocab_size:  # 0 if the file is empty
        raise _damaged(path)
    return tokenizer


def _damaged(path: Path) -> ValueError:
    return ValueError(
        f"{path} is damaged; restore it, or train again in another --workdir."
    )


VOCABULARIES = (
    *("joint.model", "source.model", "target.model", "vocab.json"),
    *("text.model", "characters.json", "words.json", "tokenizer.json"),
    *("affixes.json", "wordpiece.json"),
)
FILES = (*VOCABULARIES, "classes.json")


def checksums(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of every vocabulary in a folder, by file name."""
    paths = (folder / name for name in VOCABULARIES)
    return {p.name: zlib.crc32(p.read_bytes()) for p in paths if p.is_file()}


def remove(folder: Path) -> None:
    """Remove the vocabularies in a folder, and the folder if it is empty then."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
        for part in folder.glob(f".{name}.*.part"):  # left by a killed process
            part.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def copy(folder: Path, to: Path) -> None:
    """Copy the tokenizers of one run to another."""
    remove(to)
    for path in (folder / name for name in FILES):
        if path.is_file():
            write(to / path.name, path.read_bytes())


def copy_gpt2(source: Path, folder: Path, bos: int) -> None:
    """Copy a tokenizer.json of GPT-2 to WORKDIR/tokenizer, unless there is one.

    Args:
        source: the file, which need not exist.
        folder: WORKDIR/tokenizer.
        bos: the config's model.bos.

    Raises:
        ValueError: the file is damaged, or separates documents by another id.
    """
    path = folder / "tokenizer.json"
    if path.is_file() or not source.is_file():
        return
    separator = ByteLevelBPE(source).bos
    if separator is None:
        raise ValueError(f"{source} has no token <|endoftext|>, so it isn't GPT-2's.")
    if separator != bos:
        raise ValueError(
            f"model.bos must be {separator}, the id of <|endoftext|> in {source}, got "
            f"{bos}."
        )
    write(path, source.read_bytes())


def load_or_train_pair(
    folder: Path, sources: list[str], targets: list[str], vocab_size: int, joint: bool
) -> tuple:
    """Load the tokenizers in a folder; train them if there are none.

    Args:
        folder: WORKDIR/tokenizer.
        sources, targets: sentences of the training split.
        vocab_size: size of each vocabulary.
        joint: whether both sides share a vocabulary, which is then returned twice.
    """
    try:
        return load_pair(folder)
    except FileNotFoundError:
        pass
    if joint:
        write(
            folder / "joint.model", train_sentencepiece(sources + targets, vocab_size)
        )
    else:
        write(folder / "source.model", train_sentencepiece(sources, vocab_size))
        write(folder / "target.model", train_sentencepiece(targets, vocab_size))
    return load_pair(folder)


def load_or_make(folder: Path, kind: str, texts, vocab_size: int, kinds=None):
    """Load the tokenizer of documents in a folder; make it if there is none.

    Args:
        folder: WORKDIR/tokenizer.
        kind: a name in `kinds`.
        texts: documents of the training split; None to only load.
        vocab_size: size of the vocabulary, for kinds that depend on it.
        kinds: a table such as `KINDS`, which is the default.

    Raises:
        FileNotFoundError: there is no tokenizer, and no texts to make one from.
        ValueError: a file is damaged, or the tokenizer can't be made.
    """
    name, read, make = (KINDS if kinds is None else kinds)[kind]
    path = folder / name if name else None
    if path is not None and not path.is_file():
        if make is None:
            raise FileNotFoundError(
                f"There is no {path}: a tokenizer of this kind comes with imported "
                f"weights (weights.py --from) or, for data.tokenizer=gpt2, as "
                f"tokenizer.json in the folder data.directory of your own texts."
            )
        if texts is None:
            raise FileNotFoundError(f"There is no {path}; train first.")
        write(path, make(texts, vocab_size))
    try:
        return read(path)
    except (RuntimeError, ValueError, TypeError, RecursionError):
        raise _damaged(path) from None


def _characters(texts, vocab_size: int) -> bytes:
    return json.dumps(sorted(set().union(*texts))).encode()


def _words(texts, vocab_size: int) -> bytes:
    return json.dumps(sorted(set().union(*map(str.split, texts)))).encode()


def read_units(path: Path) -> list[str]:
    """Read a table's units, in the order of their ids.

    Raises:
        ValueError: the file is damaged.
    """
    units = json.loads(path.read_text())
    if not isinstance(units, list) or not all(isinstance(u, str) for u in units):
        raise ValueError(path)
    if len(set(units)) < len(units):
        raise ValueError(path)
    return units


def _read_table(path: Path, separator: str) -> TableTokenizer:
    return TableTokenizer(read_units(path), separator)


# Tokenizers of documents by data.tokenizer: file name, reader and maker.
KINDS = {
    "sentencepiece": (
        "text.model",
        lambda path: _read(SentencePieceTokenizer, path),
        train_on_documents,
    ),
    "characters": ("characters.json", lambda path: _read_table(path, ""), _characters),
    "words": ("words.json", lambda path: _read_table(path, " "), _words),
    "bytes": (None, lambda path: ByteTokenizer(), None),
    "gpt2": ("tokenizer.json", ByteLevelBPE, None),
}
