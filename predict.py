"""Apply a trained run to standard input, line by line: translate, complete, tag, ...

The output depends on the task: one translation per line, prompts with their
continuations, words with their tags, or labels with probabilities as JSON.

echo "two hundred and six" | python predict.py --workdir=runs/numbers
python predict.py --workdir=runs/multi30k --score < pairs.tsv > log_probabilities.tsv
"""

# isort: off
from headcount.runtime import bootstrap  # noqa: F401  before JAX is imported

# isort: on
import sys

from absl import flags

from headcount.configs.commandline import (
    TASK_FILE,
    WORKDIR,
    fail,
    one_sentence,
    path_of,
    run,
)
from headcount.decoding import flags as decoding
from headcount.runtime import stdin
from headcount.runtime.logging import show_log
from headcount.tasks import import_file
from headcount.training.run import CHECKPOINT, choose_trial, load

SCORE = flags.DEFINE_bool(
    "score",
    False,
    "Print log-probability (nats) and number of tokens of each line instead; for "
    "translation a line is source, tab, target.",
)
SCORE_TOKENS = flags.DEFINE_bool(
    "score_tokens",
    False,
    "Language models: print the tokens of each line and their log-probabilities "
    "instead, as JSON.",
)
TRIAL = flags.DEFINE_integer("trial", 0, "Which trial of the run to use.", 0)


def main():
    """Check the flags, then print results for lines as they arrive."""
    if WORKDIR.value is None:
        fail(
            "--workdir is needed, as in "
            "python predict.py --workdir=runs/numbers < sentences.txt"
        )
    show_log()
    with one_sentence():
        if TASK_FILE.value is not None:
            import_file(path_of(TASK_FILE))
        options = decoding.options()
        if SCORE.value and SCORE_TOKENS.value:
            raise ValueError("--score and --score_tokens can't be combined.")
        scores = SCORE.value or SCORE_TOKENS.value
        for name in sorted(options.keys() - {"batch_size"}) if scores else ():
            raise ValueError(f"--{name} is for decoding, and --score decodes nothing.")
        found = load(path_of(WORKDIR), CHECKPOINT.value)
        found.task.check_options(options)
        task, trial = found.task, choose_trial(found, TRIAL)
        answer = task.score_lines if SCORE.value else task.predict
        answer = task.score_tokens if SCORE_TOKENS.value else answer
        number, size = 0, decoding.BATCH_SIZE.value
        # the tokens of a beam are not known before its end
        is_single = options.get("samples", 1) == options.get("beam_size", 1) == 1
        streams = is_single and hasattr(task, "stream") and not scores
        for lines in stdin.available_lines(sys.stdin.fileno(), size):
            about = {"trial": trial, "first": number}
            about |= {} if scores else options
            if streams and len(lines) == 1:
                pieces = task.stream(found, lines[0], **about)
                first = next(pieces, "")  # fails for a bad line, before it is printed
                print(lines[0], end=first, flush=True)
                for piece in pieces:
                    print(piece, end="", flush=True)
                print()
            else:
                for line in answer(found, lines, **about):
                    print(line)
            sys.stdout.flush()
            number += len(lines)


def cli():
    """Run as a script."""
    run(main)


if __name__ == "__main__":
    cli()
