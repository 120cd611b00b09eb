"""The files of Multi30k: fetched or read from a folder, checked, split into lines.

Multi30k (Elliott et al. 2016, 2017) is 31,014 captions of Flickr30k images in English
with their translations. The text is published at github.com/multi30k/dataset; it has
no licence file and derives from Flickr30K, for research, so no file of it is kept in
this repository.
"""

import functools
import gzip
import hashlib
import os
import pathlib
import tempfile
import urllib.error
import urllib.request
import zlib

from absl import logging

LANGUAGES = ("en", "de", "fr")
SPLITS = ("train", "val", "test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")
# The web address resolves the abbreviated commit; the raw host may not.
URL = "https://github.com/multi30k/dataset/raw/a3d2e0d/data/task1"

# sha256 of the uncompressed text, so that it holds for a file gzipped or not.
CHECKSUMS = {
    "test_2016_flickr.de": (
        "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16"
    ),
    "test_2016_flickr.en": (
        "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182"
    ),
    "test_2016_flickr.fr": (
        "cb3160d69b002bb638e66cc7612fcd56cb0af82eadc9c142dedc438afb885ef6"
    ),
    "test_2017_flickr.de": (
        "c3078bc3b36808bf9d20eb2347ed6137016179ef59ec0d2b9b8ecc3fb2880081"
    ),
    "test_2017_flickr.en": (
        "ce1450ddc5ab0834502579d77a170849952e15a2938b34cc503bdc25ebb4fb98"
    ),
    "test_2017_flickr.fr": (
        "6f3764e31dac41e9455e612958bcfd4e877c5e15cd66df2c2b2be6d9bd83e5b6"
    ),
    "test_2017_mscoco.de": (
        "58277df3c75f92f7145a11b910b553d1cf82c439249d4dc237c899609eafac22"
    ),
    "test_2017_mscoco.en": (
        "43051fdfa86fd5395182e718a94ca67b1b227b9f7c79596ff0f6b813216981d2"
    ),
    "test_2017_mscoco.fr": (
        "39cde3f43f32b0a6bf29ce4917a46329ff32e53070c2fac87506695a740ae0a0"
    ),
    "train.de": ("2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72"),
    "train.en": ("460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6"),
    "train.fr": ("5925a3c18f1587b6b54b87743106e6e8ab93618edb6f65d19eac0621f853a10d"),
    "val.de": ("660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660"),
    "val.en": ("1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227"),
    "val.fr": ("5304e444d842e962b2dda4d816b70b22a1765b15401642b7ca37a67477e708dc"),
    "test_2016_flickr.lc.norm.tok.de": (
        "c6a33d39d48f9f510de147651316cd9d918e09ad0219df734a2f16b6baccacc4"
    ),
    "test_2016_flickr.lc.norm.tok.en": (
        "5b7f32627cf99eced828311b955dae9800bb52bc8b91cf8b6526829e605b29d2"
    ),
    "test_2016_flickr.lc.norm.tok.fr": (
        "1463bd5960f9bfe098ec3cd752d3df0c49c84dc646fb518964a29232658cd836"
    ),
    "test_2017_flickr.lc.norm.tok.de": (
        "02067e4a9402786a4fcb8c1b6f4307e4a5073ced64800abead5273b54f5f31f6"
    ),
    "test_2017_flickr.lc.norm.tok.en": (
        "c9d1dfd7a26add989382e534af235af9f0f658b2a30e7eb0efdaf142496ee54f"
    ),
    "test_2017_flickr.lc.norm.tok.fr": (
        "c0583117a47b31e8a6c6a97cfe8de153e462074668f4e994764fcc80b21d33b4"
    ),
    "test_2017_mscoco.lc.norm.tok.de": (
        "e2825990b8a4e5289d2cdba801d57c187810bab9b4f5d87a30c35800a0d871b6"
    ),
    "test_2017_mscoco.lc.norm.tok.en": (
        "fe69ae004d71c42ead0301e70c57de5b1b6b5fb7f52210d42b22801e98e656f3"
    ),
    "test_2017_mscoco.lc.norm.tok.fr": (
        "0b6a4620f02b6b9acf7811fda23f90fed9c6baa0b96aa224db50a273078c84d1"
    ),
    "train.lc.norm.tok.de": (
        "cb5a23529b65ec2061f1dc446192a9c37382b63cc75f81a0be59d34894b3a505"
    ),
    "train.lc.norm.tok.en": (
        "08925f8e0572bcd5a006702fc5fe20e2d77c6917d4eebd576fc20de6693c2119"
    ),
    "train.lc.norm.tok.fr": (
        "8fa41bb718412bcb7c5dfa58603842810a01543eae86a51279f9886b901266e1"
    ),
    "val.lc.norm.tok.de": (
        "97232bd273eceb7207f689527386a97e4be2616b18ada47576bdaf96c8ae1f00"
    ),
    "val.lc.norm.tok.en": (
        "46573ce391ae227f1c72f873392436a20ef18e0a6d518098cfbd70b77c8572ec"
    ),
    "val.lc.norm.tok.fr": (
        "b303e301aa21fe7822a846b2b3fb2d5a1121ec807cd5b1d006fb7b2b5507168a"
    ),
}


