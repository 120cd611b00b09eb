"""Score a trained run on a split, or translate or score text with it.

python eval.py --workdir=runs/multi30k --split=test_2016_flickr --beam_size=5
python eval.py --workdir=runs/multi30k --translate < source.txt > translations.txt
python eval.py --workdir=runs/multi30k --score < pairs.tsv > log_probabilities.tsv
"""

import contextlib
import itertools
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from headcount.configs.commandline import fail, one_sentence, path_of, run
from headcount.runtime import cluster, platform
from headcount.runtime.logging import show_log
from headcount.runtime.workdir import write_json

if TYPE_CHECKING:  # it imports JAX, which platform.setup() is to come before
    from headcount.training.run import Pairs, Trained

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run of train.py.")
SPLIT = flags.DEFINE_string(
    "split", None, "Split to score: val, test, ...; or several: val,test"
)
TRANSLATE = flags.DEFINE_bool(
    "translate", False, "Translate standard input, a sentence a line."
)
SCORE = flags.DEFINE_bool(
    "score", False, "Score standard input's pairs: a source, a tab, a target a line."
)
CHECKPOINT = flags.DEFINE_enum(
    "checkpoint",
    "best",
    ["best", "last", "average"],
    "Parameters of the best evaluation by train.best_metric, of the last checkpoint, "
    "or the mean of the checkpoints kept (train.keep_checkpoints).",
)
BEAM_SIZE = flags.DEFINE_integer("beam_size", 5, "Hypotheses; 1: greedy.", 1, 2**16)
LENGTH_PENALTY = flags.DEFINE_float(
    "length_penalty", 0.6, "Alpha of ((5 + n) / 6)^alpha, Wu et al. 2016.", 0.0, 10.0
)
N_BEST = flags.DEFINE_integer(
    "n_best", None, "How many of a beam to give, as INDEX ||| translation ||| score.", 1
)
TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.0, "Above 0: sample instead of beam search.", 0.0
)
TOP_K = flags.DEFINE_integer("top_k", 0, "Sample among the k likeliest; 0: all.", 0)
TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample within this probability.", 0.0, 1.0)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the samples.", 0, 2**31 - 1)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 128, "Hypotheses at a time, beam_size a sentence.", 1, 2**31
)
DIRECTORY = flags.DEFINE_string(
    "directory", None, "Folder of local data files; default: the run's."
)
OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "File to write the translations to; SPLIT in it stands for the split's name.",
)
SHOW = flags.DEFINE_integer("show", 0, "How many translations to print.", 0)
PLOT = flags.DEFINE_string(
    "plot", None, "Picture (.png, .pdf) of what every head attends to in a sentence."
)
SITE = flags.DEFINE_enum(
    "site",
    "cross",
    ["encoder", "decoder", "cross"],
    "Whose heads to --plot, or alone to --prune: the self-attention of one side, or "
    "the cross; default to prune: all.",
)
SENTENCE = flags.DEFINE_integer(
    "sentence", 0, "Number (from 0) in the split of the one to --plot.", 0
)
HEADS = flags.DEFINE_bool("heads", False, "Tell what each head sees and adds.")
PRUNE = flags.DEFINE_bool(
    "prune", False, "Score with ever fewer heads, those least important on val gone."
)
TRIAL = flags.DEFINE_integer(
    "trial", 0, "Trial to translate, --score, plot, or alone to tell of or prune.", 0
)
flags.adopt_module_key_flags(cluster)  # so that --help has them
ALONE = (PLOT, HEADS, PRUNE)  # one process tells of them, and only of a --split
DECODING = (BEAM_SIZE, LENGTH_PENALTY, N_BEST, TEMPERATURE, TOP_K, TOP_P, SEED)


