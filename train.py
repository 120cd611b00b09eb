"""Train a translation Transformer from a config.

    python train.py --config=configs/multi30k.py --workdir=runs/multi30k

The same command again goes on where a run was stopped or killed, bit for bit. Any key
of the config can be set: --config.model.attention.num_heads=8
"""

import contextlib
import fcntl
import json
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_flags

from configs.commandline import fail, flat, one_sentence, run
from training import platform
from training.metrics import show_log

START = time.monotonic()
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file.", lock_config=True
)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder that the run is kept in.")

MAY_CHANGE = ("train.num_steps", "train.log_every_steps", "data.directory")


def main():
    """Check the flags, then train."""
    if CONFIG.value is None or WORKDIR.value is None:
        fail(
            "--config and --workdir are needed, as in "
            "python train.py --config=configs/numbers.py --workdir=runs/numbers"
        )
    train(CONFIG.value, Path(WORKDIR.value))


class Run(NamedTuple):
    """What the loop needs, put together from a config and a workdir."""

    static: Any  # training.step.Static
    trials: dict  # the numbers in which trials differ, each of shape R
    state: Any  # training.step.TrainState
    best: dict  # of every trial's best evaluation: params, score, step
    step: int  # updates that an earlier start has done
    batches: Any  # data.pipeline.Batches
    dev: Any  # analysis.evaluation.Dev
    checkpoints: Any  # training.checkpoint.Checkpoints


def train(config, workdir: Path) -> None:
    """Train the trials of a config in a workdir, or go on with them."""
    platform.setup()
    show_log()
    stop = StopSignal()
    with contextlib.ExitStack() as stack:
        with one_sentence():
            stack.enter_context(claim(workdir, config))
            ready = prepare(config, workdir)
        with one_sentence(OSError):
            loop(config, workdir, ready, stop)


