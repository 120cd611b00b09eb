"""Corpora of documents: formats of files, and errors that name them."""

import gzip
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import tensorflow_datasets as tfds

from headcount.configs.base import get_config
from headcount.data import documents, recall

SHAKESPEARE = Path(__file__).resolve().parents[3] / "shared/data/tinyshakespeare"
needs_shakespeare = pytest.mark.skipif(
    not SHAKESPEARE.is_dir(), reason="tinyshakespeare is not beside the project"
)
BLOCKS = "one\ntwo\n\n \t\nthree – ß\r\n\r\n\n"
SPLIT = ["one\ntwo", "three – ß"]


def write(path: Path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def load(folder, split="train", name="text", **options):
    data = get_config().data
    data.update({"name": name, "directory": folder and str(folder)} | options)
    return documents.load(data, split)


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_blank_lines_separate_documents_of_a_text_file(tmp_path, name):
    write(tmp_path / name, BLOCKS)
    assert load(tmp_path) == SPLIT


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz"])
def test_a_line_of_jsonl_is_a_document(tmp_path, name):
    texts = ["one\n\ntwo", " ß ", "", "a line\u2028and\x85a line"]
    lines = [json.dumps({"text": x, "more": 1}, ensure_ascii=False) for x in texts]
    write(tmp_path / name, "\n".join(lines) + "\r\n\n")
    assert load(tmp_path) == texts


def test_a_folder_has_one_document_per_text_file(tmp_path):
    write(tmp_path / "val/b.txt", BLOCKS)
    write(tmp_path / "val/a.txt.gz", "first")
    write(tmp_path / "val/c.jsonl", '{"text": "x"}\n{"text": "y"}\n')
    write(tmp_path / "val/d.txt", " \n")
    write(tmp_path / "val/notes.md", "not a document")
    text = BLOCKS.replace("\r\n", "\n")
    assert load(tmp_path, "val") == ["first", text, "x", "y"]


@pytest.mark.parametrize(
    "files, error, culprit",
    [
        ({}, FileNotFoundError, "train.txt .*train.jsonl"),
        (
            {"train.txt": "a", "train.jsonl": '{"text": "b"}'},
            ValueError,
            "train.txt and train.jsonl",
        ),
        (
            {"train.txt": "a", "train.txt.gz": "a"},
            ValueError,
            "train.txt and train.txt.gz",
        ),
        ({"train.txt": "a", "train/b.txt": "b"}, ValueError, "train.txt and train/"),
        ({"train.txt": "\n\n"}, ValueError, "'train' of text"),
        ({"train.jsonl": '{"text": "a"}\n{"txt": "b"}'}, ValueError, "jsonl, line 2"),
        ({"train.jsonl": '{"text": 3}'}, ValueError, "train.jsonl, line 1"),
        ({"train.jsonl": '{"text": "a"}\n["b"]'}, ValueError, "train.jsonl, line 2"),
        ({"train.jsonl": "{"}, ValueError, "train.jsonl, line 1"),
        ({"train.jsonl": '{"text": ' + "[" * 10**5}, ValueError, "jsonl, line 1"),
        (
            {"train.jsonl": '{"text": "\\ud800"}'},
            ValueError,
            "line 1, .*Unicode",
        ),
    ],
)
def test_malformed_documents_raise_with_file_and_line(tmp_path, files, error, culprit):
    for name, content in files.items():
        write(tmp_path / name, content)
    with pytest.raises(error, match=culprit):
        load(tmp_path)


def test_files_that_are_not_read_are_logged(tmp_path, caplog):
    write(tmp_path / "val/a.txt", "first")
    load(tmp_path, "val")
    assert "not read" not in caplog.text
    write(tmp_path / "val/notes.md", "not a document")
    write(tmp_path / "val/more/b.txt", "in a subfolder")
    assert load(tmp_path, "val") == ["first"]
    assert "has 2 files or folders that are not read, such as more" in caplog.text


def test_text_without_its_folder_raises_with_the_config_key(tmp_path):
    with pytest.raises(ValueError, match="data.directory"):
        load(None)
    with pytest.raises(FileNotFoundError, match=r"nowhere \(data.directory\)"):
        load(tmp_path / "nowhere")


@needs_shakespeare
def test_shakespeare_has_the_published_numbers_of_characters():
    """nanoGPT, data/shakespeare_char/prepare.py: 1,003,854 and 111,540."""
    train, val = (load(SHAKESPEARE, split, "shakespeare") for split in ("train", "val"))
    assert [len(train), len(val)] == [1, 1]
    assert [len(train[0]), len(val[0])] == [1_003_854, 111_540]
    assert train[0] + val[0] == (SHAKESPEARE / "input.txt").read_text()
    assert len(set(train[0])) == 65  # likewise


@needs_shakespeare
def test_a_share_of_shakespeares_last_tenth_is_the_test_split():
    (whole,) = load(SHAKESPEARE, "val", "shakespeare")
    splits = ("val", "test")
    parts = [load(SHAKESPEARE, s, "shakespeare", test_share=0.25)[0] for s in splits]
    assert "".join(parts) == whole
    assert len(parts[1]) == round(0.25 * len(whole))
    with pytest.raises(ValueError, match="data.test_share=0.0"):
        load(SHAKESPEARE, "test", "shakespeare")


def test_another_file_than_shakespeares_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="data.directory.*input.txt"):
        load(tmp_path, "train", "shakespeare")
    write(tmp_path / "input.txt", "To be")
    with pytest.raises(ValueError, match="input.txt .*SHA-256"):
        load(tmp_path, "train", "shakespeare")
    with pytest.raises(ValueError, match="'test'.* train and val"):
        load(tmp_path, "test", "shakespeare")


