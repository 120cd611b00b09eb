"""Gather a sweep's results, and write report.md, report.html and their figures."""

import dataclasses
import inspect
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import pyplot as plt

from headcount.analysis.anchors import find_anchors, published_scores
from headcount.analysis.formatting import count
from headcount.analysis.heads import output_file
from headcount.analysis.report import (
    ArmResult,
    Bootstrap,
    Example,
    Report,
    compare,
    paired_means,
)
from headcount.analysis.report_figures import (
    HEAD_STATISTICS,
    make_figures,
    to_svg,
)
from headcount.analysis.report_html import to_html
from headcount.analysis.report_markdown import escape, join_markdown, write_markdown
from headcount.analysis.tables import arm_tables
from headcount.configs.validation import flat
from headcount.configs.variants import claim_of
from headcount.runtime import files
from headcount.runtime.files import remove_parts
from headcount.runtime.schema import Number
from headcount.sweeps.heads import design
from headcount.sweeps.labels import label, symbol
from headcount.sweeps.looks import margin_of, verdict_rows
from headcount.sweeps.plan import Arm
from headcount.sweeps.settings import command_of
from headcount.sweeps.store import Sweep, read_record, read_run
from headcount.sweeps.table import collect, count_unfinished, is_lost
from headcount.tasks import Metric, best_metric
from headcount.training.metrics import read_metrics
from headcount.training.tracking import attempt, record_report, tracker_names

HEAD = {"arm": str, "seed": Number(0), "site": str}  # schema of a row of heads.py


def write(sweep: Sweep, rows: list[dict], num_examples: int) -> None:
    """Write the report on the trials that are done, and print the verdicts.

    Args:
        rows: rows of the sweep's table.
        num_examples: number of test examples to show.

    Raises:
        ValueError: nothing is done, the baseline is missing, or a result is damaged or
            was made with other settings than the rest.
    """
    remove_parts(sweep.workdir)
    report = check_and_gather(sweep, rows, num_examples)
    markdown, svgs = render(report, sweep.workdir)
    files.write(sweep.workdir / "report.md", markdown)
    html = to_html(markdown, report.title, svgs)
    files.write(sweep.workdir / "report.html", html)
    print_verdicts(report)
    print(f"Written: {sweep.workdir / 'report.html'} and {sweep.workdir / 'report.md'}")
    track(sweep, rows, report)


def print_verdicts(report: Report) -> None:
    """Print the verdicts on a sweep's arms, and what they cost."""
    for row in report.verdicts:
        print(row["sentence"])
    print(report.cost)


def track(sweep: Sweep, rows: list[dict], report: Report) -> None:
    """Add the report to Weights & Biases, if the config's train.tracker names it."""
    base = sweep.settings["base"]
    if "wandb" not in tracker_names(base["train"]["tracker"]):
        return
    pictures = sorted((sweep.workdir / "report").glob("*.png"))
    names = ["report.html", "report.md", "sweep.csv", "verdicts.csv"]
    names += [f"report/{path.name}" for path in pictures]
    tables = {"trials": rows, "verdicts": report.verdicts}
    shown = ("ablation", "metric", "checkpoint", "test_split", "note")
    settings = {name: sweep.settings[name] for name in shown} | {"base": base}
    settings["command"] = report.command
    attempt("wandb", record_report, sweep.workdir, names, tables, settings)


def write_joined(sweeps: list[Sweep], num_examples: int) -> None:
    """Write one report on several sweeps on the same corpus to the first one's folder.

    Raises:
        ValueError: the corpora or metrics of the sweeps differ, or a sweep is named
            twice; see also `write`.
    """
    first = sweeps[0]
    workdirs = [sweep.workdir.resolve() for sweep in sweeps]
    for index, other in enumerate(sweeps[1:], 1):
        if workdirs[index] in workdirs[:index]:
            raise ValueError(f"--workdir={other.workdir} was given twice.")
        check_comparable(first, other)
    remove_parts(first.workdir)
    parts, verdicts, svgs = [], [], {}
    for index, sweep in enumerate(sweeps):
        report = check_and_gather(sweep, collect(sweep), num_examples)
        print(f"{sweep.workdir}:")
        print_verdicts(report)
        markdown, drawn = render(report, first.workdir, f"joined{index}_")
        # the first heading becomes one of the page's sections
        heading = rf"# {escape(str(sweep.workdir))}: "
        markdown = markdown.replace("# ", heading, 1)
        parts.append(re.sub(r"^(#+ )", r"#\1", markdown, flags=re.MULTILINE))
        verdicts += [(str(sweep.workdir), report, row) for row in report.verdicts]
        svgs |= drawn
    title = f"{count(len(sweeps), 'sweep')}: {report.title.partition(', ')[2]}"
    markdown = join_markdown(title, parts, verdicts)
    files.write(first.workdir / "joined.md", markdown)
    files.write(first.workdir / "joined.html", to_html(markdown, title, svgs))
    print(f"Written: {first.workdir / 'joined.html'} and {first.workdir / 'joined.md'}")


