"""Comparisons, verdicts, tables, Markdown, HTML and figures of a report."""

import re

import numpy as np
import pytest
from markdown_it import MarkdownIt

from headcount.analysis.anchors import Anchor
from headcount.analysis.formatting import NOTHING
from headcount.analysis.report import (
    ArmResult,
    Report,
    compare,
    margin_text,
    others_table,
    scores_table,
    spread_warning,
    summary_sentences,
    text_warning,
    verdict_sentence,
)
from headcount.analysis.report_figures import arm_styles, make_figures, plt, to_svg
from headcount.analysis.report_html import to_html
from headcount.analysis.report_markdown import (
    CHECKPOINTS,
    escape,
    explain_others,
    explain_scores,
    table,
    write_markdown,
)
from headcount.analysis.significance import seeds_needed
from headcount.tasks.base import LOSS, Metric

BLEU = Metric("bleu", "BLEU", "points", bounds=(0, 100), margin=0.3)
EXACT = Metric("exact_match", "exact match", "%", bounds=(0, 100))
CURVE = (np.array([1, 2]), np.ones((1, 2)))


def make_report(metric=BLEU, arms=None, **changes):
    """Return a report of the scores of arms; the first one is the baseline."""
    found = []
    for i, (name, scores) in enumerate((arms or {"whole": [3, 4, 6]}).items()):
        scores = {metric.name: np.array(scores, float)}
        seeds = list(range(len(scores[metric.name])))
        found.append(
            ArmResult(
                name=name,
                is_baseline=i == 0,
                value=None,
                mlp_dim=32,
                parameters=1000 * (i + 1),
                flops=500,
                seeds=seeds,
                test=scores,
                dev=scores,
                lost=0,
                nuisance={},
                seconds=1.0,
                tokens_per_second=10.0,
                published={},
                bootstrap=None,
                curves={metric.name: CURVE, LOSS.name: CURVE, BLEU.name: CURVE},
            )
        )
    fields = {
        "title": "title",
        "question": "Why?",
        "details": "Scientific: a.",
        "metrics": (metric,),
        "metric": metric,
        "curve_metric": metric,
        "arms": found,
        "axis": None,
        "anchors": [],
        "bootstrap_metric": None,
        "examples": [],
        "best": found[0].name,
        "worst": found[-1].name,
        "environment": {"config": "base.py"},
        "command": "python sweep.py run",
        "note": None,
        "checkpoint": "best",
        "has_search": False,
        "verdicts": [],
        "cost": "",
        "unfinished": 0,
        "seed": 0,
    }
    return Report(**(fields | changes))


def edit_arm(report, index, **changes):
    arms = list(report.arms)
    arms[index] = arms[index]._replace(**changes)
    return report._replace(arms=arms)


def paper(source, format=".1f"):
    return Anchor(
        "heads", "translation", source, "BLEU", lambda model: None, {}, format
    )


def summary_of(report):
    return " ".join(summary_sentences(report, compare(report, report.metric)))


def test_the_summary_counts_verdicts():
    arms = {"whole": [70, 72, 75], "half": [25, 31, 26], "less": [70, 73, 74]}
    rows = [{"verdict": kind, "looks": ""} for kind in ("worse", "undecided")]
    text = summary_of(make_report(arms=arms, verdicts=rows))
    assert "arms, on test: 0 better, 1 worse, 0 equivalent, 1 undecided." in text
    planned = [row | {"looks": "2,3"} for row in rows]
    text = summary_of(make_report(arms=arms, verdicts=planned))
    assert "on dev, after planned looks: 0 better, 1 worse," in text


def test_arms_that_spread_unlike_the_baseline_are_named():
    arms = {"whole": [70, 72, 75] * 3, "much": [10, 80, 90] * 3}
    arms |= {"little": [70, 70.2, 70.4] * 3, "alike": [60, 63, 70] * 3}
    text = summary_of(make_report(arms=arms))
    assert "by a factor of more than 3: much; little." in text
    assert "factor" not in summary_of(make_report(arms={"whole": [1, 2], "b": [1, 3]}))


