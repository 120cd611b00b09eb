"""What is claimed of attention heads, tested with the sweeps under results/.

    python -m analysis.claims

Writes results/claims.md, results/claims.png and the table of docs/research/claims.md.
A claim is a row of `CLAIMS`: what is said, by whom, with which figure, and which arms
of which ablation test it. Every number of the page is computed from the sweep.csv of
the sweeps; a claim without one is "not tested yet".

A sweep's folder is named ABLATION_CORPUS, as in heads_multi30k. Arms are compared by
the loss on test, paired by seed, with intervals that hold for all arms of a claim
together, and for all planned looks.
"""

import argparse
import csv
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from scipy import stats

from headcount.analysis.formatting import NOTHING, interval, number, signed
from headcount.analysis.sequential import Looks, judge
from headcount.analysis.significance import CONFIDENCE
from headcount.configs import ablations
from headcount.tasks.base import LOSS

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402  after the backend is chosen

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED, CONTRADICTED, UNDECIDED = "supported", "contradicted", "undecided"
UNTESTED = "not tested yet"
COLOURS = {SUPPORTED: "#1f9e89", CONTRADICTED: "#c2456b", UNDECIDED: "#6a6d75"}
SLOWER = 0.95  # of the reference's speed: less is slower
MARKS = "<!-- claims: python -m analysis.claims -->", "<!-- end of claims -->"
HEADER = ("", "claim", "made by", "published", "corpus", "seeds", "measured", "verdict")


class Arm(NamedTuple):
    """The trials of an arm that are done, as a sweep.csv has them."""

    name: str
    settings: dict  # overrides, by the last part of their key
    is_baseline: bool
    parameters: int
    flops: float
    speed: float | None  # tokens per second of its groups
    loss: dict[int, float]  # on test, by seed
    lost: int  # trials that diverged or failed


class Results(NamedTuple):
    """A sweep under results/."""

    ablation: str
    corpus: str
    arms: list[Arm]
    looks: tuple[int, ...] | None  # numbers of seeds; None: they were fixed

    @property
    def baseline(self) -> Arm | None:
        """The arm that is the base config."""
        return next((arm for arm in self.arms if arm.is_baseline), None)


class Effect(NamedTuple):
    """What a sweep says about a claim."""

    corpus: str
    text: str  # with numbers
    verdict: str
    seeds: int
    difference: tuple[float, float, float] | None = None  # of the loss, and interval


Chooses = Callable[[dict, dict], bool]  # by an arm's settings and the baseline's


class Claim(NamedTuple):
    """Something that is said about heads, and how it is tested."""

    sentence: str
    who: str
    published: str
    ablation: str  # of configs/ablations.py; or what else it needs
    test: Callable | None = None  # None: nothing under results/ can test it yet
    arms: Chooses | None = None  # None: all but the reference
    reference: Chooses | None = None  # None: the baseline
    margin: float = LOSS.margin  # of the loss, in nats per token


def has(match: str | None = None, **wanted) -> Chooses:
    """Choose the arms with these settings, and no others if they are matched."""

    def chooses(settings: dict, baseline: dict) -> bool:
        del baseline
        if settings.get("match") != match:
            return False
        return all(settings.get(key, "") == value for key, value in wanted.items())

    return chooses


def one_of(*choices: Chooses) -> Chooses:
    """Choose the arms that any of some functions chooses."""
    return lambda settings, baseline: any(x(settings, baseline) for x in choices)


def smaller_keys(settings: dict, baseline: dict) -> bool:
    """Choose arms with the baseline's value size and smaller keys."""
    same = settings["value_dim"] == baseline["value_dim"]
    return same and settings["head_dim"] < baseline["head_dim"]


def merge(rule: str, match: str | None = None) -> Chooses:
    """Choose the arm of a merge rule."""
    return has(match, merge=rule)


# Tests: functions of a claim and a sweep, to effects.