def check_comparable(first: Sweep, other: Sweep) -> None:
    """Raise a ValueError unless the scores of two sweeps can share a report."""
    a, b = first.settings, other.settings
    names = ["task.name", *(f"data.{key}" for key in first.task.corpus_keys)]
    first_config, other_config = flat(a["base"]), flat(b["base"])
    pairs = {name: (first_config[name], other_config[name]) for name in names}
    pairs |= {key: (a[key], b[key]) for key in ("metric", "test_split")}
    texts = read_corpora(first), read_corpora(other)
    is_same = bool(texts[0] & texts[1])
    for name, (first_value, other_value) in pairs.items():
        if name == "data.directory" and is_same:
            continue  # the same text in two folders
        if first_value != other_value:
            raise ValueError(
                f"{first.workdir} and {other.workdir} differ in {name} ({first_value} "
                f"and {other_value}), so their scores can't share a page; report them "
                f"separately."
            )
    is_encoded_alike = all(
        value == other_config[name]
        for name, value in first_config.items()
        if name.startswith("data.")
    )
    if all(texts) and not is_same and is_encoded_alike:
        raise ValueError(
            f"{first.workdir} and {other.workdir} were trained on different text (see "
            f"data in their run.json), so their scores can't share a page; report them "
            f"separately."
        )


def read_corpora(sweep: Sweep) -> set[tuple]:
    """Return the checksums of the text that the sweep's groups were trained on."""
    runs = [read_run(sweep.folder(group)) for group in sweep.groups]
    return {tuple(run["data"].items()) for run in runs if run and "data" in run}


def check_and_gather(sweep: Sweep, rows: list[dict], num_examples: int) -> Report:
    """Check the results of a sweep, and gather its report.

    It raises the same errors as `write`.
    """
    for group in sweep.groups:
        read_run(sweep.folder(group))
    for split in ("val", sweep.settings["test_split"]):
        _, errors = sweep.read_results(split)
        for error in errors.values():
            raise ValueError(error)
    done = [row for row in rows if row["status"] == "done" and row["stage"] == "report"]
    if not done:
        raise ValueError(
            f"Nothing has finished in {sweep.workdir} yet; see python sweep.py status "
            f"--workdir={sweep.workdir}."
        )
    return gather(sweep, rows, done, num_examples)


def render(report: Report, folder: Path, prefix: str = "") -> tuple[str, dict]:
    """Save a report's figures; return its Markdown, and SVG elements by path.

    Args:
        folder: folder that the Markdown will be in.
        prefix: prefix of the figures' file names.
    """
    paths, svgs = {}, {}
    (folder / "report").mkdir(exist_ok=True)
    for name, (figure, caption) in make_figures(report).items():
        path = Path("report") / f"{prefix}{name}.png"
        figure.savefig(folder / path, dpi=200, facecolor="white")  # for print, too
        svgs[str(path)] = to_svg(figure, prefix + name)
        paths[name] = (str(path), caption)
        plt.close(figure)
    return write_markdown(report, paths), svgs


