"""Apply a trained run to standard input, line by line: translate, complete, tag, ...

The output depends on the task: one translation per line, prompts with their
continuations, words with their tags, or labels with probabilities as JSON.

echo "two hundred and six" | python predict.py --workdir=runs/numbers
python predict.py --workdir=runs/multi30k --score < pairs.tsv > log_probabilities.tsv
"""

# isort: off
from headcount.runtime import bootstrap  # noqa: F401  before JAX is imported

# isort: on
import json
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
JSON = flags.DEFINE_bool(
    "json",
    False,
    "Language models: each line is a prompt as a JSON string, which may contain line "
    "breaks; continuations are printed as JSON objects.",
)
MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", 256, "Language models: maximum number of new tokens.", 1, 2**20
)
STOP = flags.DEFINE_string(
    "stop", None, "Language models: text that ends a continuation."
)
SAMPLES = flags.DEFINE_integer(
    "samples", 1, "Language models: continuations per prompt, if sampled.", 1, 2**16
)
TRIAL = flags.DEFINE_integer("trial", 0, "Which trial of the run to use.", 0)


def decode_prompts(lines: list[str], first: int) -> list[str]:
    """Parse lines that are JSON strings.

    Args:
        lines: the lines.
        first: number of input lines before these, for error messages.

    Raises:
        ValueError: a line is not a JSON string.
    """
    prompts = []
    for number, line in enumerate(lines, first + 1):
        try:
            prompt = json.loads(line)
            prompt.encode()  # fails for lone surrogates such as "\ud800"
        except (ValueError, AttributeError, RecursionError):
            raise ValueError(
                f'Line {number} is not a JSON string, as in "First line\\nSecond".'
            ) from None
        prompts.append(prompt)
    return prompts


def prediction_options() -> dict:
    """Return the options of `Task.predict` from the command line.

    Raises:
        ValueError: flags contradict each other.
    """
    options = decoding.options()
    for flag in (MAX_NEW_TOKENS, STOP, SAMPLES):
        if flag.present:
            options[flag.name] = flag.value
    if SAMPLES.value > 1 and decoding.TEMPERATURE.value == 0:
        raise ValueError(
            f"--samples={SAMPLES.value} needs a --temperature above 0, such as "
            f"--temperature=1: without sampling, all continuations are the same."
        )
    if SCORE.value and SCORE_TOKENS.value:
        raise ValueError("--score and --score_tokens can't be combined.")
    extra = options.keys() - {"batch_size"}
    if (SCORE.value or SCORE_TOKENS.value) and extra:
        names = ", ".join(f"--{name}" for name in sorted(extra))
        raise ValueError(f"Leave out {names}: scoring decodes nothing.")
    return options


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
        options, scores = prediction_options(), SCORE.value or SCORE_TOKENS.value
        trained = load(path_of(WORKDIR), CHECKPOINT.value)
        trained.task.check_options(options)
        task, can_stream = trained.task, hasattr(trained.task, "stream")
        if JSON.value and not can_stream:
            raise ValueError("--json is for language models; leave it out.")
        trial, predict = choose_trial(trained, TRIAL), task.predict
        if scores:
            predict = task.score_lines if SCORE.value else task.score_tokens
        number, size = 0, decoding.BATCH_SIZE.value
        samples = options.get("samples", 1)
        # beam search has no final tokens to stream until it ends
        is_single = samples == options.get("beam_size", 1) == 1
        streams = is_single and can_stream and not (scores or JSON.value)
        for lines in stdin.available_lines(sys.stdin.fileno(), size):
            arguments = {"trial": trial, "first": number}
            arguments |= {} if scores else options
            if JSON.value:
                lines = decode_prompts(lines, number)
            if streams and len(lines) == 1:
                pieces = task.stream(trained, lines[0], **arguments)
                first = next(pieces, "")  # fails for a bad line, before it is printed
                print(lines[0], end=first, flush=True)
                for piece in pieces:
                    print(piece, end="", flush=True)
                print()
            else:
                for i, line in enumerate(predict(trained, lines, **arguments)):
                    if JSON.value and not scores:
                        prompt = lines[i // samples]
                        result = {"prompt": prompt, "text": line[len(prompt) :]}
                        line = json.dumps(result, ensure_ascii=False)
                    print(line)
            sys.stdout.flush()
            number += len(lines)


def cli():
    """Run as a script."""
    run(main)


if __name__ == "__main__":
    cli()
