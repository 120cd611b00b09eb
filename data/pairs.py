"""Parallel corpora by name: the sentences of a split in two languages.

`numbers` and `multi30k` are built in, `text` reads local files, and any other name is a
translation set of TensorFlow Datasets, such as `wmt14_translate/de-en`.
"""

import functools
from pathlib import Path

from absl import logging

from headcount.data import multi30k, numbers
from headcount.data.cache import prepared_in
from headcount.data.files import folder_of, read_lines

USUAL_SPLITS = ("train", "val", "test")  # suggested if a split does not exist


def _read_tfds(make_builder, source: str, target: str, split: str):
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
    rows = tfds_sets.rows(tfds_sets.prepare(make_builder), split)
    return tuple(
        [row[language].decode("utf-8") for row in rows] for language in (source, target)
    )


def _catalogue(name, source, target, split, directory):
    from headcount.data import tfds_sets

    make = functools.partial(tfds_sets.from_catalogue, name)
    return _read_tfds(make, source, target, split)


def _numbers(name, source, target, split, directory):
    numbers.check(source)
    numbers.check(target)
    from headcount.data import tfds_sets

    make = functools.partial(
        tfds_sets.Numbers,
        config=tfds_sets.Languages.of(source, target).name,
        data_dir=prepared_in(),
        file_format="array_record",
    )
    return _read_tfds(make, source, target, split)


def _multi30k(name, source, target, split, directory):
    languages = source, target
    for language in languages:
        multi30k.check(language, split)  # before any is downloaded
    return tuple(multi30k.sentences(code, split, directory) for code in languages)


def _existing(folder: Path, name: str) -> Path | None:
    paths = (folder / name, folder / f"{name}.gz")
    return next((path for path in paths if path.is_file()), None)


def _files(folder: Path, split: str, source: str, target: str) -> list[Path]:
    """Return the two text files of a split, its table, or nothing."""
    pair = [_existing(folder, f"{split}.{language}") for language in (source, target)]
    table = _existing(folder, f"{split}.tsv")
    return pair if all(pair) else [table] if table else []


def _text_files(name, source, target, split, directory):
    folder = folder_of(name, directory)
    paths = _files(folder, split, source, target)
    if len(paths) == 2:
        texts = [read_lines(path) for path in paths]
        if len(texts[0]) != len(texts[1]):
            counts = " but ".join(
                f"{path} has {len(text)} lines"
                for path, text in zip(paths, texts, strict=True)
            )
            raise ValueError(f"{counts}; line i of one must translate line i.")
        return tuple(texts)
    if not paths:
        existing = [
            name for name in USUAL_SPLITS if _files(folder, name, source, target)
        ]
        has = f" It has the splits {', '.join(existing)}." if existing else ""
        raise FileNotFoundError(
            f"The folder {folder} holds neither {split}.{source} and {split}.{target} "
            f"nor {split}.tsv (each may be gzipped).{has}"
        )
    (table,) = paths
    pairs = [line.split("\t") for line in read_lines(table)]
    for number, fields in enumerate(pairs, 1):
        if len(fields) != 2:
            has = f"has {len(fields)} tab-separated fields instead of 2"
            raise ValueError(
                f"{table}, line {number}, {'is empty' if fields == [''] else has}; fix "
                f"or remove it (a line is a source, a tab and a target)"
            )
    return [s for s, _ in pairs], [t for _, t in pairs]


LOADERS = {"numbers": _numbers, "multi30k": _multi30k, "text": _text_files}


def _check_directory(name: str, directory) -> None:
    if directory is not None and (name == "numbers" or name not in LOADERS):
        raise ValueError(
            f"data.directory (--directory) has no meaning for {name}; "
            f"set $TFDS_DATA_DIR to choose where that is prepared."
        )


def load(
    name: str, source: str, target: str, split: str, directory: str | None = None
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

    Raises:
        ValueError, FileNotFoundError, NotImplementedError: there is no such corpus,
            language or split, or it can't be read.
    """
    if source == target:
        raise ValueError(f"data.source and data.target are both {source!r}.")
    _check_directory(name, directory)
    loader = LOADERS.get(name, _catalogue)
    sources, targets = loader(name, source, target, split, directory)
    if not sources:
        place = "" if directory is None else f" in {directory}"
        raise ValueError(f"The split {split!r} of {name}{place} has no sentences.")
    logging.info("%s %s: %d pairs %s-%s", name, split, len(sources), source, target)
    return sources, targets