@pytest.mark.parametrize("seeds", [2, 3, 4, 8, 16])
def test_arms_that_spread_alike_are_rarely_named(seeds):
    drawn = np.random.default_rng(seeds).normal(size=(200, 6, seeds))
    reports = [
        make_report(LOSS, {str(i): arm for i, arm in enumerate(scores)})
        for scores in drawn
    ]
    named = sum(bool(spread_warning(report)) for report in reports)
    assert named <= 0.05 * len(reports) + 4


def test_arms_that_lost_trials_have_no_p_value():
    """What is left of them is no fair sample."""
    report = make_report(arms={"a": [3, 4, 6], "b": [1, 2, 3.5], "c": [1, 2, 3.5]})
    report = edit_arm(report, 1, lost=1)
    assert [np.isnan(c.p) for c in compare(report, BLEU)] == [True, True, False]
    assert "because trials were lost, " in summary_of(report)
    report = edit_arm(report, 0, lost=1)
    assert all(np.isnan(c.p) for c in compare(report, BLEU))
    assert "no trial that diverged or failed" in summary_of(report)


def test_differences_that_depend_on_the_text_are_named():
    arms = {"a": [1, 2, 3, 4], "b": [3.1, 4, 5, 6.1], "c": [3.1, 4, 5, 6.1]}
    report = make_report(arms=arms)
    assert text_warning(report) == [], "dev and test are the same"
    dev = {"bleu": np.array([6.1, 7, 8.1, 9])}  # 5 more than the baseline, not 2
    report = edit_arm(report, 1, dev=dev)
    (text,) = text_warning(report)
    assert "for b (+5.05 and +2.05). " in text and text in summary_of(report)
    report = edit_arm(report, 2, dev={"bleu": np.array([3.3, 4.2, 5.2, 6.2])})
    assert text_warning(report) == [text], "c differs by less than the margin"
    lacking = edit_arm(report, 1, seeds=[9, 10, 11, 12])
    assert text_warning(lacking) == [], "no common seed"
    waiting = edit_arm(report, 2, seeds=[], test={}, dev={})
    assert text_warning(waiting) == [text], "c has no score yet"


def test_seeds_added_without_planned_looks_are_said_to_be_so():
    arms = {"a": [1, 2], "b": [1, 3]}
    assert "added later" not in summary_of(make_report(arms=arms))
    text = summary_of(make_report(arms=arms, earlier_seeds=[4, 8]))
    assert "started with 4, then 8 seeds, and more were added later" in text
    rows = [{"looks": "4,8,12"}]
    assert make_report(arms=arms, verdicts=rows).is_planned
    assert not make_report(arms=arms, verdicts=rows, earlier_seeds=[4, 8]).is_planned


def test_arms_without_spread_are_not_tested_or_counted():
    arms = {
        "whole": [3, 4, 6],
        "alike": [3, 4, 6],
        "half": [3, 5, 6],
        "less": [2, 4, 5],
    }
    report = make_report(arms=arms)
    comparisons = compare(report, BLEU)
    text = summary_of(report)
    assert "for all seeds: alike." in text
    by_name = {c.arm.name: c for c in comparisons}
    assert np.isnan(by_name["alike"].p) and by_name["alike"].seeds_needed is None
    sd = np.std([0, 1, 0], ddof=1)
    needed = seeds_needed(sd, 0.3, 2)
    assert by_name["half"].seeds_needed == needed > seeds_needed(sd, 0.3)
    assert f"{needed} seeds per arm" in text and "from 3 seeds." in text
    assert "smallest p-value (5% / 2)" in explain_scores(report, comparisons)


def test_means_over_other_seeds_are_not_compared():
    """An arm that got two seeds, and is worse by 1, looks better by its mean."""
    report = make_report(arms={"whole": [9, 8, 1, 2], "half": [8, 7.1]})
    text = summary_of(report)
    assert "best mean test score is 5.00 (BLEU), with whole" in text


