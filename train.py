"""Train the trials of a config.

    python train.py --config=configs/multi30k.py --workdir=runs/multi30k

Rerun the same command to resume. On CPUs the result is bit-identical to an
uninterrupted run on the same machine. Set any key of the config, as listed in
configs/base.py, with --config.model.attention.num_heads=8
"""

# isort: off
from headcount.runtime import bootstrap  # noqa: F401  before JAX is imported

# isort: on
import contextlib
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
from absl import flags
from flax import nnx
from ml_collections import config_flags

from headcount.analysis.tables import print_pairs
from headcount.attention import MERGE_RULES, cpu_kernel_unavailable, verification
from headcount.configs.commandline import (
    TASK_FILE,
    WORKDIR,
    fail,
    next_command,
    one_sentence,
    path_of,
    run,
)
from headcount.configs.validation import flat
from headcount.data import tokenizers
from headcount.models import cost
from headcount.models.transformer import implementations
from headcount.runtime import cluster, distributed, sharding
from headcount.runtime.logging import Progress, say, show_log
from headcount.runtime.profiling import CompileClock, Profile, steps_to_profile
from headcount.runtime.signals import StopSignal
from headcount.runtime.workdir import (
    check_data,
    claim,
    environment,
    has_started,
    read_json,
    record,
    set_status,
)
from headcount.tasks import TASKS, Run, import_file, make_task
from headcount.training import dry_run
from headcount.training.checkpoint import Checkpoints
from headcount.training.checks import check_config, check_memory
from headcount.training.loop import Hook, Trainer, default_hooks, fit, take_sample
from headcount.training.metrics import MetricsWriter, read_metrics
from headcount.training.optimizer import NEED_DECAY_STEPS
from headcount.training.restore import (
    parameters_to_start_from,
    run_folder,
    with_parameters,
)
from headcount.training.selection import initial_best
from headcount.training.step import (
    checkpoint_items,
    init,
    init_while_compiling,
    make_static,
    state_from_items,
)
from headcount.training.tracking import tracker_names
from headcount.training.trials import describe_trial, hyperparameters, make_trials

STARTED = time.monotonic()
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, such as configs/numbers.py.", lock_config=True
)
TRIALS = flags.DEFINE_string(
    "trials",
    None,
    "JSON file of trials to train as one program: a list of objects from config key to "
    "number, each saying how a trial differs from the config.",
)
DRY_RUN = flags.DEFINE_string(
    "dry_run",
    None,
    "Do not train: compile the step for chips such as v5e:16x16 or h200:8, which need "
    "not be attached, and print its memory, communication and cost.",
)
PROFILE = flags.DEFINE_string(
    "profile", None, "START:STEPS: trace these steps into WORKDIR/profile."
)


def main():
    """Check the flags, then train."""
    show_log()
    with one_sentence():
        if TASK_FILE.value is not None:
            import_file(path_of(TASK_FILE))
    if CONFIG.value is None or (WORKDIR.value is None and DRY_RUN.value is None):
        fail(
            "--config and --workdir are needed, as in "
            "python train.py --config=configs/numbers.py --workdir=runs/numbers"
        )
    path = None if TRIALS.value is None else path_of(TRIALS)
    if DRY_RUN.value is not None:
        if PROFILE.value is not None:
            fail("--profile has no meaning with --dry_run, which does not train.")
        plan(CONFIG.value, DRY_RUN.value, path)
        return
    train(CONFIG.value, path_of(WORKDIR), path)


def train(config, workdir: Path, trials_file: Path | None = None) -> None:
    """Train the trials of a config in a workdir, or resume.

    Args:
        config: a locked ConfigDict with all keys of configs/base.py.
        workdir: see docs/reference/workdir.md.
        trials_file: JSON file of the trials; default: one trial per seed.
    """
    stop = StopSignal()
    with contextlib.ExitStack() as stack:
        stack.enter_context(distributed.exit_at_once())
        with one_sentence(), distributed.wait_for_abort():
            trials = make_trials(flat(config.to_dict()), trials_file)
            profile = Profile(
                workdir, steps_to_profile(PROFILE.value, config.train.num_steps)
            )
            cluster.connect()
            with distributed.fail_together():
                check_config(config)
                check_memory(config, len(trials))
                if distributed.is_first():
                    stack.enter_context(claim(workdir, config.to_dict(), trials))
            distributed.check_same_run(
                workdir, config.to_dict(), trials, cpu_kernel_unavailable()
            )
            trainer = make_trainer(config, workdir, trials)
        if trainer.is_done:
            report_trained(trainer)
            return
        stack.callback(trainer.writer.close)  # trackers get the final run.json
        progress = Progress(trainer.num_steps, trainer.step)
        # JAX raises ValueErrors for some failures of Gloo, its CPU communication
        lost = distributed.wait_for_abort((RuntimeError, ValueError))
        with one_sentence((OSError, NotImplementedError)), lost:
            try:
                fit(trainer, default_hooks(config, progress), stop, profile)
            except BaseException:
                finish(workdir, "failed")
                trainer.writer.close()  # the last line printed must be the error
                raise
            finally:
                progress.close()
                trainer.checkpoints.close()
        report_end(trainer, stop)