def gather(sweep: Sweep, rows: list[dict], done: list[dict], num_examples) -> Report:
    """Read and compute everything that the report shows.

    Args:
        rows: rows of the sweep's table.
        done: rows of the finished trials to report.
    """
    settings, task = sweep.settings, sweep.task
    margin = margin_of(settings, sweep.metric)
    metric = dataclasses.replace(sweep.metric, margin=margin)
    question, _, details = inspect.cleandoc(settings["docstring"]).partition("\n")
    trials, seed = shared_seed(done)
    text = task.read(settings["test_split"])
    predictions = read_predictions(sweep, done, len(next(iter(text.values()))))
    systems = {
        arm.name: predictions[trials[arm.name]]
        for arm in sorted(sweep.plan.arms, key=lambda arm: not arm.is_baseline)
        if trials.get(arm.name) in predictions
    }
    bootstraps, bootstrap_metric = run_bootstrap(sweep, systems, text)
    anchors = find_anchors(settings["ablation"], settings["base"]["task"]["name"])
    arms = [
        arm_result(sweep, arm, rows, done, bootstraps.get(arm.name), anchors)
        for arm in sweep.plan.arms
    ]
    axis = sweep.plan.axis
    report = Report(
        title=title(settings, task.corpus_keys),
        question=question,
        details=details.strip(),
        metrics=tuple(metric if m == sweep.metric else m for m in task.metrics),
        metric=metric,
        curve_metric=curve_metric(sweep),
        arms=arms,
        axis=axis and f"{symbol(axis)}, {axis}",
        anchors=[
            a for a in anchors if any(a.source in x.published for x in arms if x.seeds)
        ],
        bootstrap_metric=bootstrap_metric,
        examples=[],
        best="",
        worst="",
        environment=environment(sweep, rows, done),
        command=command_of(sweep),
        note=settings["note"],
        checkpoint=settings["checkpoint"],
        has_search=sweep.has_search,
        verdicts=verdict_rows(sweep.plan, settings, metric, rows),
        cost=cost_of_verdicts(sweep, rows),
        unfinished=count_unfinished(sweep.plan, rows),
        seed=seed,
        heads=head_tables(sweep, rows),
        earlier_seeds=settings["earlier_seeds"] or [],
    )
    if not report.baseline.seeds:
        lost = report.baseline.lost
        reason = f"lost {count(lost, 'trial')}" if lost else "has not finished yet"
        raise ValueError(
            f"The baseline {report.baseline.name} {reason}, so there is nothing to "
            f"compare with."
        )
    means = paired_means(compare(report, metric))
    ordered = sorted(means, key=means.get, reverse=metric.higher_is_better)
    best = ordered[0]  # among ties, the first arm
    worst = next(name for name in ordered if means[name] == means[ordered[-1]])
    shown = []
    if {best, worst} <= systems.keys():
        shown = choose_examples(text, systems[best], systems[worst], num_examples)
    return report._replace(best=best, worst=worst, examples=shown)


def head_tables(sweep: Sweep, rows: list[dict]) -> list[tuple]:
    """Return tables of what heads.py measured on the split of the final scores.

    Args:
        rows: rows of the sweep's table.

    Returns:
        The result of `analysis.tables.arm_tables` for each verb that was run.
    """
    split, checkpoint = (sweep.settings[key] for key in ("test_split", "checkpoint"))
    tables = []
    for verb in ("describe", "importance"):
        path = output_file(sweep.workdir, verb, split, which=checkpoint)
        measured = read_record(path, [HEAD], f"run heads.py {verb} again.")
        if measured is not None:
            tables.append(arm_tables(measured, design(sweep, rows)))
    return tables


def cost_of_verdicts(sweep: Sweep, rows: list[dict]) -> str:
    """Describe the cost of the sweep, compared to running all seeds of every arm.

    The comparison is left out until the sweep is done. Unfinished trials count with
    their full FLOPs.
    """
    started = [row for row in rows if row["steps"]]
    searched = [row for row in started if row["stage"] == "search"]
    used = Cost.of(started)
    tuning = f"; {len(searched)} of the runs chose settings" if searched else ""
    text = f"The verdicts took {used}{tuning}."
    if sweep.looks is None or count_unfinished(sweep.plan, rows):
        return text
    fixed = Cost.of(searched)
    for arm in sweep.plan.arms:
        arm_rows = [row for row in started if row["arm"] == arm.name]
        minutes = Cost.of(arm_rows).minutes / max(1, len(arm_rows))
        number = len(arm.seeds)
        arm_cost = (number, number * arm.training_flops, number * minutes)
        fixed = Cost(*(a + b for a, b in zip(fixed, arm_cost, strict=True)))
    share = used.flops / fixed.flops
    return (
        f"{text} {sweep.looks.seeds[-1]} seeds for every arm would take {fixed}: the "
        f"planned looks needed {share:.0%} of that."
    )


