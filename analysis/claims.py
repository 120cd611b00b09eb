"""Claims about attention heads, tested with the sweeps and analyses under results/.

    python -m analysis.claims

This writes results/claims.md, results/claims.png and the table of
docs/research/claims.md. Each entry of `CLAIMS` has a claim, its source, the published
numbers, and the arms of an ablation or the analysis of trained heads that test it. All
measured numbers on the page are computed from the files of sweeps and analyses. Claims
without such files are "not tested yet". See `analysis.claim_tests`.
"""

import argparse
import re
import textwrap
from functools import partial
from operator import attrgetter
from pathlib import Path

import matplotlib

from headcount.analysis.claim_tests import (
    CONTRADICTED,
    NATS,
    SPEED,
    SUPPORTED,
    TEST_LOSS,
    UNDECIDED,
    Claim,
    Effect,
    Quantity,
    Results,
    ablations_of,
    by_setting,
    cheaper,
    chosen,
    compare,
    deeper_is_wider,
    diverges_less,
    exactly,
    find_effects,
    has,
    heads_differ,
    heads_have,
    heads_interact,
    heads_lower,
    less_spread,
    loses_less,
    most_can_go,
    no_slower,
    one_of,
    read_analyses,
    read_results,
    same_parameters,
    smaller_keys,
    smaller_start,
)
from headcount.analysis.formatting import NOTHING
from headcount.analysis.roles import POSITIONAL
from headcount.tasks.base import LOSS

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402  after the backend is chosen

ROOT = Path(__file__).resolve().parent.parent
UNTESTED = "not tested yet"
COLOURS = {SUPPORTED: "#1f9e89", CONTRADICTED: "#c2456b", UNDECIDED: "#6a6d75"}
LABEL_WIDTH = 72  # characters of a label in the figure
# Values of an estimate that mean no effect, where that is not 0.
NEUTRAL = {
    "ratio of standard deviations": 1,
    SPEED: 1,
    "share of seeds": 0.5,
    "linear CKA": 0.5,
}
MARKS = "<!-- claims: python -m analysis.claims -->", "<!-- end of claims -->"
HEADER = ("", "claim", "made by", "published", "corpus", "seeds", "measured", "verdict")

lower, higher, no_lower, little_higher = (
    partial(compare, rule, attrgetter("loss"), TEST_LOSS)
    for rule in ("lower", "higher", "no lower", "little higher")
)
BAD_HEADS = {
    "added_loss": Quantity("loss added by removing one head", LOSS.format, NATS),
    "noise_loss": Quantity("loss added by noise on one head", LOSS.format, NATS),
}
FIRST = "weight of the first token"
SINK = Quantity(FIRST, ".3f", f"difference in the {FIRST}")
# in decoders: elsewhere, the sink is the last token
sink_lower = partial(heads_lower, "describe", "sink", "decoder", SINK)
GAP = Quantity("dev loss − training loss", LOSS.format, NATS)
GAIN = Quantity("context gain", LOSS.format, "difference in context gain, nats")
SPIKE = Quantity(
    "log of the largest / median gradient norm", ".2f", "difference of logarithms"
)


def sink_and_loss_lower(claim: Claim, sweep: Results) -> list[Effect]:
    """Test both halves of a claim about sinks and loss."""
    effects = sink_lower(claim, sweep)
    return effects and effects + lower(claim, sweep)


def bad_heads_cost_less(claim: Claim, sweep: Results) -> list[Effect]:
    """Test whether removing a head, and noise on its output, cost less loss."""
    return [
        effect
        for column, quantity in BAD_HEADS.items()
        for effect in heads_lower("importance", column, None, quantity, claim, sweep)
    ]


def at_each(setting: str, test, claim: Claim, sweep: Results) -> list[Effect]:
    """Compare the arms with each value of a setting with the claim's reference there.

    Args:
        test: a `compare` with a rule, values and a quantity.
    """
    arms_of = {}
    for arm in sweep.arms:
        arms_of.setdefault(arm.settings[setting], []).append(arm)
    subsets = [sweep._replace(arms=arms) for _, arms in sorted(arms_of.items())]
    comparisons = sum(len(chosen(claim, subset)[0]) for subset in subsets)
    return [effect for subset in subsets for effect in test(claim, subset, comparisons)]