def test_all_arms_with_the_best_mean_are_named():
    arms = {"whole": [3, 4, 6], "half": [4, 3, 6], "less": [2, 4, 5]}
    assert "is 4.33 (BLEU), with whole; half." in summary_of(make_report(arms=arms))
    lower = make_report(LOSS, arms)
    assert "is 3.6667 (loss, nats per token), with less." in summary_of(lower)


def test_seeds_that_are_all_alike_have_no_interval():
    report = make_report(arms={"whole": [99.9] * 3, "half": [3, 5, 4]})
    header, whole, half = scores_table(report, BLEU, compare(report, BLEU))
    assert header[4] == "95% interval" and whole[3] == "99.90 ± 0.00"
    assert whole[4] == "–" and half[4] == "1.52 to 6.48"


def test_the_dev_column_is_of_dev():
    report = make_report(arms={"whole": [3, 4, 6], "half": [3, 5, 6]})
    report = edit_arm(report, 1, dev={"bleu": np.array([10.0, 11.0, 12.0])})
    header, _, half = scores_table(report, BLEU, compare(report, BLEU))
    assert half[header.index("dev")] == "11.00"


def test_scores_have_the_format_of_their_metric():
    report = make_report(LOSS, {"whole": [3, 4, 6], "half": [3, 5, 6]})
    _, whole, half = scores_table(report, LOSS, compare(report, LOSS))
    assert whole[3] == "4.3333 ± 1.5275" and half[5] == "+0.3333"


def test_differences_are_over_common_seeds():
    """The baseline lost two seeds, and has one that an arm lacks."""
    arms = {"whole": [3, 4, 6], "half": [3, 5, 6, 7, 9], "less": [2, 3]}
    report = edit_arm(make_report(arms=arms), 2, seeds=[1, 3])
    comparisons, text = compare(report, BLEU), summary_of(report)
    assert "from 3 seeds." in text and "(half: 3; less: 1)" in text
    assert comparisons[1].difference.mean == pytest.approx(1 / 3)
    assert comparisons[2].difference.mean == -2
    assert "the same seeds" not in explain_scores(report, comparisons)
    even = make_report(arms={"whole": [3, 4, 6], "half": [3, 5, 6]})
    assert "common seeds" not in summary_of(even)
    assert explain_scores(even, compare(even, BLEU)).startswith("All arms are trained")


@pytest.mark.parametrize("arms", [{}, {"half": []}, {"half": [5, 6]}])
def test_the_summary_says_if_nothing_can_be_compared(arms):
    report = make_report(arms={"whole": [3, 4, 6]} | arms)
    for index in range(1, len(report.arms)):
        seeds = [seed + 7 for seed in report.arms[index].seeds]
        report = edit_arm(report, index, seeds=seeds)
    text = summary_of(report)
    assert "no other arm has a seed of the baseline whole" in text
    assert ("Without a score: half." in text) == (arms == {"half": []})


def test_the_summary_says_if_one_seed_cannot_be_tested():
    assert "at least two seeds" in summary_of(
        make_report(arms={"whole": [3], "half": [5]})
    )


def test_preliminary_reports_and_lost_trials_are_said_to_be_so():
    report = edit_arm(make_report(unfinished=1), 0, lost=2)
    text = summary_of(report)
    assert "1 trial is not done yet" in text and "2 trials diverged or failed" in text


def test_too_many_seeds_to_count_are_shown_as_such():
    arms = {"whole": [10, 20, 60], "half": [10, 21, 60], "wild": [90, 0, 10]}
    report = make_report(arms=arms)
    assert "would need > 10,000 seeds per arm" in summary_of(report)
    header, *rows = scores_table(report, BLEU, compare(report, BLEU))
    column = header.index("seeds to see 0.3 points of BLEU")
    assert [row[column] for row in rows][::2] == ["–", "> 10,000"]
    assert rows[1][column].isdigit()


