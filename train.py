"""Train a translation Transformer from a config.

    python train.py --config=configs/multi30k.py --workdir=runs/multi30k

The same command again goes on where a run was stopped or killed, bit for bit. Any key
of the config can be set: --config.model.attention.num_heads=8
"""

import contextlib
import os
import shlex
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from ml_collections import config_flags

from headcount.configs.base import get_config
from headcount.configs.commandline import fail, flat, one_sentence, path_of, run
from headcount.runtime import cluster, platform
from headcount.runtime.logging import Progress, clock, say, show_log
from headcount.runtime.signals import StopSignal
from headcount.runtime.workdir import check_data, claim, environment, has_begun, record
from headcount.training.metrics import MetricsWriter, Window, is_evaluated
from headcount.training.trials import divergence, named, numbers, trials_of

START = time.monotonic()
DEFAULTS = get_config().to_dict()
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file.", lock_config=True
)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder that the run is kept in.")
TRIALS = flags.DEFINE_string(
    "trials",
    None,
    "JSON file of the trials to train as one program: a list of objects from config "
    "path to number, each a trial's difference to the config.",
)
DRY_RUN = flags.DEFINE_string(
    "dry_run",
    None,
    "Compile the step for chips that are not here, such as v5e:16x16 or h200:8, say "
    "what it needs, and train nothing.",
)
PROFILE = flags.DEFINE_string(
    "profile", None, "START:STEPS: trace these steps into WORKDIR/profile."
)
flags.adopt_module_key_flags(cluster)  # so that --help has them


def main():
    """Check the flags, then train."""
    listed = None if TRIALS.value is None else path_of(TRIALS)
    if CONFIG.value is not None and DRY_RUN.value is not None:
        dry_run(CONFIG.value, DRY_RUN.value, listed)
        return
    if CONFIG.value is None or WORKDIR.value is None:
        fail(
            "--config and --workdir are needed, as in "
            "python train.py --config=configs/numbers.py --workdir=runs/numbers"
        )
    train(CONFIG.value, path_of(WORKDIR), listed)


class Run(NamedTuple):
    """What the loop needs, put together from a config and a workdir."""

    static: Any  # training.step.Static
    numbers: dict  # of the trials, each of shape R, see training.step.train_steps
    state: Any  # training.step.TrainState
    best: dict  # of every trial's best evaluation: params, score, step
    step: int  # updates that an earlier start has done
    batches: Any  # data.pipeline.Batches
    dev: Any  # analysis.evaluation.Dev
    flops: Any  # of an update of one trial, a function
    compiled: Any  # training.utilisation.CompileClock
    checkpoints: Any  # training.checkpoint.Checkpoints


def train(config, workdir: Path, listed: Path | None = None) -> None:
    """Train the trials of a config in a workdir, or go on with them.

    `listed` is a file of trials; without it they differ in their seeds alone.
    """
    platform.setup()
    show_log()
    stop = StopSignal()
    from headcount.runtime import distributed as hosts
    from headcount.runtime.profiling import Profile, steps_to_profile
    from headcount.training.checks import check_config

    with contextlib.ExitStack() as stack:
        stack.enter_context(hosts.at_once())
        with one_sentence(), hosts.given_up():
            trials = trials_of(flat(config.to_dict()), listed)
            steps = steps_to_profile(PROFILE.value, config.train.num_steps)
            profile = Profile(workdir, steps)
            cluster.connect()
            with hosts.together():
                check_config(config)
                if hosts.is_first():
                    held = claim(workdir, config.to_dict(), trials, DEFAULTS)
                    stack.enter_context(held)
            hosts.check_same_run(workdir, config.to_dict(), trials)
            ready = prepare(config, workdir, trials)
        with one_sentence(OSError), hosts.given_up():
            loop(config, workdir, trials, ready, stop, profile)


