"""Numbers below one million in words, the embedded corpus: no download, real language.

The words come from num2words. Which numbers, and which of them are held out, follows
from SEED, so that every language pair has the same ones.
"""

import functools

import numpy as np

LIMIT = 1_000_000
SEED = 2017
SIZES = {"train": 12_000, "val": 500, "test": 1_000}


@functools.cache
def numbers() -> dict[str, np.ndarray]:
    """The numbers of each split, int64; no number is in two splits.

    Magnitudes are spread evenly (log-uniform), so that small numbers, which are few,
    are well represented. Those below 100 are all for training: their words are what
    the others are made of, and a word never seen cannot be translated.
    """
    rng = np.random.default_rng(SEED)
    small, total = 100, sum(SIZES.values())
    drawn = np.exp(rng.uniform(np.log(small), np.log(LIMIT), 4 * total)).astype(int)
    _, first = np.unique(drawn, return_index=True)
    drawn = drawn[np.sort(first)][: total - small]
    held_out = SIZES["val"] + SIZES["test"]
    return {
        "val": drawn[: SIZES["val"]],
        "test": drawn[SIZES["val"] : held_out],
        "train": np.concatenate([np.arange(small), drawn[held_out:]]),
    }


def check(language: str):
    """Raises ValueError for a language that num2words does not speak."""
    import num2words

    if language not in num2words.CONVERTER_CLASSES:
        raise ValueError(
            f"numbers has no language {language!r}; num2words speaks "
            f"{', '.join(sorted(num2words.CONVERTER_CLASSES))}"
        )


def phrases(values, language: str) -> list[str]:
    """Numbers in words: 45 is "forty-five" in "en", "fünfundvierzig" in "de".

    Raises ValueError for a language in which num2words can't say all of them.
    """
    import num2words

    check(language)
    words = []
    for value in values:
        try:
            words.append(num2words.num2words(int(value), lang=language))
        except Exception as error:  # as TypeError, for "am"
            raise ValueError(
                f"numbers can't be had in the language {language!r}: num2words fails "
                f"at {value}; choose another"
            ) from error
    return words
