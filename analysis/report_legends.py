"""The legends of a report: what its columns mean, and whose translations it shows."""

import math

from headcount.analysis.report import NAMES, Comparison, Report, bootstrapped
from headcount.analysis.significance import LEVEL

CHECKPOINTS = {
    "best": "Checkpoints were chosen on dev",
    "last": "The last checkpoint of every trial is scored",
    "average": "The mean of the checkpoints that every trial kept is scored",
}
SAME_SEEDS = "Every arm is trained with the same seeds. "
HOW_TO_READ = (
    "Mean ± sd: over seeds. The intervals are Student's, at 95 %. The difference is to "
    "the baseline, paired by seed; its p-value (two-sided t-test) is Holm's, corrected "
    "for the number of arms that are tested (not the baseline, nor one whose seeds all "
    "differ by the same); the intervals are not. Seeds to see: how many a paired test "
    "needs to find a true difference of {seen} with a power of 80 % at the level of "
    "{level}, which is what Holm asks of the smallest p-value, at the spread of the "
    "differences seen here: a rough estimate where that spread is of a few seeds. "
    "{checkpoint}; test was decoded once, after that."
)
SEARCHED = (
    " Where an arm had a choice of nuisance settings, it was made on dev, before that, "
    "with other seeds than those of the table."
)
NOT_SEARCHED = (
    " Nuisance settings were not searched: they are the config's or the ablation's, "
    "and may suit one arm better than another."
)
LOSS_TOLD = (
    " Loss: the cross-entropy of the test targets, nats a token; lower is better, the "
    "difference to the baseline is paired by seed, and its interval is not corrected."
)
HOW_TO_READ_COSTS = (
    "F: the feed-forward width, solved where arms are matched. Multiply-adds: of "
    "the matrix products of a forward pass, for one source and one target token. "
    "Seconds: of the updates alone, without compilation, evaluation and saving, a "
    "group's divided by its trials. Tokens/s: of a group, source and target."
)


def how_to_read_scores(report: Report, comparisons: list[Comparison]) -> str:
    """What the main table's columns mean."""
    tested = sum(not math.isnan(c.p) for c in comparisons)
    level = f"{LEVEL * 100:.0f} %" + (f" / {tested}" if tested > 1 else "")
    checkpoint = CHECKPOINTS[report.checkpoint]
    told = HOW_TO_READ.format(seen=report.seen, level=level, checkpoint=checkpoint)
    same = all(c.arm.seeds == report.baseline.seeds for c in comparisons)
    named = "Nuisance:" in (report.details or "")
    searched = SEARCHED if report.searched else NOT_SEARCHED * named
    return SAME_SEEDS * same + told + searched


def how_to_read_others(report: Report) -> str:
    """What the bootstrap's columns mean."""
    metric = NAMES[bootstrapped(report.metric)]
    return (
        "Scores: of test, mean ± sd over seeds. "
        f"Test set's ±: sacreBLEU's paired bootstrap ({metric}, 1000 samples, 95 %) of "
        f"the translations of {seed_told(report)}: what another draw of test "
        "sentences would change, which more seeds would not show. p (bootstrap): of no "
        f"difference between the arm's {metric} and the baseline's, by the same "
        "resampling of those translations: about one training of each, not about the "
        "seeds, and not corrected by Holm." + (LOSS_TOLD if report.has_loss else "")
    )


def how_to_read_examples(report: Report) -> str:
    """Whose translations stand there, and of which sentences."""
    differ = report.best != report.worst  # else it is one arm, or all are alike
    differ = differ and all(e.best != e.worst for e in report.examples)
    told = "; sentences on which they differ" if differ else ""
    return f"Of {seed_told(report)}{told}, spread evenly over the test set."


def seed_told(report: Report) -> str:
    """The seed that the bootstrap and the examples are of, in a sentence."""
    return "each arm's first seed" if report.seed is None else f"seed {report.seed}"