def train_config(config, workdir: Path | str, callbacks: Sequence[Hook] = ()) -> Run:
    """Train a config from Python, or resume; return the run with its best parameters.

    Repeat the same call to resume. Ctrl-C raises a KeyboardInterrupt; the run can then
    be resumed from its last checkpoint. For multi-process runs, use the script instead.

    Args:
        config: a config from a `get_config`, with any changes.
        workdir: see docs/reference/workdir.md.
        callbacks: hooks to call after those that log, evaluate and save. If one returns
            True, training saves and stops.

    Raises:
        ValueError, OSError: the config is invalid, or the workdir holds another run.
        RuntimeError: all trials diverged.
    """
    started = time.monotonic()
    config, workdir = config.copy_and_resolve_references().lock(), Path(workdir)
    trials = make_trials(flat(config.to_dict()), None)
    check_config(config)
    check_memory(config, len(trials))
    with claim(workdir, config.to_dict(), trials):
        trainer = make_trainer(config, workdir, trials)
        trainer.started = started
        progress = Progress(trainer.num_steps, trainer.step)
        status = "failed"
        try:
            if not trainer.is_done:
                hooks = [*default_hooks(config, progress), *callbacks]
                fit(trainer, hooks, None, Profile(workdir, None))
            status = "finished" if trainer.is_done else "stopped"
            status = "diverged" if diverged(trainer).all() else status
        except KeyboardInterrupt:
            # nothing is saved now; without a checkpoint, the run will start over
            status = "stopped" if trainer.checkpoints.steps() else "failed"
            raise
        finally:
            finish(workdir, status)
            progress.close()
            trainer.writer.close()
            trainer.checkpoints.close()
    if status == "diverged":
        raise RuntimeError(f"all trials of {workdir} diverged; see its metrics.jsonl.")
    return best_run(trainer)


def best_run(trainer: Trainer) -> Run:
    """Return the run with its best parameters; without scores, the current ones."""
    best, current = trainer.best, trainer.run()
    if not np.isfinite(best["score"]).any():
        return current
    return current._replace(
        params=best["params"],
        step=[int(step) for step in best["step"]],
        diverged_at=[int(step) or None for step in diverged(trainer)],
    )


