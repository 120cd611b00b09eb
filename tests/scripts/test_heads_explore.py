"""heads.py roles, explore and plot --input: files, texts of one's own, bad input."""

import base64
import json
import re
import zlib

import jax
import numpy as np
import pytest
from flax import nnx

from headcount.analysis import plots
from headcount.analysis.explorer import PLACE, TEMPLATE
from headcount.analysis.roles import first_sentences
from headcount.models.maps import attention_maps, single_example
from headcount.tasks.heldout_loss import heldout_loss
from headcount.tasks.translation import Translation
from headcount.training.run import load
from tests.runs import fails, logged, read, succeed, training

LAST = {"checkpoint": "last"}


@pytest.mark.slow
def test_roles_are_written_for_every_head_and_printed(trained, call):
    ran = call("heads.py", "roles", workdir=trained, examples=30, **LAST)
    assert ran.returncode == 0, ran.stderr
    rows = read(trained, "heads-roles-val-last.json")
    heads = {(r["trial"], r["site"], r["layer"], r["head"]) for r in rows}
    assert len(heads) == 2 * 3 * 2
    roles = {(r["site"], r["role"]) for r in rows}
    assert ("cross", "end (EOS)") in roles and ("decoder", "beginning (BOS)") in roles
    for row in rows:
        assert 0 <= row["weight"] <= 1 and row["p"] <= row["p_holm"]
        assert row["has_role"] == (row["p_holm"] <= 0.05)
    assert "previous token" in ran.stdout and "encoder, 2 trials, val" in ran.stdout


@pytest.mark.slow
def test_a_page_has_every_head_and_sentence_and_no_template_marks(
    trained, call, tmp_path, monkeypatch
):
    path = tmp_path / "explorer.html"
    monkeypatch.chdir(trained)
    options = {"workdir": ".", "output": path, "examples": 20, "sentences": 3}
    ran = call("heads.py", "explore", **options, **LAST)
    assert ran.returncode == 0, ran.stderr
    text = path.read_text()
    assert f"({len(text.encode()) / 1e3:,.0f} kB)" in ran.stdout
    assert PLACE in TEMPLATE.read_text() and PLACE not in text
    assert not re.search(r"(src|href)=|https?://", text)  # nothing to fetch
    found = re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL)
    (run,) = json.loads(found[1])["runs"]
    assert run["name"] == trained.name
    assert len(run["sentences"]) == 3 and len(run["trials"]) == 2
    assert [len(trial["heads"]) for trial in run["trials"]] == [6, 6]
    sentence = load(trained, "last").task.read("val")["source"][0]
    check_first_sentence(load(trained, "last"), run)
    shown = "".join(run["sentences"][0]["source"][:-1]).replace("▁", "")
    assert shown == sentence.replace(" ", "")


def check_first_sentence(run, data):
    """Weights and predictions, with all heads and without one, are the model's."""
    (fields,) = first_sentences(run, run.task.load("val"), 1)
    batch = single_example(fields)
    packed = base64.b64decode(data["trials"][1]["maps"])
    found = np.frombuffer(zlib.decompress(packed), np.uint8)
    S, T = len(fields["source"]), len(fields["target"])
    at = 0
    maps = attention_maps(run.graph, *run.of(1), batch)
    for site, shape in (("encoder", (S, S)), ("decoder", (T, T)), ("cross", (T, S))):
        both = np.stack([np.asarray(each)[:, 0] for each in maps[site]], axis=2)
        assert both.shape == (1, 2, 2, *shape)  # layers, heads, raw and by norm
        own = found[at : at + both.size].reshape(both.shape) / 255
        np.testing.assert_allclose(own, both, atol=0.5 / 255 + 1e-5)
        at += both.size
    model = nnx.merge(run.graph, run.of(1)[0])
    gates = model.head_gates()

    def strings(gates):
        ids = model(batch, head_gates=gates).argmax(-1)[0]
        labels = run.task.token_strings("target", ids)
        return [label.replace("▁", " ").strip() or label for label in labels]

    said = data["trials"][1]["predictions"][0]
    assert said["tokens"] == strings(gates)
    changed = 0
    for site, own in gates.items():
        for head in range(2):
            now = strings(gates | {site: own.at[0, head].set(0)})
            wanted = {str(i): x for i, x in enumerate(now) if x != said["tokens"][i]}
            assert said["without"].get(f"{site}.0.{head}", {}) == wanted
            changed += len(wanted)
    assert changed


