"""What a report says where arms, seeds or results are missing, or all are alike."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from headcount.analysis import report_html, report_markdown
from headcount.analysis.report_plots import curves, plt
from headcount.analysis.tables import print_pruning, print_scores
from headcount.sweeps import reporting, show
from headcount.sweeps.opening import open_sweep
from headcount.sweeps.plan import trials_of
from headcount.sweeps.search import known_trials, tries_of
from tests.test_sweeps import RATE, finish, options, own, three_splits


@pytest.fixture
def corpus(tmp_path):
    return three_splits(tmp_path / "corpus")


def reported(sweep):
    """The report's Markdown."""
    reporting.write(sweep, sweep.collect(), 5)
    return (sweep.workdir / "report.md").read_text()


def test_nuisance_settings_may_be_words(tmp_path, corpus, capsys):
    """Those of an ablation; --tune takes numbers alone."""
    body = """for norm in ("pre", "post"):
        yield {"model.mlp_dim": 32, "model.norm": norm}"""
    name = own(tmp_path, body)
    path = tmp_path / "own.py"
    path.write_text(path.read_text().replace("optimizer.learning_rate", "model.norm"))
    sweep = open_sweep(options(tmp_path / "s", corpus, ablation=name))
    for index in range(2):
        finish(sweep, index, dev=30 + index, splits=("val",))
    sweep = sweep.extended()
    finish(sweep, next(i for i, g in enumerate(sweep.groups) if len(g.trials) == 2))
    show.print_status(sweep, sweep.collect())
    assert "norm=post" in capsys.readouterr().out
    assert "norm=post |" in reported(sweep)


def test_what_was_moved_away_is_not_done(tmp_path, corpus):
    """As a damaged result of dev is, so that `run` scores its group again."""
    sweep = open_sweep(options(tmp_path / "s", corpus))
    for index in range(3):
        finish(sweep, index)
    (sweep.folder(sweep.groups[1]) / "result-val.json").unlink()
    status = {row["arm"]: row["status"] for row in sweep.collect()}
    assert status == {"K=4": "done", "K=2": "trained", "K=1": "done"}
    assert "2 trials are not done yet" in reported(sweep)


def test_exact_matches_are_per_cent(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus, metric="exact_match"))
    for index in range(3):
        finish(sweep, index)
    assert reported(sweep).count("| 50.00 | 50.00 ± 0.00 |") == 3


def test_the_bootstrap_is_against_the_baseline_by_the_score_that_is_told(
    tmp_path, corpus, monkeypatch
):
    name = own(tmp_path, 'yield from ({"model.mlp_dim": F} for F in (64, 32))')
    opened = options(tmp_path / "s", corpus, ablation=name, metric="exact_match")
    sweep = open_sweep(opened)
    for index in range(2):
        finish(sweep, index)
    asked = []

    def bootstrap(systems, references, metric="bleu"):
        asked.append((list(systems), metric))
        return {}

    monkeypatch.setattr(reporting, "paired_bootstrap", bootstrap)
    reported(sweep)
    assert asked == [(["F=32", "F=64"], "chrf")]  # the baseline's F is 32


