"""Parallel corpora by name: sentences of both sides, and errors that name files."""

import functools
import gzip
import http.server
import pathlib
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow_datasets as tfds

from headcount.data import multi30k, numbers, pairs, tokenizers
from headcount.data.batches import PackedBatches
from tests.marks import slow_but

ROOT = pathlib.Path(__file__).resolve().parents[2]
MULTI30K = ROOT.parent / "shared" / "data" / "multi30k"

needs_multi30k = pytest.mark.skipif(
    not MULTI30K.is_dir(), reason="no ../shared/data/multi30k (never committed)"
)


@pytest.fixture(autouse=True)
def prepared_data(tmp_path, monkeypatch):
    """Prepare each test's data sets in its own folder."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))


@pytest.fixture
def few_numbers(monkeypatch):
    """Make the corpus of numbers small."""
    monkeypatch.setattr(numbers, "SIZES", {"train": 130, "val": 10, "test": 20})
    numbers.numbers.cache_clear()
    yield
    numbers.numbers.cache_clear()


class TinyTranslate(tfds.core.GeneratorBasedBuilder):
    """A data set like those of TFDS's catalogue."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.Translation(languages=["en", "de"])
        )

    def _split_generators(self, dl_manager):
        return {
            "train": self._generate_examples(5),
            "validation": self._generate_examples(2),
        }

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"en": f"café {i}", "de": f"Größe {i}"}


def test_files_without_sentences_are_named_by_their_folder(tmp_path):
    for name in ("val.en", "val.de"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"'val' of text in {tmp_path} has no"):
        pairs.load("text", "en", "de", "val", str(tmp_path))


def test_no_number_is_in_two_splits():
    splits = numbers.numbers()
    assert {name: len(values) for name, values in splits.items()} == numbers.SIZES
    together = np.concatenate(list(splits.values()))
    assert len(set(together)) == len(together)
    assert together.min() == 0 and together.max() < numbers.LIMIT
    assert set(range(100)) <= set(splits["train"])


def test_numbers_splits_are_the_same_in_every_language(few_numbers):
    load = functools.partial(pairs.load, "numbers")
    expected = {
        language: numbers.phrases(numbers.numbers()["test"], language)
        for language in ("en", "de", "fr")
    }
    for source, target in (("en", "de"), ("de", "en"), ("fr", "en")):
        found = zip(*load(source, target, "test"), strict=True)
        both = zip(expected[source], expected[target], strict=True)
        assert sorted(found) == sorted(both)
    train, _ = load("en", "de", "train")
    assert not set(train) & set(expected["en"])


def test_german_numbers_say_ones_before_tens():
    assert numbers.phrases([45], "de") == ["fünfundvierzig"]
    assert numbers.phrases([45], "en") == ["forty-five"]
    assert numbers.phrases([45], "fr") == ["quarante-cinq"]


def test_two_processes_can_prepare_numbers_at_once():
    code = (
        "from headcount.data import pairs, numbers\n"
        "numbers.SIZES = dict(train=130, val=10, test=20)\n"
        "print(pairs.load('numbers', 'en', 'de', 'val'))"
    )
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1] and outputs[0].count("thousand") > 1


def test_an_unknown_language_of_numbers_raises():
    with pytest.raises(ValueError, match="numbers has no language 'xx'"):
        pairs.load("numbers", "en", "xx", "train")


def test_a_language_that_num2words_fails_at_raises():
    with pytest.raises(ValueError, match="can't write numbers in the language 'am'"):
        pairs.load("numbers", "en", "am", "train")


def test_equal_source_and_target_languages_raise():
    with pytest.raises(ValueError, match="are both 'en'"):
        pairs.load("numbers", "en", "en", "train")


@needs_multi30k
@pytest.mark.parametrize("split", multi30k.SPLITS)
def test_multi30k_from_a_folder_has_the_published_sizes(split):
    published = {  # sentences, from the README of github.com/multi30k/dataset
        "train": 29_000,
        "val": 1_014,
        "test_2016_flickr": 1_000,
        "test_2017_flickr": 1_000,
        "test_2017_mscoco": 461,
    }
    for source, target in (("en", "de"), ("fr", "en")):
        texts = pairs.load("multi30k", source, target, split, MULTI30K)
        assert [len(text) for text in texts] == [published[split]] * 2
    raw_folder = pairs.load("multi30k", source, target, split, MULTI30K / "raw")
    assert raw_folder == texts
    references = multi30k.tokenized("en", split, MULTI30K)
    assert len(references) == published[split]
    letters = [re.sub(r"\W", "", text.lower()) for text in texts[1]]
    same = [a == re.sub(r"\W", "", b) for a, b in zip(letters, references, strict=True)]
    assert np.mean(same) > 0.95  # the publisher normalised the others' punctuation