@pytest.mark.parametrize(
    "metric, text",
    [
        (LOSS, "0.005 nats per token of loss"),
        (Metric("a", "accuracy", "%", margin=0.5), "0.5 percentage points of accuracy"),
        (Metric("e", "errors", margin=2), "2 of errors"),
    ],
)
def test_the_margin_has_the_unit_of_its_metric(metric, text):
    report = make_report(metric, {"whole": [3, 4, 6], "half": [3, 5, 6]})
    comparisons = compare(report, metric)
    assert f"difference of {text} would need" in summary_of(report)
    assert f"seeds to see {text}" in scores_table(report, metric, comparisons)[0]
    assert f"Seeds to see {text}:" in explain_scores(report, comparisons)


def test_a_metric_without_a_margin_has_no_number_of_seeds():
    report = make_report(EXACT, {"whole": [3, 4, 6], "half": [3, 5, 6]})
    comparisons = compare(report, EXACT)
    assert "seeds per arm" not in summary_of(report)
    assert "to see" not in str(scores_table(report, EXACT, comparisons)[0])
    assert "Seeds to see" not in explain_scores(report, comparisons)


def test_the_loss_is_the_first_outcome_if_all_arms_have_it():
    report = make_report(arms={"a": [1, 2], "b": [2, 3]}, metrics=(BLEU, LOSS))
    assert report.outcomes == [BLEU]
    for index in (0, 1):
        both = report.arms[index].test | {"loss": np.array([1.0, 2.0])}
        report = edit_arm(report, index, dev=both, test=both)
    assert report.outcomes == [LOSS, BLEU]
    assert report._replace(metric=LOSS).outcomes == [LOSS, BLEU]


def test_other_metrics_that_are_0_everywhere_are_left_out():
    zeros = Metric("zero", "zero")
    report = make_report(metrics=(BLEU, zeros, EXACT))
    test = report.arms[0].test | {"zero": np.zeros(3), "exact_match": np.ones(3)}
    report = edit_arm(report, 0, test=test)
    header, row = others_table(report, compare(report, BLEU))
    assert header == ["arm", "exact match, %"] and row[1] == "1.00 ± 0.00"
    assert others_table(make_report(), compare(make_report(), BLEU)) == []


@pytest.mark.parametrize(
    "details, has_search, is_noted",
    [
        ("Scientific: a.", False, False),
        ("Nuisance: b.", False, True),
        ("Nuisance: b.", True, False),
    ],
)
def test_settings_that_were_not_searched_are_noted(details, has_search, is_noted):
    report = make_report(details=details, has_search=has_search)
    text = explain_scores(report, compare(report, BLEU))
    assert ("settings were not searched" in text) == is_noted


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_the_scored_checkpoints_are_explained(checkpoint):
    report = make_report(checkpoint=checkpoint)
    text = explain_scores(report, compare(report, BLEU))
    assert ("Checkpoints were chosen on dev" in text) == (checkpoint == "best")
    assert f"{CHECKPOINTS[checkpoint]}; test was scored once, after that." in text


def test_the_bootstrap_is_explained_with_its_metric_and_seed():
    text = explain_others(make_report(bootstrap_metric=EXACT, seed=3))
    assert "interval of exact match" in text and "seed 3" in text
    assert "ignores the variation over seeds" in text
    assert "bootstrap" not in explain_others(make_report())


# Markdown and HTML


@pytest.mark.parametrize(
    "text",
    [
        *("# no heading", "1. no list", "- no list", "+ no list", "= no underline"),
        *("*no* emphasis _at_ all __or__ this", "`code`", "[link](to)", "![image](x)"),
        *("<b>tag</b>", "&amp;", "a | b", "back\\slash", "~~gone~~", "---", "> quote"),
        *("gated_elementwise, 2. and 3", "0.71 ± 0.07", "-5", "2019"),
    ],
)
def test_escaped_text_reads_as_it_is(text):
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render
    plain = html(escape(text)).strip()
    assert plain.startswith("<p>") and plain.endswith("</p>")
    unescaped = plain[3:-4].replace("&lt;", "<").replace("&gt;", ">")
    assert unescaped.replace("&quot;", '"').replace("&amp;", "&") == text


def test_numbers_are_not_escaped():
    for text in ("0.71 ± 0.07", "−5.00", "50.00", "< 0.001"[2:], "model.num_heads"):
        assert escape(text) == text


