"""From a sweep's folder to report.html, report.md and its pictures."""

import inspect
import json
from pathlib import Path

import numpy as np

from headcount.analysis.anchors import ANCHORS, published
from headcount.analysis.formatting import counted, of_100
from headcount.analysis.report import ArmResult, Example, Report, bootstrapped, compare
from headcount.analysis.report_html import page
from headcount.analysis.report_markdown import document
from headcount.analysis.report_plots import figures, plt, save_png
from headcount.analysis.significance import paired_bootstrap
from headcount.configs.commandline import flat
from headcount.data import pairs as corpora
from headcount.sweeps.plan import Arm, letter
from headcount.sweeps.records import read_record, read_result
from headcount.sweeps.store import COLUMNS, SCORES, TOLD, Sweep, unfinished
from headcount.training.metrics import metrics_of


def write(sweep: Sweep, rows: list[dict], num_examples: int) -> None:
    """Write the report of what is done.

    Raises:
        ValueError: nothing is, or not of the baseline; or a result can't stand beside
            the others.
    """
    for group in sweep.groups:
        read_record(sweep.folder(group) / "run.json")
        for split in sweep.splits(group):
            read_result(sweep.folder(group), split, group, sweep.settings)
    done = [row for row in rows if row["status"] == "done" and row["stage"] == "report"]
    if not done:
        raise ValueError(
            f"Nothing has finished in {sweep.workdir} yet; python sweep.py status "
            f"--workdir={sweep.workdir} says how far it is."
        )
    report = gather(sweep, rows, done, num_examples)
    if not report.baseline.seeds:
        lost = report.baseline.lost
        why = f"lost {counted(lost, 'trial')}" if lost else "has not finished yet"
        raise ValueError(
            f"The baseline {report.baseline.name} {why}, and there is nothing to "
            f"compare with."
        )
    comparisons = compare(report)
    made = figures(report, comparisons)
    html = sweep.workdir / "report.html"
    html.write_text(page(report, comparisons, made))
    pictures = {}
    (sweep.workdir / "report").mkdir(exist_ok=True)
    for name, (figure, caption) in made.items():
        path = Path("report") / f"{name}.png"
        save_png(figure, sweep.workdir / path)
        plt.close(figure)
        pictures[name] = (str(path), caption)
    markdown = sweep.workdir / "report.md"
    markdown.write_text(document(report, comparisons, pictures))
    print(f"Written: {html} and {markdown}")


def gather(sweep: Sweep, rows: list[dict], done: list[dict], num_examples) -> Report:
    """Read what the report tells."""
    settings = sweep.settings
    question, _, details = inspect.cleandoc(settings["docstring"]).partition("\n")
    translations, sources, references = texts(sweep, done)
    chosen, seed = spoken_for(done)
    systems = {
        arm.name: translations[chosen[arm.name]]
        for arm in sorted(sweep.plan.arms, key=lambda arm: not arm.is_baseline)
        if arm.name in chosen
    }
    ablation = settings["ablation"]
    bootstrap_metric = bootstrapped(settings["metric"])
    bootstraps = paired_bootstrap(systems, references, metric=bootstrap_metric)
    arms = [
        arm_result(sweep, arm, rows, done, bootstraps.get(arm.name), ablation)
        for arm in sweep.plan.arms
    ]
    means = {arm.name: arm.test[settings["metric"]].mean() for arm in arms if arm.seeds}
    best, worst = max(means, key=means.get), min(means, key=means.get)
    data = settings["base"]["data"]
    anchor = ANCHORS.get(ablation)
    has_anchor = any(arm.published is not None for arm in arms)
    axis = sweep.plan.axis
    return Report(
        title=f"Headcount sweep: {ablation.rsplit(':', 1)[-1]} on {data['name']}, "
        f"{data['source']} to {data['target']}",
        question=question,
        details=details.strip(),
        metric=settings["metric"],
        arms=arms,
        axis=axis and f"{letter(axis)}, {axis}",
        anchor=(anchor.source, anchor.unit) if has_anchor else None,
        examples=choose_examples(
            sources, references, systems[best], systems[worst], num_examples
        ),
        best=best,
        worst=worst,
        environment=environment(rows, done, settings, search_told(sweep)),
        command=settings["command"],
        note=settings["note"],
        checkpoint=settings["checkpoint"],
        searched=sweep.searches(),
        unfinished=unfinished(sweep.plan, rows),
        seed=seed,
    )


