"""TensorFlow Datasets without TensorFlow: number phrases, and its catalogue."""

import contextlib
import dataclasses
import itertools
import sys

import num2words
import tensorflow_datasets as tfds
import tensorflow_datasets.text
import tensorflow_datasets.translate  # noqa: F401  both register their data sets
from tensorflow_datasets.core.download import downloader

from headcount.data import numbers
from headcount.data.cache import exclusively, prepared_in


def prepare(make_builder):
    """Return a TFDS builder, after preparing its files if necessary.

    If several processes need the same data set, one prepares it and the others wait.

    Raises:
        NotImplementedError: preparing the data set needs a package that is missing.
        FileNotFoundError: the data set can't be downloaded or written.
    """
    builder, data_dir = make_builder(), prepared_in()
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
                f"prepare it elsewhere with file_format=array_record and copy it to "
                f"{data_dir}."
            ) from error
        except (OSError, tfds.download.DownloadError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise FileNotFoundError(
                f"{name} can't be prepared in {data_dir}: {reason}"
            ) from error
    return builder


def rows(builder, split: str) -> list[dict]:
    """Return a split's rows; "val" also finds the split "validation".

    If there is neither, the last 5% of the data set's "train" is "val", and the rest is
    "train".

    Raises:
        ValueError: there is no such split.
    """
    splits = list(builder.info.splits)
    if "val" not in splits and "validation" in splits:
        split = {"val": "validation"}.get(split, split)
    elif "val" not in splits and "train" in splits:
        split = {"train": "train[:95%]", "val": "train[95%:]"}.get(split, split)
    if splits and split.split("[")[0] not in splits:
        raise ValueError(
            f"{builder.info.full_name} has no split {split!r}; --split can be "
            f"{', '.join(splits)}."
        )
    source = builder.as_data_source(split)
    return source.__getitems__(range(len(source)))  # twice as fast as one by one


def from_catalogue(name: str):
    """Return the builder of a data set in TFDS's catalogue.

    Raises:
        ValueError: there is no such data set.
    """
    try:
        return tfds.builder(name, data_dir=prepared_in(), file_format="array_record")
    except (tfds.core.DatasetNotFoundError, ValueError, AssertionError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"There is no corpus {name!r}: neither one of Headcount's nor a TFDS data "
            f"set ({reason})."
        ) from error


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
        # not self.create_dataset_info, which reads metadata files next to the class
        languages = self.builder_config.languages
        return tfds.core.DatasetInfo(
            builder=self,
            description="Numbers below a million in words.",
            features=tfds.features.Translation(languages=languages),
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
