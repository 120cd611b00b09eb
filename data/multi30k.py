"""Files of Multi30k: downloaded or read from a folder, verified, and split into lines.

Multi30k (Elliott et al. 2016, 2017) has 31,014 English captions of Flickr30k images and
their translations. The text is published at github.com/multi30k/dataset. It has no
licence file and derives from Flickr30K, which is for research, so this repository
includes none of its files.
"""

import hashlib
from pathlib import Path

from headcount.data.cache import download, prepared_in
from headcount.data.files import folder_of, read_bytes

LANGUAGES = ("en", "de", "fr")
SPLITS = ("train", "val", "test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")
# github.com resolves the abbreviated commit; the raw host may not.
URL = "https://github.com/multi30k/dataset/raw/a3d2e0d/data/task1"

# sha256 of the uncompressed text, so that files may be gzipped or not.
_LISTED = Path(__file__).with_suffix(".sha256").read_text().split()
CHECKSUMS = dict(zip(_LISTED[1::2], _LISTED[::2], strict=True))


def _checked_lines(name: str, path: Path) -> list[str]:
    content = read_bytes(path)
    if hashlib.sha256(content).hexdigest() != CHECKSUMS[name]:
        raise ValueError(
            f"{path} is not the official Multi30k file {name} (its sha256 differs); "
            "fetch it again, or read text of your own with data.name=text"
        )
    return content.decode().removesuffix("\n").split("\n")


def _from_folder(kind: str, name: str, directory: str) -> list[str]:
    folder = folder_of("multi30k", directory)
    for parent in (folder / kind, folder):
        for path in (parent / f"{name}.gz", parent / name):
            if path.is_file():
                return _checked_lines(name, path)
    raise FileNotFoundError(f"the folder {folder} holds no {kind}/{name}.gz")


def _from_network(kind: str, name: str) -> list[str]:
    # Published as raw/*.gz and, uncompressed, tok/*.
    published = f"{name}.gz" if kind == "raw" else name
    path = prepared_in() / "downloads" / "multi30k_files" / kind / published
    download(
        f"{URL}/{kind}/{published}",
        path,
        "give the folder of local files as data.directory",
    )
    try:
        return _checked_lines(name, path)
    except ValueError:
        path.unlink(missing_ok=True)  # so that the next attempt downloads it again
        raise


def check(language: str, split: str):
    """Raise a ValueError for a language or split that Multi30k does not have."""
    if language not in LANGUAGES:
        raise ValueError(
            f"multi30k has no language {language!r}; it has {', '.join(LANGUAGES)}"
        )
    if split not in SPLITS:
        raise ValueError(f"multi30k has no split {split!r}; it has {', '.join(SPLITS)}")


def _lines(kind: str, name: str, directory: str | None) -> list[str]:
    if directory is None:
        return _from_network(kind, name)
    return _from_folder(kind, name, directory)


def sentences(language: str, split: str, directory: str | None = None) -> list[str]:
    """Return the sentences of a split as published (`raw`), after checking the sha256.

    They are read from `directory` if given (the folder with raw/ and tok/, or raw/
    itself), else downloaded once into the folder of prepared data.
    """
    check(language, split)
    return _lines("raw", f"{split}.{language}", directory)


def tokenized(language: str, split: str, directory: str | None = None) -> list[str]:
    """Return the same sentences in the form that is published for scoring (`tok`).

    They are lowercased, punctuation-normalised and tokenised by Moses.
    """
    check(language, split)
    return _lines("tok", f"{split}.lc.norm.tok.{language}", directory)
