"""heads.py: the tables, files and pictures of every verb."""

import json
import statistics

import jax
import numpy as np
import pytest
from flax import nnx

from headcount.analysis import plots
from headcount.analysis.heads import describe, importance
from headcount.analysis.pruning import ORDERS, counts
from headcount.tasks.heldout_loss import heldout_loss
from headcount.training.run import load
from tests.runs import fails, read, write_corpus

LAST = {"checkpoint": "last", "beam_size": 1}


@pytest.mark.parametrize(
    "verb, measure, columns",
    [
        ("describe", describe, ("entropy", "sink", "share")),
        pytest.param(
            *("importance", importance, ("importance", "added_loss", "alone")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_heads_of_one_trial_are_measured(trained, call, verb, measure, columns):
    ran = call("heads.py", verb, workdir=trained, checkpoint="last", trial=1)
    assert ran.returncode == 0, ran.stderr
    rows = read(trained, f"heads-{verb}-val-trial_1-last.json")
    assert {row["trial"] for row in rows} == {1}
    run = load(trained, "last")
    wanted = measure(run, run.task.load("val"), 1)
    for name in columns:
        ours, theirs = ([row[name] for row in found] for found in (rows, wanted))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    first, form = columns[0], ".2f" if verb == "describe" else ".4f"
    for site in ("encoder", "decoder", "cross"):
        assert f"{site}, trial 1, val" in ran.stdout
        values = [row[first] for row in rows if row["site"] == site]
        assert values and all(f" {value:{form}} " in ran.stdout for value in values)


@pytest.mark.slow
@pytest.mark.parametrize("given, trials", [({}, [0]), ({"trial": 1}, [1])])
def test_diverged_trials_are_left_out_unless_named(
    workdir, call, monkeypatch, given, trials
):
    def load_diverged(*of):
        return load(*of)._replace(diverged_at=[None, 7])

    from tests.conftest import load_script

    monkeypatch.setattr(load_script("heads.py")[0], "load", load_diverged)
    for verb, key in (("describe", "entropy"), ("prune", "loss")):
        options = {"checkpoint": "last"} if verb == "describe" else LAST
        ran = call("heads.py", verb, workdir=workdir, **options, **given)
        assert ran.returncode == 0, ran.stderr
        of_trial = "-trial_1" if given else ""
        rows = read(workdir, f"heads-{verb}-val{of_trial}-last.json")
        assert sorted({row["trial"] for row in rows}) == trials
        assert all(row[key] is not None for row in rows)
    assert {row["diverged_at"] for row in rows} == {7 if trials == [1] else None}


def test_rows_that_can_not_be_written_fail_before_measuring(workdir, call, monkeypatch):
    from tests.conftest import load_script

    (workdir / "heads-describe-val.json").mkdir()
    monkeypatch.setitem(load_script("heads.py")[0].VERBS, "describe", None)
    ran = call("heads.py", "describe", workdir=workdir)
    fails(ran, f"--workdir={workdir}", "heads-describe-val.json")


def test_attention_is_drawn_of_the_example_and_the_site(
    trained, call, tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr(plots, "plot_maps", lambda *given: drawn.append(given))
    options = {"workdir": trained, "checkpoint": "last", "beam_size": 1, "trial": 1}
    path = tmp_path / "val.pdf"
    ran = call("heads.py", "plot", **options, site="decoder", example=3, output=path)
    assert ran.returncode == 0, ran.stderr
    ((maps, queries, keys, axes, where),) = drawn
    run = load(trained, "last")
    source = run.task.read("val")["source"][3]
    (line,) = run.task.translate(run, [source], 1, beam_size=1)
    shown = "".join(queries[:-1]).replace("▁", " ").strip()
    assert (shown, axes, where) == (line, ("target", "decoder input"), path)
    assert keys == ["<s>", *queries[:-1]]
    assert maps.shape[2:] == (len(queries), len(keys))


def test_a_picture_is_written_in_the_format_of_its_suffix(trained, call, tmp_path):
    path = tmp_path / "cross.png"
    options = {"workdir": trained, "checkpoint": "last", "beam_size": 1, "trial": 1}
    ran = call("heads.py", "plot", **options, output=path)
    assert ran.returncode == 0, ran.stderr
    assert path.read_bytes().startswith(b"\x89PNG") and str(path) in ran.stdout


def test_an_example_that_is_not_there(trained, call, tmp_path):
    options = {"output": tmp_path / "p.png", "example": 10**6}
    ran = call("heads.py", "plot", workdir=trained, **options)
    fails(ran, "--example=1000000", "199")


@pytest.mark.slow
def test_heads_are_pruned_in_every_order_the_least_important_first(trained, call):
    ran = call("heads.py", "prune", workdir=trained, **LAST)
    assert ran.returncode == 0, ran.stderr
    assert (trained / "heads-prune-val-last.png").read_bytes().startswith(b"\x89PNG")
    found = read(trained, "heads-prune-val-last.json")
    assert call("eval.py", workdir=trained, split="val", **LAST).returncode == 0
    whole = read(trained, "result-val.json")
    run = load(trained, "last")
    dev = run.task.load("val")
    for trial, result in enumerate(whole):
        measured = importance(run, dev, trial)
        norms = {}
        for row in measured:
            norms.setdefault((row["site"], row["layer"]), []).append(row["importance"])
        for row in measured:
            norm = np.linalg.norm(norms[row["site"], row["layer"]])
            row["normalized_importance"] = row["importance"] / norm
        random = [r for r in found if (r["trial"], r["order"]) == (trial, "random")]
        drawn = {r["draw"]: tuple(r["removed_heads"]) for r in random}
        assert len(set(drawn.values())) == len(drawn) == 3
        for order in ORDERS:
            whose = (trial, order, 0)
            rows = [r for r in found if (r["trial"], r["order"], r["draw"]) == whose]
            assert [row["removed"] for row in rows] == counts(len(measured))
            everything = rows[-1]["removed_heads"]
            for row in rows:
                assert row["removed_heads"] == everything[: row["removed"]]
                assert row["ranked_on"] == "val" and row["heads"] == len(measured)
            if order != "random":
                values = {f"{r['site']}.{r['layer']}.{r['head']}": r for r in measured}
                falls = -np.diff([values[name][order] for name in everything])
                assert falls.max() < 1e-6
            first, middle = rows[0], rows[3]
            for name in ("bleu", "chrf", "exact_match", "signatures", "options"):
                assert first[name] == result[name]
            assert first["loss"] == pytest.approx(result["loss"], rel=1e-6)
            gates = nnx.merge(run.graph, run.of(trial)[0]).head_gates()
            gates = jax.tree.map(lambda x: np.stack([x, x]), gates)
            for name in middle["removed_heads"]:
                site, layer, head = name.split(".")
                gates[site][trial, int(layer), int(head)] = 0
            pruned = run._replace(head_gates=gates)
            loss = heldout_loss(pruned, run.task.evaluation_batches(dev))[trial]
            assert middle["loss"] == pytest.approx(loss, rel=1e-5)
    means = [
        statistics.mean(r["loss"] for r in found if (r["removed"], r["order"]) == at)
        for at in ((0, "random"), (counts(len(measured))[3], "added_loss"))
    ]
    assert "mean of 2 trials, val" in ran.stdout
    assert all(f" {mean:.4f} ± " in ran.stdout for mean in means)


@pytest.mark.slow
def test_heads_of_one_site_are_pruned(trained, call):
    before = {
        path: path.read_bytes() for path in trained.glob("heads-prune-val-last.*")
    }
    options = {"workdir": trained, "trial": 1, "site": "decoder"}
    ran = call("heads.py", "prune", **options, **LAST)
    assert ran.returncode == 0, ran.stderr
    assert "decoder heads removed, trial 1, val" in ran.stdout
    assert (trained / "heads-prune-val-decoder-trial_1-last.png").exists()
    assert before == {path: path.read_bytes() for path in before}
    found = read(trained, "heads-prune-val-decoder-trial_1-last.json")
    run = load(trained, "last")
    gates = nnx.merge(run.graph, run.of(1)[0]).head_gates()["decoder"]
    every = {f"decoder.{layer}.{head}" for layer, head in np.ndindex(gates.shape)}
    for order in ORDERS:
        rows = [r for r in found if (r["order"], r["draw"]) == (order, 0)]
        assert [row["removed"] for row in rows] == counts(len(every))
        for row in rows:
            names = row["removed_heads"]
            assert len(names) == row["removed"] and row["heads"] == len(every)
            assert set(names) <= every and row["site"] == "decoder"


def test_pruning_needs_val_and_says_so_before_it_decodes(workdir, call, tmp_path):
    """Heads are ranked on it."""
    folder = tmp_path / "corpus"
    write_corpus(folder, ["one"], ["eins"])
    for language in ("en", "de"):
        (folder / f"train.{language}").rename(folder / f"test.{language}")
        (folder / f"val.{language}").unlink(missing_ok=True)
    config = read(workdir, "config.json")
    config["data"] |= {"name": "text", "directory": str(folder)}
    (workdir / "config.json").write_text(json.dumps(config))
    ran = call("heads.py", "prune", workdir=workdir, split="test", beam_size=1)
    fails(ran, "val.en", folder)
    assert not list(workdir.glob("heads-prune*"))