def main():
    """Check the flags, then score or translate."""
    modes = [SPLIT.value is not None, TRANSLATE.value, SCORE.value]
    if WORKDIR.value is None or sum(modes) != 1:
        fail(
            "--workdir and one of --split, --translate and --score are needed, as in "
            "python eval.py --workdir=runs/numbers --split=test"
        )
    if cluster.COORDINATOR.value:
        for flag in (TRANSLATE, SCORE, *ALONE):
            if flag.value:
                fail(f"--{flag.name} takes one process, not a --coordinator.")
    if SENTENCE.present and not PLOT.value:
        fail("--sentence says what to draw, so add --plot=FILE.png.")
    if N_BEST.value and SPLIT.value and not OUTPUT.value:
        fail("--n_best says what to write, so add --output=FILE.")
    if SITE.present and not (PLOT.value or PRUNE.value):
        fail("--site says what to draw or prune, so add --plot=FILE.png or --prune.")
    if SPLIT.value is None:
        mode = TRANSLATE.name if TRANSLATE.value else SCORE.name
        for flag in (*ALONE, SHOW, DIRECTORY):
            if flag.value:
                fail(
                    f"--{flag.name} needs the references of a --split, and --{mode} "
                    f"has none."
                )
        if OUTPUT.value:
            fail(f"--{mode} prints what it finds; leave --output out, and add > FILE.")
    for flag in DECODING:
        if SCORE.value and flag.present:
            fail(f"--{flag.name} says how to decode, and --score decodes nothing.")
    platform.setup()
    show_log()
    from headcount.runtime import distributed as hosts

    with contextlib.ExitStack() as stack:
        stack.enter_context(hosts.at_once())
        with one_sentence(), hosts.given_up():
            options = decoding_options()
            named = [] if SPLIT.value is None else splits()
            check_files(named)
            cluster.connect()
            from headcount.training.run import load, read

            workdir = path_of(WORKDIR)
            trained = load(workdir, CHECKPOINT.value)
            trial_of(trained)  # or it would be refused after all was decoded
            if SPLIT.value is None:
                take_lines(trained, options)
                return
            with hosts.together():
                needed = [*named, *["val"] * PRUNE.value]  # to rank heads on
                found = {
                    split: read(trained, split, DIRECTORY.value) for split in needed
                }
                check_sentence([found[split] for split in named])
            for split in named:
                evaluate(workdir, trained, found[split], options, found.get("val"))
            hosts.share(None)  # the first scores for longer than a shutdown may take


def splits() -> list[str]:
    """The splits that --split names.

    Raises:
        ValueError: one has no name, or there are several, and --output or --plot names
            one file for all.
    """
    found = SPLIT.value.split(",")
    if "" in found:
        raise ValueError(
            f"--split={SPLIT.value} must name splits with commas between them, as in "
            f"--split=val,test"
        )
    for flag, example in ((OUTPUT, "SPLIT.txt"), (PLOT, "SPLIT.png")):
        if len(found) > 1 and flag.value and "SPLIT" not in flag.value:
            raise ValueError(
                f"--{flag.name}={flag.value} would hold the last of {len(found)} "
                f"splits; write SPLIT where a split's name is to stand, as in "
                f"--{flag.name}={example}"
            )
    return found


