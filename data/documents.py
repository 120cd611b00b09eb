"""Corpora of documents by name: the texts of a split, for language models.

`shakespeare`, `recall` and `stories` are built in, `text` reads local files, and any
other name is a text data set of TensorFlow Datasets that can be prepared without
TensorFlow.
"""

import functools
import hashlib
import json
import re
from pathlib import Path

from absl import logging

from headcount.data import recall, stories
from headcount.data.cache import download, prepared_in
from headcount.data.files import folder_of, read_lines, read_text

SHAKESPEARE_URL = (
    "https://github.com/karpathy/char-rnn/raw/6f9487a/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
GENERATED = ("recall", "stories")  # corpora that are not read from files


def load(data, split: str) -> list[str]:
    """Return the documents of a split.

    Args:
        data: the config's section `data`.
        split: "train", "val" or "test".

    Raises:
        ValueError, OSError: there is no such corpus or split, or it can't be read.
    """
    name = data.name
    if data.directory is not None and (name in GENERATED or name not in LOADERS):
        raise ValueError(
            f"data.directory (--directory) has no meaning here: {name} reads no files "
            f"from it; leave it out."
        )
    loader = LOADERS.get(name, _tfds)
    documents = loader(data, split)
    if not any(map(str.strip, documents)):
        place = "" if data.directory is None else f" in {data.directory}"
        raise ValueError(f"The split {split!r} of {name}{place} has no documents.")
    s = "s" * (len(documents) != 1)
    logging.info("%s %s: %d document%s", name, split, len(documents), s)
    return documents


def corpus_keys(data) -> tuple[str, ...]:
    """Return the keys of the config's section `data` that determine the corpus."""
    generator_keys = ("max_length", "vocab_size") if data.name == "recall" else ()
    return "name", "directory", "test_share", *generator_keys


def check_test_share(data) -> None:
    """Raise a ValueError if data.test_share is out of range."""
    if not 0 <= data.test_share < 1:
        raise ValueError(
            f"data.test_share must be at least 0 and below 1, got {data.test_share}."
        )


def test_split(data) -> str:
    """Return the split of final scores: test, or val if the corpus has no test split.

    Args:
        data: the config's section `data`.
    """
    return "val" if data.name == "shakespeare" and not data.test_share else "test"


def _shakespeare(data, split) -> list[str]:
    """Return the complete text of a split: 90% and 10%, as in nanoGPT.

    If data.test_share is above 0, that share of the last 10%, at its end, is the test
    split.
    """
    splits = ("train", "val", "test") if data.test_share else ("train", "val")
    if split not in splits:
        raise ValueError(
            f"shakespeare has no split {split!r}; it has {' and '.join(splits)} with "
            f"data.test_share={data.test_share}."
        )
    path = _shakespeare_file(data)
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        if data.directory is None:
            path.unlink(missing_ok=True)  # so that the next attempt downloads it again
        raise ValueError(
            f"{path} is not char-rnn's tinyshakespeare input.txt (its SHA-256 "
            f"differs); fetch it again, or read a text of your own with data.name=text."
        )
    text = content.decode()
    train = int(0.9 * len(text))
    val = len(text) - round(data.test_share * (len(text) - train))
    cuts = {"train": (0, train), "val": (train, val), "test": (val, len(text))}
    return [text[slice(*cuts[split])]]


def _shakespeare_file(data) -> Path:
    if data.directory is not None:
        folder = folder_of(data.name, data.directory)
        path = folder / "input.txt"
        if not path.is_file():
            raise FileNotFoundError(
                f"The folder {folder} (data.directory) holds no input.txt."
            )
        return path
    path = prepared_in() / "downloads" / "tinyshakespeare" / "input.txt"
    download(
        SHAKESPEARE_URL,
        path,
        "download it elsewhere and set --config.data.directory=FOLDER, the folder that "
        "holds input.txt.",
    )
    return path


def _recall(data, split) -> list[str]:
    return recall.documents(split, data.max_length, data.vocab_size)


def _stories(data, split) -> list[str]:
    return [story.text for story in stories.documents(split)]


def _text(data, split) -> list[str]:
    """Return the documents of SPLIT.txt, SPLIT.jsonl, or the files in SPLIT/."""
    folder = folder_of(data.name, data.directory)
    paths = _paths(folder, split)
    if not paths:
        existing = [name for name in ("train", "val", "test") if _paths(folder, name)]
        has = f" It has the splits {', '.join(existing)}." if existing else ""
        raise FileNotFoundError(
            f"The folder {folder} holds neither {split}.txt nor {split}.jsonl (each "
            f"may be gzipped), nor a folder {split}/ of such files.{has}"
        )
    if len(paths) > 1:
        names = [f"{path.name}{'/' * path.is_dir()}" for path in paths[:2]]
        raise ValueError(
            f"The folder {folder} holds both {' and '.join(names)}; keep one of them."
        )
    (path,) = paths
    if path.is_file():
        return _documents_of(path, one_per_file=False)
    every = sorted(path.iterdir())
    files = [file for file in every if file.name.endswith(SUFFIXES)]
    if ignored := [file.name for file in every if file not in files]:
        logging.warning(
            "%s has %d files or folders that are not read, such as %s: their names do "
            "not end in %s.",
            *(path, len(ignored), ignored[0], ", ".join(SUFFIXES)),
        )
    return [text for file in files for text in _documents_of(file, one_per_file=True)]


def _paths(folder: Path, split: str) -> list[Path]:
    """Return a split's files, and its folder; there should be only one."""
    paths = [folder / f"{split}{suffix}" for suffix in SUFFIXES]
    files = [path for path in paths if path.is_file()]
    return files + [folder / split] * (folder / split).is_dir()


def _documents_of(path: Path, one_per_file: bool) -> list[str]:
    """Return a file's documents: JSON lines, blocks of lines, or the whole file."""
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        lines = enumerate(read_lines(path), 1)
        return [_json_text(path, n, line) for n, line in lines if line.strip()]
    text = read_text(path).replace("\r\n", "\n")
    if one_per_file:
        return [text] if text.strip() else []
    blocks = re.split(r"\n(?:[ \t]*\n)+", text)
    return [block.strip("\n") for block in blocks if block.strip()]


def _json_text(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
        text.encode()  # fails for lone surrogates such as "\ud800"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(
            f'{path}, line {number}, is not an object with a string "text" of Unicode '
            f"characters."
        ) from None
    return text


def _tfds(data, split) -> list[str]:
    """Return the field `text` of a TFDS data set."""
    from headcount.data import tfds_sets  # takes a second to import

    make = functools.partial(tfds_sets.from_catalogue, data.name)
    features = make().info.features
    if "text" not in features:
        raise ValueError(
            f"{data.name} has no field `text`; it has {', '.join(features)}."
        )
    builder = tfds_sets.prepare(make)
    return [row["text"].decode("utf-8") for row in tfds_sets.rows(builder, split)]


LOADERS = {
    "shakespeare": _shakespeare,
    "recall": _recall,
    "stories": _stories,
    "text": _text,
}
