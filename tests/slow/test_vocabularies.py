"""One vocabulary of both languages; `make test` learns with two."""

import json

from tests.test_train import (
    BY_HEART,
    TEN_PAIRS,
    command,
    run,
    train_command,
    write_corpus,
)


def test_ten_pairs_are_learnt_by_heart_with_one_vocabulary(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", TEN_PAIRS, TEN_PAIRS.values())
    ran = run(train_command(tmp_path / "run", **corpus | BY_HEART))
    assert ran.returncode == 0, ran.stderr
    ran = run(command("eval.py", workdir=tmp_path / "run", split="val"))
    assert ran.returncode == 0, ran.stderr
    (row,) = json.loads((tmp_path / "run" / "result-val.json").read_text())
    assert row["bleu"] > 95