def dry_run(config, target: str, listed: Path | None) -> None:
    """Print what a step needs on chips that are not here."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # else the GPUs' plugin misses a driver, aloud
    from headcount.analysis.tables import print_pairs
    from headcount.data.packing import largest_rows
    from headcount.runtime import sharding
    from headcount.training import dry_run
    from headcount.training.checks import check_config

    with one_sentence():
        check_config(config)
        trials = trials_of(flat(config.to_dict()), listed)
        shape = largest_rows(config.data.batch_tokens, config.data.max_length)
        arrays = numbers(flat(config.to_dict()), trials)
        plan = dry_run.plan(config, arrays, target, shape)
    sharding.warn_of_whole(flat(config.to_dict()), plan.mesh)
    print_pairs(f"{target}, per chip", dry_run.rows(plan))
    if advice := dry_run.advice(plan, config):
        print(advice)


def read_data(config, workdir: Path, trials: list[dict]):
    """Load the corpus, and encode it with the run's vocabulary, new on a first start.

    Returns the trials' batches, dev, the vocabularies' sizes, and the data's checksums.
    """
    from headcount.analysis.evaluation import Dev
    from headcount.data import batches as pipeline
    from headcount.data import corpora, tokenizer
    from headcount.models.checks import check_bos
    from headcount.runtime import distributed as hosts
    from headcount.training.restore import run_at

    names = (config.data.name, config.data.source, config.data.target)
    with hosts.together():
        sources, targets = corpora.load(*names, "train", config.data.directory)
        held_out = corpora.load(*names, "val", config.data.directory)
        tokenizers_of = partial(
            tokenizer.load_or_train,
            workdir / "tokenizer",
            sources,
            targets,
            config.data.vocab_size,
            joint=config.data.joint_vocabulary,
        )
        if hosts.is_first():
            if not has_begun(workdir):
                # of a start that failed, with other settings or of other sentences
                tokenizer.forget(workdir / "tokenizer")
                if other := config.train.init_from:
                    tokenizer.copy(run_at(other) / "tokenizer", workdir / "tokenizer")
            tokenizers_of()  # for the other processes, which find it
    with hosts.together():
        tokenizers = tokenizers_of()
        vocab_sizes = tokenizer.vocab_sizes(tokenizers)
        check_bos(config.model.bos, vocab_sizes[0])
        batches = pipeline.Batches(
            tokenizers[0].encode(sources),
            tokenizers[1].encode(targets),
            batch_tokens=config.data.batch_tokens,
            max_length=config.data.max_length,
            seeds=[trial["seed"] for trial in trials],
        )
        dev = Dev(*held_out, tokenizers, config.data.batch_tokens)
        data = {"pairs": len(sources), "crc32": batches.crc32, "dev_crc32": dev.crc32}
        if hosts.is_first():
            check_data(workdir, data)
    hosts.check_same("data", data)
    return batches, dev, vocab_sizes, data


def prepare(config, workdir: Path, trials: list[dict]) -> Run:
    """Load the data, build the model, take up the last checkpoint."""
    import jax

    from headcount.models import cost as counting
    from headcount.models.sites import implementations
    from headcount.models.transformer import Transformer
    from headcount.runtime import distributed as hosts
    from headcount.runtime import sharding
    from headcount.runtime.profiling import CompileClock
    from headcount.training.checkpoint import Checkpoints
    from headcount.training.restore import begun_from, with_parameters
    from headcount.training.step import begin, init, items_of, state_of, static_of

    compiled = CompileClock()
    every, other = config.train, config.train.init_from
    batches, dev, vocab_sizes, data = read_data(config, workdir, trials)
    with hosts.together():
        rows = sharding.rows_of_part(batches.shape[0], every.accumulate_steps)
        mesh = sharding.make_mesh(config.mesh, len(trials), rows)
    jax.set_mesh(mesh)
    sharding.warn_of_whole(flat(config.to_dict()), mesh.shape)

    build = partial(Transformer, *vocab_sizes, **config.model.to_dict())
    model = counting.abstract(build)
    static = static_of(model, config)
    make_state = partial(init, static=static, build=build)
    arrays = numbers(flat(config.to_dict()), trials)
    abstract = jax.eval_shape(make_state, arrays)
    R = len(trials)
    marks = {"score": np.full(R, -np.inf), "step": np.zeros(R, np.int32)}
    keep, due = every.keep_checkpoints, every.checkpoint_every_steps
    checkpoints = Checkpoints(workdir, keep, due)
    like = items_of(abstract, {"params": abstract.params, **marks})
    last = checkpoints.restore_last(**like)
    if last is None:
        step, k = 0, every.steps_per_dispatch
        if other:  # refused before anything is compiled
            theirs = begun_from(other, config, trials, abstract.params, DEFAULTS)
        state = begin(make_state, arrays, k, batches.shape, static)
        state = with_parameters(state, theirs) if other else state
        best = {"params": jax.tree.map(lambda x: x.copy(), state.params), **marks}
    else:
        step, items = last
        diverged = np.asarray(items["trials"]["diverged_at"]) > 0
        if step > every.num_steps and not diverged.all():
            raise ValueError(
                f"{workdir} is trained for {step} steps already, more than "
                f"train.num_steps={every.num_steps}; set it to {step} or more, "
                f"or choose another --workdir."
            )
        state = sharding.place(state_of(items), mesh, config.mesh.shard)
        where = jax.tree.map(lambda x: x.sharding, state.params)
        best = items["best"]
        best["params"] = jax.tree.map(sharding.put, best["params"], where)
        say(f"Going on from step {step} of {workdir}.")
    if hosts.is_first():
        facts = {
            "attention": implementations(model, *batches.shape),
            "trials": R,
            "dtype": model.dtype,
            "mesh": dict(mesh.shape),
            "data": data,
            "num_parameters": counting.parameters(model),
            "steps_per_epoch": batches.steps_per_epoch,
            "batch": dict(zip(("B", "S", "T"), batches.shape, strict=True)),
            **environment(),
        }
        if (changed := record(workdir, config.to_dict(), trials, facts)) and step:
            say(f"Not the bits of an undisturbed run any more: {changed}.")
    flops = partial(counting.update_flops, model, *batches.shape)
    return Run(
        static, arrays, state, best, step, batches, dev, flops, compiled, checkpoints
    )


def tell_trained(workdir, trials, step: int, num_steps: int, frozen, diverged) -> None:
    """Say that there is nothing left to do."""
    for trial in np.flatnonzero(diverged).tolist():
        say(f"step {diverged[trial]}: {named(trials, trial)} diverged.")
    say(f"{workdir} is trained already: {step} of {num_steps} steps.")
    if not frozen.all() and not is_evaluated(workdir, step):
        say(
            f"Step {step} was saved without an evaluation: score it with eval.py "
            f"--checkpoint=last, or set train.num_steps to more."
        )


def loop(config, workdir: Path, trials, ready: Run, stop, profile) -> None:
    """Update, log, evaluate and save until num_steps, a signal, or no trial is left."""
    import jax

    from headcount.analysis.evaluation import evaluate
    from headcount.data.batches import portions, training_batches
    from headcount.runtime import distributed as hosts
    from headcount.runtime import sharding
    from headcount.runtime.profiling import peak_flops
    from headcount.training.step import items_of, stop_late, train_steps

    static, arrays, state, best, step, batches, dev, flops, compiled, checkpoints = (
        ready
    )
    every, num_steps = config.train, config.train.num_steps
    frozen, diverged = map(np.array, sharding.fetch((state.frozen, state.diverged_at)))
    if step >= num_steps and not diverged.all():
        tell_trained(workdir, trials, step, num_steps, frozen, diverged)
        return
    writer = MetricsWriter(workdir, step, silent=not hosts.is_first())
    progress = Progress(num_steps, step)
    window, unread = Window(batches.shape), []
    intervals = (
        every.log_every_steps,
        every.eval_every_steps,
        every.checkpoint_every_steps,
    )
    ends = {step + 1, *profile.ends(step)}  # the first shows at once that all is well
    todo = portions(step, num_steps, every.steps_per_dispatch, intervals, ends)
    mesh = jax.sharding.get_mesh()
    part = sharding.part_here(mesh, len(trials), batches.shape[0])
    feed = training_batches(batches, todo, every.steps_per_dispatch, part[:2])

    def freeze(which, at: int, why: str, **row) -> None:
        """Say which trials are not updated any more."""
        for trial in which.tolist():
            frozen[trial] = True
            writer.write(at, trial, **row)
            say(f"step {at}: {named(trials, trial)} {why}; it is frozen from now on.")

    def read(most: int) -> None:
        """Take in the metrics of all but the last `most` dispatches."""
        while len(unread) > most:
            first, number, metrics = unread.pop(0)
            metrics = {name: np.asarray(array) for name, array in metrics.items()}
            why = "diverged: its loss or gradient is not finite"
            for index in range(number):
                of_step = {name: array[:, index] for name, array in metrics.items()}
                at = first + index + 1
                freeze(window.add(of_step), at, why, diverged_at=at)

    @contextlib.contextmanager
    def paused():
        """Time that is not training; until all is computed that was begun, it is."""
        read(most=0)
        with window.paused():
            yield

    def is_due(interval: int) -> bool:
        return step % interval == 0 or step == num_steps

    try:
        for count, (first, number) in enumerate(todo):
            if stop.reached(count) or frozen.all():
                break
            if profile.is_due(step):
                with paused():  # to write a trace takes many seconds
                    profile.at(step, state)
            with window.waiting():
                batch = sharding.place_batch(next(feed), part)
            state, metrics = train_steps(state, arrays, batch, number, static=static)
            step += number
            unread.append((first, number, sharding.to_all(metrics)))
            read(most=1)  # one late, so that the device never waits for Python
            if window.compiling:
                read(most=0)
                say(f"First step {clock(time.monotonic() - START)} after the launch.")
                if peak := peak_flops():
                    window.ideal_seconds = flops() / peak
                window.start_clock()
            if is_due(every.log_every_steps):
                read(most=0)
                for trial, row in window.rows().items():
                    writer.write(step, trial, **row, compile_seconds=compiled.seconds)
                progress.update(step, window.text)
            if is_due(every.eval_every_steps):
                with paused():
                    gates, graph = arrays["head_gates"], static.graph
                    best = evaluate(
                        config, step, state, gates, best, frozen, graph, dev, writer
                    )
                    if every.patience is not None:
                        since = every.patience * every.eval_every_steps
                        state, late = stop_late(state, best, step - since, step)
                        why = f"has had no better {every.best_metric} in {since} steps"
                        freeze(late, step, why, stopped_at=step)
            if is_due(every.checkpoint_every_steps):
                with paused():
                    checkpoints.save(step, **items_of(state, best))
        read(most=0)
        checkpoints.save(step, **items_of(state, best))  # also when it ended early
        checkpoints.wait()
    finally:
        profile.close()
        progress.close()
        writer.close()
        feed.close()
        checkpoints.close()
    diverged = sharding.fetch(state.diverged_at)
    hosts.leave()
    if frozen.all():
        say(f"step {step}: no trial is left to train.")
    if stop.name is not None:
        say.muted = False  # so that whoever started a process knows that it is not done
        say(f"{stop.name}: saved step {step}; the same command goes on from there.")
    elif diverged.all():
        saved = checkpoints.directory / str(step)
        fail(divergence(int(diverged.max()), len(trials), saved))
    else:
        end = "; no trial is left to train" if step < num_steps else ""
        hint = shlex.join(["python", "eval.py", f"--workdir={workdir}", "--split=val"])
        say(f"Trained {step} steps{end}. {hint}")


if __name__ == "__main__":
    run(main)