def test_tables_align_numbers_and_mark_the_baseline():
    text = table([["arm", "loss"], ["a | b", "1"], ["c", "2"]], bold="c")
    assert text.splitlines() == [
        "| arm | loss |",
        "| --- | ---: |",
        r"| a \| b | 1 |",
        "| **c** | 2 |",
    ]


def test_html_is_made_from_the_markdown_with_figures_inside():
    text = "# A\n\n![b *c*](report/x.png)\n\n| a | b |\n| --- | ---: |\n| **a** | 1 |\n"
    page = to_html(text, "T & U", {"report/x.png": "<svg>drawn</svg>"})
    assert "<title>T &amp; U</title>" in page and "<h1>A</h1>" in page
    assert '<span class="figure" role="img" aria-label="b c"><svg>drawn</svg>' in page
    assert '<div class="scroll"><table>' in page and "<strong>a</strong>" in page
    assert "<img" not in page
    assert "<i>" not in to_html("<i>no</i>", "", {})


def test_the_document_has_every_section_once():
    report = make_report(arms={"whole": [3, 4, 6], "half": [3, 5, 6]}, note="A note.")
    report = report._replace(bootstrap_metric=BLEU, anchors=[paper("Paper")])
    text = write_markdown(report, {"costs": ("report/costs.png", "Costs.")})
    headings = re.findall(r"^##? .*", text, re.MULTILINE)
    assert headings == ["# Why?", "## Scores", "## Other scores", "## Cost"] + [
        "## Environment",
        "## Command",
    ]
    assert "Published: Paper, BLEU." in text and "A note." in text
    assert "![Costs.](report/costs.png)" in text


def test_published_scores_stand_in_a_column_per_source_with_their_own_digits():
    report = make_report(arms={"whole": [3, 4, 6], "half": [3, 5, 6]})
    report = edit_arm(report, 0, published={"A, Table 1": 1.846, "B": 47.25})
    report = edit_arm(report, 1, published={"A, Table 1": 1.849})
    report = report._replace(anchors=[paper("A, Table 1", ".3f"), paper("B")])
    header, *rows = scores_table(report, BLEU, compare(report, BLEU))
    assert header[-2:] == ["published, A (BLEU)", "published, B (BLEU)"]
    assert [row[-2:] for row in rows] == [["1.846", "47.2"], ["1.849", NOTHING]]
    assert "Published: A, Table 1, BLEU; B, BLEU." in write_markdown(report, {})


# Figures


@pytest.fixture
def drawn():
    """Draw a report's figures; close them afterwards."""
    yield make_figures
    plt.close("all")


def test_every_arm_looks_different_and_matched_arms_alike():
    names = [*"abcdefghijklmno", "b, equal parameters", "c, equal parameters"]
    arms = make_report(arms=dict.fromkeys(names, [1])).arms
    styles = arm_styles(arms)
    assert len(set(styles.values())) == len(names)
    colours = {name: style[0] for name, style in styles.items()}
    assert colours["b"] == colours["b, equal parameters"] != colours["c"]


def test_an_arm_has_one_colour_in_all_figures(drawn):
    arms = {"whole": [3, 4, 6], "half": [3, 5, 6], "less": [2, 4, 5]}
    report = make_report(arms=arms)
    styles, figures = arm_styles(report.arms), drawn(report)
    assert set(figures) == {"test_bleu", "dev_bleu", "costs"}
    for figure, _ in figures.values():
        svg = to_svg(figure, "x")
        for colour, *_ in list(styles.values())[1:]:
            assert colour in svg
    curves = figures["dev_bleu"][0].axes[0]
    assert [line.get_color() for line in curves.lines] == [
        styles[name][0] for name in arms
    ]


def intervals(figure):
    """Return the drawn error bars' ends, per axes."""
    return [
        [
            (min(points[:, i]), max(points[:, i]))
            for container in ax.containers
            for bars in container.lines[2]
            for points in bars.get_segments()
            for i in (0, 1)
            if min(points[:, i]) != max(points[:, i])
        ]
        for ax in figure.axes
    ]