def chosen(claim: Claim, sweep: Results) -> tuple[list[Arm], Arm | None]:
    """Return the arms of a claim in a sweep, and the one they are compared with."""
    baseline = sweep.baseline
    if baseline is None:
        return [], None
    base, reference = baseline.settings, baseline
    if claim.reference is not None:
        found = [arm for arm in sweep.arms if claim.reference(arm.settings, base)]
        if not found:
            return [], None
        reference = found[0]
    others = [arm for arm in sweep.arms if arm is not reference]
    if claim.arms is not None:
        others = [arm for arm in others if claim.arms(arm.settings, base)]
    return others, reference


RULES = {  # from the interval of the difference in loss to "supported", "contradicted"
    "lower": lambda low, high, margin: (high < 0, low > -margin),
    "higher": lambda low, high, margin: (low > 0, high < margin),
    "no lower": lambda low, high, margin: (low > -margin, high < -margin),
    "little higher": lambda low, high, margin: (high < margin, low > margin),
}


def loss_is(rule: str, claim: Claim, sweep: Results) -> list[Effect]:
    """Test whether the arms' loss is lower, higher, ... than the reference's."""
    arms, reference = chosen(claim, sweep)
    found = []
    for arm in arms:
        seeds = sorted(arm.loss.keys() & reference.loss.keys())
        if len(seeds) < 2:
            continue
        each = [arm.loss[seed] - reference.loss[seed] for seed in seeds]
        looks = sweep.looks or (len(seeds),)
        result = judge(each, Looks(looks, None, len(arms)))
        if math.isnan(result.low):
            continue
        is_so, is_not = RULES[rule](result.low, result.high, claim.margin)
        verdict = SUPPORTED if is_so else CONTRADICTED if is_not else UNDECIDED
        if arm.lost + reference.lost and verdict == SUPPORTED:
            verdict = UNDECIDED  # the seeds that are left are no fair sample
        spread = interval(result.low, result.high, LOSS.format, signed)
        text = f"loss of {arm.name} − {reference.name}: "
        text += f"{signed(result.mean, LOSS.format)} ({spread})"
        numbers = (result.mean, result.low, result.high)
        effect = Effect(sweep.corpus, text, verdict, result.num_seeds, numbers)
        found.append(effect)
    return found


def same_parameters(claim: Claim, sweep: Results) -> list[Effect]:
    """Test whether all arms have the reference's parameters, exactly."""
    arms, reference = chosen(claim, sweep)
    if not arms:
        return []
    counts = sorted({arm.parameters for arm in [*arms, reference]})
    text = f"{len(arms) + 1} arms: {' to '.join(f'{c:,}' for c in counts)} parameters"
    verdict = SUPPORTED if len(counts) == 1 else CONTRADICTED
    return [Effect(sweep.corpus, text, verdict, len(reference.loss))]


def cheaper(claim: Claim, sweep: Results) -> list[Effect]:
    """Test whether an arm has fewer parameters and takes fewer operations."""
    arms, reference = chosen(claim, sweep)
    found = []
    for arm in arms:
        parameters = arm.parameters / reference.parameters
        flops = arm.flops / reference.flops
        text = f"{arm.name} / {reference.name}: parameters {parameters:.3f}, FLOP "
        text += f"{flops:.3f}"
        is_so = parameters < 1 and flops <= 1
        verdict = SUPPORTED if is_so else CONTRADICTED
        found.append(Effect(sweep.corpus, text, verdict, len(arm.loss)))
    return found


def no_slower(claim: Claim, sweep: Results) -> list[Effect]:
    """Test whether arms train at the reference's speed. It is measured once per arm."""
    arms, reference = chosen(claim, sweep)
    arms = [arm for arm in arms if arm.speed is not None]
    if not arms or reference.speed is None:
        return []
    slowest = min(arms, key=lambda arm: arm.speed)
    ratio = slowest.speed / reference.speed
    text = f"tokens/s of {slowest.name} / {reference.name}: {ratio:.2f}, once each"
    verdict = SUPPORTED if ratio >= SLOWER else CONTRADICTED
    return [Effect(sweep.corpus, text, verdict, len(slowest.loss))]


