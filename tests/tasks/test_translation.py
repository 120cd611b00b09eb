"""The log-probability of translations that are there: whose, and of which line."""

import os

import numpy as np
import pytest
from tests.test_trained import run_of

from headcount.analysis import lines, scoring
from headcount.data.packing import Sentences
from headcount.runtime.stdin import pairs_of
from headcount.training import run as trained
from tests import test_decoding


def test_a_translation_has_the_score_of_the_search(monkeypatch):
    """Of several lengths and batches, the last of them not full, and with a gate."""
    graph, params = test_decoding.make(layers=1)
    texts = test_decoding.sentences(3, 40, 9, 2)
    gates = {"decoder": np.array([[1, 1, 0, 1]], np.float32)}
    decode = test_decoding.jitted(graph, max_length=12, beam_size=4, n_best=3)
    out = decode(params, *test_decoding.batch(texts), None, None, gates)
    targets = test_decoding.trimmed(out.tokens.reshape(12, 12))
    sources = [text for text in texts for _ in range(3)]
    monkeypatch.setattr(scoring, "BATCH_TOKENS", 128)
    sides = Sentences.of(sources), Sentences.of(targets)
    found, tokens = scoring.log_probs(graph, params, gates, *sides)
    np.testing.assert_allclose(found, out.scores.ravel(), rtol=1e-4)
    assert tokens.tolist() == [len(target) for target in targets]


def test_sources_and_targets_are_read_by_their_own_vocabularies(monkeypatch):
    given = []

    def log_probs(graph, params, gates, *sides):
        given.extend(sides)
        return np.array([-1.5]), np.array([3])

    monkeypatch.setattr(trained, "log_probs", log_probs)
    assert run_of("text", "nowhere").score(["a"], ["b"]) == [(-1.5, 3)]
    assert given == [["source: a"], ["target: b"]]


def test_lines_longer_than_any_in_training_are_named(monkeypatch, capsys):
    """The vocabularies here write a text of n letters in 8 + n tokens."""
    run = run_of("text", "nowhere")
    run.config.data.max_length = 12
    monkeypatch.setattr(trained, "log_probs", lambda *_: np.ones((2, 3), int))
    given = ["a\tb", "aaaaa\tb", "a\tbbbbb"]
    monkeypatch.setattr(lines.data.lines, "lines_at_hand", lambda *_: [given])
    with open(os.devnull) as nothing:
        monkeypatch.setattr(lines.sys, "stdin", nothing)
        lines.score_lines(run, 0, 8)
    end = "has 13 tokens, more than the 12 of the longest in training: expect little"
    told = capsys.readouterr().err.splitlines()
    for line, start in zip(told, ("Line 2", "Line 3's target"), strict=True):
        assert line.startswith(f"{start} {end}")


@pytest.mark.parametrize("line, count", [("", 1), ("a", 1), ("a\tb\tc", 3)])
def test_a_line_that_is_no_pair_is_named(line, count):
    assert pairs_of(["a\tb", "c\t"]) == (["a", "c"], ["b", ""])
    message = f"Line 8 of the input has {count} tab-separated fields instead of 2"
    with pytest.raises(ValueError, match=message):
        pairs_of(["a\tb", line], first=6)
