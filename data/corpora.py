"""Parallel corpora by name: the sentences of a split in two languages.

`numbers` and `multi30k` are our own TFDS builders, `text` reads files of your own, and
any other name is one of TFDS's translation catalogue, such as `wmt14_translate/de-en`.
"""

import contextlib
import fcntl
import functools
import gzip
import os
import pathlib
import sys
import zlib

from absl import logging

from headcount.data import multi30k, numbers


def prepared_in(data_dir=None) -> pathlib.Path:
    """Where prepared data and downloads are kept; None: $TFDS_DATA_DIR, or TFDS's."""
    default = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
    return pathlib.Path(data_dir or default).expanduser()


@contextlib.contextmanager
def _exclusively(path: pathlib.Path):
    """Waits for other processes that hold the lock at `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise type(error)(
            f"cannot write prepared data to {path.parent} ({error.strerror}); set "
            "TFDS_DATA_DIR to a folder that can be written"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _prepared(make_builder, data_dir: pathlib.Path, languages: tuple[str, ...]):
    """A TFDS builder of these languages, its files prepared unless they are there.

    Two processes preparing the same set would write in each other's way, so the second
    waits, and then finds the files.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download import downloader

    builder = make_builder()
    name, features = builder.info.full_name, builder.info.features
    if not isinstance(features, tfds.features.Translation):
        raise NotImplementedError(
            f"{name} is not a translation set with one sentence a language"
        )
    for language in languages:
        if language not in features:
            raise ValueError(
                f"{name} has no language {language!r}; it has "
                f"{', '.join(features.languages)}"
            )
    if builder.is_prepared():
        return builder
    # Ten attempts with growing pauses would let a machine without a network wait for
    # three minutes; TFDS has no argument for it.
    downloader.MAX_RETRIES = 4
    tfds.disable_progress_bar()
    # TFDS prints to stdout, which is for translations.
    with (
        _exclusively(data_dir / f".{name.replace('/', '-')}.lock"),
        contextlib.redirect_stdout(sys.stderr),
    ):
        builder = make_builder()  # reads what another process may have prepared
        config = tfds.download.DownloadConfig(try_download_gcs=False)
        try:
            builder.download_and_prepare(
                download_dir=data_dir / "downloads", download_config=config
            )
        except ImportError as error:
            raise NotImplementedError(
                f"TFDS cannot prepare {name} here, for it needs {error.name}; prepare "
                f"it elsewhere with file_format=array_record and copy it to {data_dir}"
            ) from error
        except (OSError, tfds.download.DownloadError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise FileNotFoundError(
                f"cannot prepare {name} in {data_dir}: {reason}"
            ) from error
    return builder


def _read_tfds(make_builder, source: str, target: str, split: str, data_dir):
    builder = _prepared(make_builder, data_dir, (source, target))
    known = list(builder.info.splits)
    if split == "val" and split not in known and "validation" in known:
        split = "validation"
    if known and split.split("[")[0] not in known:
        raise ValueError(
            f"{builder.info.full_name} has no split {split!r}; it has "
            f"{', '.join(known)}"
        )
    rows = builder.as_data_source(split)
    rows = rows.__getitems__(range(len(rows)))  # twice as fast as one by one
    return tuple(
        [row[language].decode("utf-8") for row in rows] for language in (source, target)
    )


def _tfds_builder(name: str, data_dir: pathlib.Path):
    import tensorflow_datasets as tfds
    import tensorflow_datasets.translate  # noqa: F401  registers WMT and others

    try:
        return tfds.builder(name, data_dir=data_dir, file_format="array_record")
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"there is no corpus {name!r}: neither {', '.join(LOADERS)} nor a TFDS "
            f"translation set ({reason})"
        ) from error


def _catalogue(name, source, target, split, directory, data_dir):
    make = functools.partial(_tfds_builder, name, data_dir)
    return _read_tfds(make, source, target, split, data_dir)


def _numbers(name, source, target, split, directory, data_dir):
    numbers.check(source)
    numbers.check(target)
    from headcount.data import builders

    make = functools.partial(
        builders.Numbers,
        config=builders.Languages.of(source, target).name,
        data_dir=data_dir,
        file_format="array_record",
    )
    return _read_tfds(make, source, target, split, data_dir)


