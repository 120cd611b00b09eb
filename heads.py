"""Analyse the heads of a trained run, or of the arms of a sweep.

python heads.py describe --workdir=runs/numbers
python heads.py describe --workdir=runs/heads
python heads.py importance --workdir=runs/numbers
python heads.py prune --workdir=runs/numbers --split=test
python heads.py plot --workdir=runs/numbers --site=cross --output=cross.png
python heads.py roles --workdir=runs/stories
python heads.py similarity --workdir=runs/stories
python heads.py interactions --workdir=runs/stories
python heads.py explore --workdir=runs/stories --output=explorer.html

`describe`: what each head attends to. `importance`: the loss without each head.
`prune`: scores while heads are removed. `plot`: attention maps of one example.
`roles`: which heads attend to the previous token, the subject of the verb, and so on.
`similarity`: similarity of the maps and outputs of two heads. `interactions`: the loss
added by removing two heads, minus that of removing each alone. `explore`: a web page
to explore all of this. With the workdir of a sweep, `describe` and `importance` print
means for each arm.
"""

# isort: off
from headcount.runtime import bootstrap  # noqa: F401  before JAX is imported

# isort: on
import itertools
import sys
from pathlib import Path

from absl import flags

from headcount.analysis.explorer import explore, page
from headcount.analysis.heads import describe, importance, output_file
from headcount.analysis.plots import plot_example, plot_pruning
from headcount.analysis.pruning import curve
from headcount.analysis.roles import MIN_EXAMPLES, first_sentences, measure_roles
from headcount.analysis.similarity import interactions, similarity
from headcount.analysis.tables import (
    arm_tables,
    print_arms,
    print_heads,
    print_pairs_of_heads,
    print_pruning,
    print_roles,
)
from headcount.configs.commandline import (
    DIRECTORY,
    TASK_FILE,
    WORKDIR,
    fail,
    next_command,
    one_sentence,
    path_of,
    run,
)
from headcount.configs.sites import layers_of
from headcount.configs.validation import choose
from headcount.data.files import read_lines
from headcount.decoding import flags as decoding
from headcount.runtime.files import check_output as check_file
from headcount.runtime.files import write
from headcount.runtime.logging import show_log
from headcount.runtime.stdin import available_lines
from headcount.runtime.workdir import write_json
from headcount.sweeps.heads import design, measure_arms
from headcount.sweeps.settings import Options, open_sweep
from headcount.sweeps.table import make_rows
from headcount.tasks import best_metric, import_file
from headcount.training.run import CHECKPOINT, choose_trial, choose_trials, load

SPLIT = flags.DEFINE_string("split", "val", "Split to analyse the heads on.")
SITE = flags.DEFINE_string(
    "site",
    None,
    "Attention site: encoder, decoder or cross. Default: in plot, cross if the model "
    "has it; in prune, roles, similarity and interactions, all sites.",
)
EXAMPLE = flags.DEFINE_integer("example", 0, "plot: number of the example, from 0.", 0)
OUTPUT = flags.DEFINE_string(
    "output", None, "plot: the picture (.png, .pdf, .svg). explore: the page (.html)."
)
EXAMPLES = flags.DEFINE_integer(
    "examples",
    200,
    f"roles, similarity, interactions, explore: how many examples to use, at least "
    f"{MIN_EXAMPLES}.",
)
SENTENCES = flags.DEFINE_integer(
    "sentences", 50, "explore: number of sentences on the page.", 1
)
COMPARE = flags.DEFINE_string("compare", None, "explore: workdir of a second run.")
INPUT = flags.DEFINE_string(
    "input",
    None,
    "plot, explore: file of your own texts instead of the split's, one per line (- is "
    "standard input); in translation source, or source, tab, target.",
)
TRIAL = flags.DEFINE_integer(
    "trial", 0, "Analyse only this trial. Default: all trials (plot: the first).", 0
)


def main(verb: str) -> None:
    """Check the flags, load the run, and execute the verb."""
    if WORKDIR.value is None:
        fail(
            f"--workdir is needed, as in python heads.py {verb} --workdir=runs/numbers"
        )
    show_log()
    with one_sentence():
        if TASK_FILE.value is not None:
            import_file(path_of(TASK_FILE))
        options = decoding.options()
        check_flags(verb)
        if verb in SUFFIXES:
            check_output(verb)
        workdir = path_of(WORKDIR)
        if verb in SWEEP_VERBS and (workdir / "sweep.json").exists():
            measure_sweep(verb, workdir)
            return
        trained = open_run(workdir, CHECKPOINT.value)
        trained.task.check_options(options, evaluates=True)
        sites = list(layers_of(trained.config.model))
        if SITE.value is not None:
            choose("--site", SITE.value, sites)
        # a plot of the user's own text needs no corpus
        uses_corpus = verb != "plot" or INPUT.value is None
        examples = trained.task.load(SPLIT.value) if uses_corpus else None
        shown = SPLIT.value, SITE.value, f"trial_{TRIAL.value}" * TRIAL.present
        path = output_file(workdir, verb, *shown, which=CHECKPOINT.value)
        if verb not in SUFFIXES:
            check_file(f"--workdir={WORKDIR.value}", path)
        VERBS[verb](path, trained, examples, options)


