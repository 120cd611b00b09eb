"""Reports of sweeps: what is gathered from files, and what is missing or alike."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from sweep_fakes import (
    LINES,
    RATE,
    edit_results,
    finish,
    finish_all,
    options,
    statuses,
    write_ablation,
    write_corpus,
    write_report,
    write_run,
)

from headcount.analysis.report_figures import HEAD_STATISTICS
from headcount.analysis.report_markdown import escape
from headcount.sweeps import report
from headcount.sweeps.settings import open_sweep
from headcount.sweeps.table import collect
from headcount.tasks.base import LOSS
from headcount.tasks.language_model import BITS_PER_BYTE, PERPLEXITY
from headcount.tasks.translation import METRICS


def diverge(sweep, index, trial=None):
    """Let the trials of a finished group diverge, or one of them."""

    def edit(row):
        is_it = trial is None or row["trial"] == trial
        return row | ({"diverged_at": 7} if is_it else {})

    edit_results(sweep, index, edit)


@pytest.mark.usefixtures("figures")
def test_a_report_shows_what_was_computed(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus, note="A <shared> machine."))
    with pytest.raises(ValueError, match="Nothing has finished"):
        write_report(sweep)
    finish(sweep, 1)
    with pytest.raises(ValueError, match="The baseline K=4 has not finished"):
        write_report(sweep)
    finish(sweep, 0, dev=31, test=40)
    markdown = write_report(sweep, num_examples=3)
    html = (tmp_path / "s" / "report.html").read_text()
    sd = np.std([40, 41], ddof=1)
    for text in (html, markdown):
        assert f"40.50 ± {sd:.2f}" in text
        assert "How many heads may share their keys and values?" in text
        assert "2 trials are not done yet" in text
        assert "c0ffee" in text and "9,000" in text
        assert text.count("source: ") == 3
        # by 0 and by 0.01 more: Student's t of one degree of freedom is 12.706
        for cell in ("1.5950", "1.6000", "+0.0050", "−0.0585 to +0.0685"):
            assert cell in text
    assert "A &lt;shared&gt; machine." in html
    assert r"A \<shared\> machine." in markdown
    outside = re.findall(r'(?:src|href)="(?!#)[^"]*"|url\(http[^)]*\)|@import', html)
    assert not outside and "<script" not in html
    figures = re.findall(r"\]\((report/\w+\.png)\)", markdown)
    assert figures == [
        f"report/{name}.png"
        for name in ("test_loss", "test_bleu", "dev_loss", "dev_bleu")
    ]
    assert html.count("<svg") == len(figures)
    for name in figures:
        assert (tmp_path / "s" / name).read_bytes().startswith(b"\x89PNG")
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))


def test_the_loss_comes_first_and_is_left_out_if_an_arm_lacks_it(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    markdown = write_report(sweep)
    assert markdown.index("### loss") < markdown.index("### BLEU")
    for splits in (["val"], ["test"]):
        edit_results(sweep, 1, lambda row: row | {"loss": None}, splits=splits)
        assert "### loss" not in write_report(sweep)
        edit_results(sweep, 1, lambda row: row | {"loss": 2.0}, splits=splits)


def test_a_metric_for_which_lower_is_better_can_be_the_sweeps(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus, metric="loss"))
    finish_all(sweep)
    edit_results(sweep, 2, lambda row: row | {"loss": 1.0})
    markdown = write_report(sweep)
    assert "best mean test score is 1.0000 (loss, nats per token), with K=1" in markdown
    headings = re.findall("^### (.*)", markdown, re.MULTILINE)
    assert headings == ["loss, nats per token (lower is better)", "BLEU"]
    assert "| arm | chrF | exact match, % |" in markdown
    assert "- best, K=1: " in markdown


def test_percentages_are_stored_as_fractions_and_shown_times_100(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus, metric="exact_match"))
    finish_all(sweep)
    assert write_report(sweep).count("| 50.00 | 50.00 ± 0.00 |") == 3


def test_losses_of_other_tokens_are_not_compared(tmp_path, corpus):
    arms = tmp_path / "arms.py"
    function = '"""Scientific: KEY."""\n    return [{"KEY": n} for n in (20, 60)]\n'
    found = {}
    for name, key in (("same", "train.num_steps"), ("other", "data.vocab_size")):
        arms.write_text(f"def sizes(base):\n    {function.replace('KEY', key)}")
        sweep = open_sweep(options(tmp_path / name, corpus, ablation=f"{arms}:sizes"))
        finish_all(sweep)
        found[name] = write_report(sweep)
    assert "nats per token" in found["same"] and "chrF" in found["same"]
    assert "nats per token" not in found["other"] and "chrF" in found["other"]


def test_a_trial_belongs_to_the_plans_arm_whatever_its_group_says(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    path = sweep.folder(sweep.groups[1]) / "group.json"
    path.write_text(path.read_text().replace('"arm": "K=2"', '"arm": "baseline"'))
    again = open_sweep(options(tmp_path / "s", corpus))
    assert list(statuses(again)) == ["K=4", "K=2", "K=1"]
    write_report(again)


def test_predictions_may_contain_any_character(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    odd = ["a\u0085b", "a\u2028b", "a\x0bb", "a\rb", "# a | `b` <i>*c*</i> [d](e) _f_"]
    odd += [*LINES[5:-1], ""]
    path = sweep.folder(sweep.groups[1]) / "test-0.txt"
    path.write_text("".join(line + "\n" for line in odd))
    done = [row for row in collect(sweep) if row["status"] == "done"]
    found = report.read_predictions(sweep, done, len(LINES))
    assert found[sweep.groups[1].trials[0].id] == odd
    assert {len(lines) for lines in found.values()} == {len(LINES)}
    edit_results(sweep, 1, lambda row: row | {"bleu": 99.0})  # so that it is shown
    write_report(sweep, num_examples=12)
    html = (tmp_path / "s" / "report.html").read_text()
    assert "# a | `b` &lt;i&gt;*c*&lt;/i&gt; [d](e) _f_" in html


def test_a_task_without_predictions_has_no_examples_and_no_bootstrap(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    for path in sweep.workdir.glob("groups/*/*.txt"):
        path.unlink()
    markdown = write_report(sweep)
    assert "## Examples" not in markdown and "bootstrap" not in markdown


def test_the_bootstrap_is_of_the_sweeps_metric_if_the_task_has_it(
    tmp_path, corpus, monkeypatch
):
    name = write_ablation(
        tmp_path, 'yield from ({"model.mlp_dim": F} for F in (64, 32))'
    )
    sweep = open_sweep(options(tmp_path / "s", corpus, ablation=name))
    finish_all(sweep)
    asked = []

    def bootstrap(metric, systems, text):
        asked.append((metric.name, list(systems), list(text)))
        if metric.name == "exact_match":
            return {s: (0.5, 0.125, None if s == "F=32" else 0.25) for s in systems}
        return None

    monkeypatch.setattr(sweep.task, "bootstrap", bootstrap)
    markdown = write_report(sweep)
    systems, fields = ["F=32", "F=64"], ["source", "target"]  # the baseline's F is 32
    assert asked == [
        (metric, systems, fields) for metric in ("bleu", "chrf", "exact_match")
    ]
    assert "interval of exact match" in markdown
    assert "| 12.50 | – |" in markdown and "| 12.50 | 0.250 |" in markdown


def test_seeds_to_see_are_of_the_margin_that_was_given(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus, margin="2"))
    finish_all(sweep)
    edit_results(sweep, 1, lambda row: row | {"bleu": row["bleu"] + row["trial"]})
    markdown = write_report(sweep)
    assert "seeds to see 2 points of BLEU" in markdown
    assert "0.3 points of BLEU" not in markdown


def test_a_curve_is_per_seed_and_of_common_steps(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish(sweep, 0)
    lines = [
        json.dumps({"step": step, "trial": trial, "dev_bleu": 10 * trial + step})
        for step, trial in ((1, 0), (1, 1), (2, 0), (2, 1), (3, 0))
    ]
    path = sweep.folder(sweep.groups[0]) / "metrics.jsonl"
    path.write_text("\n".join(lines))
    done = [row for row in collect(sweep) if row["status"] == "done"]
    trials = report.logged(sweep, done)
    steps, scores = report.curve(trials, "dev_bleu")
    assert steps.tolist() == [1, 2] and scores.tolist() == [[1, 2], [11, 12]]
    assert report.curve(trials, "dev_bleu", 100)[1][0].tolist() == [100, 200]


@pytest.mark.slow
@pytest.mark.usefixtures("figures")
def test_heads_are_drawn_over_steps_where_they_were_logged(tmp_path, corpus):
    """As means over heads, by statistic."""
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    assert "## Heads" not in write_report(sweep)
    heads = {"decoder.0.0": 1.0, "decoder.0.1": 4.0, "cross.0.0": None}
    lines = [
        {"step": step, "trial": trial}
        | {f"{name}/{head}": x for head, x in heads.items() for name in HEAD_STATISTICS}
        for step in (1, 2)
        for trial in (0, 1)
    ]
    for group in sweep.groups:
        with (sweep.folder(group) / "metrics.jsonl").open("a") as file:
            file.writelines("\n" + json.dumps(line) for line in lines)
    done = [row for row in collect(sweep) if row["arm"] == sweep.plan.arms[0].name]
    steps, values = report.curve(report.logged(sweep, done), "sink")
    assert steps.tolist() == [1, 2] and (values == 2.5).all()
    markdown = write_report(sweep)
    assert "## Heads" in markdown and "(report/heads.png)" in markdown
    assert (tmp_path / "s/report/heads.png").exists()


@pytest.mark.slow
def test_measured_heads_are_shown_by_arm_and_tested_against_the_baseline(
    tmp_path, corpus
):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    assert "## Heads" not in write_report(sweep)
    rows = [
        {"arm": f"K={K}", "seed": seed, "site": "encoder", "layer": 0, "head": head}
        | {"gate": 1.0, "sink": K / 8 + head / 4 + seed / 1024}
        | {"learned_sink": None, "share": 0.5, "entropy": 1.0 + seed * K}
        for K in (4, 2, 1)
        for seed in (0, 1)
        for head in (0, 1)
    ]
    path = tmp_path / "s" / "heads-describe-test.json"
    path.write_text(json.dumps(rows))
    markdown = write_report(sweep)
    section = markdown.partition("\n## Heads\n")[2].partition("\n## ")[0]
    assert "| arm | seeds | sink | entropy |" in section
    # by 12.706 / 2 / 1024; the difference from K=4 is the same for all seeds
    assert "| **K=4** | 2 | 0.63 ± 0.01 |" in section
    assert section.count("↑") == section.count("↓") == 1  # in the legend
    for row in rows:
        row["sink"] += (row["arm"] == "K=2") * row["seed"] / 10**5
    path.write_text(json.dumps(rows))
    assert "| K=2 | 2 | 0.38 ± 0.01↓ |" in write_report(sweep)
    diverge(sweep, 1, trial=1)  # the other seeds are a biased sample
    assert "| K=2 | 2 | 0.38 ± 0.01 |" in write_report(sweep)
    path.write_text(json.dumps([row | {"seed": "x"} for row in rows]))
    with pytest.raises(ValueError, match="is damaged .* run heads.py describe again"):
        write_report(sweep)


@pytest.mark.slow
@pytest.mark.usefixtures("figures")
def test_scores_are_drawn_against_the_heads_that_learned_gates_left(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    assert "heads left" not in write_report(sweep)
    for index in (1, 2):  # not the baseline
        edit_results(sweep, index, lambda row: row | {"open_heads": 5 + row["trial"]})
    markdown = write_report(sweep)
    assert "(report/heads_left.png)" in markdown and "| heads left |" in markdown
    assert markdown.count("| 5.5 ± 0.7 |") == 2
    table = (tmp_path / "s" / "sweep.csv").read_text()
    assert table.splitlines()[0].count("open_heads") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("figures")
def test_the_curve_of_a_metric_not_evaluated_in_training_is_that_which_selects(
    tmp_path, corpus
):
    sweep = open_sweep(options(tmp_path / "s", corpus, metric="chrf"))
    finish_all(sweep)
    assert report.curve_metric(sweep).name == "bleu"
    markdown = write_report(sweep)
    assert "### chrF" in markdown and "(report/dev_bleu.png)" in markdown


def test_an_arm_that_diverged_in_the_search_is_listed_and_not_waited_for(
    tmp_path, corpus
):
    tune = [f"{RATE}=0.01,0.02"]
    sweep = open_sweep(options(tmp_path / "s", corpus, tune=tune))
    for index in range(3):
        finish(sweep, index, splits=("val",))
    edit_results(sweep, 1, lambda row: row | {"diverged_at": 7}, splits=["val"])  # K=2
    sweep = sweep.extended()
    assert {t.arm for t in sweep.plan.trials if not t.is_search} == {"K=4", "K=1"}
    for index, group in enumerate(sweep.groups):
        if not group.trials[0].is_search:
            finish(sweep, index)
    markdown = write_report(sweep)
    assert "not done yet" not in markdown and "Without a score: K=2." in markdown
    assert "; 6 of the runs chose settings." in markdown


@pytest.mark.parametrize("rates, is_end", [("0.01,0.02,0.04", True), ("1,2", False)])
def test_values_chosen_at_an_end_of_those_tried_are_named(
    tmp_path, corpus, rates, is_end
):
    sweep = open_sweep(options(tmp_path / "s", corpus, tune=[f"{RATE}={rates}"]))
    finish_all(sweep)  # the highest rate has the best score
    sweep = sweep.extended()
    for index, group in enumerate(sweep.groups):
        if not group.trials[0].is_search:
            finish(sweep, index)
    row = "| chosen at an end of the values tried | K=4 (learning_rate=0.04); K=2 "
    assert (row in write_report(sweep)) == is_end


def test_a_baseline_that_diverged_is_an_error(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    diverge(sweep, 0)
    with pytest.raises(ValueError, match="The baseline K=4 lost 2 trials"):
        write_report(sweep)


def test_settings_of_an_ablation_are_not_said_to_be_chosen_on_dev(tmp_path, corpus):
    body = """for width, rate in ((32, 0.01), (64, 0.02)):
        yield {"model.mlp_dim": width, "optimizer.learning_rate": rate}"""
    name = write_ablation(tmp_path, body)
    sweep = open_sweep(options(tmp_path / "s", corpus, ablation=name))
    finish_all(sweep)
    markdown = write_report(sweep)
    assert "learning_rate=0.02" in markdown and "| nuisance settings |" in markdown
    assert markdown.count("chosen on dev") == 1  # the checkpoints
    assert "settings were not searched" in markdown


def test_examples_are_those_on_which_arms_differ():
    lines = [str(i) for i in range(100)]
    other = [line + "!" * (line in ("31", "77")) for line in lines]
    found = report.choose_examples({"text": lines}, lines, other, 5)
    assert [e.text["text"] for e in found] == ["31", "77"]
    assert all(e.best != e.worst for e in found)
    alike = report.choose_examples({"text": lines}, lines, lines, 5)
    assert [e.text["text"] for e in alike] == ["0", "25", "50", "74", "99"]


def test_predictions_are_of_the_first_seed_that_all_arms_have(tmp_path, corpus):
    """So that they are paired as the scores are."""
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    markdown = write_report(sweep)
    assert "paired bootstrap, seed 0" in markdown and "From seed 0, spread" in markdown
    diverge(sweep, 1, trial=0)
    finish(sweep, 2, test=50)
    markdown = write_report(sweep)
    assert "paired bootstrap, seed 1" in markdown and "From seed 1, spread" in markdown
    # `finish` writes a trial's score, 40 (or 50) and the seed, into its predictions
    assert re.findall(r"in the (\d+)$", markdown, re.MULTILINE) == ["51", "41"] * 5
    diverge(sweep, 2, trial=1)
    markdown = write_report(sweep)
    assert "paired bootstrap, each arm's first seed" in markdown
    assert "From each arm's first seed" in markdown


@pytest.mark.slow
def test_published_scores_stand_beside_our_own_ablations_only(tmp_path, corpus):
    body = 'yield from ({"model.attention.num_heads": N} for N in (4, 8))'
    path = write_ablation(tmp_path, body).removesuffix(":sizes")
    text = (tmp_path / "own.py").read_text().replace("def sizes", "def heads")
    (tmp_path / "own.py").write_text(text)
    found = {}
    for name in ("heads", f"{path}:heads"):
        sweep = open_sweep(options(tmp_path / name[-9:], corpus, ablation=name))
        finish_all(sweep)
        markdown = write_report(sweep)
        assert "Headcount sweep: heads, translation, text en de" in markdown
        texts = "Vaswani et al. 2017", "| published (BLEU) |"
        found[name] = tuple(text in markdown for text in texts)
    assert list(found.values()) == [(True, True), (False, False)]


def test_the_environment_lists_every_signature_and_version(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    path = sweep.folder(sweep.groups[2]) / "run.json"
    run = json.loads(path.read_text()) | {"versions": {"jax": "2", "flax": "3"}}
    path.write_text(json.dumps(run | {"commit": "decade"}))
    markdown = write_report(sweep)
    assert "| signatures | bleu: nrefs:1; chrf: nc:6 |" in markdown
    assert "jax 1 and 2, flax 3" in markdown
    assert "| commit | c0ffee, decade (several" in markdown
    assert "| evaluation | beam_size=5 |" in markdown


def test_metrics_per_token_need_the_same_tokens(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    assert LOSS in report.comparable_metrics(sweep)
    arms = [sweep.plan.arms[0], sweep.plan.arms[1]]
    data = arms[1].config["data"] | {"vocab_size": 90}
    arms[1] = arms[1]._replace(config=arms[1].config | {"data": data})
    other = sweep._replace(plan=sweep.plan._replace(arms=arms))
    assert [m.name for m in report.comparable_metrics(other)] == [
        metric.name for metric in sweep.task.metrics if metric != LOSS
    ]
    own = METRICS["bleu"]  # by which the sweep compares
    task = SimpleNamespace(metrics=(own, PERPLEXITY, BITS_PER_BYTE))
    found = report.comparable_metrics(other._replace(task=task))
    assert found == [own, BITS_PER_BYTE]


@pytest.mark.usefixtures("figures")
def test_several_sweeps_share_a_page(tmp_path, corpus, capsys):
    sweeps = []
    for name, ablation in (("a", "kv_heads"), ("b", "sink")):
        sweep = open_sweep(options(tmp_path / name, corpus, ablation=ablation))
        finish_all(sweep)
        sweeps.append(sweep)
    report.write_joined(sweeps, 2)
    text = (tmp_path / "a" / "joined.md").read_text()
    html = (tmp_path / "a" / "joined.html").read_text()
    headings = re.findall(r"^(##? .*)", text, re.MULTILINE)
    assert headings[:2] == ["# 2 sweeps: translation, text en de", "## All verdicts"]
    questions = ["How many heads may share", "Does it help a head"]
    for heading, name, question in zip(headings[2:], "ab", questions, strict=True):
        assert heading.startswith(f"## {escape(str(tmp_path / name))}: {question}")
    table = text.split("## All verdicts")[1].split("## ")[0]
    for cell in ("| K=2 |", "| K=1 |", "| sink=True |"):
        assert table.count(cell) == 1
    assert table.count("| BLEU on test |") == 3
    figures = re.findall(r"\]\((report/\w+\.png)\)", text)
    assert len(figures) == len(set(figures)) == html.count("<svg")
    assert all((tmp_path / "a" / name).exists() for name in figures)
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    printed = capsys.readouterr().out
    assert printed.count("K=2 is ") == printed.count("sink=True is ") == 1
    assert printed.count("The verdicts took") == 2
    with pytest.raises(ValueError, match=f"--workdir={tmp_path / 'b'} was given twice"):
        report.write_joined([*sweeps, sweeps[1]], 2)


@pytest.mark.slow
@pytest.mark.usefixtures("figures")
def test_a_corpus_may_lie_elsewhere_on_another_machine(tmp_path, corpus):
    sweeps = []
    for name, place in (("a", corpus), ("b", write_corpus(tmp_path / "copy"))):
        sweep = open_sweep(options(tmp_path / name, place))
        finish_all(sweep)
        for group in sweep.groups:
            write_run(sweep.folder(group), data={"examples": 3, "crc32": 5})
        sweeps.append(sweep)
    report.write_joined(sweeps, 2)
    for group in sweep.groups:
        write_run(sweep.folder(group), data={"examples": 3, "crc32": 6})
    with pytest.raises(ValueError, match="differ in data.directory "):
        report.write_joined(sweeps, 2)


@pytest.mark.usefixtures("figures")
def test_a_corpus_that_was_replaced_in_its_folder_is_another(tmp_path, corpus):
    sweeps = [open_sweep(options(tmp_path / name, corpus)) for name in "ab"]
    for checksum, sweep in enumerate(sweeps):
        finish_all(sweep)
        for group in sweep.groups:
            write_run(sweep.folder(group), data={"examples": 3, "crc32": checksum})
    with pytest.raises(ValueError, match="b were trained on different text"):
        report.write_joined(sweeps, 2)


def test_sweeps_of_other_corpora_or_metrics_cannot_share_a_page(tmp_path, corpus):
    first = open_sweep(options(tmp_path / "a", corpus))
    other = write_corpus(tmp_path / "other")
    for name, change in (
        ("data.directory", {"corpus": other}),
        ("metric", {"metric": "loss"}),
    ):
        given = {"workdir": tmp_path / name, "corpus": corpus} | change
        with pytest.raises(ValueError, match=f"differ in {name} "):
            report.write_joined([first, open_sweep(options(**given))], 2)


@pytest.mark.parametrize(
    "minutes, text", [(0.005, "0.3 seconds"), (2.5, "2.5 minutes")]
)
def test_short_training_is_reported_in_seconds(minutes, text):
    assert f" and {text} of updates" in str(report.Cost(1, 1e9, minutes))
