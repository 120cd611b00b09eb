"""weights.py --to: tokenizers in the form of another library."""

import pytest

from headcount.data import tokenizers
from headcount.data.tokenizer_json import tokenizer_json

TEXTS = [
    "To be, or not to be:\nthat is  the question.\n\n“quoted” ﬁne",
    "a\tb  c ",
    " x",
    "forty-five thousand",
    "",
]


@pytest.mark.parametrize("kind", ["sentencepiece", "characters", "words", "bytes"])
def test_a_tokenizer_json_gives_the_same_ids_and_text(kind):
    from tokenizers import Tokenizer

    made = {
        "sentencepiece": lambda: tokenizers.SentencePieceTokenizer(
            tokenizers.train_sentencepiece(TEXTS * 3, 70)
        ),
        "characters": lambda: tokenizers.TableTokenizer(
            sorted(set("".join(TEXTS))), ""
        ),
        "words": lambda: tokenizers.TableTokenizer(
            sorted(set(" ".join(TEXTS).split())), " "
        ),
        "bytes": tokenizers.ByteTokenizer,
    }
    ours = made[kind]()
    theirs = Tokenizer.from_str(tokenizer_json(ours))
    for text in TEXTS:
        ids = ours.encode([text], eos=False)[0].tolist()
        assert theirs.encode(text).ids == ids
        assert theirs.decode(ids) == ours.decode(ids)
    assert ours.encode(["☃"], eos=False)[0].tolist() == theirs.encode("☃").ids