@pytest.mark.slow
def test_attention_of_a_text_of_ones_own(trained, call, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "plot_maps", lambda *given: drawn.append(given))
    path = tmp_path / "texts"
    path.write_text("two hundred\nsix\tsechs\n")
    monkeypatch.setattr(Translation, "load", None)  # no corpus is needed
    options = {"workdir": trained, "input": path, "output": tmp_path / "p.png"}
    ran = call("heads.py", "plot", example=1, **options, **LAST)
    assert ran.returncode == 0, ran.stderr
    ((maps, queries, keys, _, _),) = drawn
    assert "".join(keys[:-1]).replace("▁", " ").strip() == "six"
    assert "".join(queries[:-1]).replace("▁", " ").strip() == "sechs"
    run = load(trained, "last")
    found = run.attention("six", "sechs")
    np.testing.assert_array_equal(found.weights, maps)
    assert found.keys == keys and found.queries == ["<s>", *queries[:-1]]
    np.testing.assert_allclose(found.weights.sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(found.norm_weights.sum(-1), 1, rtol=1e-5)
    own = run.attention("two hundred", site="decoder", trial=1)
    (line,) = run.task.translate(run, ["two hundred"], 1)
    shown = "".join(own.keys[1:]).replace("▁", " ").strip()
    assert shown == line and own.weights.shape[2:] == (len(own.keys),) * 2
    with pytest.raises(ValueError, match="site must be one of .* 'middle'"):
        run.attention("six", site="middle")
    with pytest.raises(ValueError, match="trial must be from 0 to 1, got 2"):
        run.attention("six", trial=2)


@pytest.mark.parametrize(
    "verb, options, culprits",
    [
        ("explore", {}, ["--output=FILE.html"]),
        ("explore", {"output": "x.png"}, ["--output=x.png", ".html"]),
        ("explore", {"output": "no/x.html"}, ["--output=no/x.html"]),
        ("explore", {"output": "x.html", "compare": "nowhere"}, ["nowhere"]),
        ("plot", {"output": "x.png", "input": "nowhere.txt"}, ["nowhere.txt"]),
        ("plot", {"output": "x.png", "site": "middle"}, ["--site", "'middle'"]),
        ("plot", {"output": "x.png", "input": "latin1"}, ["latin1, line 2"]),
        ("plot", {"output": "x.png", "input": "table"}, ["--input=table", "3 tab"]),
        ("plot", {"output": "x.png", "input": "table", "split": "test"}, ["--split"]),
        (
            "plot",
            {"output": "x.png", "input": "table", "beam_size": 2},
            ["--beam_size"],
        ),
        (
            "explore",
            {"output": "x.html", "input": "x", "sentences": 2},
            ["--sentences"],
        ),
        ("plot", {"output": "x.gif"}, ["--output=x.gif", ".png, .pdf, .svg"]),
        ("roles", {"examples": 10}, ["--examples must be at least 20, got 10"]),
        ("roles", {"trial": 2}, ["--trial", "2"]),
        ("roles", {"input": "x.txt"}, ["--input", "roles", "plot, explore"]),
        ("roles", {"beam_size": 2}, ["--beam_size", "roles", "decodes nothing"]),
        ("describe", {"site": "cross"}, ["--site", "describe"]),
        ("explore", {"example": 0, "output": "x.html"}, ["--example", "explore"]),
        ("roles", {"workdir": "nowhere"}, ["nowhere"]),
    ],
)
def test_what_is_not_there_or_has_no_meaning_is_named(
    trained, call, tmp_path, monkeypatch, verb, options, culprits
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin1").write_bytes(b"six\ns\xefx\n")
    (tmp_path / "table").write_text("six\tsechs\t6\n")
    ran = call("heads.py", verb, **({"workdir": trained} | options))
    fails(ran, *culprits)


@pytest.mark.slow
def test_heads_are_removed_from_a_run_for_real(trained, call, tmp_path):
    """Scores of the smaller run are those of the gated one."""
    to, heads = tmp_path / "less", "encoder.0.1,cross.0.0"
    ran = call("weights.py", workdir=trained, prune=to, heads=heads, trial=1, **LAST)
    assert ran.returncode == 0, ran.stderr
    less, whole = load(to), load(trained, "last")
    gates = nnx.merge(whole.graph, whole.of(1)[0]).head_gates()
    gates = jax.tree.map(lambda x: np.stack([x, x]), gates)
    gates["encoder"][1, 0, 1] = gates["cross"][1, 0, 0] = 0
    dev = whole.task.load("val")
    batches = whole.task.evaluation_batches(dev)
    wanted = heldout_loss(whole._replace(head_gates=gates), batches)[1]
    found = heldout_loss(less, less.task.evaluation_batches(less.task.load("val")))
    assert found[0] == pytest.approx(wanted, rel=1e-5)
    assert less.step == [whole.step[1]]
    assert read(to, "run.json")["num_parameters"] < sum(
        leaf[0].size for leaf in jax.tree.leaves(whole.params)
    )
    again = call("weights.py", workdir=trained, prune=to, heads=heads, **LAST)
    fails(again, to)
    wrong = {"prune": tmp_path / "x", "heads": "cross.7.0"}
    fails(call("weights.py", workdir=trained, **wrong, **LAST), "cross.7.0")
    wrong = {"prune": tmp_path / "x", "heads": "cross-7"}
    fails(call("weights.py", workdir=trained, **wrong, **LAST), "--heads", "cross-7")


@pytest.mark.slow
def test_heads_are_logged_at_evaluations_if_asked(tmp_path, corpus):
    changes = {"train.log_heads": True, "train.num_steps": 4}
    succeed(training(tmp_path / "run", **corpus | changes))
    rows = [row for row in logged(tmp_path / "run") if "entropy/encoder.0.1" in row]
    assert [(row["step"], row["trial"]) for row in rows] == [(4, 0), (4, 1)]
    sites = ("encoder.0.0", "decoder.0.1", "cross.0.1")
    for row in rows:
        assert len(row) == 2 + 4 * 6
        for site in sites:
            assert 0 <= row[f"sink/{site}"] <= 1 and row[f"entropy/{site}"] > 0
            assert np.isfinite(row[f"largest_logit/{site}"])