def tolerates_rates(claim: Claim, sweep: Results) -> list[Effect]:
    """Test whether higher learning rates cost less loss, divergence and spikes.

    Spikes of the gradient are compared at the highest rate at which no trial was lost,
    by the logarithm of the largest gradient norm of a training over the median.
    """
    rate = "learning_rate"
    effects = loses_less(rate, True, claim, sweep) + diverges_less(rate, claim, sweep)
    settings_at = {
        value: [arm.settings for arm in pair]
        for value, pair in by_setting(rate, claim, sweep).items()
        if not any(arm.lost for arm in pair)
    }
    if not settings_at:
        return effects
    arm_settings, reference = settings_at[max(settings_at)]
    narrowed = claim._replace(
        arms=exactly(**arm_settings), reference=exactly(**reference)
    )
    return effects + compare("lower", attrgetter("spike"), SPIKE, narrowed, sweep)


EQUAL_STARTS = "merge_start", "merge_rules"
GATES = one_of(
    *(has(merge="gated"), has(merge="gated_elementwise")),
    *(exactly(gate="sigmoid"), exactly(gate="sigmoid", gate_size="element")),
)
VASWANI = "Vaswani et al. 2017, Table 3"
ROLES = (  # of every corpus, by `analysis.roles`
    *POSITIONAL,  # self, previous token, next token, local, global
    "same token earlier",
    *("after the same token", "induction", "punctuation"),
    *("beginning (BOS)", "end (EOS)"),
)
SUBJECTS = (  # links of the corpus `stories` between words that agree
    *("verb → its subject", "before the verb → its subject"),
    *("verb that agrees → its subject", "before the verb that agrees → its subject"),
)


def is_syntax(role: str) -> bool:
    """Whether a role is a verb's subject, or a relation of Universal Dependencies."""
    of, _, to = role.partition(" → ")
    is_relation = "head" in (of, to) and "punct" not in (of, to)
    return is_relation or role in SUBJECTS


