"""TFDS builders of our corpora, for `tfds.data_source`; they need no TensorFlow."""

import dataclasses
import itertools

import num2words
import tensorflow_datasets as tfds

from headcount.data import multi30k, numbers


def _info(builder, languages, description: str, **more) -> tfds.core.DatasetInfo:
    # Not self.create_dataset_info: it reads metadata files beside the class.
    return tfds.core.DatasetInfo(
        builder=builder,
        description=description,
        features=tfds.features.Translation(languages=sorted(languages)),
        **more,
    )


@dataclasses.dataclass
class Languages(tfds.core.BuilderConfig):
    """Two languages of num2words, sorted: both directions share what is prepared."""

    languages: tuple[str, str] = ("de", "en")

    @classmethod
    def of(cls, *languages: str) -> "Languages":
        languages = tuple(sorted(languages))
        return cls(name="_".join(languages), languages=languages)


class Numbers(tfds.core.GeneratorBasedBuilder):
    """Numbers in words; see data/numbers.py. A config a pair of languages: de_en."""

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

    Downloads the official files, or reads them from `manual_dir` of the DownloadConfig
    where that folder exists; see data/multi30k.py.
    """

    VERSION = tfds.core.Version("2.0.0")  # 1.0.0 was shuffled
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Optional: raw/ of github.com/multi30k/dataset."

    def _info(self):
        description = "Multi30k, task 1, as published."
        # The tokenised references, which are not in it, go with it line by line.
        return _info(self, multi30k.LANGUAGES, description, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        try:
            directory = dl_manager.manual_dir
        except AssertionError:  # TFDS's way to say that there is no such folder
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