def open_run(folder: Path, which: str):
    """Load a run whose task reads its data from --directory, if given."""
    trained = load(folder, which)
    if DIRECTORY.value is not None:
        trained.task.set_directory(DIRECTORY.value)
    return trained


def measure_sweep(verb: str, workdir: Path) -> None:
    """Print and write the measurements of the heads of every arm of a sweep."""
    if TRIAL.present:
        raise ValueError(
            f"--trial={TRIAL.value}: {workdir} holds a sweep, and {verb} measures all "
            f"its trials; for one, set --workdir to the folder of its group."
        )
    sweep = open_sweep(Options("report", workdir))
    which = CHECKPOINT.value if CHECKPOINT.present else sweep.settings["checkpoint"]

    def load_group(folder: Path):
        trained = open_run(folder, which)
        return trained, trained.task.load(SPLIT.value)

    path = output_file(workdir, verb, SPLIT.value, which=which)
    check_file(f"--workdir={WORKDIR.value}", path)
    rows = measure_arms(sweep, load_group, SWEEP_VERBS[verb])
    write_json(path, rows)
    tables, legend = arm_tables(rows, design(sweep, make_rows(sweep)))
    print_arms(tables, legend, SPLIT.value, path)


def describe_heads(path, trained, examples, options) -> None:
    """Print and write the statistics of every head."""
    rows = each_trial(trained, describe, examples)
    write_json(path, rows)
    print_heads(rows, examples.split, "entropy", path)
    command = next_command("heads.py explore", workdir=path.parent, output="FILE.html")
    print(f"A page of pictures: {command}")


def rank_heads(path, trained, examples, options) -> None:
    """Print and write the importance of every head."""
    rows = each_trial(trained, importance, examples)
    write_json(path, rows)
    print_heads(rows, examples.split, "added_loss", path)


def prune(path, trained, examples, options) -> None:
    """Print, write and plot scores while removing heads, which are ranked on val."""
    dev, trials = trained.task.load("val"), choose_trials(trained, TRIAL)
    common = {"split": examples.split, "ranked_on": dev.split}
    common["checkpoint"] = CHECKPOINT.value
    of_trials = [
        {**common, **settings, "step": step, "diverged_at": at}
        for settings, step, at in zip(
            trained.trials, trained.step, trained.diverged_at, strict=True
        )
    ]
    rows = [
        of_trials[row["trial"]] | row
        for row in curve(trained, dev, examples, trials, SITE.value, **options)
    ]
    write_json(path, rows)
    metric = best_metric(trained.task)
    print_pruning(rows, metric, path)
    plot_pruning(rows, metric, path.with_suffix(".png"))
    print(f"Wrote {path.with_suffix('.png')}")


def plot(_, trained, examples, options) -> None:
    """Plot the attention maps of one example with the model's own output."""
    sites = list(layers_of(trained.config.model))
    site = SITE.value or ("cross" if "cross" in sites else sites[0])
    trial, output, index = choose_trial(trained, TRIAL), path_of(OUTPUT), EXAMPLE.value
    lines = None if INPUT.value is None else input_lines()
    if lines is None:
        origin, count = examples.split, len(examples)
    else:
        origin, count = f"--input={INPUT.value}", len(lines)
    if index >= count:
        raise ValueError(
            f"--example={index} is not in {origin}, whose last example is number "
            f"{count - 1}."
        )
    if lines is None:
        fields = trained.task.fields_to_plot(trained, examples, index, trial, **options)
    else:
        fields = fields_of_line(trained, lines[index], trial)
    plot_example(trained, trial, fields, site, output)
    print(f"Wrote the attention ({site}) in example {index} of {origin} to {output}")


def find_roles(path, trained, examples, options) -> None:
    """Print and write the roles of heads."""
    trials = choose_trials(trained, TRIAL)
    rows = [
        row
        for row in measure_roles(trained, examples, trials, EXAMPLES.value)
        if SITE.value in (None, row["site"])
    ]
    if not rows:
        raise ValueError(
            f"{examples.split} has no role in {MIN_EXAMPLES} examples, the fewest that "
            f"are tested; use another --split."
        )
    write_json(path, rows)
    print_roles(rows, examples.split, path)


def compare_heads(path, trained, examples, options) -> None:
    """Print and write the similarity of every pair of heads of a site."""
    sentences = first_sentences(trained, examples, EXAMPLES.value)
    rows = [
        row
        for row in each_trial(trained, similarity, sentences)
        if SITE.value in (None, row["site"])
    ]
    write_json(path, rows)
    print_pairs_of_heads(rows, examples.split, "cka", path)


def find_interactions(path, trained, examples, options) -> None:
    """Print and write how the removal of every pair of heads of a site interacts."""
    sample = examples.take(range(len(examples))[: EXAMPLES.value])
    rows = each_trial(trained, interactions, sample, site=SITE.value)
    write_json(path, rows)
    print_pairs_of_heads(rows, examples.split, "interaction", path)