CLAIMS = (
    Claim(
        "More heads at fixed width cost no parameters.",
        "Vaswani et al. 2017",
        "65 million for N = 1 to 32",
        "heads",
        same_parameters,
    ),
    Claim(
        "8 heads beat 1.",
        f"{VASWANI}, rows A",
        "24.9 and 25.8 BLEU",
        "heads",
        lower,
        has(num_heads=8),
        has(num_heads=1),
    ),
    Claim(
        "16 or 32 heads are no better than 8.",
        f"{VASWANI}, rows A",
        "25.8, 25.8 and 25.4 BLEU for 8, 16 and 32",
        "heads",
        no_lower,
        one_of(has(num_heads=16), has(num_heads=32)),
        has(num_heads=8),
    ),
    Claim(
        "Heads of size 64 are about right at every width.",
        "common practice; Kaplan et al. 2020, Figure 5",
        "sizes 16 to 300 move the loss by at most 1.9% at D = 256, 0.8% at 1024",
        "width_heads",
        partial(at_each, "width", no_lower),
        None,
        has(head_dim=64),
    ),
    Claim(
        "Smaller keys hurt.",
        f"{VASWANI}, rows B",
        "25.8, 25.4 and 25.1 BLEU for H = 64, 32, 16",
        "head_dim",
        higher,
        smaller_keys,
    ),
    Claim(
        "Without the scale 1/√H training suffers.",
        "Vaswani et al. 2017, Section 3.2.1",
        NOTHING,
        "unscaled",
        higher,
        has(scale=1.0),
    ),
    Claim(
        "Concatenation beats averaging with the rules as they are.",
        "common practice",
        NOTHING,
        "merge",
        higher,
        has(merge="mean"),
        has(merge="concat"),
    ),
    Claim(
        "Concatenation beats averaging with equal parameters.",
        "common practice",
        NOTHING,
        "merge",
        higher,
        has("parameters", merge="mean"),
        has(merge="concat"),
    ),
    Claim(
        "Concatenation beats averaging at equal initial scales.",
        "common practice",
        NOTHING,
        EQUAL_STARTS,
        higher,
        has(merge="mean"),
        has(merge="concat", merge_gain=1.0),
    ),
    Claim(
        "Averaging is cheaper.",
        "by its formula",
        "(N − 1)·V·D fewer parameters per layer",
        "merge",
        cheaper,
        has(merge="mean"),
        has(merge="concat"),
    ),
    Claim(
        "Averaging trains more stably: less spread over seeds.",
        "common belief",
        NOTHING,
        EQUAL_STARTS,
        less_spread,
        has(merge="mean"),
        has(merge="concat", merge_gain=1.0),
    ),
    Claim(
        "Averaging trains more stably: it tolerates higher learning rates, with "
        "smaller spikes of the gradient norm.",
        "common belief",
        NOTHING,
        "merge_rates",
        tolerates_rates,
        has(merge="mean"),
        has(merge="concat"),
    ),
    Claim(
        "Averaging is more robust to a bad head.",
        "common belief",
        NOTHING,
        ("merge", *EQUAL_STARTS),
        bad_heads_cost_less,
        has(merge="mean"),
        has(merge="concat"),
    ),
    Claim(
        "Weights that depend on the input beat fixed ones.",
        "common belief",
        NOTHING,
        ("merge_start", "variants"),
        lower,
        one_of(has(merge="dynamic"), exactly(gate="double_sigmoid")),
        one_of(has(merge="weighted"), exactly(gate="double_sigmoid", gate_features=0)),
    ),
    Claim(
        "Gates beat concatenation.",
        "Qiu et al. 2025 (Qwen)",
        "perplexity 6.026 → 5.792 headwise, 5.761 elementwise",
        ("gates", "merge", *EQUAL_STARTS, "variants"),
        lower,
        GATES,
        one_of(has(merge="concat"), exactly()),
    ),
    Claim(
        "Averaging loses less with many heads.",
        "common belief",
        NOTHING,
        "merge_heads",
        partial(loses_less, "num_heads", False),
        has(merge="mean"),
        has(merge="concat"),
    ),
    Claim(
        "Heads specialise, more than in an untrained model.",
        "Clark et al. 2019; Voita et al. 2019",
        NOTHING,
        "roles",
        partial(heads_have, ROLES.__contains__),
    ),
    Claim(
        "Low layers attend locally, high layers don't.",
        "Clark et al. 2019",
        NOTHING,
        "roles",
        deeper_is_wider,
    ),
    Claim(
        "Heads follow syntax beyond any fixed offset.",
        "Clark et al. 2019; Voita et al. 2019",
        NOTHING,
        "roles",
        partial(heads_have, is_syntax),
    ),
    Claim(
        "Most heads can be removed without loss.",
        "Michel et al. 2019; Voita et al. 2019",
        "38 of 48 encoder heads for 0.15 BLEU",
        "roles",
        most_can_go,
    ),
    Claim(
        "Heads look at different subspaces, rather than being redundant.",
        "Vaswani et al. 2017",
        NOTHING,
        "roles",
        heads_differ,
    ),
    Claim(
        "Heads interact through the output projection: removing two does not cost the "
        "sum of removing each.",
        "common belief",
        NOTHING,
        "roles",
        heads_interact,
    ),
    Claim(
        "Positions are needed.",
        "Vaswani et al. 2017",
        NOTHING,
        "positions",
        higher,
        has(positions="none"),
    ),
    Claim(
        "Positions are needed most where much context precedes.",
        "common belief",
        NOTHING,
        "positions",
        partial(compare, "lower", attrgetter("context_gain"), GAIN),
        has(positions="none"),
    ),
    Claim(
        "More heads overfit less.",
        "common belief",
        NOTHING,
        "heads",
        partial(compare, "lower", attrgetter("gap"), GAP),
        None,
        has(num_heads=1),
    ),
    Claim(
        "Heads run in parallel, so more of them are no slower.",
        "common belief",
        NOTHING,
        ("heads", "head_speed"),
        no_slower,
        None,
        has(num_heads=1),
    ),
    Claim(
        "Multi-query and grouped heads lose little.",
        "Shazeer 2019; Ainslie et al. 2023",
        "26.7 and 26.5 BLEU; 47.2, 46.6 and (8 groups) 47.1",
        "kv_heads",
        little_higher,
    ),
    Claim(
        "Talking heads help.",
        "Shazeer et al. 2020",
        NOTHING,
        "variants",
        lower,
        has(talking_heads=True),
    ),
    Claim(
        "Gates empty the sink and lower the loss.",
        "Qiu et al. 2025 (Qwen)",
        "weight of the first token 0.467 → 0.048",
        ("gates", "merge", *EQUAL_STARTS, "variants"),
        sink_and_loss_lower,
        GATES,
        one_of(has(merge="concat"), exactly()),
    ),
    Claim(
        "Each variant of the ablation `variants` lowers the loss.",
        "2019 to 2026, see docs/reference/variants.md",
        NOTHING,
        "variants",
        lower,
    ),
    Claim(
        "Muon trains better than AdamW.",
        "Liu et al. 2025 (Moonlight)",
        "the same loss with half the FLOP",
        "muon",
        lower,
        exactly(name="muon"),
    ),
    Claim(
        "Muon trains better on each head's projection than on those of all heads.",
        "GLM-5 2026, 2602.15763; Kimi K3 2026, 2607.24653",
        NOTHING,
        "muon",
        lower,
        exactly(name="muon", muon_per_head=True),
        exactly(name="muon"),
    ),
    Claim(
        "Concatenation gains by starting at the scale of averaging.",
        "asked here, after claims 7 and 9",
        NOTHING,
        ("merge_start", "small_start"),
        lower,
        smaller_start,
        has(merge="concat", merge_gain=1.0),
    ),
    Claim(
        "Logits should be divided by H instead of √H.",
        "Yang et al. 2022",
        NOTHING,
        "scale",
        partial(at_each, "head_dim", lower),
        None,
        has(scale=None),
    ),
)