class Cost(NamedTuple):
    """The total cost of training some trials."""

    runs: int
    flops: float
    minutes: float  # of updates, as if processes ran one after another; NaN: unknown

    @classmethod
    def of(cls, rows: list[dict]) -> "Cost":
        """Add up the cost of rows of the table."""
        seconds = sum(row["seconds"] or math.nan for row in rows)
        return cls(len(rows), sum(row["flops"] for row in rows), seconds / 60)

    def __str__(self) -> str:
        runs, flops = count(self.runs, "training run"), f"{self.flops:.3g} FLOP"
        if math.isnan(self.minutes):
            return f"{runs} and {flops}"
        if self.minutes < 1:
            return f"{runs}, {flops} and {60 * self.minutes:.2g} seconds of updates"
        return f"{runs}, {flops} and {self.minutes:.3g} minutes of updates"


def title(settings: dict, corpus_keys: tuple[str, ...]) -> str:
    """Return the report's title: ablation, task and corpus."""
    data = settings["base"]["data"]
    corpus_settings = {
        key: data[key] for key in corpus_keys if key != "directory" and data[key]
    }
    corpus = " ".join(
        value if isinstance(value, str) else f"{key} {value}"
        for key, value in corpus_settings.items()
    )
    ablation = settings["ablation"].rsplit(":", 1)[-1]
    return f"Headcount sweep: {ablation}, {settings['base']['task']['name']}, {corpus}"


def shared_seed(done: list[dict]) -> tuple[dict[str, str], int | None]:
    """Choose the trial of each arm whose predictions are shown and resampled.

    These are the trials with the first seed that all arms share, so that predictions
    are paired like the scores. Without a shared seed, each arm's first is used.

    Returns:
        Trial ids by arm, and the shared seed or None.
    """
    trials: dict[str, dict[int, str]] = {}
    for row in done:
        trials.setdefault(row["arm"], {})[row["seed"]] = row["id"]
    shared = min(set.intersection(*map(set, trials.values())), default=None)
    return {
        arm: by_seed[min(by_seed) if shared is None else shared]
        for arm, by_seed in trials.items()
    }, shared


def read_predictions(
    sweep: Sweep, done: list[dict], num_examples: int
) -> dict[str, list[str]]:
    """Read the test predictions of trials, by trial id.

    Tasks without predictions don't have these files.

    Raises:
        ValueError: a file's number of lines differs from the number of examples.
    """
    split, trial_ids = sweep.settings["test_split"], {row["id"] for row in done}
    predictions = {}
    for group in sweep.groups:
        for index, trial in enumerate(group.trials):
            suffix = f"-{index}" if len(group.trials) > 1 else ""
            path = sweep.folder(group) / f"{split}{suffix}.txt"
            if trial.id not in trial_ids or not path.exists():
                continue
            # not str.splitlines: it also splits at characters other than "\n"
            text = path.read_bytes().decode(errors="replace")
            lines = text.removesuffix("\n").split("\n")
            if len(lines) != num_examples:
                raise ValueError(
                    f"{path} has {len(lines)} lines, not one for each of the "
                    f"{num_examples} examples; move result-{split}.json beside it "
                    f"away, and sweep.py run scores its group again."
                )
            predictions[trial.id] = lines
    return predictions


def run_bootstrap(
    sweep: Sweep, systems: dict[str, list[str]], text: dict[str, list[str]]
) -> tuple[dict[str, Bootstrap], Metric | None]:
    """Bootstrap the test examples with the sweep's metric, or else another metric.

    Args:
        systems: predictions by arm; the first is the baseline.
        text: the test split.

    Returns:
        Results by arm, and the metric; empty and None if the task has no bootstrap.
    """
    if sweep.plan.baseline.name not in systems:
        return {}, None
    other_metrics = [m for m in sweep.task.metrics if m != sweep.metric]
    for metric in (sweep.metric, *other_metrics):
        results = sweep.task.bootstrap(metric, systems, text)
        if results is not None:
            return {
                name: Bootstrap(half_width * metric.scale, p)
                for name, (_, half_width, p) in results.items()
            }, metric
    return {}, None