@needs_multi30k
@pytest.mark.parametrize(
    ("source", "target"), slow_but([("en", "de")], [("en", "de"), ("de", "fr")])
)
def test_multi30k_fills_its_batches_to_95_percent(source, target):
    texts = pairs.load("multi30k", source, target, "train", MULTI30K)
    model = tokenizers.SentencePieceTokenizer(
        tokenizers.train_sentencepiece(texts[0] + texts[1], 10_000)
    )
    fields = {
        side: model.encode(text)
        for side, text in zip(("source", "target"), texts, strict=True)
    }
    for batch_tokens in (4096, 8192):
        batches = PackedBatches(fields, batch_tokens=batch_tokens, seeds=[1])
        for side in ("source", "target"):
            steps = range(int(batches.steps_per_epoch))
            share = [(batches[i][f"{side}_segments"] > 0).mean() for i in steps]
            assert np.mean(share) >= 0.95 and min(share[0], share[-1]) >= 0.94


@needs_multi30k
def test_a_changed_multi30k_file_raises_with_its_name(tmp_path):
    content = gzip.decompress((MULTI30K / "raw" / "val.de.gz").read_bytes())
    (tmp_path / "val.de").write_bytes(content.replace(b"Hund", b"Hund ", 1))
    with pytest.raises(ValueError, match=r"val\.de is not the official Multi30k file"):
        multi30k.sentences("de", "val", tmp_path)
    (tmp_path / "val.de").write_bytes(content)
    expected = multi30k.sentences("de", "val", MULTI30K)
    assert multi30k.sentences("de", "val", tmp_path) == expected


@needs_multi30k
def test_a_truncated_multi30k_file_raises_with_its_name(tmp_path):
    content = (MULTI30K / "raw" / "val.fr.gz").read_bytes()
    (tmp_path / "val.fr.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"val\.fr\.gz .*; fetch it again"):
        multi30k.sentences("fr", "val", tmp_path)


def test_a_missing_multi30k_folder_or_file_raises_with_its_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere \(data.directory\)"):
        pairs.load("multi30k", "en", "de", "train", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds no raw/train\.en\.gz"):
        pairs.load("multi30k", "en", "de", "train", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no tok/val\.lc\.norm\.tok\.de"):
        multi30k.tokenized("de", "val", tmp_path)


def test_an_unknown_language_or_split_of_multi30k_raises():
    with pytest.raises(ValueError, match="no language 'cs'; it has en, de, fr"):
        pairs.load("multi30k", "en", "cs", "train")
    with pytest.raises(
        ValueError, match="no split 'test'; it has train, val, test_2016"
    ):
        pairs.load("multi30k", "en", "de", "test")


def test_no_network_raises_with_url_and_config_key(monkeypatch):
    monkeypatch.setattr(multi30k, "URL", "http://127.0.0.1:9")  # refuses at once
    for attempt in (
        lambda: pairs.load("multi30k", "en", "de", "train"),
        lambda: multi30k.tokenized("de", "val"),
    ):
        with pytest.raises(FileNotFoundError, match="127.0.0.1:9/.*data.directory"):
            attempt()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def publisher(tmp_path, monkeypatch):
    """Serve one split of what github.com/multi30k/dataset publishes."""
    folder = tmp_path / "published"
    for kind in ("raw", "tok"):
        (folder / kind).mkdir(parents=True)
        for path in (MULTI30K / kind).glob("val.*"):
            content = path.read_bytes()
            if kind == "raw":
                (folder / kind / path.name).write_bytes(content)
            else:
                (folder / kind / path.stem).write_bytes(gzip.decompress(content))
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=folder)
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(multi30k, "URL", f"http://127.0.0.1:{server.server_port}")
    yield folder
    server.shutdown()
    thread.join()
    server.server_close()


@needs_multi30k
def test_multi30k_downloaded_equals_the_folder(publisher):
    load = functools.partial(pairs.load, "multi30k", "en", "fr", "val")
    assert load() == load(MULTI30K)  # also in the order, which the references have
    tokenized = functools.partial(multi30k.tokenized, "fr", "val")
    assert tokenized() == tokenized(MULTI30K)


@needs_multi30k
def test_a_damaged_download_is_fetched_again(publisher):
    good = (publisher / "raw" / "val.en.gz").read_bytes()
    fetch = functools.partial(multi30k.sentences, "en", "val")
    (publisher / "raw" / "val.en.gz").write_bytes(good[:-100])
    with pytest.raises(ValueError, match=r"val\.en\.gz"):
        fetch()
    (publisher / "raw" / "val.en.gz").write_bytes(good)
    assert fetch() == fetch(MULTI30K)


class Rows(list):
    """Rows for TFDS's mocking, with the batched access of a real data source."""

    def __getitems__(self, keys):
        return [self[key] for key in keys]


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("ted_hrlr_translate/pt_to_en", "pt", "en"),
        ("wmt14_translate/de-en", "en", "de"),
    ],
)
def test_tfds_catalogue_loads_by_name(name, source, target):
    expected = (
        [f"{source} é {i}" for i in range(7)],
        [f"{target} {i}" for i in range(7)],
    )

    def rows(builder, split, **kwargs):
        assert f"{builder.info.full_name}".startswith(name) and split == "train"
        return Rows(
            {source: s.encode(), target: t.encode()}
            for s, t in zip(*expected, strict=True)
        )

    with tfds.testing.mock_data(as_data_source_fn=rows):
        texts = pairs.load(name, source, target, "train")
        assert texts == expected
        with pytest.raises(ValueError, match=f"{name}.*'xx'"):
            pairs.load(name, source, "xx", "train")


