"""One vocabulary of both languages; `make test` learns with two."""

from tests.runs import arguments, read, succeed, training, write_corpus
from tests.scripts.test_train_script import MEMORIZING, TEN_PAIRS


def test_ten_pairs_are_learnt_by_heart_with_one_vocabulary(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", TEN_PAIRS, TEN_PAIRS.values())
    succeed(training(tmp_path / "run", **corpus | MEMORIZING))
    succeed(arguments("eval.py", workdir=tmp_path / "run", split="val"))
    (row,) = read(tmp_path / "run", "result-val.json")
    assert row["bleu"] > 95