def test_shakespeare_without_a_network_raises_with_url_and_key(tmp_path, monkeypatch):
    def unreachable(url, timeout):
        raise urllib.error.URLError("no route")

    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    with pytest.raises(FileNotFoundError, match="github.com.*no route.*data.directory"):
        load(None, "train", "shakespeare")


def test_a_wrong_download_of_shakespeare_is_removed(tmp_path, monkeypatch):
    """Such as a login page: otherwise every later attempt would find it again."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    path = tmp_path / "downloads/tinyshakespeare/input.txt"
    write(path, "<html>")
    with pytest.raises(ValueError, match=f"{path} .*SHA-256"):
        load(None, "train", "shakespeare")
    assert not path.exists()


@pytest.mark.parametrize("name", ["recall", "stories", "lm1b"])
def test_a_folder_for_a_corpus_without_files_raises_with_the_key(tmp_path, name):
    with pytest.raises(ValueError, match=f"data.directory .*{name} reads no files"):
        load(tmp_path, name=name, max_length=32, vocab_size=64)


def test_a_corpus_of_ones_own_gets_the_folder(tmp_path, monkeypatch):
    own = {"mine": lambda data, split: [f"{split} in {data.directory}"]}
    monkeypatch.setattr(documents, "LOADERS", documents.LOADERS | own)
    assert load(tmp_path, "val", "mine") == [f"val in {tmp_path}"]


def test_recall_is_made_for_the_sizes_of_the_config():
    texts = load(None, "val", "recall", max_length=16, vocab_size=44)
    assert texts == recall.documents("val", 16, 44)


class Rows(list):
    """Rows for TFDS's mocking, with the batched access of a real data source."""

    def __getitems__(self, keys):
        return [self[key] for key in keys]


def test_the_field_text_of_a_tfds_set_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    rows = Rows({"text": f"é {i}".encode(), "label": i % 2} for i in range(5))
    with tfds.testing.mock_data(as_data_source_fn=lambda builder, split, **_: rows):
        found = load(None, "train", "imdb_reviews")
    assert found == [f"é {i}" for i in range(5)]


class TinyText(tfds.core.GeneratorBasedBuilder):
    """A data set with train and test alone, like imdb_reviews and lm1b."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
        )

    def _split_generators(self, dl_manager):
        sizes = {"train": 41, "test": 3}
        return {
            split: self._generate_examples(split, size) for split, size in sizes.items()
        }

    def _generate_examples(self, split, size):
        for i in range(size):
            yield i, {"text": f"{split} {i}"}


def test_val_is_the_end_of_train_in_a_tfds_set_without_a_validation_split(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    train, val, test = (
        load(None, split, "tiny_text") for split in ("train", "val", "test")
    )
    assert sorted(train + val) == sorted(f"train {i}" for i in range(41))
    assert load(None, "train[:41]", "tiny_text") == train + val
    assert len(val) == 2 and sorted(test) == [f"test {i}" for i in range(3)]


def test_a_tfds_set_without_text_raises_with_its_fields(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="mnist .*image, label"):
        load(None, "train", "mnist")
    with pytest.raises(ValueError, match="'shakespear'"):
        load(None, "train", "shakespear")