def _multi30k(name, source, target, split, directory, data_dir):
    multi30k.check(source, split)
    multi30k.check(target, split)
    if directory is not None:
        # The text itself: faster to read than what TFDS would make of it.
        return tuple(
            multi30k.sentences(language, split, directory=directory)
            for language in (source, target)
        )
    from headcount.data import builders

    make = functools.partial(
        builders.Multi30k, data_dir=data_dir, file_format="array_record"
    )
    return _read_tfds(make, source, target, split, data_dir)


def _read_lines(path: pathlib.Path) -> list[str]:
    """The lines of a UTF-8 file, gzipped or not; a last newline ends a line."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no whole gzip file ({error})") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}, is not UTF-8 text") from error
    # Not splitlines: it also splits at characters that occur within sentences.
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.removesuffix("\r") for line in lines]


def _folder(directory) -> pathlib.Path:
    if directory is None:
        raise ValueError(
            "data.name=text needs data.directory, the folder of your files"
        )
    folder = pathlib.Path(directory).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder} (data.directory)")
    return folder


def _existing(folder: pathlib.Path, name: str) -> pathlib.Path | None:
    paths = (folder / name, folder / f"{name}.gz")
    return next((path for path in paths if path.is_file()), None)


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
            raise ValueError(f"{counts}; line i of one must translate line i")
        return tuple(texts)
    if table is None:
        raise FileNotFoundError(
            f"the folder {folder} holds neither {split}.{source} and {split}.{target} "
            f"nor {split}.tsv (each may be gzipped)"
        )
    pairs = [line.split("\t") for line in _read_lines(table)]
    for number, fields in enumerate(pairs, 1):
        if len(fields) != 2:
            raise ValueError(
                f"{table}, line {number}, has {len(fields)} tab-separated fields "
                "instead of 2, source and target; mend it, or take it out"
            )
    return [s for s, _ in pairs], [t for _, t in pairs]


LOADERS = {"numbers": _numbers, "multi30k": _multi30k, "text": _text_files}


def _check_directory(name: str, directory) -> None:
    if directory is not None and name not in ("multi30k", "text"):
        raise ValueError(
            f"a folder of data (data.directory, --directory) is for multi30k and text, "
            f"not for {name}; set $TFDS_DATA_DIR to choose where that is prepared"
        )


def load(
    name: str, source: str, target: str, split: str, directory=None, data_dir=None
) -> tuple[list[str], list[str]]:
    """The source and the target sentences of a split; sentence i translates i.

    Args:
      name: `numbers`, `multi30k`, `text`, or a set of TFDS's translation catalogue.
      source, target: language codes, such as "en" and "de".
      split: `train`, `val`, `test`, ...
      directory: for `multi30k` the folder with the official files (None: download
        them); for `text` the folder with train.en and train.de, val.en, ..., or
        train.tsv, ..., source before target, each optionally gzipped; for no other.
      data_dir: where prepared data is kept, see `prepared_in`.

    Raises ValueError, FileNotFoundError or NotImplementedError with one sentence.
    """
    if source == target:
        raise ValueError(f"data.source and data.target are both {source!r}")
    _check_directory(name, directory)
    loader, data_dir = LOADERS.get(name, _catalogue), prepared_in(data_dir)
    sources, targets = loader(name, source, target, split, directory, data_dir)
    if not sources:
        raise ValueError(f"the split {split!r} of {name} has no sentences")
    logging.info("%s %s: %d pairs %s-%s", name, split, len(sources), source, target)
    return sources, targets


def tokenized_references(
    name: str, target: str, split: str, directory=None, data_dir=None
) -> list[str]:
    """The publisher's lowercased, normalised, Moses-tokenised sentences of a split.

    Multi30k only. Raises FileNotFoundError where the folder has no tok/ or, without
    `directory`, the files can be neither found nor downloaded.
    """
    if name != "multi30k":
        raise NotImplementedError(f"{name} is published without tokenised references")
    cache = prepared_in(data_dir) / "downloads"
    return multi30k.tokenized(target, split, directory=directory, cache=cache)
