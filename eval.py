"""Score a trained run on one or several splits.

python eval.py --workdir=runs/multi30k --split=test_2016_flickr --beam_size=5
"""

# isort: off
from headcount.runtime import bootstrap  # noqa: F401  before JAX is imported

# isort: on
import contextlib
import itertools
from pathlib import Path

from absl import flags

from headcount.analysis.heads import open_heads
from headcount.analysis.tables import print_examples, print_report, print_scores
from headcount.configs.commandline import (
    DIRECTORY,
    TASK_FILE,
    WORKDIR,
    fail,
    one_sentence,
    path_of,
    run,
)
from headcount.decoding import flags as decoding
from headcount.runtime import cluster, distributed, files
from headcount.runtime.logging import heartbeat, say, show_log
from headcount.runtime.workdir import read_json, with_digest, write_json
from headcount.tasks import Run, Task, best_metric, import_file
from headcount.training.run import CHECKPOINT, choose_trial, load

SPLIT = flags.DEFINE_string(
    "split", None, "Split to score: val, test, ...; or several: val,test"
)
OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "File for the predictions, one per example; SPLIT in it stands for the split. With "
    "several trials, each gets a file of its own: FILE-0, ...",
)
STRIDE = flags.DEFINE_integer(
    "stride",
    None,
    "Language models: tokens between the starts of windows; fewer give tokens more "
    "context. Default: data.stride.",
    1,
)
SHOW = flags.DEFINE_integer("show", 0, "How many predictions to print.", 0)
TRIAL = flags.DEFINE_integer("trial", 0, "Trial whose predictions to print.", 0)


def main():
    """Check the flags, then score."""
    for flag in (WORKDIR, SPLIT):
        if flag.value is None:
            fail(
                f"--{flag.name} is needed, as in "
                f"python eval.py --workdir=runs/numbers --split=test"
            )
    show_log()
    with contextlib.ExitStack() as stack:
        stack.enter_context(distributed.exit_at_once())
        with one_sentence(), distributed.wait_for_abort():
            if TASK_FILE.value is not None:
                import_file(path_of(TASK_FILE))
            options, names = decoding.options(), split_names()
            if STRIDE.value is not None:
                options["stride"] = STRIDE.value
            if decoding.N_BEST.value and not OUTPUT.value:
                raise ValueError(
                    "--n_best writes n-best lists, so --output=FILE is needed."
                )
            check_output(names)
            cluster.connect()
            workdir = path_of(WORKDIR)
            trained = load(workdir, CHECKPOINT.value)
            choose_trial(trained, TRIAL)
            trained.task.check_options(options, evaluates=True)
            check_predictions(trained.task)
            if DIRECTORY.value is not None:
                trained.task.set_directory(DIRECTORY.value)
            with distributed.fail_together():
                # load everything first, to fail before the first split is decoded
                examples = [trained.task.load(name) for name in names]
                for name in names:
                    trained.task.check_references(name)
                    files.check_output(
                        f"--workdir={WORKDIR.value}", result_path(workdir, name)
                    )
            for split in examples:
                evaluate(workdir, trained, split, options)
            # wait for process 0, which may take longer than SHUTDOWN to finish
            distributed.gather(None)


def split_names() -> list[str]:
    """Return the splits that --split names.

    Raises:
        ValueError: a name is empty, or several splits share one --output file.
    """
    names = [name.strip() for name in SPLIT.value.split(",")]
    if "" in names:
        raise ValueError(
            f"--split={SPLIT.value} must be splits separated by commas, as in "
            f"--split=val,test"
        )
    if len(names) > 1 and OUTPUT.value and "SPLIT" not in path_of(OUTPUT).name:
        raise ValueError(
            f"--output={OUTPUT.value} is one file for {len(names)} splits; write SPLIT "
            f"where the split's name is to stand, as in --output=SPLIT.txt"
        )
    return names


def check_output(names: list[str]) -> None:
    """Raise a ValueError if --output can't be written, before anything is decoded."""
    workdir = path_of(WORKDIR).resolve()
    for name in names if OUTPUT.value is not None else ():
        path = output_path(name)
        files.check_output(f"--output={OUTPUT.value}", path)
        folder, in_run = path.resolve().parent, path.resolve().is_relative_to(workdir)
        is_run_file = (
            folder != workdir  # in checkpoints/, tokenizer/, ...
            or path.suffix in (".json", ".jsonl")
            or path.name.startswith((".", "log."))  # locks and the log
        )
        if in_run and is_run_file:
            raise ValueError(
                f"--output={OUTPUT.value} may overwrite a file of the run; choose "
                f"another name, such as predictions.txt."
            )


