"""Parallel corpora by name: the sentences of a split in two languages.

`numbers` and `multi30k` are built in, `text` reads local files, and any other name is a
translation set of TensorFlow Datasets, such as `wmt14_translate/de-en`.
"""

import functools
import gzip
import os
import zlib
from pathlib import Path

from absl import logging

from headcount.data import multi30k, numbers

USUAL_SPLITS = ("train", "val", "test")  # suggested if a split does not exist


def prepared_in(data_dir=None) -> Path:
    """Return the folder of prepared data: `data_dir`, $TFDS_DATA_DIR, or default."""
    default = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
    return Path(data_dir or default).expanduser()


def _read_tfds(make_builder, source: str, target: str, split: str, data_dir):
    from headcount.data import tfds_sets

    builder = make_builder()
    features = builder.info.features
    if not hasattr(features, "languages"):
        raise NotImplementedError(
            f"{builder.info.full_name} is not a translation set with one sentence per "
            f"language."
        )
    for language in (source, target):
        if language not in features:
            raise ValueError(
                f"{builder.info.full_name} has no language {language!r}; it has "
                f"{', '.join(features.languages)}."
            )
    rows = tfds_sets.rows(tfds_sets.prepare(make_builder, data_dir), split)
    return tuple(
        [row[language].decode("utf-8") for row in rows] for language in (source, target)
    )


def _catalogue(name, source, target, split, directory, data_dir):
    from headcount.data import tfds_sets

    make = functools.partial(tfds_sets.from_catalogue, name, data_dir)
    return _read_tfds(make, source, target, split, data_dir)


def _numbers(name, source, target, split, directory, data_dir):
    numbers.check(source)
    numbers.check(target)
    from headcount.data import tfds_sets

    make = functools.partial(
        tfds_sets.Numbers,
        config=tfds_sets.Languages.of(source, target).name,
        data_dir=data_dir,
        file_format="array_record",
    )
    return _read_tfds(make, source, target, split, data_dir)


def _multi30k(name, source, target, split, directory, data_dir):
    multi30k.check(source, split)
    multi30k.check(target, split)
    if directory is not None:
        # reading the text is faster than preparing it with TFDS
        return tuple(
            multi30k.sentences(language, split, directory=directory)
            for language in (source, target)
        )
    from headcount.data import tfds_sets

    make = functools.partial(
        tfds_sets.Multi30k, data_dir=data_dir, file_format="array_record"
    )
    return _read_tfds(make, source, target, split, data_dir)


def _read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file, gzipped or not."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file ({error}).") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}, is not UTF-8 text.") from error
    # not splitlines, which also splits at other characters, inside sentences
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.removesuffix("\r") for line in lines]


def _folder(directory) -> Path:
    if directory is None:
        raise ValueError(
            "data.name=text needs data.directory, the folder of your files."
        )
    folder = Path(directory).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder} (data.directory).")
    return folder


def _existing(folder: Path, name: str) -> Path | None:
    paths = (folder / name, folder / f"{name}.gz")
    return next((path for path in paths if path.is_file()), None)


def _holds(folder: Path, split: str, source: str, target: str) -> bool:
    """Return whether a folder has the text files of a split."""
    pair = [_existing(folder, f"{split}.{language}") for language in (source, target)]
    return all(pair) or _existing(folder, f"{split}.tsv") is not None


def _text_files(name, source, target, split, directory, data_dir):
    folder = _folder(directory)
    table = _existing(folder, f"{split}.tsv")
    paths = [_existing(folder, f"{split}.{language}") for language in (source, target)]
    if all(paths):
        texts = [_read_lines(path) for path in paths]
        if len(texts[0]) != len(texts[1]):
            counts = " but ".join(
                f"{path} has {len(text)} lines"
                for path, text in zip(paths, texts, strict=True)
            )
            raise ValueError(f"{counts}; line i of one must translate line i.")
        return tuple(texts)
    if table is None:
        there = [name for name in USUAL_SPLITS if _holds(folder, name, source, target)]
        has = f" It has the splits {', '.join(there)}." if there else ""
        raise FileNotFoundError(
            f"The folder {folder} holds neither {split}.{source} and {split}.{target} "
            f"nor {split}.tsv (each may be gzipped).{has}"
        )
    pairs = [line.split("\t") for line in _read_lines(table)]
    for number, fields in enumerate(pairs, 1):
        if len(fields) != 2:
            raise ValueError(
                f"{table}, line {number}, has {len(fields)} tab-separated fields "
                "instead of 2, source and target; fix or remove it"
            )
    return [s for s, _ in pairs], [t for _, t in pairs]


LOADERS = {"numbers": _numbers, "multi30k": _multi30k, "text": _text_files}


def _check_directory(name: str, directory) -> None:
    if directory is not None and name not in ("multi30k", "text"):
        raise ValueError(
            f"data.directory (--directory) is for multi30k and text, not for {name}; "
            f"set $TFDS_DATA_DIR to choose where that is prepared."
        )


def load(
    name: str, source: str, target: str, split: str, directory=None, data_dir=None
) -> tuple[list[str], list[str]]:
    """Return the source and target sentences of a split; sentence i translates i.

    Args:
        name: `numbers`, `multi30k`, `text`, or a set of TFDS's translation catalogue.
        source, target: language codes, such as "en" and "de".
        split: `train`, `val`, `test`, ...
        directory: for `multi30k`, the folder with the official files, or None to
            download them. For `text`, the folder with train.en and train.de, val.en,
            ..., or with train.tsv, ... (columns source and target). Each file can be
            gzipped.
        data_dir: folder of prepared data; see `prepared_in`.

    Raises:
        ValueError, FileNotFoundError, NotImplementedError: there is no such corpus,
            language or split, or it can't be read.
    """
    if source == target:
        raise ValueError(f"data.source and data.target are both {source!r}.")
    _check_directory(name, directory)
    loader, data_dir = LOADERS.get(name, _catalogue), prepared_in(data_dir)
    sources, targets = loader(name, source, target, split, directory, data_dir)
    if not sources:
        raise ValueError(f"The split {split!r} of {name} has no sentences.")
    logging.info("%s %s: %d pairs %s-%s", name, split, len(sources), source, target)
    return sources, targets


def tokenized_references(
    name: str, target: str, split: str, directory=None, data_dir=None
) -> list[str]:
    """Return Multi30k's lowercased, normalised, Moses-tokenised sentences of a split.

    Raises:
        NotImplementedError: for any other corpus.
        FileNotFoundError: the folder has no tok/, or the files can't be downloaded.
    """
    if name != "multi30k":
        raise NotImplementedError(f"{name} is published without tokenised references.")
    cache = prepared_in(data_dir) / "downloads"
    return multi30k.tokenized(target, split, directory=directory, cache=cache)
