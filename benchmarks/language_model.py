"""Compare the speed of language models with PyTorch and CTranslate2.

    .venv-peers/bin/python -m benchmarks.language_model [--recipe short] [--rounds 5]
        [--steps 64] [--peers torch torch.compile] [--trials 16] [--data DIR]
        [--generate] [--new_tokens 200]

By default this trains configs/shakespeare.py, a plain PyTorch GPT with the same layers,
and transformers' GPT2LMHeadModel (which adds biases), in turn. Both peers use scaled
dot-product attention and fused AdamW, eager and compiled. All train on the same
windows; cutting them is part of the time. With --trials, ours also trains that many
trials as one program. This prints tokens per second, the share of the matmul ceiling
(see benchmarks.training) and the ratios. --steps is the number of updates per round, by
default 64, or 8 for the full recipe; the first few after a pause are slow. The data is
tiny Shakespeare in --data if that exists, else random characters.

--generate instead continues one prompt, then 64 prompts, by --new_tokens tokens each,
greedily, and compares with transformers' generate and CTranslate2 (float32). All have
the same random GPT-2 of the recipe's sizes. The share of equal tokens is printed, too.
"""

# isort: off
from headcount.runtime import bootstrap  # noqa: F401  before JAX is imported

# isort: on
import argparse
import importlib.util
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from flax import nnx

from benchmarks.training import Program, print_table, serve, take_turns
from headcount.configs import shakespeare
from headcount.data.windows import WindowBatches
from headcount.decoding.generate import generate
from headcount.decoding.search import Vocabulary
from headcount.exchange.importing import import_checkpoint, load_model
from headcount.tasks import make_task

PEERS = ("torch", "torch.compile", "transformers", "transformers, compiled")
PROMPT = 16  # tokens per prompt


def main():
    """Time training or generation, or serve as the worker of one contestant."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipe", default="short", choices=("short", "full"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="updates per round")
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data/tinyshakespeare")
    )
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--new_tokens", type=int, default=200)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or {"short": 64, "full": 8}[arguments.recipe]
    config = shakespeare.get_config(arguments.recipe)
    if arguments.worker:
        return serve(contestant(arguments, config), arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = Path(folder)
        run = time_generation if arguments.generate else time_training
        run(arguments, config)


def time_training(arguments, config) -> None:
    """Time the training of every contestant in turn, and print medians."""
    stream, origin = corpus(arguments, config)
    np.save(arguments.folder / "stream.npy", stream)
    names = ["ours"]
    if arguments.trials > 1:
        names.append(f"ours, {arguments.trials} trials")
    if importlib.util.find_spec("torch"):
        names += arguments.peers
    options = [f"--folder={arguments.folder}", f"--recipe={arguments.recipe}"]
    options += [f"--trials={arguments.trials}", f"--steps={arguments.steps}"]
    measurements = take_turns(
        "benchmarks.language_model", names, options, arguments.rounds
    )
    print(f"data: {origin}; {config.data.batch_tokens} tokens per update and trial")
    print_table(*measurements, flop_per_token(config))


def corpus(arguments, config) -> tuple[np.ndarray, str]:
    """Return the training split as a stream of tokens, and a name of its source."""
    if arguments.data.is_dir():
        config.data.directory = str(arguments.data)
        task = make_task(config, arguments.folder / "tokenizer")
        return task.token_stream(task.load("train")), "tiny Shakespeare"
    random = np.random.default_rng(0)
    stream = random.integers(4, config.data.vocab_size, 1_000_000, dtype=np.int32)
    return stream, f"random characters ({arguments.data} is not there)"


def flop_per_token(config) -> float:
    """Return the FLOPs of matrix products per token, forward and backward.

    The backward pass counts twice. A token attends only to earlier tokens, half of its
    window on average.
    """
    model = config.model
    D, F, T = model.width, model.mlp_dim, config.data.max_length
    layer = 8 * D * D + 4 * D * F + 4 * D * (T + 1) / 2
    return 3 * (model.num_decoder_layers * layer + 2 * D * config.data.vocab_size)


def contestant(arguments, config):
    """Return the contestant that this worker process runs."""
    batches = windows_of(np.load(arguments.folder / "stream.npy"), config)
    if arguments.worker in PEERS:
        from benchmarks.peers_language_model import Torch

        return Torch(arguments.worker, config, batches(seeds=[0]))
    alone = arguments.worker == "ours"
    return Program(config, batches, 1 if alone else arguments.trials)


def windows_of(stream: np.ndarray, config) -> partial:
    """Return a function from seeds to batches of windows of a stream of tokens."""
    return partial(
        WindowBatches,
        stream,
        length=config.data.max_length,
        batch_tokens=config.data.batch_tokens,
        separator=config.model.bos,
        cross=True,
    )


def time_generation(arguments, config) -> None:
    """Time all sides in turn while they continue one prompt, then 64 prompts."""
    from benchmarks import peers_language_model as peers

    config.model.max_positions = PROMPT + arguments.new_tokens
    theirs = peers.random_gpt2(config)
    theirs.save_pretrained(arguments.folder / "theirs")
    sides = {
        "ours": ours(arguments.folder, config.model.bos),
        "transformers": peers.transformers_side(theirs),
        "CTranslate2": peers.ctranslate2_side(arguments.folder / "run"),
    }
    random = np.random.default_rng(0)
    print("| | prompts | new tokens/s | spread | speedup | same tokens |")
    print("| --- | ---: | ---: | --- | ---: | ---: |")
    for count in (1, 64):
        prompts = random.integers(4, config.data.vocab_size, (count, PROMPT)).tolist()
        new = arguments.new_tokens
        results = {name: np.array(side(prompts, new)) for name, side in sides.items()}
        rates = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for name, side in sides.items():
                time.sleep(0.5)  # let the threads of the previous side sleep
                begin = time.perf_counter()
                side(prompts, new)
                rates[name].append(count * new / (time.perf_counter() - begin))
        mine = statistics.median(rates["ours"])
        for name, speeds in rates.items():
            rate = statistics.median(speeds)
            same = (results[name] == results["ours"]).mean()
            print(
                f"| {name} | {count} | {rate:,.0f} | {min(speeds):,.0f} to "
                f"{max(speeds):,.0f} | {mine / rate:.2f} | {same:.1%} |"
            )


def ours(folder: Path, eos: int):
    """Return a function that continues prompts with `decoding.generate`.

    The model is imported from transformers' checkpoint in `folder/theirs`.
    """
    run = folder / "run"
    import_checkpoint(folder / "theirs", run)
    graph, params = nnx.split(load_model(run))
    vocabulary = Vocabulary(eos=eos, banned=())

    def side(prompts, new_tokens):
        limits = [new_tokens + 1] * len(prompts)  # the last token is EOS
        options = {"vocabulary": vocabulary, "return_scores": False}
        return generate(graph, params, prompts, limits=limits, **options)[0]

    return side


if __name__ == "__main__":
    main()