def decoding_options() -> dict:
    """The flags that say how to decode, as `decoding.generate.translate` takes them.

    Raises:
        ValueError: one is not finite, there are some of sampling without a temperature
            or of beam search with one, or --n_best of a smaller beam.
    """
    for flag in (LENGTH_PENALTY, TEMPERATURE, TOP_P):
        if not math.isfinite(flag.value):
            raise ValueError(f"--{flag.name} must be finite, got {flag.value}.")
    if TEMPERATURE.value == 0 and (TOP_K.value or TOP_P.value < 1 or SEED.value):
        raise ValueError(
            "--top_k, --top_p and --seed say what to sample, and nothing is sampled at "
            "--temperature=0; set it too, as in --temperature=1"
        )
    if TEMPERATURE.value > 0:
        for flag in (BEAM_SIZE, LENGTH_PENALTY, N_BEST):
            if flag.present:
                raise ValueError(
                    f"--{flag.name} is of beam search, and --temperature="
                    f"{TEMPERATURE.value:g} samples instead; leave one of them out."
                )
        return {
            "temperature": TEMPERATURE.value,
            "top_k": TOP_K.value,
            "top_p": TOP_P.value,
            "seed": SEED.value,
        }
    if N_BEST.value and N_BEST.value > BEAM_SIZE.value:
        raise ValueError(
            f"--n_best must be at most --beam_size={BEAM_SIZE.value}, got "
            f"{N_BEST.value}."
        )
    if BEAM_SIZE.value == 1 and N_BEST.value is None:  # its score is not told
        return {"beam_size": 1}
    return {"beam_size": BEAM_SIZE.value, "length_penalty": LENGTH_PENALTY.value}


def check_files(named: list[str]) -> None:
    """Raise a ValueError where --output or --plot can't be written, before decoding."""
    given = [flag for flag in (OUTPUT, PLOT) if flag.value is not None]
    for flag, name in itertools.product(given, named):
        path = path_for(flag, name)
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(
                f"--{flag.name}={flag.value} must be a file in a folder that is there."
            )
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"--{flag.name}={flag.value}: {path} can't be written.")
    if PLOT.value is not None:
        from matplotlib.backend_bases import FigureCanvasBase

        from headcount.models.checks import choose

        formats = [f".{name}" for name in FigureCanvasBase.filetypes]
        choose("The suffix of --plot", path_of(PLOT).suffix.lower(), formats)


def check_sentence(splits: "list[Pairs]") -> None:
    """Raise a ValueError where a split has no such --sentence."""
    for pairs in splits:
        if SENTENCE.value >= len(pairs.sources):
            raise ValueError(
                f"--sentence={SENTENCE.value} is not in {pairs.split}, whose last is "
                f"{len(pairs.sources) - 1}."
            )


def evaluate(
    workdir: Path,
    trained: "Trained",
    pairs: "Pairs",
    options: dict,
    dev: "Pairs | None",
) -> None:
    """Score every trial, print a table, and write result-SPLIT.json.

    `dev` is what --prune ranks heads on.
    """
    from headcount.analysis.tables import print_scores, print_sentences
    from headcount.runtime import distributed as hosts
    from headcount.training.run import decoded, listed, scored, texts

    trials, gates = range(len(trained.step)), trained.head_gates
    sizes = {"batch_size": BATCH_SIZE.value, "n_best": N_BEST.value}
    loss, found = decoded(trained, pairs, trials, gates, **sizes, **options)
    if not hosts.is_first():
        return
    lists, target, rows = found, trained.tokenizers[1], []
    if N_BEST.value:
        found = {t: [some[0][0] for some in each] for t, each in lists.items()}
    for trial in trials:
        hypotheses = target.decode_many(found[trial])
        row = about(trained, trial, pairs) | {"loss": float(loss[trial])}
        row |= scored(trained, pairs, hypotheses)
        rows.append(row | {"decoding": options, "sentences": len(pairs.sources)})
        if trial == trial_of(trained):
            chosen = hypotheses
        lines = listed(texts(target, lists[trial])) if N_BEST.value else hypotheses
        write_output(lines, pairs.split, trial, len(trials))
    path = workdir / f"result-{pairs.split}.json"
    write_json(path, rows)
    print_scores(rows, list(trained.trials[0]), path)
    print_sentences(pairs, chosen, SHOW.value)
    if PLOT.value:
        plot(trained, pairs, found[trial_of(trained)])
    if HEADS.value:
        tell_heads(trained, pairs, workdir)
    if PRUNE.value:
        prune(trained, dev, pairs, workdir, options)


