"""SentencePiece vocabularies: trained on the training split, kept in the workdir.

Kudo & Richardson 2018; byte-pair encoding, case kept, one vocabulary for both
languages unless told otherwise. Ids: pad 0, bos 1, eos 2, unk 3.
"""

import io
import json
import os
import pathlib
import re

from absl import logging

from headcount.data.examples import Ragged

PAD, BOS, EOS, UNK = range(4)


class Tokenizer:
    """Sentences to token ids and back, by a SentencePiece model (its bytes)."""

    def __init__(self, model: bytes):
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    @property
    def vocab_size(self) -> int:
        return self._processor.vocab_size()

    @property
    def vocabulary(self):
        """What ids mean: the same for tokenizers that share an embedding."""
        return self._processor.serialized_model_proto()

    def encode(self, sentences: list[str]) -> Ragged:
        """Token ids of each sentence, eos at the end; an empty one is eos alone."""
        threads = min(16, os.cpu_count() or 1)
        return Ragged.of(
            self._processor.encode(sentences, add_eos=True, num_threads=threads)
        )

    def pieces(self, ids) -> list[str]:
        """The piece of every token id, eos too: labels for pictures."""
        return [self._processor.id_to_piece(int(i)) for i in ids]

    def decode(self, ids) -> str:
        """The text of token ids up to the first eos; pad and bos are skipped."""
        ids = [int(i) for i in ids]
        if EOS in ids:
            ids = ids[: ids.index(EOS)]
        return self._processor.decode([i for i in ids if i not in (PAD, BOS)])

    def decode_many(self, sequences) -> list[str]:
        return [self.decode(ids) for ids in sequences]


class MarianTokenizer:
    """Token ids of Marian: the pieces of a SentencePiece model, numbered by a file.

    A source may begin with the code of a language to translate into, as `>>fra<<`.

    Args:
        model: a SentencePiece model (its bytes); its own ids don't count.
        vocabulary: pieces to their ids in Marian, see `marian_order`.
    """

    def __init__(self, model: bytes, vocabulary: dict[str, int]):
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocabulary = vocabulary
        names = {number: piece for piece, number in vocabulary.items()}
        self._pieces = ["<pad>", *(names[i] for i in marian_order(vocabulary))]
        self._ids = {piece: i for i, piece in enumerate(self._pieces) if i > BOS}

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def encode(self, sentences: list[str]) -> Ragged:
        """Token ids of each sentence, eos at the end; an empty one is eos alone."""
        return Ragged.of([self._encode(sentence) for sentence in sentences])

    def _encode(self, sentence: str) -> list[int]:
        code = re.match(r">>.*?<<", sentence)
        start = code.end() if code else 0
        pieces = self._processor.encode(sentence[start:], out_type=str)
        pieces = [code.group(), *pieces] if code else pieces
        return [*(self._ids.get(piece, UNK) for piece in pieces), EOS]

    def pieces(self, ids) -> list[str]:
        """The piece of every token id, eos too: labels for pictures."""
        return [self._pieces[int(i)] for i in ids]

    def decode(self, ids) -> str:
        """The text of token ids up to the first eos; pad and bos are skipped."""
        ids = [int(i) for i in ids]
        if EOS in ids:
            ids = ids[: ids.index(EOS)]
        pieces = self.pieces(i for i in ids if i not in (PAD, BOS, UNK))
        return self._processor.decode_pieces(pieces)

    def decode_many(self, sequences) -> list[str]:
        return [self.decode(ids) for ids in sequences]


def marian_order(vocabulary: dict[str, int]) -> list[int]:
    """Marian's ids in the order of ours from 1 on: its padding, from which it decodes,
    is our bos; eos and unk follow, then the rest.

    Raises:
        ValueError: a special piece is missing, or the ids are not 0, 1, 2, ...
    """
    special = ("<pad>", "</s>", "<unk>")
    for piece in special:
        if piece not in vocabulary:
            raise ValueError(f"vocab.json must hold {piece}, and does not.")
    numbers = sorted(vocabulary.values())
    if numbers != list(range(len(numbers))):
        raise ValueError(
            f"vocab.json must number its {len(numbers)} pieces 0 to "
            f"{len(numbers) - 1}, each once."
        )
    first = [vocabulary[piece] for piece in special]
    return first + [number for number in numbers if number not in first]