def test_intervals_are_clipped_to_the_bounds_of_the_metric(drawn):
    report = make_report(EXACT, {"whole": [97, 99, 100], "half": [0, 0, 4]})
    figure, _ = drawn(report)["test_exact_match"]
    (whole, half), *_ = intervals(figure)
    assert whole[1] == 100 and half[0] == 0
    _, whole, half = scores_table(report, EXACT, compare(report, EXACT))
    assert whole[4].endswith("to 100.00") and half[4].startswith("0.00 to")


@pytest.mark.parametrize("seeds, has_intervals", [(1, False), (2, False), (3, True)])
def test_fewer_than_three_seeds_are_dots_without_intervals(drawn, seeds, has_intervals):
    arms = {"whole": [3, 4, 6][:seeds], "half": [3, 5, 6][:seeds]}
    figures = drawn(make_report(arms=arms))
    assert any(intervals(figures["test_bleu"][0])) == has_intervals
    assert any(intervals(figures["costs"][0])) == has_intervals
    dots = sum(
        len(x.get_offsets())
        for x in figures["test_bleu"][0].axes[0].collections
        if hasattr(x, "get_sizes") and len(x.get_sizes())
    )
    assert dots == 2 * seeds
    assert ("95% interval" in figures["test_bleu"][1]) == has_intervals


def test_the_curve_is_the_mean_with_the_range_over_seeds(drawn):
    report = make_report()
    scores = np.array([[1.0, 2.0], [11.0, 12.0]])
    report = edit_arm(report, 0, curves={"bleu": (np.array([1, 2]), scores)})
    figure, caption = drawn(report)["dev_bleu"]
    assert figure.axes[0].lines[0].get_ydata().tolist() == [6, 7]
    assert figure.axes[0].get_title(loc="left") == "Dev BLEU during training"
    assert "Dev BLEU during training" in caption


def test_published_scores_are_drawn_below(drawn):
    report = make_report(arms={"1": [3, 4, 6], "2": [3, 5, 6]}, axis="N")
    for index in (0, 1):
        report = edit_arm(
            report, index, value=index + 1, published={"Paper": 20.0 + index}
        )
    report = report._replace(anchors=[paper("Paper")])
    figure, caption = drawn(report)["test_bleu"]
    assert figure.axes[1].lines[0].get_ydata().tolist() == [20, 21]
    assert "Below: Paper." in caption


def numbered(losses):
    """Return a report of the loss of arms with the swept numbers 1, 2, 4, ..."""
    arms = {str(2**i): scores for i, scores in enumerate(losses)}
    report = make_report(LOSS, arms, axis="N, model.attention.num_heads")
    for index in range(len(losses)):
        report = edit_arm(report, index, value=2**index)
    return report


def test_the_loss_has_a_curve_where_the_swept_quantity_is_a_number(drawn):
    losses = [[1 + 2.0**-i + noise for noise in (0, 0.01, -0.01)] for i in range(4)]
    report = numbered(losses)
    text = write_markdown(report, {})
    assert "a·n^b + c with a = 1 (1 to 1), b = −1 (−1 to −1)" in text
    figure, caption = drawn(report)["test_loss"]
    (curve,) = [x for x in figure.axes[0].lines if len(x.get_xdata()) == 100]
    assert curve.get_ydata()[[0, -1]] == pytest.approx([2, 1 + 2.0**-3])
    assert "The curve is" in caption
    for other in (numbered(losses[:3]), report._replace(axis=None)):
        assert "a·n^b" not in write_markdown(other, {})
    losses[3] = [score + 1 for score in losses[3]]
    report = numbered(losses)
    assert "does not follow a curve a·n^b + c" in write_markdown(report, {})
    assert "The curve is" not in drawn(report)["test_loss"][1]


def planned(report, **changes):
    """Return a report with a verdict on its second arm, by planned looks."""
    row = {"arm": "half", "verdict": "worse", "metric": "bleu", "split": "dev"}
    row |= {"difference": -2.0, "low": -3.0, "high": -1.0, "margin": 0.3}
    row |= {"seeds": 4, "looks": "4,8", "lost": 0, "chance": None} | changes
    sentence = verdict_sentence(row, report.metric, report.baseline.name)
    return report._replace(verdicts=[row | {"sentence": sentence}])


