"""Compare the speed of the training step with plain PyTorch, eager and compiled.

    .venv-peers/bin/python -m benchmarks.training [--recipe short] [--rounds 5]
        [--steps 32] [--data DIR] [--set KEY=VALUE ...]

This prints source and target tokens per second (without padding), their ratio, FLOPs
per token, and the share of the machine's matmul ceiling, which is the best of NumPy,
XLA and torch at 2048 x 2048 x 2048 in float32, or in bfloat16 at 8192 x 8192 x 8192 on
a GPU. Contestants take turns. Each has its own process, so that their threads don't
interfere, and waits while another is timed. The data is Multi30k in --data if that
exists, else random tokens with similar lengths. torch is optional
(requirements-peers.txt). Without it, only ours is timed, with any --set; otherwise
--set accepts only settings that the peers support.
"""

# isort: off
from headcount.runtime import bootstrap  # noqa: F401  before JAX is imported

# isort: on
import argparse
import ast
import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from headcount.configs import multi30k
from headcount.configs.validation import flat
from headcount.data.batches import PackedBatches, stack_steps
from headcount.data.examples import Ragged
from headcount.models.cost import abstract
from headcount.tasks import make_task
from headcount.training.step import init, make_static, train_steps
from headcount.training.trials import hyperparameters, make_trials

STEPS = 32  # updates per round; the first few after a pause are slow

# Keys that --set may change if torch is timed, too: those that the peers read, and the
# implementation of our attention.
SHARED = (
    *("data.name", "data.source", "data.target", "data.vocab_size"),
    *("data.batch_tokens", "model.width", "model.mlp_dim", "model.dropout"),
    *("model.norm", "model.num_encoder_layers", "model.num_decoder_layers"),
    *("model.attention.num_heads", "model.attention.implementation"),
    *("optimizer.beta1", "optimizer.beta2", "optimizer.epsilon"),
    *("optimizer.clip_norm", "optimizer.label_smoothing"),
)