class StopSignal:
    """Remembers a SIGTERM or Ctrl-C, so that the loop can save and end."""

    def __init__(self):
        self.name = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)

    def receive(self, number, frame):
        """Note the signal; a second one ends the process at once."""
        self.name = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def claim(workdir: Path, config):
    """Make the workdir this config's, and this process's alone.

    Raises:
        ValueError: it holds a run of another config, or another process is at it.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"Another process is training in {workdir}; wait for it, or choose "
                f"another --workdir."
            ) from None
        path = workdir / "config.json"
        differences = differing(path, config) if path.exists() else []
        if differences and (workdir / "metrics.jsonl").exists():
            raise ValueError(
                f"{workdir} holds a run of another config: {', '.join(differences)}; "
                f"choose another --workdir, or the settings of that run."
            )
        if differences:  # a start that failed; its vocabulary is of the other config
            shutil.rmtree(workdir / "tokenizer", ignore_errors=True)
        write_json(path, config.to_dict())
        write_json(workdir / "trials.json", [{"seed": config.seed}])
        yield


def differing(path: Path, config) -> list[str]:
    """What differs between a config.json and a config, but for what may."""
    there, now = flat(json.loads(path.read_text())), flat(config.to_dict())
    return [
        f"{key} (there {there.get(key, 'unset')!r}, now {now.get(key, 'unset')!r})"
        for key in sorted(there | now)
        if key not in MAY_CHANGE and there.get(key, "unset") != now.get(key, "unset")
    ]


def write_json(path: Path, value) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.replace(path)


def trials_of(config) -> dict:
    """The numbers in which trials may differ, each with the trial axis R in front."""
    import numpy as np

    optimizer = config.optimizer.to_dict()
    smoothing = optimizer.pop("label_smoothing")
    del optimizer["schedule"]  # part of the program
    return {
        "seed": np.array([config.seed], np.uint32),
        "dropout": np.array([config.model.dropout], np.float32),
        "label_smoothing": np.array([smoothing], np.float32),
        "optimizer": {k: np.array([v], np.float32) for k, v in optimizer.items()},
    }


def prepare(config, workdir: Path) -> Run:
    """Load the data, build the model, take up the last checkpoint."""
    import jax
    import numpy as np
    from flax import nnx

    from analysis.evaluation import METRICS, Dev
    from data import corpora, pipeline, tokenizer
    from models.layers import choose
    from models.transformer import Transformer, num_parameters
    from training.checkpoint import Checkpoints
    from training.metrics import say
    from training.optimizer import SCHEDULES
    from training.step import Static, TrainState, init

    choose("train.best_metric", config.train.best_metric, METRICS)
    choose("optimizer.schedule", config.optimizer.schedule, SCHEDULES)
    names = (config.data.name, config.data.source, config.data.target)
    sources, targets = corpora.load(*names, "train", config.data.directory)
    tokenizers = tokenizer.load_or_train(
        workdir / "tokenizer",
        sources,
        targets,
        config.data.vocab_size,
        joint=config.data.joint_vocabulary,
    )
    trials = trials_of(config)
    batches = pipeline.Batches(
        tokenizers[0].encode(sources),
        tokenizers[1].encode(targets),
        batch_tokens=config.data.batch_tokens,
        max_length=config.data.max_length,
        seeds=[int(seed) for seed in trials["seed"]],
    )
    dev = Dev(
        *corpora.load(*names, "val", config.data.directory),
        tokenizers,
        config.data.batch_tokens,
    )

    vocab_sizes = [t.vocab_size for t in dict.fromkeys(tokenizers[::-1])]
    build = partial(Transformer, *vocab_sizes, **config.model.to_dict())
    graph = nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))[0]
    static = Static(graph, config.optimizer.schedule, config.model.width)
    make_state = partial(init, trials, static=static, build=build)
    abstract = jax.eval_shape(make_state)
    num_trials = len(trials["seed"])
    marks = {
        "score": np.full(num_trials, -np.inf),
        "step": np.zeros(num_trials, np.int32),
    }
    checkpoints = Checkpoints(workdir, config.train.keep_checkpoints)
    last = checkpoints.restore_last(
        **items_of(abstract, {"params": abstract.params, **marks})
    )
    if last is None:
        step, state = 0, make_state()
        best = {"params": jax.tree.map(lambda x: x.copy(), state.params), **marks}
    else:
        step, items = last
        updates, opt_state = items["optimizer"]
        state = jax.device_put(TrainState(updates, items["params"], opt_state))
        best = items["best"]
        say(f"Going on from step {step} of {workdir}.")
    write_json(
        workdir / "run.json",
        {
            "attention": implementations(config.model, *batches.shape),
            "num_parameters": num_parameters(abstract.params) // num_trials,
            "steps_per_epoch": batches.steps_per_epoch,
            "batch": dict(zip(("B", "S", "T"), batches.shape, strict=True)),
            **environment(),
        },
    )
    return Run(static, trials, state, best, step, batches, dev, checkpoints)


def items_of(state, best: dict) -> dict:
    """What a checkpoint holds; the parameters apart, for who wants only them."""
    return {
        "params": state.params,
        "optimizer": (state.step, state.opt_state),
        "best": best,
    }


def implementations(model, B: int, S: int, T: int) -> dict[str, str]:
    """Which attention implementation each site runs; see docs/attention.md."""
    import jax
    import jax.numpy as jnp

    import attention
    from models.layers import head_shape

    if model.attention.implementation is not None:
        return dict.fromkeys(
            ("encoder", "decoder", "cross"), model.attention.implementation
        )
    heads = model.attention
    K, H, V = head_shape(
        model.width,
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        heads.value_dim,
    )

    def resolve(T, S):
        def array(length, num, size):
            return jax.ShapeDtypeStruct((B, length, num, size), jnp.float32)

        return attention.resolve_implementation(
            array(T, heads.num_heads, H),
            array(S, K, H),
            array(S, K, V),
        )

    return {
        "encoder": resolve(S, S),
        "decoder": resolve(T, T),
        "cross": resolve(T, S),
    }


def environment() -> dict:
    """What a result depends on besides the config: versions, device, commit."""
    import subprocess
    from importlib.metadata import version

    import jax

    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "sentencepiece")
    return {
        "commit": git.stdout.strip() or None,
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in packages},
        "devices": [f"{d.platform}: {d.device_kind}" for d in jax.local_devices()],
    }


def loop(config, workdir: Path, ready: Run, stop: StopSignal) -> None:
    """Update, log, evaluate and save until num_steps, a signal, or a divergence."""
    from data.pipeline import training_batches
    from training.metrics import MetricsWriter, Progress, Window, clock, say
    from training.step import train_step

    static, trials, state, best, step, batches, dev, checkpoints = ready
    every, num_steps = config.train, config.train.num_steps
    if step >= num_steps:
        say(f"{workdir} is trained already: {step} of {num_steps} steps.")
        return
    writer, progress = MetricsWriter(workdir, step), Progress(num_steps, step)
    window, unread = Window(batches.shape), []
    feed = training_batches(batches, start_step=step)

    def read(most: int) -> None:
        """Take in the metrics of all but the last `most` steps."""
        while len(unread) > most:
            at, metrics = unread.pop(0)
            if window.add(metrics):
                fail(divergence(at, checkpoints))

    def is_due(interval: int) -> bool:
        return step % interval == 0 or step == num_steps

    try:
        while step < num_steps and stop.name is None:
            with window.waiting():
                batch = next(feed)
            state, metrics = train_step(state, trials, batch, static=static)
            step += 1
            unread.append((step, metrics))
            read(most=1)  # one step late, so that the device never waits for Python
            if window.compiling:
                read(most=0)
                say(f"First step {clock(time.monotonic() - START)} after the launch.")
                window.start_clock()
            if is_due(every.log_every_steps):
                read(most=0)
                for trial, row in enumerate(window.rows()):
                    writer.write(step, trial, **row)
                progress.update(step, window.text)
            with window.paused():
                if is_due(every.eval_every_steps):
                    read(most=0)
                    best = evaluate(config, step, state, best, static, dev, writer)
                if is_due(every.checkpoint_every_steps):
                    read(most=0)  # a diverged state is not to be kept
                    checkpoints.save(step, **items_of(state, best))
        if stop.name is not None:
            read(most=0)
            checkpoints.save(step, **items_of(state, best))
        checkpoints.wait()
    finally:
        progress.close()
        writer.close()
        feed.close()
        checkpoints.close()
    if stop.name is not None:
        say(f"{stop.name}: saved step {step}; the same command goes on from there.")
    else:
        say(f"Trained {step} steps. python eval.py --workdir={workdir} --split=val")


def evaluate(config, step: int, state, best: dict, static, dev, writer) -> dict:
    """Score every trial on the dev set; the best of every trial so far."""
    from analysis.evaluation import dev_scores, ranking
    from training.metrics import say
    from training.step import keep_best

    rows = dev_scores(static, state.params, dev)
    for trial, row in enumerate(rows):
        writer.write(step, trial, **row)
        say(f"step {step}: " + "  ".join(f"{k} {v:.3f}" for k, v in row.items()))
    return keep_best(best, state.params, step, ranking(rows, config.train.best_metric))


def divergence(step: int, checkpoints) -> str:
    """What to say when a loss is not finite."""
    last = max(checkpoints.steps(), default=None)
    good = "there is no checkpoint yet" if last is None else f"step {last} is saved"
    return (
        f"The loss or its gradient stopped being finite at step {step}; of the good "
        f"states before, {good}. A lower optimizer.learning_rate or a longer "
        f"optimizer.warmup_steps may help."
    )


if __name__ == "__main__":
    run(main)