def about(trained: "Trained", trial: int, pairs: "Pairs") -> dict:
    """Which parameters a row is of, and what they are scored on."""
    row = {"trial": trial, **trained.trials[trial], "split": pairs.split}
    row |= {"checkpoint": CHECKPOINT.value, "step": trained.step[trial]}
    return row | {"diverged_at": trained.diverged_at[trial]}


def path_for(flag, split: str) -> Path:
    """The file that --output or --plot names for a split."""
    path = path_of(flag)
    return path.with_name(path.name.replace("SPLIT", split))


def write_output(lines: list[str], split: str, trial: int, num_trials: int) -> None:
    """Write the translations to --output; of many trials each to a file of its own."""
    if OUTPUT.value is None:
        return
    path = path_for(OUTPUT, split)
    if num_trials > 1:
        path = path.with_name(f"{path.stem}-{trial}{path.suffix}")
    path.write_text("".join(line + "\n" for line in lines))


def take_lines(trained: "Trained", options: dict) -> None:
    """Translate or score standard input line by line."""
    from headcount.analysis.lines import score_lines, translate_lines

    trial, size = trial_of(trained), BATCH_SIZE.value
    if SCORE.value:
        score_lines(trained, trial, size)
    else:
        translate_lines(trained, trial, N_BEST.value, size, **options)


def trial_of(trained: "Trained") -> int:
    """The trial that --trial names."""
    if not 0 <= TRIAL.value < len(trained.step):
        raise ValueError(
            f"--trial must be below {len(trained.step)}, the number of trials in the "
            f"run, got {TRIAL.value}."
        )
    return TRIAL.value


def trials_of(trained: "Trained") -> list[int]:
    """The trial that --trial names, by default all that have not diverged."""
    every = [t for t, at in enumerate(trained.diverged_at) if at is None]
    return [trial_of(trained)] if TRIAL.present or not every else every


def plot(trained: "Trained", pairs: "Pairs", translations: list[list[int]]) -> None:
    """Save what the heads of --site attend to in --sentence and its translation."""
    from headcount.analysis.plots import plot_sentence

    index, path = SENTENCE.value, path_for(PLOT, pairs.split)
    ids, translation = pairs.source[index].tolist(), translations[index]
    plot_sentence(trained, trial_of(trained), ids, translation, SITE.value, path)
    print(f"\nThe attention ({SITE.value}) in sentence {index}: {path}")


def tell_heads(trained: "Trained", pairs: "Pairs", workdir: Path) -> None:
    """Write heads-SPLIT.json, a row a trial and head, and print it."""
    from headcount.analysis.heads import measure_trials
    from headcount.analysis.tables import print_heads

    rows = list(measure_trials(trained, pairs, trials_of(trained)))
    path = workdir / f"heads-{pairs.split}.json"
    write_json(path, rows)
    print_heads(rows, pairs.split, path)


def prune(
    trained: "Trained", dev: "Pairs", pairs: "Pairs", workdir: Path, options: dict
) -> None:
    """Write pruning-SPLIT.json and .png: the scores with ever fewer heads.

    Of one --site they are pruning-SPLIT-SITE.
    """
    from headcount.analysis.plots import plot_pruning
    from headcount.analysis.pruning import curve
    from headcount.analysis.tables import print_pruning

    trials, site = trials_of(trained), SITE.value if SITE.present else None
    sizes, ranked_on = {"batch_size": BATCH_SIZE.value}, {"ranked_on": dev.split}
    rows = [
        about(trained, row["trial"], pairs) | ranked_on | row | {"decoding": options}
        for row in curve(trained, dev, pairs, trials, site, **sizes, **options)
    ]
    path = workdir / f"pruning-{'-'.join(filter(None, (pairs.split, site)))}.json"
    write_json(path, rows)
    metric = trained.config.train.best_metric.removeprefix("dev_")
    metric = metric if metric in rows[0] and metric != "loss" else "bleu"
    print_pruning(rows, metric, path)
    plot_pruning(rows, metric, path.with_suffix(".png"))


if __name__ == "__main__":
    run(main)