@pytest.mark.parametrize(
    "changes, text",
    [
        ({}, "half is worse than whole: −2.00 (BLEU; −3.00 to −1.00, after 4 seeds)."),
        (
            {"verdict": "better", "difference": 0.1, "low": 0.05, "high": 0.15},
            "half is better than whole, by less than the margin of 0.3 points of BLEU: "
            "+0.10 (BLEU; +0.05 to +0.15, after 4 seeds).",
        ),
        (
            {"verdict": "equivalent", "difference": 0.1, "bound": 0.22},
            "half is equivalent to whole within 0.3 points of BLEU: +0.10 (BLEU; at "
            "most 0.22 either way by two one-sided tests, after 4 seeds).",
        ),
        (
            {"verdict": "undecided", "low": np.nan, "high": np.nan, "seeds": 1},
            "half is undecided against whole: −2.00 (BLEU; after 1 seed, too few or "
            "too alike for an interval).",
        ),
        (
            {"verdict": "undecided", "low": -3.0, "high": 1.0, "chance": 0.084},
            "half is undecided against whole: −2.00 (BLEU; −3.00 to +1.00, after 4 "
            "seeds). More seeds are unlikely to decide it (8%).",
        ),
        (
            {"verdict": "undecided", "low": -3.0, "high": 1.0, "chance": 0.1},
            "half is undecided against whole: −2.00 (BLEU; −3.00 to +1.00, after 4 "
            "seeds).",
        ),
        (
            {"verdict": "undecided", "lost": 2},
            "half is undecided: 2 trials of it or whole diverged or failed.",
        ),
        (
            {"verdict": "undecided", "seeds": 0},
            "half is undecided: it has no seed in common with whole.",
        ),
    ],
)
def test_every_verdict_is_a_sentence_with_its_interval(changes, text):
    report = planned(
        make_report(arms={"whole": [3, 4, 6], "half": [1, 2, 4]}), **changes
    )
    assert report.verdicts[0]["sentence"] == text


def test_a_report_of_planned_looks_shows_verdicts_instead_of_p_values():
    report = make_report(arms={"whole": [3, 4, 6], "half": [1, 2, 3]})
    assert "p (Holm)" in write_markdown(report, {})
    text = write_markdown(planned(report), {})
    assert "p (Holm)" not in text and "only the verdicts and their" in text
    assert "0 better, 1 worse, 0 equivalent, 0 undecided" in text
    assert "half is worse than whole: −2.00" in text
    header, _, half = scores_table(planned(report), BLEU, compare(report, BLEU))
    assert half[header.index("verdict")] == "worse"


def test_every_outcome_says_how_many_seeds_it_would_need():
    report = make_report(arms={"a": [1, 2, 3], "b": [2, 3, 5]}, metrics=(BLEU, LOSS))
    for index, losses in enumerate(([1.0, 1.1, 1.2], [1.01, 1.12, 1.2])):
        both = report.arms[index].test | {"loss": np.array(losses)}
        report = edit_arm(report, index, dev=both, test=both)
    text = summary_of(report)
    for metric in (BLEU, LOSS):
        (needed,) = [c.seeds_needed for c in compare(report, metric) if c.seeds_needed]
        assert f"{margin_text(metric)} would need {needed} seeds per arm" in text


def test_figures_are_as_wide_as_a_phone_and_themed(drawn):
    for figure, _ in drawn(make_report()).values():
        assert figure.get_size_inches()[0] <= 5
        svg = to_svg(figure, "name")
        assert (
            "var(--ink)" in svg and svg.startswith("<svg") and "width=" not in svg[:90]
        )
        assert re.findall(r'\bid="(?!name-)', svg) == []


def test_scores_that_exceed_their_range_by_rounding_are_drawn():
    """As those of sacreBLEU for perfect translations."""
    report = make_report(arms={"whole": [100.00000000000004] * 3})
    figure, _ = make_figures(report)["test_bleu"]
    plt.close(figure)