def main():
    """Time the contestants in turn, or serve as the worker of one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipe", default="short", choices=("short", "full"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS, help="updates per round")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/multi30k"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return serve(contestant(arguments), arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = Path(folder)
        race(arguments)


def race(arguments) -> None:
    """Time every contestant in turn, several rounds, and print medians."""
    names = contestants_of(arguments.set)
    source, target, origin = corpus(arguments)
    np.savez(
        arguments.folder / "corpus.npz",
        *(x for side in (source, target) for x in (side.tokens, side.offsets)),
    )
    options = [f"--folder={arguments.folder}", f"--recipe={arguments.recipe}"]
    options += [f"--steps={arguments.steps}", "--set", *arguments.set]
    found = take_turns("benchmarks.training", names, options, arguments.rounds)
    config = config_of(arguments)
    flop = flop_per_token(config, source.lengths, target.lengths)
    print(f"data: {origin}, vocabulary {config.data.vocab_size}")
    print(f"target tokens per update: {config.data.batch_tokens}")
    print_table(*found, flop)


def take_turns(
    module: str, names: list[str], options: list[str], rounds: int
) -> tuple[dict[str, list[float]], float]:
    """Time contestants in turn.

    Args:
        module: module to run with `--worker=NAME` as a contestant's process; see
            `serve`.
        names: names of the contestants. Contestants that fail are left out.
        options: further command-line options of each process.
        rounds: number of rounds, in each of which all contestants train in turn.

    Returns:
        The tokens per second of each contestant by round, and the ceiling in FLOP/s.
    """
    contestants = {name: start(module, name, options) for name in names}
    for name in list(contestants):
        if ask(contestants[name], "prepare") is None:
            print(f"{name} failed, see above")
            del contestants[name]
    rates, ceilings = {name: [] for name in contestants}, [numpy_ceiling()]
    for _ in range(rounds):
        for name, process in contestants.items():
            answer = ask(process, "train")
            rates[name].append(answer["tokens"] / answer["seconds"])
            ceilings.append(ask(process, "ceiling")["flops"])
        ceilings.append(numpy_ceiling())
    for process in contestants.values():
        process.stdin.close()
        process.wait()
    return rates, max(ceilings)


def print_table(rates: dict[str, list[float]], ceiling: float, flop: float) -> None:
    """Print the medians, their spread, and their ratio to ours."""
    print(f"arithmetic: {flop / 1e6:.2f} MFLOP per token")
    print(f"matmul ceiling: {ceiling / 1e9:.0f} GFLOP/s\n")
    print("| | tokens/s | spread | share of ceiling | speedup |")
    print("| --- | --- | --- | --- | --- |")
    best = statistics.median(rates["ours"])
    for name, speeds in rates.items():
        rate = statistics.median(speeds)
        share = rate * flop / ceiling
        print(
            f"| {name} | {rate:,.0f} | {min(speeds):,.0f} to {max(speeds):,.0f} "
            f"| {share:.0%} | {best / rate:.2f} |"
        )


def contestants_of(settings: list[str]) -> list[str]:
    """Return the names of the contestants for these settings.

    Exit with an error if the torch peers don't support a setting.
    """
    if not importlib.util.find_spec("torch"):
        print("torch is not installed: only ours is timed (requirements-peers.txt)")
        return ["ours"]
    for setting in settings:
        key = setting.split("=", 1)[0]
        if key not in SHARED:
            raise SystemExit(
                f"--set {key}: the torch peers lack it and would be another model; "
                "where torch is not installed ours is timed alone"
            )
    return ["ours", "torch", "torch.compile"]


def config_of(arguments):
    """Return the experiment's config with the settings of the command line."""
    config = multi30k.get_config(arguments.recipe)
    config.model.dropout = 0.3
    for setting in arguments.set:
        key, value = setting.split("=", 1)
        with contextlib.suppress(SyntaxError, ValueError):  # a plain string
            value = ast.literal_eval(value)
        config.update_from_flattened_dict({key: value})
    return config


def corpus(arguments) -> tuple[Ragged, Ragged, str]:
    """Return the tokenised source and target sentences, and a name of their source."""
    config = config_of(arguments)
    if arguments.data.is_dir():
        config.data.directory = str(arguments.data)
        fields = make_task(config, arguments.folder / "tokenizer").load("train").fields
        return fields["source"], fields["target"], "Multi30k"
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.gamma(12, 1.25, 29_000), 4, 60).astype(int)
    sides = []
    for noise in (0, 2):
        own = np.clip(lengths + rng.integers(-noise, noise + 1, lengths.size), 4, 60)
        tokens = np.minimum(rng.zipf(1.3, own.sum()) + 3, config.data.vocab_size - 1)
        offsets = np.concatenate([[0], np.cumsum(own)])
        sides.append(Ragged(tokens.astype(np.int32), offsets))
    return *sides, f"random tokens ({arguments.data} is not there)"


def flop_per_token(config, source_lengths, target_lengths) -> float:
    """Return the FLOPs of matrix products per token of either side.

    This includes the backward pass, which counts twice. A token attends only to its own
    sentence, so packing and padding are free.
    """
    model = config.model
    D, F = model.width, model.mlp_dim
    source, target = source_lengths.sum(), target_lengths.sum()
    pairs = (source_lengths * source_lengths).sum()
    triangles = (target_lengths * (target_lengths + 1) // 2).sum()
    crosses = (source_lengths * target_lengths).sum()
    encoder = source * (8 * D * D + 4 * D * F) + pairs * 4 * D
    decoder = target * (12 * D * D + 4 * D * F) + source * 4 * D * D
    decoder += (triangles + crosses) * 4 * D
    forward = model.num_encoder_layers * encoder + model.num_decoder_layers * decoder
    forward += target * 2 * D * config.data.vocab_size
    return 3 * forward / (source + target)


def numpy_ceiling() -> float:
    """Return the FLOP/s of a large NumPy matrix product."""
    x = np.random.default_rng(0).standard_normal((2048, 2048), dtype=np.float32)
    out = np.empty_like(x)
    return ceiling_of(lambda: np.matmul(x, x, out=out))


def ceiling_of(product, size: int = 2048) -> float:
    """Return the best FLOP/s of five products of square matrices of this size."""
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds)