def spoken_for(done: list[dict]) -> tuple[dict[str, str], int | None]:
    """The trial of every arm whose translations stand for it, and their seed.

    It is the first that all arms have, so that what is resampled and shown is paired
    as the scores are; None: there is none, and each arm's first stands for it.
    """
    trials: dict[str, dict[int, str]] = {}
    for row in done:
        trials.setdefault(row["arm"], {})[row["seed"]] = row["id"]
    shared = min(set.intersection(*map(set, trials.values())), default=None)
    first = {arm: min(of) if shared is None else shared for arm, of in trials.items()}
    return {arm: of[first[arm]] for arm, of in trials.items()}, shared


def search_told(sweep: Sweep) -> str | None:
    """How the nuisance settings were found; None: they are the config's."""
    if not sweep.searches():
        return None
    seeds = sweep.search.seeds
    told = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    if sweep.search.count is None:
        most = max(len(arm.candidates) for arm in sweep.plan.arms)
        return (
            f"every combination of the values listed, {most} at most, with seed {told}"
        )
    where = "; ".join(
        f"{key} among {', '.join(map(str, values))}"
        if isinstance(values, list)
        else f"{key} from {values[0]:g} to {values[1]:g}"
        for key, values in sweep.search.space.items()
    )
    count = sweep.search.count
    return f"{count} settings an arm by Optuna's TPE, with seed {told}: {where}"


def arm_result(
    sweep: Sweep, arm: Arm, rows: list[dict], done: list[dict], bootstrap, ablation: str
) -> ArmResult:
    """What an arm's rows say."""
    of_arm = sorted(
        (row for row in done if row["arm"] == arm.name), key=lambda row: row["seed"]
    )
    lost = [
        row
        for row in rows
        if row["arm"] == arm.name
        and row["stage"] == "report"
        and row["status"] in ("diverged", "failed")
    ]
    axis = sweep.plan.axis

    # losses can be compared where they are of the same tokens
    same_data = arm.config["data"] == sweep.settings["base"]["data"]
    told = TOLD if same_data else SCORES

    def scores(split):
        return {
            score: of_100(score, np.array([row[f"{split}_{score}"] for row in of_arm]))
            for score in told
            if of_arm and all(row[f"{split}_{score}"] is not None for row in of_arm)
        }

    def mean(column):
        values = [row[column] for row in of_arm if row[column] is not None]
        return float(np.mean(values)) if values else None

    return ArmResult(
        name=arm.name,
        is_baseline=arm.is_baseline,
        value=arm.overrides[axis] if axis else None,
        mlp_dim=arm.config["model"]["mlp_dim"],
        parameters=of_arm[0]["parameters"] if of_arm else arm.parameters,
        flops=arm.flops,
        seeds=[row["seed"] for row in of_arm],
        test=scores("test"),
        dev=scores("dev"),
        lost=len(lost),
        nuisance=json.loads(of_arm[0]["nuisance"]) if of_arm else {},
        seconds=mean("seconds"),
        tokens_per_second=mean("tokens_per_second"),
        published=published(ablation, arm.config["model"]),
        bootstrap=bootstrap,
        curve=curve(sweep, of_arm),
    )


