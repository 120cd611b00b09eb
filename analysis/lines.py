"""Translations and scores of standard input, in batches of what is there already."""

import sys

from headcount.runtime import stdin
from headcount.runtime.logging import say
from headcount.training.run import Trained, listed


def translate_lines(
    run: Trained, trial: int, n_best: int | None, batch_size: int, **options
) -> None:
    """Print the translation of every line, or a list of its n best.

    Args:
        batch_size, options: see `decoding.generate.translate_trials`.
    """
    number = 0
    for lines in stdin.lines_at_hand(sys.stdin.fileno(), batch_size):
        _tell_long(run, lines, number)
        options |= {"n_best": n_best, "batch_size": batch_size, "first": number}
        found = run.translate(lines, trial, **options)
        for line in listed(found, number) if n_best else found:
            print(line)
        sys.stdout.flush()
        number += len(lines)


def score_lines(run: Trained, trial: int, batch_size: int) -> None:
    """Print the log-probability of every target given its source, and its tokens.

    The lines are taken so many at a time.
    """
    number = 0
    for lines in stdin.lines_at_hand(sys.stdin.fileno(), batch_size):
        pairs = stdin.pairs_of(lines, number)
        for side, sentences in enumerate(pairs):
            _tell_long(run, sentences, number, side)
        for log_prob, tokens in run.score(*pairs, trial):
            print(f"{log_prob:.4f}\t{tokens}")
        sys.stdout.flush()
        number += len(lines)


def _tell_long(run, lines, number, side=0):
    """Name the lines that are longer than any in training, of the source or target."""
    longest = run.config.data.max_length
    for index, ids in enumerate(run.tokenizers[side].encode(lines)):
        if len(ids) > longest:
            which = ("", "'s target")[side]
            say(
                f"Line {number + index + 1}{which} has {len(ids)} tokens, more than "
                f"the {longest} of the longest in training: expect little of it."
            )
