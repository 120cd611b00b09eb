"""predict.py: standard input to standard output, line by line."""

import os
import subprocess
import sys

import pytest

from headcount.training.run import load
from tests.runs import ROOT, arguments, fails, run, succeed

LINES = "seven\n \ntwenty-one\n"


@pytest.mark.slow
def test_lines_are_translated_by_the_trial_asked_for(trained):
    args = arguments("predict.py", workdir=trained, trial=1, beam_size=2, batch_size=2)
    ran = succeed(args, stdin=LINES.encode())
    task = (found := load(trained)).task
    lines = LINES.splitlines()
    wanted = task.translate(found, lines, 1, beam_size=2, length_penalty=0.6)
    assert ran.stdout.splitlines() == wanted


@pytest.mark.slow
def test_n_best_lists_are_numbered_across_batches(trained):
    args = arguments("predict.py", workdir=trained, beam_size=2, n_best=2, batch_size=1)
    ran = succeed(args, stdin=b"seven\n\nforty\n")
    fields = [line.split(" ||| ") for line in ran.stdout.splitlines()]
    assert [number for number, *_ in fields] == ["0", "0", "1", "2", "2"]
    assert fields[2] == ["1", "", "0.0000"]
    scores = [float(score) for *_, score in fields]
    assert scores[0] >= scores[1] and scores[3] >= scores[4]


@pytest.mark.slow
def test_pairs_are_scored(trained):
    args = arguments("predict.py", "--score", workdir=trained, batch_size=1)
    ran = succeed(args, stdin=b"seven\tsieben\nforty\t\n")
    found = [line.split("\t") for line in ran.stdout.splitlines()]
    task = (loaded := load(trained)).task
    wanted = task.score_lines(loaded, ["seven\tsieben", "forty\t"], trial=0, first=0)
    assert found == [line.split("\t") for line in wanted]
    assert float(found[1][0]) < 0 and found[1][1] == "1", "EOS counts"


def test_what_comes_before_a_bad_line_is_answered(trained):
    args = arguments("predict.py", "--score", workdir=trained, batch_size=1)
    ran = run(args, stdin=b"seven\tsieben\nforty\n")
    fails(ran, "Line 2", "1 tab-separated")
    assert len(ran.stdout.splitlines()) == 1


def test_two_kinds_of_scores_at_once_are_named(trained):
    args = arguments("predict.py", "--score", "--score_tokens", workdir=trained)
    fails(run(args), "--score and --score_tokens")


def test_samples_without_a_temperature_would_be_equal_so_they_fail(trained):
    ran = run(arguments("predict.py", workdir=trained, samples=2), stdin=b"seven\n")
    fails(ran, "--samples=2", "--temperature")


def test_a_line_that_is_not_utf8_is_named_by_its_number(trained):
    ran = run(arguments("predict.py", workdir=trained), stdin=b"one\n\xff\xfe\n")
    fails(ran, "Line 2", "UTF-8")


@pytest.mark.slow
def test_lines_are_answered_as_they_come(trained):
    """A program that waits for each answer before it asks again is not kept waiting."""
    process = subprocess.Popen(
        [sys.executable, *arguments("predict.py", workdir=trained, beam_size=1)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    for _ in range(2):
        process.stdin.write(b"seven\n")
        process.stdin.flush()
        assert process.stdout.readline().endswith(b"\n")
    process.stdin.close()
    process.stdout.close()
    assert process.wait() == 0


@pytest.mark.slow
def test_a_reader_that_has_enough_gets_no_error(trained):
    """As `head` does. It is the reader's business, so nothing is printed."""
    read, write = os.pipe()
    os.close(read)
    args = [sys.executable, *arguments("predict.py", workdir=trained, beam_size=1)]
    ran = subprocess.run(
        args, cwd=ROOT, input=b"seven\n", stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert (ran.returncode, ran.stderr) == (1, b"")