def arm_result(
    sweep: Sweep, arm: Arm, rows: list[dict], done: list[dict], bootstrap, anchors
) -> ArmResult:
    """Collect an arm's results from the rows of the table."""
    arm_rows = sorted(
        (row for row in done if row["arm"] == arm.name), key=lambda row: row["seed"]
    )
    lost = [row for row in rows if row["arm"] == arm.name and is_lost(row)]
    metrics, trials = comparable_metrics(sweep), logged(sweep, arm_rows)
    axis = sweep.plan.axis

    def scores(side):
        columns = {m: [row[f"{side}_{m.name}"] for row in arm_rows] for m in metrics}
        return {
            metric.name: metric.scale * np.array(values)
            for metric, values in columns.items()
            if values and None not in values
        }

    def mean(column):
        values = [row[column] for row in arm_rows if row[column] is not None]
        return float(np.mean(values)) if values else None

    return ArmResult(
        name=arm.name,
        is_baseline=arm.is_baseline,
        value=arm.overrides[axis] if axis else None,
        mlp_dim=arm.config["model"]["mlp_dim"],
        parameters=arm_rows[0]["parameters"] if arm_rows else arm.parameters,
        flops=arm.flops,
        seeds=[row["seed"] for row in arm_rows],
        test=scores("test"),
        dev=scores("dev"),
        lost=len(lost),
        open_heads=[
            row["open_heads"] for row in arm_rows if row["open_heads"] is not None
        ],
        nuisance=json.loads(arm_rows[0]["nuisance"]) if arm_rows else {},
        seconds=mean("seconds"),
        tokens_per_second=mean("tokens_per_second"),
        published=published_scores(anchors, arm.config["model"]),
        claim=claim_of(arm.overrides, sweep.settings["base"]),
        bootstrap=bootstrap,
        curves={
            m.name: curve(trials, f"dev_{m.name}", m.scale) for m in sweep.task.metrics
        },
        heads={name: curve(trials, name) for name in HEAD_STATISTICS},
    )


def comparable_metrics(sweep: Sweep) -> list[Metric]:
    """Return the metrics that are comparable across all arms.

    Values per token are comparable only if all arms have the same tokens. The sweep's
    own metric is always included.
    """
    data = sweep.settings["base"]["data"]
    same_tokens = all(arm.config["data"] == data for arm in sweep.plan.arms)
    return [
        metric
        for metric in sweep.task.metrics
        if same_tokens or not metric.per_token or metric == sweep.metric
    ]


def curve_metric(sweep: Sweep) -> Metric:
    """Return the metric of the learning curves: the sweep's metric, if it was logged.

    Some metrics are not evaluated during training. The fallback is the metric that
    selects the best checkpoint, which always is.
    """
    name = f"dev_{sweep.metric.name}"
    for group in sweep.groups:
        if any(name in row for row in read_metrics(sweep.folder(group))):
            return sweep.metric
    return best_metric(sweep.task)


def logged(sweep: Sweep, rows: list[dict]) -> list[list[dict]]:
    """Return the rows of metrics.jsonl for the trial of each row of the table."""
    places = {
        trial.id: (group, index)
        for group in sweep.groups
        for index, trial in enumerate(group.trials)
    }
    groups = {group.name: group for group, _ in (places[row["id"]] for row in rows)}
    metrics = {key: read_metrics(sweep.folder(group)) for key, group in groups.items()}
    logs = []
    for row in rows:
        group, index = places[row["id"]]
        logs.append([m for m in metrics[group.name] if m["trial"] == index])
    return logs