def make_trainer(config, workdir: Path, trials: list[dict]) -> Trainer:
    """Read the data, make the mesh, build the model, restore the last checkpoint."""
    compile_clock = CompileClock()
    task = make_task(config, workdir / "tokenizer")
    examples, dev = read_data(task, workdir)
    batches = task.batches(examples, [trial["seed"] for trial in trials])
    R, spec = len(trials), batches.spec

    with distributed.fail_together():
        rows = next(iter(spec.values())).shape[0]
        rows = sharding.rows_of_part(rows, config.train.accumulate_steps)
        mesh = sharding.make_mesh(config.mesh, R, rows)
    jax.set_mesh(mesh)

    model = cost.abstract(task.build)
    with distributed.fail_together():
        check_memory(config, R, cost.parameters(model))
    verify_kernels(model, spec)
    static = make_static(model, config, task.loss)
    sharding.warn_of_undivided(nnx.state(model), flat(config.to_dict()), mesh.shape)
    make_state = partial(init, static=static, build=task.build)
    arrays = hyperparameters(flat(config.to_dict()), trials)
    abstract = jax.eval_shape(make_state, arrays)

    checkpoints = Checkpoints(
        workdir, config.train.keep_checkpoints, config.train.checkpoint_every_steps
    )
    items = checkpoint_items(abstract, initial_best(abstract.params, R))
    last = checkpoints.restore_last(**items)
    if last is None:
        step, init_from = 0, config.train.init_from
        if init_from is not None:  # before anything is compiled, to fail early
            with distributed.fail_together():  # some hosts may lack the folder
                new_parts = task.new_parameters(run_folder(init_from) / "tokenizer")
            params = parameters_to_start_from(
                init_from, config, trials, abstract.params, new_parts
            )
        k = config.train.steps_per_dispatch
        state = init_while_compiling(make_state, arrays, k, spec, static)
        if init_from is not None:
            state = with_parameters(state, params)
        best = initial_best(jax.tree.map(lambda x: x.copy(), state.params), R)
    else:
        step, items = last
        diverged = np.asarray(items["trials"]["diverged_at"]) > 0
        if step > config.train.num_steps and not diverged.all():
            raise ValueError(
                f"{workdir} is trained for {step} steps already, more than "
                f"train.num_steps={config.train.num_steps}; set that to {step} or "
                f"more, or choose another --workdir."
            )
        state = sharding.place(state_from_items(items), mesh, config.mesh.shard)
        shardings = jax.tree.map(lambda x: x.sharding, state.params)
        best = items["best"]
        best["params"] = jax.tree.map(sharding.put, best["params"], shardings)
        say(f"Resuming {workdir} from step {step}.")
        warn_of_new_decay(read_json(workdir / "config.json"), config, trials)

    attention = implementations(model, spec)
    distributed.check_same("choice of attention kernels", attention)
    done = step >= config.train.num_steps or sharding.fetch(state.frozen).all()
    # run.json describes the process that trains, so resuming a finished run keeps it
    if distributed.is_first() and not done:
        facts = {
            "task": {
                "name": config.task.name,
                "metrics": [vars(metric) for metric in task.metrics],
            },
            "attention": attention,
            "no_cpu_kernel": cpu_kernel_unavailable(),
            "kernel_verdicts": [vars(verdict) for verdict in verification.verdicts()],
            "trials": R,
            "dtype": model.dtype,
            "mesh": dict(mesh.shape),
            "data": checksums(examples, dev),
            "tokenizer": tokenizers.checksums(task.folder),
            "num_parameters": cost.parameters(model),
            "steps_per_epoch": batches.steps_per_epoch,
            "batch": {name: array.shape for name, array in spec.items()},
            **environment(),
        }
        changed = record(workdir, config.to_dict(), trials, facts)
        if step:
            warn_of_other_bits(changed, facts["xla_flags"])
    return Trainer(
        config=config,
        workdir=workdir,
        task=task,
        trials=trials,
        hyperparameters=arrays,
        static=static,
        batches=batches,
        dev=dev,
        train_sample=(
            take_sample(task, examples, dev) if config.train.eval_train else []
        ),
        state=state,
        best=best,
        step=step,
        checkpoints=checkpoints,
        writer=MetricsWriter(
            workdir,
            step,
            silent=not distributed.is_first(),
            trackers=tracker_names(config.train.tracker),
        ),
        flops=partial(cost.update_flops, model, spec),
        compile_clock=compile_clock,
        started=STARTED,
    )


def verify_kernels(model, spec: dict) -> None:
    """Verify attention kernels in process 0, and adopt its verdicts in all processes.

    A verdict depends on measured times, so processes that verify for themselves might
    choose different kernels.
    """
    with distributed.fail_together():
        if distributed.is_first():
            implementations(model, spec)
    verdicts = distributed.gather(
        [vars(verdict) for verdict in verification.verdicts()]
    )[0]
    verification.adopt([verification.Verdict(**verdict) for verdict in verdicts])


def warn_of_other_bits(changed: str, xla_flags: str) -> None:
    """If a resumed run will not be bit-identical to an uninterrupted one, log why.

    Args:
        changed: what changed since the run was started; see `workdir.record`.
        xla_flags: the environment variable XLA_FLAGS.
    """
    deterministic = "xla_gpu_deterministic_ops=true" in xla_flags
    if jax.default_backend() == "gpu" and not deterministic and not changed:
        changed = (
            "on a GPU the gradients of embeddings are summed in no fixed order, unless "
            "XLA_FLAGS=--xla_gpu_deterministic_ops=true is set"
        )
    if changed:
        say(f"The result will not be bit-identical to an uninterrupted run: {changed}.")


def warn_of_new_decay(recorded: dict, config, trials: list[dict]) -> None:
    """Log if a resumed run's learning rate decays until another step than before.

    Args:
        recorded: the config in the workdir, with which the run started.
        config: the current config.
        trials: hyperparameters of each trial.
    """
    old_end, new_end = recorded["train"]["num_steps"], config.train.num_steps
    default = config.optimizer.decay_steps
    steps = [trial.get("optimizer.decay_steps", default) for trial in trials]
    if (
        config.optimizer.schedule in NEED_DECAY_STEPS
        and old_end != new_end
        and 0 in steps
    ):
        say(
            f"The learning rate now decays until step {new_end} instead of {old_end}, "
            f"because optimizer.decay_steps=0 stands for train.num_steps."
        )


def read_data(task, workdir: Path):
    """Read the training and dev splits; a new run builds its vocabulary first."""
    try:
        return _read_data(task, workdir)
    except BaseException:
        if distributed.is_first() and not has_started(workdir):
            tokenizers.remove(task.folder)
        raise


