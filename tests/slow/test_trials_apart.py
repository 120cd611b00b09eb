"""A group as train.py trains it, whose trials end apart."""

import json

from tests.test_train import command, refused, rows, run, train_command


def test_trials_that_differ_stop_and_diverge(tmp_path):
    rates = 0.0, 1e30  # the first gets no better and is stopped early
    workdir, listed = tmp_path / "run", tmp_path / "listed.json"
    listed.write_text(json.dumps([{"optimizer.learning_rate": r} for r in rates]))
    overrides = {
        "seeds": 1,
        "train.eval_every_steps": 10,
        "train.best_metric": "dev_loss",
        "train.patience": 1,
    }
    args = train_command(workdir, **overrides)
    ran = run([*args, f"--trials={listed}"])
    assert ran.returncode == 0, ran.stderr
    assert "trial 0 (seed 0, optimizer.learning_rate 0) has had no better" in ran.stderr
    assert "trial 1 (seed 0, optimizer.learning_rate 1e+30) diverged" in ran.stderr
    assert "no trial is left" in ran.stderr
    found = rows(workdir)
    (stop,) = [row for row in found if "stopped_at" in row]
    assert (stop["trial"], stop["stopped_at"]) == (0, 20)
    (divergence,) = [row for row in found if "diverged_at" in row]
    at = divergence["diverged_at"]
    assert divergence["trial"] == 1 and 0 < divergence["step"] == at < 10
    logged = {(row["step"], row["trial"]) for row in found if "loss" in row}
    assert logged == {(n, 0) for n in range(1, 21)} | {(n, 1) for n in range(1, at)}
    evaluated = [(row["step"], row["trial"]) for row in found if "dev_loss" in row]
    assert evaluated == [(10, 0), (20, 0)]
    ran = run(command("eval.py", workdir=workdir, split="val", beam_size=1))
    assert ran.returncode == 0, ran.stderr
    result = json.loads((workdir / "result-val.json").read_text())
    assert [row["step"] for row in result] == [10, 0]
    assert [row["diverged_at"] for row in result] == [None, at]
    refused(run(args), "trials[1]", "choose another --workdir")