def make_rows(results: list[tuple[Claim, list[Effect]]]) -> list[tuple[str, ...]]:
    """Return the rows of the table: one per effect or, without any, what is needed."""
    rows = []
    for index, (claim, effects) in enumerate(results, start=1):
        claim_cells = (str(index), claim.sentence, claim.who, claim.published)
        for effect in effects:
            cells = (effect.corpus, str(effect.seeds), effect.text, effect.verdict)
            rows.append((*claim_cells, *cells))
            claim_cells = ("",) * len(claim_cells)  # once per claim
        if not effects:
            needed = f"needs: {' or '.join(ablations_of(claim))}"
            rows.append((*claim_cells, NOTHING, NOTHING, needed, UNTESTED))
    return rows


def summarize(results: list[tuple[Claim, list[Effect]]]) -> str:
    """Count the tested claims, and the comparisons by verdict, in a sentence."""
    tested = [effects for _, effects in results if effects]
    verdicts = [effect.verdict for effects in tested for effect in effects]
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in COLOURS)
    return (
        f"{len(tested)} of {len(results)} claims are tested, by {len(verdicts)} "
        f"comparisons: {counts}."
    )


def to_markdown(results: list[tuple[Claim, list[Effect]]]) -> str:
    """Format the summary and the table as Markdown."""
    rows = [HEADER, ("---:", *["---"] * (len(HEADER) - 1)), *make_rows(results)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n\n".join([summarize(results), "\n".join(lines)])


def draw(results: list[tuple[Claim, list[Effect]]], path: Path) -> None:
    """Save a forest plot: estimates with intervals by unit, coloured by verdict."""
    panels = {}
    for index, (_, effects) in enumerate(results, start=1):
        for effect in effects:
            if effect.estimate is not None:
                panels.setdefault(effect.unit, []).append((index, effect))
    panels = panels or {NATS: []}
    sizes = [len(drawn) + 3 for drawn in panels.values()]  # 3: its axis and its label
    figure, axes = plt.subplots(
        len(panels),
        figsize=(9.6, 0.8 + 0.24 * sum(sizes)),
        height_ratios=sizes,
        squeeze=False,
        layout="constrained",
    )
    for ax, (unit, drawn) in zip(axes.flat, panels.items(), strict=True):
        draw_panel(ax, unit, drawn)
    for verdict, colour in COLOURS.items():
        axes[0, 0].plot([], [], "o", color=colour, label=verdict)
    figure.legend(loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_panel(ax, unit: str, drawn: list[tuple[int, Effect]]) -> None:
    """Draw the estimates of one unit, one per row."""
    for row, (_, effect) in enumerate(drawn):
        value, low, high = effect.estimate
        ax.errorbar(
            [value],
            [row],
            xerr=[[value - low], [high - value]],
            fmt="o",
            ms=4,
            color=COLOURS[effect.verdict],
        )
    ax.axvline(NEUTRAL.get(unit, 0), color="#6a6d75", lw=0.8)
    # without the numbers, which follow a colon or stand in parentheses
    names = [re.split(r": | \(\d", effect.text)[0] for _, effect in drawn]
    names = [name.replace("learning_rate=", "rate ") for name in names]
    labels = [
        f"{index}. {name.removeprefix('loss of ')}, {effect.corpus}"
        for name, (index, effect) in zip(names, drawn, strict=True)
    ]
    labels = [textwrap.fill(label, LABEL_WIDTH) for label in labels]
    ax.set_yticks(range(len(drawn)), labels, fontsize=7)
    ax.tick_params(axis="x", labelsize=7)
    ax.set_ylim(max(1, len(drawn)) - 0.5, -0.5)
    ax.set_xlabel(unit, fontsize=8)
    if unit == NATS:
        ax.axvspan(-LOSS.margin, LOSS.margin, color="#dfe1e6", lw=0)
        ax.set_xscale("symlog", linthresh=0.01)
        ax.set_xticks([-1, -0.1, -0.01, 0, 0.01, 0.1, 1])
        ax.set_xticks([], minor=True)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_xlabel(f"{unit} (grey: margin)", fontsize=8)


def fill(page: str, text: str) -> str:
    """Return a page with the text between `MARKS` replaced.

    Raises:
        ValueError: the page does not contain each mark exactly once.
    """
    start, end = MARKS
    if page.count(start) != 1 or page.count(end) != 1:
        raise ValueError(f"The page must have the lines {start} and {end} once.")
    head, tail = page.split(start)
    return f"{head}{start}\n\n{text}\n\n{end}{tail.split(end)[1]}"


def main() -> None:
    """Test every claim with the available results, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    page = ROOT / "docs/research/claims.md"
    parser.add_argument("--page", type=Path, default=page)
    arguments = parser.parse_args()
    if not arguments.results.is_dir():
        parser.error(f"--results={arguments.results} is not a folder.")
    if not arguments.page.is_file():
        parser.error(f"--page={arguments.page} is not a file.")
    page = arguments.page.read_text()
    try:
        fill(page, "")  # before anything is written
    except ValueError as error:
        parser.error(f"--page={arguments.page}: {error}")
    folders = sorted(path for path in arguments.results.iterdir() if path.is_dir())
    readers = read_results, read_analyses
    try:
        contents = [reader(folder) for folder in folders for reader in readers]
        sweeps = [results for results in contents if results is not None]
        tested = [(claim, find_effects(claim, sweeps)) for claim in CLAIMS]
    except ValueError as error:
        parser.error(str(error))
    if not any(effects for _, effects in tested):
        parser.error(f"--results={arguments.results} has no results for any claim.")
    text = to_markdown(tested)
    draw(tested, arguments.results / "claims.png")
    title = "# Claims about heads\n\nWritten by `python -m analysis.claims`."
    title += " [Rules and limits](../docs/research/claims.md)."
    title += "\n\n![Estimates with their intervals, by verdict](claims.png)"
    (arguments.results / "claims.md").write_text(f"{title}\n\n{text}\n")
    arguments.page.write_text(fill(page, text))
    print(summarize(tested))


if __name__ == "__main__":
    main()