def check_predictions(task: Task) -> None:
    """Raise a ValueError for a flag about predictions if the task makes none."""
    for flag in (OUTPUT, SHOW):
        if flag.value and not task.has_predictions:
            name = task.config.task.name
            raise ValueError(
                f"--{flag.name}={flag.value}: evaluating a {name} makes no "
                f"predictions; leave it out, or use predict.py."
            )


def evaluate(workdir: Path, trained: Run, examples, options: dict) -> None:
    """Score every trial, print a table, and write result-SPLIT.json."""
    with heartbeat(f"Still scoring {len(examples)} examples of {examples.split}"):
        scores = trained.task.evaluate(trained, examples, **options)
    # in every process, because a trial's parameters may be sharded over all of them
    heads = [open_heads(trained, trial) for trial in range(len(trained.trials))]
    if not distributed.is_first():
        return
    rows, outputs = [], []
    for trial, row in enumerate(scores):
        outputs.append(row.pop("predictions", None))
        rows.append(
            {
                "trial": trial,
                **trained.trials[trial],
                "split": examples.split,
                "checkpoint": CHECKPOINT.value,
                "step": trained.step[trial],
                "diverged_at": trained.diverged_at[trial],
                "examples": len(examples),
                "crc32": examples.crc32,
                **({} if heads[trial] is None else {"open_heads": heads[trial]}),
                "options": row.pop("options", {}),
                "signatures": row.pop("signatures", {}),
                **row,
            }
        )
        if trial == TRIAL.value and "report" in row:
            print_report(row["report"], row["confusions"], row.get("entities"))
    path = result_path(workdir, examples.split)
    keep_other(path, rows[0])
    write_json(path, [with_digest(row) for row in rows])
    settings, selects = list(trained.trials[0]), best_metric(trained.task)
    print_scores(rows, trained.task.metrics, settings, path, selects)
    for trial, predictions in enumerate(outputs):
        if predictions is not None:
            write_predictions(predictions, examples.split, trial, len(outputs))
    shown = outputs[TRIAL.value]
    if shown is not None:
        if options.get("n_best"):  # lines of lists, each with the number of its example
            lists = itertools.groupby(shown, lambda line: line.split(" ||| ")[0])
            shown = ["\n".join(lines) for _, lines in lists]
        print_examples(examples.text, shown, SHOW.value)


def result_path(workdir: Path, split: str) -> Path:
    """Return the file for the scores of a split."""
    return workdir / f"result-{split}.json"


def keep_other(path: Path, row: dict) -> None:
    """Rename result-SPLIT.json if its scores are of another checkpoint, search or text.

    This keeps them from being overwritten by the new scores.

    Args:
        path: result-SPLIT.json.
        row: one of the rows to be written there.
    """
    try:
        old_row = read_json(path)[0]
        old_settings = {"checkpoint": old_row["checkpoint"], **old_row["options"]}
    except (OSError, ValueError, LookupError, TypeError):
        return  # there are no readable scores
    settings = {"checkpoint": row["checkpoint"], **row["options"]}
    if old_row.get("crc32") not in (None, row.get("crc32")):  # with another --directory
        old_settings["crc32"] = old_row["crc32"]
    if old_settings != settings:
        suffix = ",".join(f"{name}={value}" for name, value in old_settings.items())
        backup = path.with_name(f"{path.stem}-{suffix}{path.suffix}")
        path.replace(backup)
        say(f"Kept the scores of other settings in {backup}.")


def output_path(split: str) -> Path:
    """Return the file that --output names for a split."""
    path = path_of(OUTPUT)
    if not path.name:
        raise ValueError(f"--output={OUTPUT.value} is a folder; name a file in it.")
    return path.with_name(path.name.replace("SPLIT", split))


def write_predictions(lines: list[str], split: str, trial: int, count: int) -> None:
    """Write predictions to --output or, with several trials, to one file per trial."""
    if OUTPUT.value is None:
        return
    path = output_path(split)
    if count > 1:
        path = path.with_name(f"{path.stem}-{trial}{path.suffix}")
    files.write(path, "".join(line + "\n" for line in lines))


def cli():
    """Run as a script."""
    run(main)


if __name__ == "__main__":
    cli()
