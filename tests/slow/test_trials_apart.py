"""A group as train.py trains it, whose trials end apart."""

import json

from tests.runs import arguments, fails, logged, run, succeed, training


def test_trials_that_differ_stop_and_diverge(tmp_path):
    rates = 0.0, 1e30  # the first gets no better and is stopped early
    workdir, listed = tmp_path / "run", tmp_path / "listed.json"
    listed.write_text(json.dumps([{"optimizer.learning_rate": r} for r in rates]))
    overrides = {
        "seeds": 1,
        "train.eval_every_steps": 10,
        "train.best_metric": "loss",
        "train.patience": 1,
    }
    args = [*training(workdir, **overrides), f"--trials={listed}"]
    ran = succeed(args)
    assert "optimizer.learning_rate 1e+30" in ran.stderr
    found = logged(workdir)
    (stop,) = [row for row in found if "stopped_at" in row]
    assert (stop["trial"], stop["stopped_at"]) == (0, 20)
    (divergence,) = [row for row in found if "diverged_at" in row]
    at = divergence["diverged_at"]
    assert divergence["trial"] == 1 and 0 < divergence["step"] == at < 10
    trained = {(row["step"], row["trial"]) for row in found if "loss" in row}
    assert trained == {(n, 0) for n in range(1, 21)} | {(n, 1) for n in range(1, at)}
    evaluated = [(row["step"], row["trial"]) for row in found if "dev_loss" in row]
    assert evaluated == [(10, 0), (20, 0)]
    succeed(arguments("eval.py", workdir=workdir, split="val", beam_size=1))
    result = json.loads((workdir / "result-val.json").read_text())
    assert [row["step"] for row in result] == [10, 0]
    assert [row["diverged_at"] for row in result] == [None, at]
    fails(run(training(workdir, **overrides)), "trials[1]", "--workdir")