def vocab_sizes(tokenizers: tuple) -> list[int]:
    """Of the target's vocabulary, and of the source's where it is another."""
    source, target = tokenizers
    if source.vocabulary == target.vocabulary:
        return [target.vocab_size]
    return [target.vocab_size, source.vocab_size]


def train(sentences: list[str], vocab_size: int) -> bytes:
    """Trains a BPE model on sentences; the same input gives the same bytes.

    A corpus that does not support `vocab_size` pieces gets a smaller vocabulary, and
    the log says so. Raises ValueError where `vocab_size` does not even hold the
    alphabet.
    """
    import sentencepiece

    lines = [sentence for sentence in sentences if sentence.strip()]
    if not lines:
        raise ValueError(
            "there is no text to train a vocabulary on: every line is empty"
        )
    # With four special pieces and one for the space; a smaller one fails in the
    # trainer, with many lines that name no mend.
    needed = len(set("".join(lines))) + 5
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            max_sentence_length=1 << 20,  # bytes; else longer lines count for nothing
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"cannot train a vocabulary with data.vocab_size={vocab_size}: the text "
            f"needs about {needed} pieces for its characters alone"
        ) from error
    trained = Tokenizer(model.getvalue()).vocab_size
    if trained != vocab_size:
        logging.warning(
            "the corpus supports a vocabulary of %d, not %d", trained, vocab_size
        )
    return model.getvalue()


def _write(path: pathlib.Path, content: bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    # not tempfile's, which nobody but the owner could read
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)  # all of it or nothing, killed at whatever moment


def load(folder) -> tuple[Tokenizer, Tokenizer]:
    """The source's and the target's tokenizer of a run, from WORKDIR/tokenizer.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file is not what was written.
    """
    folder = pathlib.Path(folder)
    joint = folder / "joint.model"
    if joint.is_file():
        tokenizer = _read(Tokenizer, joint)
        return tokenizer, tokenizer
    sides = [folder / "source.model", folder / "target.model"]
    numbered = folder / "vocab.json"
    for path in sides:
        if not path.is_file():
            raise FileNotFoundError(f"there is no tokenizer in {folder}; train first")
    if numbered.is_file():
        try:
            vocabulary = json.loads(numbered.read_text())
        except (ValueError, RecursionError):
            raise _damaged(numbered) from None
        return tuple(_read(MarianTokenizer, path, vocabulary) for path in sides)
    return tuple(_read(Tokenizer, path) for path in sides)


def _read(kind, path: pathlib.Path, *vocabulary):
    try:
        tokenizer = kind(path.read_bytes(), *vocabulary)
    except RuntimeError:
        tokenizer = None
    if tokenizer is None or not tokenizer.vocab_size:  # 0: of an empty file
        raise _damaged(path)
    return tokenizer


def _damaged(path: pathlib.Path) -> ValueError:
    return ValueError(
        f"{path} is damaged; restore it, or train anew in another --workdir."
    )


FILES = ("joint.model", "source.model", "target.model", "vocab.json")


def remove(folder) -> None:
    """Remove what `load_or_train` or `copy` wrote into a folder, and nothing else."""
    for name in FILES:
        (pathlib.Path(folder) / name).unlink(missing_ok=True)


def copy(folder, to) -> None:
    """Give a run the tokenizers of another.

    Raises:
        FileNotFoundError, ValueError: see `load`.
    """
    load(folder)
    remove(to)
    for path in (pathlib.Path(folder) / name for name in FILES):
        if path.is_file():
            _write(pathlib.Path(to) / path.name, path.read_bytes())


def load_or_train(
    folder, sources: list[str], targets: list[str], vocab_size: int, joint: bool = True
) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers in a folder, trained on these sentences where it holds none.

    Pass the training split only. `joint`: one vocabulary of `vocab_size` for both
    sides, returned twice; else one of `vocab_size` each.
    """
    try:
        return load(folder)
    except FileNotFoundError:
        folder = pathlib.Path(folder)
    if joint:
        _write(folder / "joint.model", train(sources + targets, vocab_size))
    else:
        _write(folder / "source.model", train(sources, vocab_size))
        _write(folder / "target.model", train(targets, vocab_size))
    return load(folder)