def explore_heads(path, trained, examples, options) -> None:
    """Write a page to explore the heads of one or two runs."""
    first = path.parent.resolve().name  # the workdir may be "."
    runs, splits = {first: trained}, {first: examples}
    if COMPARE.value is not None:
        folder = path_of(COMPARE)
        name = folder.resolve().name
        name = f"{name} (2)" if name == first else name
        runs[name] = open_run(folder, CHECKPOINT.value)
        splits[name] = runs[name].task.load(examples.split)
    lines = None if INPUT.value is None else input_lines()
    sentences, trials = {}, {}
    for name, shown in runs.items():
        trials[name] = choose_trials(shown, TRIAL)
        if lines is None:
            sentences[name] = first_sentences(shown, splits[name], SENTENCES.value)
        else:
            trial = trials[name][0]
            sentences[name] = [fields_of_line(shown, line, trial) for line in lines]
    data = explore(runs, splits, sentences, trials, EXAMPLES.value)
    output = path_of(OUTPUT)
    write(output, page(data))
    size = output.stat().st_size / 1e3
    print(f"Wrote {output} ({size:,.0f} kB): open it in a browser.")


def each_trial(trained, measure, data, **options) -> list[dict]:
    """Return the rows that `measure` finds for each chosen trial."""
    return [
        {"trial": trial} | row
        for trial in choose_trials(trained, TRIAL)
        for row in measure(trained, data, trial, **options)
    ]


def input_lines() -> list[str]:
    """Return the nonblank lines of --input."""
    if INPUT.value == "-":
        parts = available_lines(sys.stdin.fileno(), most=1000)
        lines = itertools.chain.from_iterable(parts)
    else:
        lines = read_lines(path_of(INPUT))
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise ValueError(f"--input={INPUT.value} has no text.")
    return lines


def fields_of_line(run, line: str, trial: int) -> dict[str, list[int]]:
    """Encode a line of --input; return its token ids by field."""
    source, target = line, None
    if "\t" in line and run.task.has_targets:
        source, target, *more = line.split("\t")
        if more:
            raise ValueError(
                f"A line of --input={INPUT.value} has {2 + len(more)} tab-separated "
                f"fields; it takes a source, or source and target."
            )
    return run.task.fields_of_text(run, source, target, trial)


def check_flags(verb: str) -> None:
    """Raise a ValueError for a flag that the verb would ignore, or too few examples."""
    for name, verbs in FLAG_VERBS.items():
        if flags.FLAGS[name].present and verb not in verbs:
            raise ValueError(
                f"--{name} has no meaning for {verb}; it is for {', '.join(verbs)}."
            )
    for name in decoding.options():
        if verb not in ("prune", "plot"):
            raise ValueError(f"--{name} has no meaning for {verb}; it decodes nothing.")
    if EXAMPLES.value < MIN_EXAMPLES:
        raise ValueError(
            f"--examples must be at least {MIN_EXAMPLES}, got {EXAMPLES.value}."
        )
    if INPUT.value is None:
        return
    unused = [*decoding.options(), "split"] if verb == "plot" else ["sentences"]
    for name in unused:
        if flags.FLAGS[name].present:
            raise ValueError(
                f"--{name} has no meaning with --input, whose lines {verb} shows."
            )


def check_output(verb: str) -> None:
    """Raise a ValueError unless --output can be a file of the verb's format."""
    suffixes = SUFFIXES[verb]
    if OUTPUT.value is None:
        raise ValueError(f"{verb} needs --output=FILE{suffixes[0]}.")
    path: Path = path_of(OUTPUT)
    if path.suffix.lower() not in suffixes:
        raise ValueError(
            f"--output={OUTPUT.value} must end in one of {', '.join(suffixes)}."
        )
    check_file(f"--output={OUTPUT.value}", path)


# file types of --output, by verb; an error message suggests the first
SUFFIXES = {
    "plot": [".png", ".pdf", ".svg"],
    "explore": [".html", ".htm"],
}
FLAG_VERBS = {  # flags that not all verbs use, and those that do
    "site": ("prune", "plot", "roles", "similarity", "interactions"),
    "example": ("plot",),
    "output": ("plot", "explore"),
    "examples": ("roles", "similarity", "interactions", "explore"),
    "sentences": ("explore",),
    "compare": ("explore",),
    "input": ("plot", "explore"),
}
SWEEP_VERBS = {"describe": describe, "importance": importance}
VERBS = {
    "describe": describe_heads,
    "importance": rank_heads,
    "prune": prune,
    "plot": plot,
    "roles": find_roles,
    "similarity": compare_heads,
    "interactions": find_interactions,
    "explore": explore_heads,
}


def cli():
    """Run as a script, whose first argument is the verb."""
    if len(sys.argv) < 2 or sys.argv[1] not in (*VERBS, "--help", "-h"):
        fail(
            f"The first argument must be one of {', '.join(VERBS)}, as in python "
            f"heads.py describe --workdir=runs/numbers"
        )
    verb = sys.argv.pop(1) if sys.argv[1] in VERBS else ""
    run(lambda: main(verb))


if __name__ == "__main__":
    cli()