def test_a_curve_is_the_mean_of_the_seeds_each_its_own(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish(sweep, 0)
    lines = [
        json.dumps({"step": step, "trial": trial, "dev_bleu": 10 * trial + step})
        for step in (1, 2)
        for trial in (0, 1)
    ]
    path = sweep.folder(sweep.groups[0]) / "metrics.jsonl"
    path.write_text("\n".join(lines))
    done = [row for row in sweep.collect() if row["status"] == "done"]
    steps, scores = reporting.curve(sweep, done)
    assert steps.tolist() == [1, 2] and scores.tolist() == [[1, 2], [11, 12]]
    arm = SimpleNamespace(name="K=4", curve=(steps, scores))
    report = SimpleNamespace(metric="bleu", name="BLEU")
    figure, _ = curves(report, [SimpleNamespace(arm=arm)])
    assert figure.axes[0].lines[0].get_ydata().tolist() == [6, 7]
    plt.close(figure)


def diverge(sweep, index):
    """Have all trials of a finished group diverge."""
    for path in sweep.folder(sweep.groups[index]).glob("result-*.json"):
        rows = [row | {"diverged_at": 7} for row in json.loads(path.read_text())]
        path.write_text(json.dumps(rows))


def test_an_arm_that_diverged_is_told_and_not_waited_for(tmp_path, corpus, capsys):
    tune = [f"{RATE}=0.01,0.02"]
    sweep = open_sweep(options(tmp_path / "s", corpus, tune=tune))
    for index in range(3):
        finish(sweep, index, splits=("val",))
    diverge(sweep, 1)  # the search of K=2
    sweep = sweep.extended()
    assert {t.arm for t in sweep.plan.trials if not t.is_search} == {"K=4", "K=1"}
    for index, group in enumerate(sweep.groups):
        if not group.trials[0].is_search:
            finish(sweep, index)
    told = reported(sweep)
    assert "not done yet" not in told
    assert "Not in the table, for want of a score: K=2." in told
    show.print_status(sweep, sweep.collect())
    assert "All is done" in capsys.readouterr().out


def test_a_baseline_that_diverged_is_not_waited_for(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    for index in range(3):
        finish(sweep, index)
    diverge(sweep, 0)
    with pytest.raises(ValueError, match="The baseline K=4 lost 2 trials, and there"):
        reported(sweep)


def test_settings_that_nothing_chose_are_not_said_to_be_chosen(tmp_path, corpus):
    body = """for width, rate in ((32, 0.01), (64, 0.02)):
        yield {"model.mlp_dim": width, "optimizer.learning_rate": rate}"""
    sweep = open_sweep(options(tmp_path / "s", corpus, ablation=own(tmp_path, body)))
    for index in range(2):
        finish(sweep, index)
    told = reported(sweep)
    assert "learning_rate=0.02" in told and "| nuisance settings |" in told
    assert told.count("chosen on dev") == 1  # the checkpoints


@pytest.mark.parametrize(
    "metric, name",
    [
        ("published_bleu", "BLEU"),
        ("published_chrf", "chrF"),
        ("exact_match", "exact match, %"),
    ],
)
def test_curves_are_named_after_what_is_scored_while_training(metric, name):
    arm = SimpleNamespace(name="N=4", curve=(np.array([1, 2]), np.ones((1, 2))))
    report = SimpleNamespace(metric=metric, name="not this")
    figure, caption = curves(report, [SimpleNamespace(arm=arm)])
    assert figure.axes[0].get_title() == f"Dev {name} while training, greedy"
    assert f"dev {name} of greedy" in caption
    plt.close(figure)


def test_examples_are_sentences_on_which_arms_differ(tmp_path, corpus):
    """Though fewer of them than were asked for; where arms are alike, one speaks."""
    lines = [str(i) for i in range(100)]
    other = [line + "!" * (line in ("31", "77")) for line in lines]
    found = reporting.choose_examples(lines, lines, lines, other, 5)
    assert [e.source for e in found] == ["31", "77"]
    assert all(e.best != e.worst for e in found)
    alike = reporting.choose_examples(lines, lines, lines, lines, 5)
    assert [e.source for e in alike] == ["0", "25", "50", "74", "99"]
    for examples, worst, differ, speakers in (
        (found, "K=1", True, 2),
        (alike, "K=1", False, 2),
        (alike, "K=4", False, 1),
    ):
        told = {"examples": examples, "best": "K=4", "worst": worst, "seed": 3}
        report = SimpleNamespace(**told)
        html = report_html.examples(report)
        assert "Of seed 3" in html
        assert ("on which they differ" in html) == differ
        assert html.count("K=") == html.count("<th") - 2 - 1 == speakers
        markdown = "\n".join(report_markdown.examples(report))
        assert markdown.count("K=") == speakers * len(examples)


def diverge_alone(sweep, index, trial):
    """Have one trial of a finished group diverge."""
    for path in sweep.folder(sweep.groups[index]).glob("result-*.json"):
        rows = json.loads(path.read_text())
        rows[trial]["diverged_at"] = 7
        path.write_text(json.dumps(rows))


def test_translations_are_compared_of_one_seed(tmp_path, corpus):
    """The first that all arms have: where one diverged, not the first of each."""
    sweep = open_sweep(options(tmp_path / "s", corpus))
    for index in range(3):
        finish(sweep, index)
    bootstrap, shown = "the translations of seed {}: what", "Of seed {}; sentences on"
    told = reported(sweep)
    assert bootstrap.format(0) in told and "Of seed 0, spread" in told
    diverge_alone(sweep, 1, 0)
    finish(sweep, 2, test=50)
    told = reported(sweep)
    assert bootstrap.format(1) in told and shown.format(1) in told
    # `finish` has a trial's score, 40 (or 50) and the seed, in its translations
    assert re.findall(r"in the (\d+)$", told, re.MULTILINE) == ["51", "41"] * 5
    diverge_alone(sweep, 2, 1)
    told = reported(sweep)
    assert "of each arm's first seed: what" in told
    html = (sweep.workdir / "report.html").read_text()
    assert "Of each arm&#x27;s first seed; sentences on which" in html


def test_published_numbers_are_of_the_ablations_that_are_shipped(tmp_path, corpus):
    body = 'yield from ({"model.attention.num_heads": N} for N in (4, 8))'
    path = own(tmp_path, body).removesuffix(":sizes")
    text = (tmp_path / "own.py").read_text().replace("def sizes", "def heads")
    (tmp_path / "own.py").write_text(text)
    found = {}
    for name in ("heads", f"{path}:heads"):
        sweep = open_sweep(options(tmp_path / name[-9:], corpus, ablation=name))
        for index in range(len(sweep.groups)):
            finish(sweep, index)
        told = reported(sweep)
        assert "Headcount sweep: heads on text" in told
        found[name] = "Vaswani et al. 2017, Table 3" in told, "| published |" in told
    assert list(found.values()) == [(True, True), (False, False)]


def test_every_signature_is_told(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    for index in range(3):
        finish(sweep, index)
    names = ("signature", "chrf_signature", "published_signature")
    names += ("published_chrf_signature",)
    for path in sweep.workdir.glob("groups/*/result-test.json"):
        rows = [
            row | {name: f"of:{name}" for name in names}
            for row in json.loads(path.read_text())
        ]
        path.write_text(json.dumps(rows))
    told = "; ".join(f"of:{name}" for name in names)
    assert f"| signatures | {told} |" in reported(sweep)


def test_eval_prints_every_score_and_its_signature(capsys):
    scores = {"bleu": 31.25, "chrf": 55.5, "exact_match": 0.25, "loss": 1.5}
    scores |= {"published_bleu": 33.75, "published_chrf": 58.5}
    names = ("signature", "chrf_signature", "published_signature")
    names += ("published_chrf_signature",)
    row = {"trial": 0, "step": 9, "diverged_at": None, "split": "test", "decoding": {}}
    row |= scores | {name: f"of:{name}" for name in names}
    print_scores([row], [], "result-test.json")
    said = capsys.readouterr().out
    for cell in ("31.25", "33.75", "55.50", "58.50", "published chrf", "25.00%"):
        assert cell in said
    assert [f"{name}: of:{name}" in said for name in names] == [True] * 4


def test_a_mean_is_of_the_trials_that_did_not_diverge(capsys):
    row = {"step": 9, "split": "test", "decoding": {}, "exact_match": 0.5, "loss": 1.0}
    rows = [
        row | {"trial": trial, "bleu": bleu, "chrf": bleu, "diverged_at": at}
        for trial, (bleu, at) in enumerate([(30.0, None), (32.0, None), (1.0, 5)])
    ]
    print_scores(rows, [], "result-test.json")
    said = capsys.readouterr().out.splitlines()
    (line,) = [line for line in said if "mean of 2" in line]
    assert " 31.00 " in line


def test_scores_without_heads_have_half_of_their_interval(capsys):
    rows = [
        {"order": "random", "removed": 0, "heads": 4, "split": "test", "loss": loss}
        | {"ranked_on": "val", "trial": trial, "exact_match": 0.5, "site": None}
        for trial, loss in enumerate((1.0, 2.0, 6.0))
    ]
    print_pruning(rows, "exact_match", "pruning-test.json")
    said = capsys.readouterr().out
    half = stats.t.ppf(0.975, 2) * np.std([1, 2, 6], ddof=1) / np.sqrt(3)
    assert f" 3.000 ± {half:.3f} " in said and " 50.00 " in said


def test_every_version_that_a_trial_had_is_told(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    for index in range(3):
        finish(sweep, index)
    path = sweep.folder(sweep.groups[2]) / "run.json"
    run = json.loads(path.read_text()) | {"versions": {"jax": "2", "flax": "3"}}
    path.write_text(json.dumps(run))
    assert "jax 1 and 2, flax 3" in reported(sweep)


@pytest.mark.parametrize(
    "split", ["train", "val", "val[:100]", "train[50%:]", "test[:9]+val[:9]"]
)
def test_what_was_learnt_from_or_chosen_on_is_no_test(tmp_path, corpus, split):
    with pytest.raises(ValueError, match=f"^--test_split={re.escape(split)} must be"):
        open_sweep(options(tmp_path / "s", corpus, test_split=split))
    assert not (tmp_path / "s").exists()


def test_a_search_that_found_no_more_to_try_is_over_for_who_proposes_nothing(
    tmp_path, corpus
):
    """Of ten settings a space of two has but two: report and --group see what followed,
    and before it did they don't begin it.
    """
    space = {"search": "optuna:10", "tune": [f"{RATE}=0.01,0.02"]}
    opened = options(tmp_path / "s", corpus, **space, proposes=False)
    sweep = open_sweep(opened)
    (arm, *_), search = sweep.plan.arms, sweep.search
    tries = tries_of(arm, [{RATE: 0.01}, {RATE: 0.02}], search.seeds)
    followed = trials_of(arm, [{RATE: 0.02}], arm.seeds)
    scored = [(trial, 30 + trial.nuisance[RATE]) for trial in tries]
    assert known_trials([arm], search, scored, propose=False) == tries
    there = [*scored, *((trial, None) for trial in followed)]
    for propose in (False, True):
        assert known_trials([arm], search, there, propose) == tries + followed


def test_the_command_repeats_a_sweep_that_was_given_more_seeds(tmp_path, corpus):
    """By its workdir alone; of a flag that stands there twice the last counts."""
    first = open_sweep(options(tmp_path / "s", corpus))
    alone = options(tmp_path / "s", corpus, config=None, ablation=None, seeds=None)
    assert open_sweep(alone).settings == first.settings
    for _ in range(2):
        more = open_sweep(alone._replace(seeds=3, note="Two words."))
        added = " --seeds=3 '--note=Two words.'"
        assert more.settings["command"] == first.settings["command"] + added
    assert open_sweep(alone._replace(verb="report")).settings == more.settings


def test_means_are_of_trials_that_differ_in_their_seed_alone(capsys):
    row = {"split": "test", "decoding": {}, "step": 1, "diverged_at": None}
    settings = [(0, 0.1), (1, 0.1), (0, 0.2), (1, 0.2), (2, 0.3)]
    rows = [
        row
        | {"trial": trial, "seed": seed, "model.dropout": dropout, "bleu": 10.0 * trial}
        for trial, (seed, dropout) in enumerate(settings)
    ]
    print_scores(rows, ["seed", "model.dropout"], "result-test.json")
    printed = capsys.readouterr().out
    means = [line for line in printed.splitlines() if "mean of 2" in line]
    assert len(means) == 2 and "mean of 5" not in printed
    assert "0.1" in means[0] and "5.00" in means[0]
    assert "0.2" in means[1] and "25.00" in means[1]
