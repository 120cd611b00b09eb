"""TensorFlow Datasets without TensorFlow: our data sets, and its catalogue."""

import contextlib
import dataclasses
import itertools
import sys
from pathlib import Path

import num2words
import tensorflow_datasets as tfds
import tensorflow_datasets.text
import tensorflow_datasets.translate  # noqa: F401  both register their data sets
from tensorflow_datasets.core.download import downloader

from headcount.data import multi30k, numbers
from headcount.data.cache import exclusively


def prepare(make_builder, data_dir: Path):
    """Return a TFDS builder, after preparing its files if necessary.

    If several processes need the same data set, one prepares it and the others wait.

    Raises:
        NotImplementedError: preparing the data set needs a package that is missing.
        FileNotFoundError: the data set can't be downloaded or written.
    """
    builder = make_builder()
    name = builder.info.full_name
    if builder.is_prepared():
        return builder
    # By default, TFDS retries ten times with growing pauses, which takes three minutes
    # without a network. There is no argument for this.
    downloader.MAX_RETRIES = 4
    tfds.disable_progress_bar()
    # TFDS prints to standard output, which is for predictions.
    with (
        exclusively(data_dir / f".{name.replace('/', '-')}.lock"),
        contextlib.redirect_stdout(sys.stderr),
    ):
        builder = make_builder()  # another process may have prepared it meanwhile
        config = tfds.download.DownloadConfig(try_download_gcs=False)
        try:
            builder.download_and_prepare(
                download_dir=data_dir / "downloads", download_config=config
            )
        except ImportError as error:
            raise NotImplementedError(
                f"TFDS can't prepare {name} here because it needs {error.name}; "
                "prepare "
                f"it elsewhere with file_format=array_record and copy it to {data_dir}."
            ) from error
        except (OSError, tfds.download.DownloadError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise FileNotFoundError(
                f"{name} can't be prepared in {data_dir}: {reason}"
            ) from error
    return builder


def rows(builder, split: str) -> list[dict]:
    """Return a split's rows; "val" also finds the split "validation".

    Raises:
        ValueError: there is no such split.
    """
    known = list(builder.info.splits)
    if split == "val" and split not in known and "validation" in known:
        split = "validation"
    if known and split.split("[")[0] not in known:
        raise ValueError(
            f"{builder.info.full_name} has no split {split!r}; it has "
            f"{', '.join(known)}."
        )
    source = builder.as_data_source(split)
    return source.__getitems__(range(len(source)))  # twice as fast as one by one


def from_catalogue(name: str, data_dir: Path):
    """Return the builder of a data set in TFDS's catalogue.

    Raises:
        ValueError: there is no such data set.
    """
    try:
        return tfds.builder(name, data_dir=data_dir, file_format="array_record")
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"There is no corpus {name!r}: neither one of Headcount's nor a TFDS data "
            f"set ({reason})."
        ) from error


def _info(builder, languages, description: str, **more) -> tfds.core.DatasetInfo:
    # not self.create_dataset_info, which reads metadata files next to the class
    return tfds.core.DatasetInfo(
        builder=builder,
        description=description,
        features=tfds.features.Translation(languages=sorted(languages)),
        **more,
    )


@dataclasses.dataclass
class Languages(tfds.core.BuilderConfig):
    """Two languages of num2words, sorted, so that both directions share files."""

    languages: tuple[str, str] = ("de", "en")

    @classmethod
    def of(cls, *languages: str) -> "Languages":
        """Return the config for two languages."""
        languages = tuple(sorted(languages))
        return cls(name="_".join(languages), languages=languages)


class Numbers(tfds.core.GeneratorBasedBuilder):
    """Numbers in words (data/numbers.py), one config per pair of languages: de_en."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [
        Languages.of(*pair)
        for pair in itertools.combinations(num2words.CONVERTER_CLASSES, 2)
    ]

    def _info(self):
        return _info(
            self, self.builder_config.languages, "Numbers below a million in words."
        )

    def _split_generators(self, dl_manager):
        return {
            split: self._generate_examples(values)
            for split, values in numbers.numbers().items()
        }

    def _generate_examples(self, values):
        languages = self.builder_config.languages
        phrases = [numbers.phrases(values, language) for language in languages]
        for value, *words in zip(values, *phrases, strict=True):
            yield int(value), dict(zip(languages, words, strict=True))


class Multi30k(tfds.core.GeneratorBasedBuilder):
    """Image captions in English, German and French, in the files' order.

    Reads the official files from `manual_dir` of the DownloadConfig if that folder
    exists, else downloads them; see data/multi30k.py.
    """

    VERSION = tfds.core.Version("2.0.0")  # 1.0.0 was shuffled
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Optional: raw/ of github.com/multi30k/dataset."

    def _info(self):
        description = "Multi30k, task 1, as published."
        # not shuffled, to match the tokenised references, which are separate files
        return _info(self, multi30k.LANGUAGES, description, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        try:
            directory = dl_manager.manual_dir
        except AssertionError:  # TFDS raises this if the folder does not exist
            directory = None
        cache = dl_manager.download_dir
        return {
            split: self._generate_examples(split, directory=directory, cache=cache)
            for split in multi30k.SPLITS
        }

    def _generate_examples(self, split, **where):
        texts = [multi30k.sentences(x, split, **where) for x in multi30k.LANGUAGES]
        for i, sentences in enumerate(zip(*texts, strict=True)):
            yield i, dict(zip(multi30k.LANGUAGES, sentences, strict=True))
