"""Scores on dev while a run trains: of which trial they are, and which is the best."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from headcount.analysis import evaluation
from headcount.analysis.evaluation import Dev, dev_scores, evaluate


def test_every_trial_is_scored_by_its_own_translations(monkeypatch):
    """From the source's vocabulary, in the words of the target's."""
    given = []

    def losses(graph, params, gates, source, target, batch_tokens):
        given.append((source, target))
        return np.array([1.0, 2.0])

    def translations(graph, params, gates, sources, trials):
        given.append(sources)
        return {0: ["A B"], 1: ["C D"]}

    monkeypatch.setattr(evaluation, "losses", losses)
    monkeypatch.setattr(evaluation, "translations", translations)
    source, target = (
        SimpleNamespace(
            encode=lambda lines, number=number: [np.array([number])],
            decode_many=lambda texts, f=f: [f(text) for text in texts],
        )
        for number, f in ((3, str.upper), (4, str.lower))
    )
    dev = Dev(["x"], ["c d"], (source, target), 64)
    found = dev_scores(None, None, {}, dev, [0, 1], chrf=False)
    assert given == [([3], [4]), [[3]]]
    assert [found[trial]["dev_exact_match"] for trial in (0, 1)] == [0, 1]
    assert [found[trial]["dev_loss"] for trial in (0, 1)] == [1, 2]
    assert "dev_chrf" not in found[0]
    found = dev_scores(None, None, {}, dev, [0, 1], chrf=True)
    assert found[1]["dev_chrf"] == pytest.approx(100) and found[0]["dev_chrf"] == 0


@pytest.mark.parametrize("metric, best", [("dev_bleu", 1), ("dev_loss", 2)])
def test_the_best_is_by_the_metric_that_is_asked_for(monkeypatch, metric, best):
    config = SimpleNamespace(train=SimpleNamespace(best_metric=metric))
    kept = {"params": {"w": jnp.zeros((1, 3))}, "score": np.array([-np.inf])}
    kept["step"] = np.zeros(1, np.int32)
    writer = SimpleNamespace(write=lambda *_, **__: None)
    for step, bleu, loss in ((1, 30.0, 2.0), (2, 20.0, 1.0)):
        row = {0: {"dev_bleu": bleu, "dev_loss": loss}}
        monkeypatch.setattr(evaluation, "dev_scores", lambda *_, row=row: row)
        state = SimpleNamespace(params={"w": jnp.full((1, 3), step)})
        frozen = np.zeros(1, bool)
        kept = evaluate(config, step, state, {}, kept, frozen, None, None, writer)
    assert kept["step"].tolist() == [best]
    assert (kept["params"]["w"] == best).all()