def less_spread(claim: Claim, sweep: Results) -> list[Effect]:
    """Test whether an arm's loss varies less over seeds, which are paired.

    By the interval of Pitman (1939) and Morgan (1939) for the ratio of two correlated
    variances.
    """
    arms, reference = chosen(claim, sweep)
    found = []
    for arm in arms:
        seeds = sorted(arm.loss.keys() & reference.loss.keys())
        if len(seeds) < 4:
            continue
        x, y = ([of.loss[seed] for seed in seeds] for of in (arm, reference))
        ratio, low, high = ratio_of_spreads(np.array(x), np.array(y))
        verdict = UNDECIDED
        if high < 1 or low > 1:
            verdict = SUPPORTED if high < 1 else CONTRADICTED
        text = f"sd of {arm.name} / {reference.name}: {number(ratio)} "
        text += f"({interval(low, high)})"
        found.append(Effect(sweep.corpus, text, verdict, len(seeds)))
    return found


def ratio_of_spreads(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Return the ratio of standard deviations of paired samples, and its interval."""
    count, ratio = len(x), float(x.std(ddof=1) / y.std(ddof=1))
    correlation = np.corrcoef(x, y)[0, 1]
    t = stats.t.isf((1 - CONFIDENCE) / 2, count - 2)
    K = 1 + 2 * (1 - correlation**2) * t**2 / (count - 2)
    root = math.sqrt(K**2 - 1)
    return ratio, ratio * math.sqrt(K - root), ratio * math.sqrt(K + root)


lower, higher = partial(loss_is, "lower"), partial(loss_is, "higher")
no_lower = partial(loss_is, "no lower")
little_higher = partial(loss_is, "little higher")
VASWANI = "Vaswani et al. 2017, Table 3"

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
        "64 per head is about right at every width.",
        "common practice; Kaplan et al. 2020, Figure 5",
        "sizes 16 to 300 move the loss by at most 1.9% at D = 256, 0.8% at 1024",
        "heads at several widths",
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
        "scale",
        higher,
        has(scale=1.0),
    ),
    Claim(
        "Concatenation beats averaging, as it is.",
        "common practice",
        NOTHING,
        "merge",
        higher,
        merge("mean"),
        merge("concat"),
    ),
    Claim(
        "Concatenation beats averaging with equal parameters.",
        "common practice",
        NOTHING,
        "merge",
        higher,
        merge("mean", "parameters"),
        merge("concat"),
    ),
    Claim(
        "Concatenation beats averaging with equal starts.",
        "common practice",
        NOTHING,
        "merge_start",
        higher,
        merge("mean"),
        has(merge="concat", merge_gain=1.0),
    ),
    Claim(
        "Averaging is cheaper.",
        "by its formula",
        "(N − 1)·V·D parameters less per layer",
        "merge",
        cheaper,
        merge("mean"),
        merge("concat"),
    ),
    Claim(
        "Averaging trains more stably: less spread over seeds.",
        "common belief",
        NOTHING,
        "merge_start",
        less_spread,
        merge("mean"),
        has(merge="concat", merge_gain=1.0),
    ),
    Claim(
        "Averaging trains more stably: it bears higher learning rates, with fewer "
        "spikes of the gradient norm.",
        "common belief",
        NOTHING,
        "merge × optimizer.learning_rate",
    ),
    Claim(
        "Averaging is more robust to a bad head.",
        "common belief",
        NOTHING,
        "noise on one head's output",
    ),
    Claim(
        "Weights that depend on the input beat fixed ones.",
        "common belief",
        NOTHING,
        "merge_start",
        lower,
        merge("dynamic"),
        merge("weighted"),
    ),
    Claim(
        "Gates beat concatenation.",
        "Qiu et al. 2025 (Qwen)",
        "perplexity 6.026 → 5.792 headwise, 5.761 elementwise",
        "gates",
        lower,
        one_of(merge("gated"), merge("gated_elementwise")),
        merge("concat"),
    ),
    Claim(
        "Averaging loses less with many heads.",
        "common belief",
        NOTHING,
        "merge × num_heads",
    ),
    Claim(
        "Heads specialise, more than in an untrained model.",
        "Clark et al. 2019; Voita et al. 2019",
        NOTHING,
        "roles of heads, trained and untrained",
    ),
    Claim(
        "Low layers attend locally, high layers don't.",
        "Clark et al. 2019",
        NOTHING,
        "distances of heads by layer",
    ),
    Claim(
        "Heads follow syntax beyond any fixed offset.",
        "Clark et al. 2019; Voita et al. 2019",
        NOTHING,
        "gold dependencies of CoNLL-U",
    ),
    Claim(
        "Most heads can be removed without loss.",
        "Michel et al. 2019; Voita et al. 2019",
        "38 of 48 encoder heads for 0.15 BLEU",
        "pruning curves over seeds",
    ),
    Claim(
        "Heads look at different subspaces, rather than being redundant.",
        "Vaswani et al. 2017",
        NOTHING,
        "similarity between heads",
    ),
    Claim(
        "Heads interact through the output projection: removing two costs other than "
        "the sum.",
        "common belief",
        NOTHING,
        "removal of pairs of heads",
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
        "Positions are needed most at long distance.",
        "common belief",
        NOTHING,
        "scores by length and distance",
    ),
    Claim(
        "More heads overfit less.",
        "common belief",
        NOTHING,
        "the gap between train and dev by num_heads",
    ),
    Claim(
        "Heads run in parallel, so more of them are no slower.",
        "common belief",
        NOTHING,
        "heads",
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
        "gates, with the statistics of heads",
    ),
    Claim(
        "Each variant of the ablation `variants` lowers the loss.",
        "2019 to 2026, see docs/guides/sweeps.md",
        NOTHING,
        "variants",
        lower,
    ),
)


def read_results(folder: Path) -> Results | None:
    """Read the sweep of a folder; None if it holds none, or is of no known ablation."""
    table = folder / "sweep.csv"
    known = [
        name
        for name in dir(ablations)
        if folder.name.startswith(f"{name}_") and callable(getattr(ablations, name))
    ]
    if not table.exists() or not known:
        return None
    ablation = max(known, key=len)
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["stage"] == "report"]
    arms = [
        read_arm(name, [row for row in rows if row["arm"] == name])
        for name in dict.fromkeys(row["arm"] for row in rows)
    ]
    return Results(
        ablation, folder.name.removeprefix(f"{ablation}_"), arms, read_looks(folder)
    )


def read_arm(name: str, rows: list[dict]) -> Arm:
    """Return an arm from its rows of a sweep.csv."""
    done = [row for row in rows if row["status"] == "done"]
    speeds = [
        float(row["tokens_per_second"]) for row in done if row["tokens_per_second"]
    ]
    settings = json.loads(rows[0]["overrides"])
    return Arm(
        name=name,
        settings={key.rsplit(".")[-1]: value for key, value in settings.items()},
        is_baseline=rows[0]["is_baseline"] == "1",
        parameters=int(rows[0]["parameters"]),
        flops=float(rows[0]["flops"]),
        speed=float(np.mean(speeds)) if speeds else None,
        loss={
            int(row["seed"]): float(row["test_loss"])
            for row in done
            if row["test_loss"]
        },
        lost=sum(row["status"] in ("diverged", "failed") for row in rows),
    )


def read_looks(folder: Path) -> tuple[int, ...] | None:
    """Return the planned looks of a sweep, from its verdicts.csv."""
    path = folder / "verdicts.csv"
    if not path.exists():
        return None
    with path.open(newline="") as file:
        looks = next((row["looks"] for row in csv.DictReader(file)), "")
    return tuple(map(int, looks.split(","))) if looks else None


def find_effects(claim: Claim, sweeps: list[Results]) -> list[Effect]:
    """Return what all sweeps say about a claim."""
    if claim.test is None:
        return []
    return [
        effect
        for sweep in sweeps
        if sweep.ablation == claim.ablation
        for effect in claim.test(claim, sweep)
    ]


def make_rows(found: list[tuple[Claim, list[Effect]]]) -> list[tuple[str, ...]]:
    """Return the rows of the table: one per effect, or one that says what is needed."""
    rows = []
    for index, (claim, effects) in enumerate(found, start=1):
        about = (str(index), claim.sentence, claim.who, claim.published)
        for effect in effects:
            cells = (effect.corpus, str(effect.seeds), effect.text, effect.verdict)
            rows.append((*about, *cells))
            about = ("",) * len(about)  # once per claim
        if not effects:
            needed = f"needs: {claim.ablation}"
            rows.append((*about, NOTHING, NOTHING, needed, UNTESTED))
    return rows


def summarize(found: list[tuple[Claim, list[Effect]]]) -> str:
    """Return how many claims are tested, and how the comparisons came out."""
    tested = [effects for _, effects in found if effects]
    each = [effect.verdict for effects in tested for effect in effects]
    counts = ", ".join(f"{each.count(v)} {v}" for v in COLOURS)
    return (
        f"{len(tested)} of {len(found)} claims are tested, by {len(each)} comparisons: "
        f"{counts}."
    )


def to_markdown(found: list[tuple[Claim, list[Effect]]]) -> str:
    """Return the summary and the table."""
    rows = [HEADER, ("---:", *["---"] * (len(HEADER) - 1)), *make_rows(found)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n\n".join([summarize(found), "\n".join(lines)])


def draw(found: list[tuple[Claim, list[Effect]]], path: Path) -> None:
    """Save a forest plot: the differences in loss, coloured by verdict."""
    drawn = [
        (index, effect)
        for index, (_, effects) in enumerate(found, start=1)
        for effect in effects
        if effect.difference is not None
    ]
    height = 1.2 + 0.26 * len(drawn)
    figure, ax = plt.subplots(figsize=(7.2, height), layout="constrained")
    for row, (_, effect) in enumerate(drawn):
        mean, low, high = effect.difference
        ax.errorbar(
            [mean],
            [row],
            xerr=[[mean - low], [high - mean]],
            fmt="o",
            ms=4,
            color=COLOURS[effect.verdict],
        )
    ax.axvline(0, color="#6a6d75", lw=0.8)
    ax.axvspan(-LOSS.margin, LOSS.margin, color="#dfe1e6", lw=0)
    labels = [f"{i}. {e.text.split(': ')[0]}, {e.corpus}" for i, e in drawn]
    labels = [label.replace(" loss of ", " ") for label in labels]
    ax.set_yticks(range(len(drawn)), labels, fontsize=7)
    ax.set_ylim(len(drawn) - 0.5, -0.5)
    ax.set_xscale("symlog", linthresh=0.01)
    ax.set_xlabel("difference in test loss, nats (grey: margin)", fontsize=8)
    for verdict, colour in COLOURS.items():
        ax.plot([], [], "o", color=colour, label=verdict)
    figure.legend(loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def fill(page: str, text: str) -> str:
    """Return a page with the text between `MARKS` replaced.

    Raises:
        ValueError: the page has no such marks.
    """
    start, end = MARKS
    if page.count(start) != 1 or page.count(end) != 1:
        raise ValueError(f"The page must have the lines {start} and {end} once.")
    before, rest = page.split(start)
    return f"{before}{start}\n\n{text}\n\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Test every claim with what is there, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    page = ROOT / "docs/research/claims.md"
    parser.add_argument("--page", type=Path, default=page)
    arguments = parser.parse_args()
    if not arguments.results.is_dir():
        parser.error(f"--results={arguments.results} is not a folder.")
    folders = sorted(path for path in arguments.results.iterdir() if path.is_dir())
    sweeps = [sweep for sweep in map(read_results, folders) if sweep is not None]
    found = [(claim, find_effects(claim, sweeps)) for claim in CLAIMS]
    text = to_markdown(found)
    draw(found, arguments.results / "claims.png")
    title = "# Claims about heads\n\nWritten by `python -m analysis.claims`."
    (arguments.results / "claims.md").write_text(f"{title}\n\n{text}\n")
    arguments.page.write_text(fill(arguments.page.read_text(), text))
    print(summarize(found))


if __name__ == "__main__":
    main()
