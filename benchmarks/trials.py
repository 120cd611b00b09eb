"""Time R trials as one program beside one trial after another.

    .venv/bin/python -m benchmarks.trials [--trials 1 2 4 8] [--recipe short]
        [--rounds 5] [--steps 4] [--data DIR] [--set KEY=VALUE ...]

Prints source and target tokens per second that all trials together are trained on (real
ones: padding does not count), beside R = 1, which is what one after another comes to;
and how long the input pipeline takes for a step of all trials, as a share of the step.
Medians of rounds in turn. Data as in benchmarks.training.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.training import config_of, corpus


def main():
    """Time every number of trials in turn, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--trials", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--recipe", default="short", choices=("short", "full"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="updates a round")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/multi30k"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    from training import platform

    platform.setup()
    with TemporaryDirectory() as folder:
        arguments.folder = Path(folder)
        *sides, origin = corpus(arguments)
    config = config_of(arguments)
    groups = {R: Group(config, sides, R) for R in sorted({1, *arguments.trials})}
    for group in groups.values():  # compiles
        group.train(arguments.steps)
    timed = {R: [] for R in groups}
    for _ in range(arguments.rounds):
        for R, group in groups.items():
            timed[R].append(group.train(arguments.steps))

    import jax

    print(f"data: {origin}; device: {jax.devices()[0].device_kind}")
    print(f"{config.data.batch_tokens} target tokens an update and trial\n")
    print("| trials | tokens/s | spread | against one after another | input |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    alone = statistics.median(rate for rate, _ in timed[1])
    for R, found in timed.items():
        rates = [rate for rate, _ in found]
        rate = statistics.median(rates)
        share = statistics.median(share for _, share in found)
        print(
            f"| {R} | {rate:,.0f} | {min(rates):,.0f} to {max(rates):,.0f} "
            f"| {rate / alone:.2f} | {share:.1%} |"
        )


class Group:
    """R trials and their batches, as train.py has them."""

    def __init__(self, config, sides, num_trials: int):
        from configs.commandline import flat
        from data.pipeline import Batches, stacked
        from models.counting import abstract
        from models.transformer import Transformer
        from training.step import init, static_of, train_steps
        from training.trials import numbers, trials_of

        settings = flat(config.to_dict()) | {"seeds": num_trials}
        trials = trials_of(settings)
        arrays = numbers(settings, trials)
        batches = Batches(
            *sides,
            batch_tokens=config.data.batch_tokens,
            max_length=config.data.max_length,
            seeds=[trial["seed"] for trial in trials],
        )
        self.batches = partial(stacked, batches)
        build = partial(Transformer, config.data.vocab_size, **config.model.to_dict())
        static = static_of(abstract(build), config)
        self.state = init(arrays, static=static, build=build)
        self.update = partial(train_steps, trials=arrays, static=static)
        self.step = 0

    def train(self, steps: int) -> tuple[float, float]:
        """Tokens a second of some updates, and the share that their batches take."""
        start = time.perf_counter()
        batches = self.batches(self.step, steps, steps)
        middle = time.perf_counter()
        self.state, metrics = self.update(
            self.state, batches=batches, num_steps=np.int32(steps)
        )
        tokens = int(metrics["source_tokens"].sum() + metrics["target_tokens"].sum())
        seconds = time.perf_counter() - middle
        self.step += steps
        return tokens / seconds, (middle - start) / seconds


if __name__ == "__main__":
    main()
