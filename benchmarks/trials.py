"""Compare the speed of R trials as one program with training one trial after another.

    .venv/bin/python -m benchmarks.trials [--trials 1 2 4 8] [--recipe short]
        [--rounds 5] [--steps 4] [--data DIR] [--set KEY=VALUE ...]

This prints the total source and target tokens per second of all trials (without
padding), their ratio to R = 1, which is the rate of training one trial after another,
and the time of the input pipeline as a share of the step. Values are medians over
rounds, in which all R are timed in turn. The data is that of benchmarks.training.
"""

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from benchmarks.training import Ours, config_of, corpus


def main():
    """Time every number of trials in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--trials", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--recipe", default="short", choices=("short", "full"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="updates per round")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/multi30k"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        arguments.folder = Path(folder)
        *sides, origin = corpus(arguments)
    config = config_of(arguments)
    groups = {
        R: Ours(f"{R} trials", config, *sides, R)
        for R in sorted({1, *arguments.trials})
    }
    for group in groups.values():  # compiles
        group.train(arguments.steps)
    rounds = {R: [] for R in groups}
    for _ in range(arguments.rounds):
        for R, group in groups.items():
            rounds[R].append(timed(group, arguments.steps))

    print(f"data: {origin}; device: {jax.devices()[0].device_kind}")
    print(f"{config.data.batch_tokens} target tokens per update and trial\n")
    print("| trials | tokens/s | spread | against one after another | input |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    alone = statistics.median(rate for rate, _ in rounds[1])
    for R, found in rounds.items():
        rates = [rate for rate, _ in found]
        rate = statistics.median(rates)
        share = statistics.median(share for _, share in found)
        print(
            f"| {R} | {rate:,.0f} | {min(rates):,.0f} to {max(rates):,.0f} "
            f"| {rate / alone:.2f} | {share:.1%} |"
        )


def timed(group: Ours, steps: int) -> tuple[float, float]:
    """Return tokens per second of some updates, and the input time relative to them."""
    start = time.perf_counter()
    batches = group.input(steps)
    middle = time.perf_counter()
    tokens = group.update(batches, steps)
    seconds = time.perf_counter() - middle
    return tokens / seconds, (middle - start) / seconds


if __name__ == "__main__":
    main()