def _read_data(task, workdir: Path):
    with distributed.fail_together():
        if distributed.is_first():
            init_from = None if has_started(workdir) else task.config.train.init_from
            if not has_started(workdir):
                tokenizers.remove(task.folder)  # left over from a failed start
            if init_from is not None:
                tokenizers.copy(run_folder(init_from) / "tokenizer", task.folder)
            copied = tokenizers.checksums(task.folder).keys()
            examples = task.load("train")
            made = tokenizers.checksums(task.folder).keys() - copied
            if init_from is not None and made:
                folder = run_folder(init_from) / "tokenizer"
                raise ValueError(
                    f"train.init_from={init_from}: {folder} has no vocabulary of "
                    f"data.tokenizer={task.config.data.tokenizer}, and its parameters "
                    f"only fit its own vocabulary. Set data.tokenizer to that run's "
                    f"value, or restore that folder."
                )
    with distributed.fail_together():
        if not distributed.is_first():
            examples = task.load("train")
        dev = task.load("val")
        if distributed.is_first():
            check_data(workdir, checksums(examples, dev))
    distributed.check_same("data", checksums(examples, dev))
    return examples, dev


def checksums(examples, dev) -> dict:
    """Return counts and checksums that identify the data of a run."""
    return {
        "examples": len(examples),
        "crc32": examples.crc32,
        "dev_crc32": dev.crc32,
    }


def report_trained(trainer: Trainer) -> None:
    """Log that there is nothing left to train."""
    workdir, step = trainer.workdir, trainer.step
    for trial in np.flatnonzero(diverged_at := diverged(trainer)).tolist():
        name = describe_trial(trainer.trials, trial)
        say(f"step {diverged_at[trial]}: {name} diverged.")
    say(f"{workdir} is trained already: {step} of {trainer.num_steps} steps.")
    scored = {row["step"] for row in read_metrics(workdir) if "dev_loss" in row}
    if not trainer.frozen.all() and step not in scored:
        say(
            f"Step {step} was saved without an evaluation: score it with eval.py "
            f"--checkpoint=last, or raise train.num_steps to train further."
        )
    finish(workdir, "diverged" if diverged_at.all() else "finished")
    if diverged_at.all():
        sys.exit(1)


def report_end(trainer: Trainer, stop: StopSignal) -> None:
    """Record and log how training ended, and exit with the corresponding code."""
    diverged_at, step, workdir = diverged(trainer), trainer.step, trainer.workdir
    distributed.leave()
    if diverged_at.all():
        finish(workdir, "diverged")
        saved = trainer.checkpoints.directory / str(step)
        say(
            f"The loss or its gradient stopped being finite in all trials, at step "
            f"{int(diverged_at.max())} in the last one; {saved} holds the parameters "
            f"before. Try a lower optimizer.learning_rate or more "
            f"optimizer.warmup_steps."
        )
        sys.exit(1)
    if stop.number is not None and not trainer.is_done:
        finish(workdir, "stopped")
        say(f"Saved step {step}; rerun the same command to resume.")
        sys.exit(128 + stop.number)
    finish(workdir, "finished")
    early = "; no trial is left to train" if step < trainer.num_steps else ""
    command = next_command("eval.py", workdir=workdir, split="val", **task_file())
    say(f"Trained {step} steps{early}. Next: {command}")


def task_file() -> dict[str, str]:
    """Return the config file as --task_file if it adds a task or a merge rule."""
    registered = *TASKS.values(), *(rule.function for rule in MERGE_RULES.values())
    if all(item.__module__.startswith("headcount.") for item in registered):
        return {}
    file = config_flags.get_config_filename(flags.FLAGS["config"])
    return {"task_file": file.split(":")[0]}  # without the argument of get_config


def diverged(trainer: Trainer) -> np.ndarray:
    """Return the step at which each trial diverged, of shape R; 0 if it did not."""
    return sharding.fetch(trainer.state.diverged_at)


def finish(workdir: Path, status: str) -> None:
    """Record a run's status, in process 0 only."""
    if distributed.is_first():
        with contextlib.suppress(OSError):  # a full disk has already been reported
            set_status(workdir, status)


def plan(config, target: str, trials_file: Path | None) -> None:
    """Print what a step needs on chips that need not be attached (--dry_run)."""
    jax.config.update("jax_platforms", "cpu")  # compilation needs only the host
    with one_sentence():
        check_config(config)
        trials = make_trials(flat(config.to_dict()), trials_file)
        arrays = hyperparameters(flat(config.to_dict()), trials)
        task = make_task(config)
        step_plan = dry_run.plan(config, task, arrays, target)
    params = nnx.state(cost.abstract(task.build))
    sharding.warn_of_undivided(params, flat(config.to_dict()), step_plan.mesh)
    print_pairs(f"{target}, per chip", dry_run.rows(step_plan))
    if advice := dry_run.advice(step_plan, config):
        print(advice)


def cli():
    """Run as a script."""
    run(main)


if __name__ == "__main__":
    cli()