def test_a_tfds_set_is_prepared_and_its_splits_loaded():
    load = functools.partial(pairs.load, "tiny_translate")
    found = sorted(zip(*load("de", "en", "train"), strict=True))
    assert found == [(f"Größe {i}", f"café {i}") for i in range(5)]
    assert len(load("en", "de", "val")[0]) == 2  # TFDS calls it validation
    assert len(load("en", "de", "train[:3]")[0]) == 3
    with pytest.raises(ValueError, match="'fr'.*de, en"):
        load("en", "fr", "train")
    with pytest.raises(ValueError, match="'test'; --split .* train, validation"):
        load("en", "de", "test")


@pytest.mark.parametrize("name", ["numbers", "tiny_translate"])
def test_data_directory_raises_for_corpora_that_ignore_it(name, tmp_path):
    with pytest.raises(ValueError, match=f"data.directory .*{name}.*TFDS_DATA_DIR"):
        pairs.load(name, "en", "de", "train", tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_unknown_corpus_raises():
    with pytest.raises(ValueError, match="'multi3k'"):
        pairs.load("multi3k", "en", "de", "train")
    with pytest.raises(NotImplementedError, match="mnist"):
        pairs.load("mnist", "en", "de", "train")


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (ConnectionError("no route"), FileNotFoundError, "tiny_translate.*no route"),
        (
            ModuleNotFoundError(name="beam"),
            NotImplementedError,
            "tiny_translate.* beam",
        ),
    ],
)
def test_a_failed_tfds_preparation_raises_with_the_reason(
    failure, error, message, monkeypatch
):
    def fail(*args, **kwargs):
        raise failure

    monkeypatch.setattr(TinyTranslate, "download_and_prepare", fail)
    with pytest.raises(error, match=message):
        pairs.load("tiny_translate", "en", "de", "train")


def test_an_unwritable_folder_of_prepared_data_raises(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "file"))
    with pytest.raises(OSError, match="file .*TFDS_DATA_DIR"):
        pairs.load("tiny_translate", "en", "de", "train")


def write(path: pathlib.Path, text: str):
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def load_text(folder, split="train"):
    return pairs.load("text", "en", "de", split, folder)


def test_line_aligned_files_keep_unusual_separators(tmp_path):
    # A line separator inside a sentence, a Windows line end, no newline at the end.
    write(tmp_path / "train.en", "one\r\ntwo\u2028more\n\nfour")
    write(tmp_path / "train.de.gz", "eins\nzwei\ndrei\nvier\n")
    assert load_text(tmp_path) == (
        ["one", "two\u2028more", "", "four"],
        ["eins", "zwei", "drei", "vier"],
    )


@pytest.mark.parametrize("name", ["val.tsv", "val.tsv.gz"])
def test_a_tsv_table_gives_both_sides(tmp_path, name):
    write(tmp_path / name, "one\teins\ntwo\tzwei\n")
    assert load_text(tmp_path, "val") == (["one", "two"], ["eins", "zwei"])


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        (
            {},
            FileNotFoundError,
            r"holds neither train\.en and train\.de nor train\.tsv",
        ),
        ({"train.en": "a\n"}, FileNotFoundError, r"neither train\.en and train\.de"),
        (
            {"train.en": "a\nb\n", "train.de": "a\n"},
            ValueError,
            r"train\.en has 2 lines but .*train\.de has 1 lines",
        ),
        ({"train.en": "", "train.de": ""}, ValueError, "'train' of text"),
        ({"train.tsv": "a\tb\nc d\n"}, ValueError, r"train\.tsv, line 2, has 1 tab"),
        (
            {"train.tsv": "a\tb\n\nc\td\n"},
            ValueError,
            r"line 2, is empty; fix or remove it",
        ),
        ({"train.tsv": "a\tb\tc\n"}, ValueError, r"train\.tsv, line 1, has 3 tab"),
    ],
)
def test_malformed_text_files_raise_with_file_and_line(tmp_path, files, error, message):
    for name, text in files.items():
        write(tmp_path / name, text)
    with pytest.raises(error, match=message):
        load_text(tmp_path)


def test_text_without_its_folder_raises_with_the_key(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere .*data.directory"):
        load_text(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="needs data.directory.*--directory"):
        load_text(None)
