"""Time training from launch until a loss is reached, beside a plain PyTorch program.

    .venv-peers/bin/python -m benchmarks.launch [--recipe short] [--rounds 3]
        [--loss 1.886] [--data DIR] [--peers torch torch.compile torch,our-start]

Both train configs/shakespeare.py from its own text: ours by train.py with everything it
does by default (checkpoints, logging), PyTorch by `benchmarks/torch_gpt.py`, with the
initial weights of nanoGPT or of ours. Each is a new process, and they take turns. They
evaluate on the whole validation split after the same numbers of updates. This prints
the seconds from launch to the first evaluation with at most --loss, to the last one,
and its loss; medians over rounds. Our programs are compiled anew in every round.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from headcount.configs import shakespeare
from headcount.tasks import make_task

PEERS = {
    "torch": (),
    "torch.compile": ("--compile",),
    "torch,our-start": ("--our_start",),
}
ROOT = Path(__file__).resolve().parent


def main():
    """Time every program in turn, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipe", default="short", choices=("short", "full"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loss", type=float, default=1.886, help="nats per token")
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data/tinyshakespeare")
    )
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        parser.error(f"--data={arguments.data}: there is no such folder.")
    names = ["ours", *(arguments.peers if importlib.util.find_spec("torch") else ())]
    seconds = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                seconds[name].append(launch(name, Path(folder), arguments))
    print(f"| | s to loss {arguments.loss:g} | s to the end | last loss | speedup |")
    print("| --- | ---: | ---: | ---: | ---: |")
    medians = {
        name: [*map(statistics.median, zip(*rounds, strict=True))]
        for name, rounds in seconds.items()
    }
    for name, (to_loss, to_end, loss) in medians.items():
        ratio = to_loss / medians["ours"][0]
        print(f"| {name} | {to_loss:.1f} | {to_end:.1f} | {loss:.3f} | {ratio:.2f} |")


def launch(name: str, folder: Path, arguments) -> tuple[float, float, float]:
    """Run a program to its end; return the seconds to the loss and to the end, and it.

    The seconds to the loss are infinite if it is never reached.
    """
    environment, data = dict(os.environ), arguments.data.resolve()
    if name == "ours":
        rows = folder / "run" / "metrics.jsonl"
        command = [ROOT.parent / "train.py", f"--workdir={folder / 'run'}"]
        command += [f"--config={ROOT.parent}/configs/shakespeare.py:{arguments.recipe}"]
        command += [f"--config.data.directory={data}"]
        environment["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache")
    else:
        rows = folder / "torch.jsonl"
        write_data(folder, arguments.recipe, data)
        command = [ROOT / "torch_gpt.py", folder, *PEERS[name]]
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    begin, seconds = time.perf_counter(), {}
    process = subprocess.Popen([sys.executable, *command], env=environment)
    is_running = True
    while is_running:  # reads once more after the end
        is_running = process.poll() is None
        time.sleep(0.1)
        losses = dev_losses(rows)
        now = time.perf_counter() - begin
        seconds |= {step: now for step in losses if step not in seconds}
    if process.returncode or not seconds:
        sys.exit(f"{name} failed, see above.")
    reached = [seconds[s] for s in seconds if losses[s] <= arguments.loss]
    last = max(seconds)
    return min(reached, default=float("inf")), seconds[last], losses[last]


def dev_losses(path: Path) -> dict[int, float]:
    """Return the dev losses in a file of JSON lines, by step."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["step"]: row["dev_loss"] for row in rows if "dev_loss" in row}


def write_data(folder: Path, recipe: str, data: Path) -> None:
    """Write the settings and the token streams that `torch_gpt.py` reads."""
    config = shakespeare.get_config(recipe)
    config.data.directory = str(data)
    task = make_task(config, folder / "tokenizer")
    for name, split in (("train", "train"), ("dev", "val")):
        np.save(folder / f"{name}.npy", task.token_stream(task.load(split)))
    (folder / "config.json").write_text(json.dumps(config.to_dict()))


if __name__ == "__main__":
    main()