def curve(sweep: Sweep, rows: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Dev scores while training at the steps that all trials were evaluated at."""
    score = sweep.settings["metric"].removeprefix("published_")
    metric = f"dev_{score}"
    places = {
        trial.id: (group, index)
        for group in sweep.groups
        for index, trial in enumerate(group.trials)
    }
    curves = []
    for row in rows:
        group, index = places[row["id"]]
        metrics = metrics_of(sweep.folder(group))
        curves.append(
            {
                m["step"]: m[metric]
                for m in metrics
                if m["trial"] == index and metric in m
            }
        )
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    values = np.array([[one[step] for step in steps] for one in curves])
    return np.array(steps), of_100(score, values)


def texts(sweep: Sweep, done: list[dict]):
    """The translations of every trial by its id, the sources and the references."""
    data, split = sweep.settings["base"]["data"], sweep.settings["test_split"]
    sources, references = corpora.load(
        data["name"], data["source"], data["target"], split, data["directory"]
    )
    wanted = {row["id"] for row in done}
    translations = {}
    for group in sweep.groups:
        for index, trial in enumerate(group.trials):
            if trial.id in wanted:
                suffix = f"-{index}" if len(group.trials) > 1 else ""
                path = sweep.folder(group) / f"{split}{suffix}.txt"
                # as eval.py ends lines: str.splitlines knows more ends than "\n"
                text = path.read_bytes().decode(errors="replace")
                translations[trial.id] = text.removesuffix("\n").split("\n")
                if len(translations[trial.id]) != len(sources):
                    raise ValueError(
                        f"{path} holds {len(translations[trial.id])} lines, not a "
                        f"translation of each of the {len(sources)} sentences; move "
                        f"result-{split}.json beside it away, and sweep.py run scores "
                        f"its group again."
                    )
    return translations, sources, references


def choose_examples(sources, references, best, worst, count: int) -> list[Example]:
    """Sentences spread evenly over the test set: such on which two arms differ, if any
    do."""
    differ = [i for i in range(len(sources)) if best[i] != worst[i]]
    among = differ or list(range(len(sources)))
    at = np.linspace(0, len(among) - 1, min(count, len(among))).round().astype(int)
    return [
        Example(sources[i], references[i], best[i], worst[i])
        for i in (among[k] for k in at)
    ]


def environment(
    rows: list[dict], done: list[dict], settings: dict, search: str | None
) -> dict[str, str]:
    """What the results depend on; several values where trials had several."""

    def values(column):
        return ", ".join(sorted({str(row[column]) for row in done if row[column]}))

    reported = [row for row in rows if row["stage"] == "report"]
    told = f"{len(done)} of {len(reported)} in the table"
    if tries := len(rows) - len(reported):
        told += f", after {tries} of the search"
    versions = {}
    for row in done:
        for name, version in json.loads(row["versions"] or "{}").items():
            versions.setdefault(name, set()).add(version)
    signatures = (values(name) for name in COLUMNS if name.endswith("signature"))
    base = flat(settings["base"])
    shown = ("data.batch_tokens", "train.num_steps", "optimizer.learning_rate")
    return {
        "config": settings["config"],
        "changed in it": ", ".join(f"{k}={v}" for k, v in settings["overrides"].items())
        or "nothing",
        **{key: str(base[key]) for key in shown},
        "model": ", ".join(
            f"{k}={v}"
            for k, v in flat(settings["base"]["model"]).items()
            if v is not None
        ),
        "test split": settings["test_split"],
        **({"search on dev": search} if search else {}),
        "checkpoint": settings["checkpoint"],
        "decoding": values("decoding"),
        "signatures": "; ".join(filter(None, signatures)),
        "device": values("device"),
        "attention": values("attention"),
        "commit": values("commit")
        + " (not of one code, so what differs may be of that)"
        * (len({row.get("commit") for row in done} - {None}) > 1),
        "versions": ", ".join(
            f"{name} {' and '.join(sorted(of))}" for name, of in versions.items()
        ),
        "python": values("python"),
        "trials": told,
    }