def start(module: str, name: str, options: list[str]) -> subprocess.Popen:
    """Start a contestant's process, which answers requests by `ask`."""
    command = [sys.executable, "-m", module, f"--worker={name}", *options]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, text=True, bufsize=1, **pipes)


def ask(process: subprocess.Popen, request: str) -> dict | None:
    """Send a request to a contestant; return its answer, or None if it has died."""
    try:
        process.stdin.write(request + "\n")
    except BrokenPipeError:
        return None
    answer = process.stdout.readline()
    return json.loads(answer) if answer else None


def contestant(arguments):
    """Return the contestant that this worker process runs."""
    arrays = list(np.load(arguments.folder / "corpus.npz").values())
    sides = Ragged(*arrays[:2]), Ragged(*arrays[2:])
    if arguments.worker == "ours":
        worker = Ours
    else:
        from benchmarks.peers_training import Torch as worker
    return worker(arguments.worker, config_of(arguments), *sides)


def serve(contestant, steps: int) -> None:
    """Answer requests from standard input until it ends, training `steps` at a time."""
    for request in sys.stdin:
        if request.strip() == "ceiling":
            answer = {"flops": ceiling_of(contestant.product, contestant.size)}
        else:
            begin = time.perf_counter()
            tokens = contestant.train(steps)
            answer = {"tokens": tokens, "seconds": time.perf_counter() - begin}
        print(json.dumps(answer), flush=True)


class Program:
    """R trials of a config and their batches, as in train.py.

    Args:
        config: config of any task.
        make_batches: function from seeds to `tasks.base.Batches`.
        num_trials: R.
    """

    def __init__(self, config, make_batches, num_trials=1):
        settings = flat(config.to_dict()) | {"seeds": num_trials}
        trials = make_trials(settings)
        arrays = hyperparameters(settings, trials)
        self.batches = make_batches(seeds=[trial["seed"] for trial in trials])
        task = make_task(config)
        static = make_static(abstract(task.build), config, task.loss)
        self.state = init(arrays, static=static, build=task.build)
        self.program = partial(train_steps, trials=arrays, static=static)
        self.step = 0
        on_cpu = jax.default_backend() == "cpu"
        self.size, dtype = (2048, jnp.float32) if on_cpu else (8192, jnp.bfloat16)
        x = jax.random.normal(jax.random.key(0), (self.size, self.size), dtype)
        product = jax.jit(jnp.matmul)
        self.product = lambda: product(x, x).block_until_ready()

    def input(self, steps: int) -> dict:
        """Return the batches of the next updates."""
        return stack_steps(self.batches, self.step, steps, steps)

    def update(self, batches: dict, steps: int) -> int:
        """Update on batches; return the number of non-padding tokens."""
        self.state, metrics = self.program(
            self.state, batches=batches, num_steps=np.int32(steps)
        )
        self.step += steps
        return int(sum(count.sum() for count in metrics["tokens"].values()))

    def train(self, steps: int) -> int:
        """Run the next updates; return the number of non-padding tokens."""
        return self.update(self.input(steps), steps)


class Ours(Program):
    """R trials of a translation model."""

    def __init__(self, name, config, source, target, num_trials=1):
        del name

        def batches(seeds):
            return PackedBatches(
                {"source": source, "target": target},
                batch_tokens=config.data.batch_tokens,
                max_length=config.data.max_length,
                seeds=seeds,
            )

        super().__init__(config, batches, num_trials)


if __name__ == "__main__":
    main()