def _checked_lines(name: str, content: bytes, where: str) -> list[str]:
    if hashlib.sha256(content).hexdigest() != CHECKSUMS[name]:
        raise ValueError(
            f"{where} is not the official Multi30k file {name} (its sha256 differs); "
            "fetch it again, or read text of your own with data.name=text"
        )
    return content.decode("utf-8").removesuffix("\n").split("\n")


def _unpacked(path: pathlib.Path) -> bytes:
    content = path.read_bytes()
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); fetch it again") from error


def _from_folder(kind: str, name: str, directory: pathlib.Path) -> list[str]:
    if not directory.is_dir():
        raise FileNotFoundError(
            f"there is no folder {directory}; name the one that holds Multi30k's raw/ "
            "and tok/, or none to download the files"
        )
    for folder in (directory / kind, directory):
        for path in (folder / f"{name}.gz", folder / name):
            if path.is_file():
                return _checked_lines(name, _unpacked(path), str(path))
    raise FileNotFoundError(f"the folder {directory} holds no {kind}/{name}.gz")


def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.read()
    except (urllib.error.URLError, OSError) as error:
        raise FileNotFoundError(
            f"cannot download {url} ({getattr(error, 'reason', error)}); give the "
            "folder of local files as data.directory"
        ) from error


def _from_network(kind: str, name: str, cache: pathlib.Path) -> list[str]:
    # Published as raw/*.gz and, uncompressed, tok/*.
    published = f"{name}.gz" if kind == "raw" else name
    path = cache / "multi30k_files" / kind / published
    if not path.is_file():
        logging.info("downloading Multi30k's %s/%s", kind, published)
        content = _download(f"{URL}/{kind}/{published}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)  # a second process sees all of it or nothing
    try:
        return _checked_lines(name, _unpacked(path), str(path))
    except ValueError:
        path.unlink(missing_ok=True)  # so that the next attempt fetches it again
        raise


def check(language: str, split: str):
    """Raises ValueError for a language or split that Multi30k does not have."""
    if language not in LANGUAGES:
        raise ValueError(
            f"multi30k has no language {language!r}; it has {', '.join(LANGUAGES)}"
        )
    if split not in SPLITS:
        raise ValueError(f"multi30k has no split {split!r}; it has {', '.join(SPLITS)}")


@functools.lru_cache(maxsize=4)
def _lines(kind, name, directory, cache):
    if directory is not None:
        return _from_folder(kind, name, pathlib.Path(directory).expanduser())
    return _from_network(kind, name, pathlib.Path(cache))


def sentences(language: str, split: str, *, directory=None, cache=None) -> list[str]:
    """The sentences of a split as published (`raw`), checked against their sha256.

    From `directory` where given (the folder with raw/ and tok/, or raw/ itself), else
    downloaded once into `cache`.
    """
    check(language, split)
    return list(_lines("raw", f"{split}.{language}", directory, cache))


def tokenized(language: str, split: str, *, directory=None, cache=None) -> list[str]:
    """The same sentences in the publisher's form for scores: `tok`, that is
    lowercased, punctuation-normalised, tokenised by Moses."""
    check(language, split)
    return list(_lines("tok", f"{split}.lc.norm.tok.{language}", directory, cache))