def curve(
    trials: list[list[dict]], column: str, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps at which all trials have a value, and the values.

    The values have shape R x steps. Those of heads are averaged; see `train.log_heads`.

    Args:
        trials: each trial's rows of metrics.jsonl, as returned by `logged`.
        column: name of the column, or the part before the slash of columns per head.
        scale: factor from stored to returned values.
    """

    def values(row):
        names = [x for x in row if x == column or x.startswith(f"{column}/")]
        return [row[name] for name in names if row[name] is not None]

    curves = [
        {row["step"]: scale * np.mean(x) for row in rows if (x := values(row))}
        for rows in trials
    ]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    scores = np.array([[by_step[step] for step in steps] for by_step in curves], float)
    return np.array(steps), scores


def choose_examples(
    text: dict[str, list[str]], best: list[str], worst: list[str], count: int
) -> list[Example]:
    """Choose examples spread evenly over those on which two arms differ.

    If the arms agree on all examples, choose from the whole test set.
    """
    differ = [i for i in range(len(best)) if best[i] != worst[i]]
    among = differ or list(range(len(best)))
    at = np.linspace(0, len(among) - 1, min(count, len(among))).round().astype(int)
    return [
        Example({name: lines[i] for name, lines in text.items()}, best[i], worst[i])
        for i in (among[k] for k in at)
    ]


def environment(sweep: Sweep, rows: list[dict], done: list[dict]) -> dict[str, str]:
    """Describe what the results depend on; list all values if trials differ."""
    settings = sweep.settings

    def values(column):
        return ", ".join(sorted({str(row[column]) for row in done if row[column]}))

    def by_name(column):
        values_by_name = {}
        for row in done:
            for name, value in json.loads(row[column] or "{}").items():
                values_by_name.setdefault(name, set()).add(str(value))
        return {
            name: " and ".join(sorted(texts)) for name, texts in values_by_name.items()
        }

    reported = [row for row in rows if row["stage"] == "report"]
    trials = f"{len(done)} of {len(reported)} in the tables"
    if searched := len(rows) - len(reported):
        trials += f", after {searched} of the search"
    base = flat(settings["base"])
    shown = ("data.batch_tokens", "train.num_steps", "optimizer.learning_rate")
    commits = {row["commit"] for row in done} - {None}
    mixed = " (several, so differences may come from the code)" * (len(commits) > 1)
    entries = {
        "config": settings["config"],
        "changed in it": ", ".join(f"{k}={v}" for k, v in settings["overrides"].items())
        or "nothing",
        **{key: str(base[key]) for key in shown if key in base},
        "model": ", ".join(
            f"{k}={v}"
            for k, v in flat(settings["base"]["model"]).items()
            if v is not None
        ),
        "test split": settings["test_split"],
        "search on dev": search_text(sweep),
        "chosen at an end of the values tried": chosen_ends(sweep, done),
        "checkpoint": settings["checkpoint"],
        "evaluation": ", ".join(f"{k}={v}" for k, v in by_name("options").items()),
        "signatures": "; ".join(f"{k}: {v}" for k, v in by_name("signatures").items()),
        "device": values("device"),
        "attention": values("attention"),
        "commit": values("commit") + mixed,
        "versions": ", ".join(f"{k} {v}" for k, v in by_name("versions").items()),
        "python": values("python"),
        "trials": trials,
    }
    return {name: value for name, value in entries.items() if value}


def chosen_ends(sweep: Sweep, done: list[dict]) -> str | None:
    """Name arms that chose the smallest or largest of three or more values of a key.

    Their best value may lie beyond it.
    """
    descriptions = []
    for arm in sweep.plan.arms:
        rows = (row for row in done if row["arm"] == arm.name)
        chosen = json.loads(next(rows, {"nuisance": "{}"})["nuisance"])
        for key, value in chosen.items():
            tried = {candidate[key] for candidate in arm.candidates if key in candidate}
            if len(tried) > 2 and value in (min(tried), max(tried)):
                descriptions.append(f"{arm.name} ({label(key, value)})")
    return "; ".join(descriptions) or None


def search_text(sweep: Sweep) -> str | None:
    """Describe how nuisance settings were found; None if they are the config's."""
    if not sweep.has_search:
        return None
    seeds = sweep.search.seeds
    seeds = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    if sweep.search.count is None:
        most = max(len(arm.candidates) for arm in sweep.plan.arms)
        return f"all combinations of the listed values, at most {most}, seed {seeds}"
    space = "; ".join(
        f"{key} from {', '.join(map(str, values))}"
        if isinstance(values, list)
        else f"{key} between {values[0]:g} and {values[1]:g}"
        for key, values in sweep.search.space.items()
    )
    return (
        f"{sweep.search.count} settings per arm by Optuna's TPE, with seed {seeds}: "
        f"{space}"
    )
