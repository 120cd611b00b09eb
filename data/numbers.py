"""Numbers below one million in words: a built-in corpus that needs no download.

The words come from num2words. SEED determines the numbers and their splits, so that
these are the same for every language pair.
"""

import functools

import numpy as np

LIMIT = 1_000_000
SEED = 2017
SIZES = {"train": 12_000, "val": 500, "test": 1_000}


@functools.cache
def numbers() -> dict[str, np.ndarray]:
    """Return the numbers of each split, int64; no number is in two splits.

    Magnitudes are log-uniform, so that small numbers are well represented. All numbers
    below 100 are in the training split, because larger ones consist of their words, and
    a model can't translate words that it has never seen.
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
    """Raise a ValueError for a language that num2words does not support."""
    import num2words

    if language not in num2words.CONVERTER_CLASSES:
        raise ValueError(
            f"numbers has no language {language!r}; num2words speaks "
            f"{', '.join(sorted(num2words.CONVERTER_CLASSES))}"
        )


def phrases(values, language: str) -> list[str]:
    """Write numbers in words: 45 is "forty-five" in "en", "fünfundvierzig" in "de".

    Raises:
        ValueError: num2words does not support the language, or fails for a number.
    """
    import num2words

    check(language)
    words = []
    for value in values:
        try:
            words.append(num2words.num2words(int(value), lang=language))
        except Exception as error:  # for example TypeError for "am"
            raise ValueError(
                f"num2words can't write numbers in the language {language!r}: it fails "
                f"at {value}; choose another"
            ) from error
    return words
