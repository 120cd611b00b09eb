"""Export a trained run to other libraries, and import Hugging Face weights.

    python weights.py --workdir=runs/numbers --to=ctranslate2:FOLDER
    python weights.py --workdir=runs/numbers --to=huggingface:FOLDER
    python weights.py --workdir=runs/numbers --to=stablehlo:FOLDER

    python weights.py --from=opus-mt-en-de --workdir=runs/opus
    python predict.py --workdir=runs/opus < source.txt
    python weights.py --workdir=runs/numbers --prune=less --heads=cross.0.2,cross.1.0

An export has a README.md that describes the model and how to load it. An import reads a
local folder of Marian, BERT or GPT-2 with config.json and model.safetensors and, for
Marian, source.spm, target.spm and vocab.json. The resulting workdir is like that of
train.py. Exporting an imported run to huggingface writes the same files, with
bit-identical float32 tensors. --prune writes a smaller run without some heads. Its
outputs equal those of the run in which the gates of these heads are 0.
"""

# isort: off
from headcount.runtime import bootstrap  # noqa: F401  before JAX is imported

# isort: on
import os
from pathlib import Path

from absl import flags

from headcount.analysis.removal import write_smaller
from headcount.configs.commandline import (
    TASK_FILE,
    WORKDIR,
    fail,
    one_sentence,
    path_of,
    run,
)
from headcount.exchange.exporting import FORMATS, export
from headcount.exchange.importing import import_checkpoint
from headcount.runtime.logging import say, show_log
from headcount.tasks import import_file
from headcount.training.run import CHECKPOINT, choose_trial, load

FROM = flags.DEFINE_string("from", None, "Folder of a Hugging Face checkpoint to read.")
TO = flags.DEFINE_string(
    "to",
    None,
    f"FORMAT:FOLDER to export to; the formats are {', '.join(FORMATS)}.",
)
TRIAL = flags.DEFINE_integer(
    "trial", 0, "Which trial to export (needed if there are several) or prune.", 0
)
PRUNE = flags.DEFINE_string(
    "prune", None, "Folder for the smaller run, without the removed heads."
)
HEADS = flags.DEFINE_list(
    "heads",
    [],
    "--prune: heads to remove, as SITE.LAYER.HEAD, besides those with a gate of 0.",
)


def main():
    """Check the flags, then import, export or prune."""
    chosen = [flag.value is not None for flag in (FROM, TO, PRUNE)]
    if WORKDIR.value is None or sum(chosen) != 1:
        fail(
            "--workdir and one of --from, --to and --prune are needed, as in "
            "python weights.py --from=opus-mt-en-de --workdir=runs/opus"
        )
    show_log()
    with one_sentence():
        check_flags()
        if TASK_FILE.value is not None:
            import_file(path_of(TASK_FILE))
        if PRUNE.value is not None:
            prune(path_of(WORKDIR), path_of(PRUNE), CHECKPOINT.value)
        elif FROM.value is not None:
            import_checkpoint(path_of(FROM), path_of(WORKDIR))
        else:
            kind, folder = parse_target(TO.value)
            which = CHECKPOINT.value if CHECKPOINT.present else None
            trial = TRIAL.value if TRIAL.present else None
            export(path_of(WORKDIR), kind, folder, which, trial)


def check_flags() -> None:
    """Raise a ValueError for a flag that would be ignored."""
    for flag, is_used, which in (
        (HEADS, PRUNE.value is not None, "--prune"),
        (TRIAL, FROM.value is None, "--to and --prune"),
        (CHECKPOINT, FROM.value is None, "--to and --prune"),
    ):
        if flag.present and not is_used:
            raise ValueError(f"--{flag.name} has no meaning here; it is for {which}.")


def prune(workdir: Path, folder: Path, which: str) -> None:
    """Write a trial of a run without its removed heads as a new run.

    Raises:
        ValueError, OSError: see `analysis.removal.write_smaller`.
    """
    trained = load(workdir, which)
    trial, heads = choose_trial(trained, TRIAL), []
    for name in HEADS.value:
        parts = name.split(".")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts[1:]):
            raise ValueError(
                f"--heads must be SITE.LAYER.HEAD, as in cross.0.2, got {name!r}."
            )
        heads.append((parts[0], int(parts[1]), int(parts[2])))
    sizes = write_smaller(trained, workdir, folder, trial, heads)
    say(
        f"Wrote {sizes['parameters']:,} of {sizes['before']:,} parameters of trial "
        f"{trial} to {folder}."
    )


def parse_target(text: str) -> tuple[str, Path]:
    """Parse FORMAT:FOLDER; return the format and the folder."""
    kind, colon, folder = text.partition(":")
    if not colon or not folder or kind not in FORMATS:
        raise ValueError(
            f"--to must be FORMAT:FOLDER with a format of {', '.join(FORMATS)}, got "
            f"{text!r}."
        )
    return kind, Path(os.path.expanduser(folder))


def cli():
    """Run as a script."""
    run(main)


if __name__ == "__main__":
    cli()
