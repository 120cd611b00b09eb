"""Train every arm of an ablation with many seeds, and report the differences.

    python sweep.py run --config=configs/multi30k.py --ablation=heads --seeds=16 \\
      --workdir=runs/heads
    python sweep.py report --workdir=runs/heads

    list     show the arms, their cost, and how long the sweep will take
    run      train and score every trial; rerun the same command to resume
    status   show the progress of a sweep without writing any files
    report   write report.html and report.md; with several --workdir, one joined page

--config.KEY=VALUE sets any config key, as in train.py. A workdir stores its sweep, so
later calls need only --workdir.
"""

# isort: off
from headcount.runtime import bootstrap  # noqa: F401  before JAX is imported

# isort: on
import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
from absl import flags
from ml_collections import config_flags

from headcount.analysis.budget import BUDGETS
from headcount.analysis.report_markdown import CHECKPOINTS
from headcount.configs.commandline import (
    TASK_FILE,
    WORKDIR,
    describe,
    fail,
    one_sentence,
    path_of,
    run,
)
from headcount.runtime import cluster, distributed
from headcount.sweeps import launchers, multihost, preview, report, settings, status
from headcount.sweeps.looks import parse_seeds
from headcount.sweeps.plan import Group, Shard
from headcount.sweeps.restore import restore
from headcount.sweeps.runner import Stopped
from headcount.sweeps.store import Sweep
from headcount.sweeps.table import collect, count_unfinished, make_rows
from headcount.tasks import TASKS, import_file

VERBS = ("list", "run", "status", "report")
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file that every arm starts from.", lock_config=True
)
ABLATION = flags.DEFINE_string(
    "ablation",
    None,
    "What to compare: a function of configs/ablations.py, or FILE.py:FUNCTION.",
)
SEEDS = flags.DEFINE_string(
    "seeds",
    None,
    "Number of seeds per arm. Default: the config's seeds. With FIRST:LAST, as in "
    "4:32, seeds are added in stages, to undecided arms only.",
)
LOOKS = flags.DEFINE_list(
    "looks",
    [],
    "With --seeds=FIRST:LAST: after how many seeds to look, as in 4,8,16,32. Default: "
    "FIRST, and 1.5, 2, 3, 4, 6, ... times as many.",
)
MARGIN = flags.DEFINE_string(
    "margin",
    None,
    "Difference from the baseline within which an arm is equivalent, in the unit in "
    "which scores are shown; the unit may be appended, as in 0.01nats. Default: the "
    "metric's own (0.3 BLEU, 0.005 nats of loss, ...).",
)
MATCH = flags.DEFINE_enum(
    "match",
    None,
    list(BUDGETS),
    "Change model.mlp_dim to give every arm the baseline's parameters or "
    "multiply-adds.",
)
TUNE = flags.DEFINE_multi_string(
    "tune",
    [],
    "KEY=VALUE,VALUE,...: try nuisance settings in every arm and keep those with the "
    "best dev score, as in --tune=optimizer.learning_rate=0.002,0.005; with --search "
    "also KEY=LOW:HIGH.",
)
SEARCH = flags.DEFINE_string(
    "search",
    None,
    "optuna:N: let Optuna propose N nuisance settings per arm, for the keys of --tune "
    "or all keys that the ablation lists.",
)
SEARCH_SEEDS = flags.DEFINE_integer(
    "search_seeds",
    None,
    "Seeds per nuisance setting that is tried; they are never reported. Default: 1.",
    1,
)
CHECKPOINT = flags.DEFINE_enum(
    "checkpoint",
    None,
    list(CHECKPOINTS),
    "Parameters to score: best on dev, last, or the mean of those kept. Default: best, "
    "or last if there is no test split.",
)
METRIC = flags.DEFINE_string(
    "metric",
    None,
    "Metric of the task to compare arms by. Default: train.best_metric.",
)
TEST_SPLIT = flags.DEFINE_string(
    "test_split", None, "Split of the final scores. Default: the task's test split."
)
GROUP_SIZE = flags.DEFINE_integer(
    "group_size", None, "Trials per program, at most. Default: 16.", 1
)
GROUP = flags.DEFINE_string("group", None, "Run only the group of this number or name.")
SHARD = flags.DEFINE_string("shard", None, "i/n: run every n-th group, from group i.")
LAUNCHER = flags.DEFINE_enum(
    "launcher", "local", list(launchers.LAUNCHERS), "Where to run groups."
)
ADDRESS = flags.DEFINE_string(
    "address",
    None,
    "HOST:PORT of a Ray cluster. Default: start one here. With --launcher=slurm: "
    "local, to try it without Slurm.",
)
RESOURCES = flags.DEFINE_multi_string(
    "resources",
    [],
    "KEY=VALUE: resources per group, for Ray (num_gpus=1) or submitit "
    "(timeout_min=600, slurm_partition=gpu); or cores=1, on a machine without GPUs.",
)
FINISHED = flags.DEFINE_string(
    "finished",
    None,
    "The sweep.csv of this sweep in another workdir: `run` takes over its finished "
    "trials instead of repeating them.",
)
NOTE = flags.DEFINE_string("note", None, "A sentence to show in the report.")
EXAMPLES = flags.DEFINE_integer(
    "examples", 5, "Test examples to show in the report, with their predictions.", 0
)
CALIBRATE = flags.DEFINE_bool(
    "calibrate", True, "With `list`: train a few steps to estimate the time."
)
FLAG_VERBS = (  # flags that not all verbs use, and those that do
    (FINISHED, ("run",)),
    # `list` ignores some of these, but takes any command line of `run` to show its cost
    *((flag, ("list", "run")) for flag in (GROUP, SHARD, LAUNCHER, ADDRESS, RESOURCES)),
    (EXAMPLES, ("report",)),
    (CALIBRATE, ("list",)),
)


def main(verb: str, more_workdirs: list[str]) -> None:
    """Open the sweep, then execute the verb.

    Args:
        verb: one of `VERBS`.
        more_workdirs: `report`: the workdirs after the first.
    """
    jax.config.update("jax_platforms", "cpu")  # leave accelerators to the trials
    with one_sentence(), tempfile.TemporaryDirectory() as temporary:
        check_flags(verb)
        workdir = choose_workdir(verb, Path(temporary))
        task_file = import_task()
        if verb == "run":
            launcher = launchers.LAUNCHERS[LAUNCHER.value]
            launch = launcher(workdir, ADDRESS.value, RESOURCES.value)
            is_new = CONFIG.value and ABLATION.value
            if is_new and not (workdir / "sweep.json").exists():
                # try it in another folder first: a sweep's settings are fixed once it
                # has started, so bad input must not start one
                with contextlib.redirect_stderr(io.StringIO()):  # it is logged below
                    open_groups(verb, Path(temporary), task_file)
        sweep, groups = open_groups(verb, workdir, task_file)
        if verb == "list":
            preview.print_list(sweep, CALIBRATE.value)
        elif verb == "status":
            status.print_status(sweep, make_rows(sweep))
        elif verb == "report":
            joined = [
                settings.Options(verb, Path(os.path.expanduser(path)), sweep.task_file)
                for path in more_workdirs
            ]
            if joined:
                sweeps = [sweep, *map(settings.open_sweep, joined)]
                report.write_joined(sweeps, EXAMPLES.value)
            else:
                report.write(sweep, collect(sweep), EXAMPLES.value)
    if verb == "run":
        run_groups(sweep, groups, launch)


def open_groups(
    verb: str, workdir: Path, task_file: Path | None
) -> tuple[Sweep, list[Group] | Shard]:
    """Open or start the sweep in a workdir; return it and the groups to run."""
    sweep = settings.open_sweep(options(verb, workdir, task_file))
    if FINISHED.value is not None:
        sweep = restore(sweep, path_of(FINISHED), GROUP.value is None)
    return sweep, settings.select_groups(sweep, GROUP.value, SHARD.value)


def check_flags(verb: str) -> None:
    """Raise a ValueError if flags are missing or inconsistent."""
    named = cluster.COORDINATOR, cluster.NUM_PROCESSES, cluster.PROCESS_ID
    distributed.check_flags(*(flag.value for flag in named))
    if cluster.arguments() and LAUNCHER.value == "ray":
        raise ValueError(
            "--coordinator: a Ray task is a single process; use --launcher=local, or "
            "slurm with jobs of several tasks."
        )
    if WORKDIR.value is None and verb != "list":
        raise ValueError("--workdir is needed: the folder of the sweep.")
    for flag, verbs in FLAG_VERBS:
        if flag.present and verb not in verbs:
            no = "no" if flag.value is False else ""  # as in --nocalibrate
            raise ValueError(
                f"--{no}{flag.name} has no meaning for {verb}; it is for "
                f"{' and '.join(verbs)}."
            )
    if GROUP.value is not None and SHARD.value is not None:
        raise ValueError("--group and --shard exclude each other; give one of them.")
    if SHARD.value is not None:
        settings.parse_shard(SHARD.value)
    remote = [x for x in RESOURCES.value if not x.startswith("cores=")]
    unused = [("address", ADDRESS.value)]
    unused.append(("resources", RESOURCES.value if cluster.arguments() else remote))
    for name, value in unused:
        if value and LAUNCHER.value == "local":
            raise ValueError(
                f"--{name} needs --launcher=ray or --launcher=slurm (except for "
                f"--resources=cores=N, on one machine without GPUs)."
            )


def import_task() -> Path | None:
    """Execute --task_file; return the file that registers a user-defined task, if any.

    This may also be the config file, which has already been executed. The processes of
    groups get the file as their --task_file.
    """
    if TASK_FILE.value is not None:
        file = path_of(TASK_FILE).resolve()
        import_file(file)
        return file
    if CONFIG.value is None or CONFIG.value.task.name not in TASKS:
        return None
    is_ours = TASKS[CONFIG.value.task.name].__module__.startswith("headcount.")
    return None if is_ours else Path(config_file().partition(":")[0]).resolve()


def config_file() -> str:
    """Return the value of --config."""
    return config_flags.get_config_filename(flags.FLAGS["config"])


def choose_workdir(verb: str, temporary: Path) -> Path:
    """Return the workdir; `list` of a new sweep gets a temporary one.

    If `list` wrote to the workdir, a later `run` with other settings could not use it.
    """
    workdir = None if WORKDIR.value is None else path_of(WORKDIR)
    is_new = workdir is None or not (workdir / "sweep.json").exists()
    if verb != "list" or not is_new or (workdir is not None and not CONFIG.value):
        return workdir
    for flag, example in ((CONFIG, "configs/numbers.py"), (ABLATION, "heads")):
        if flag.value is None:
            raise ValueError(f"--{flag.name} is needed, as in --{flag.name}={example}.")
    return temporary


def options(verb: str, workdir: Path, task_file: Path | None) -> settings.Options:
    """Return the flags that specify the sweep."""
    specified = {name: flags.FLAGS[name].value for name in settings.FLAGS}
    specified["seeds"], specified["looks"] = parse_seeds(SEEDS.value, LOOKS.value)
    if CONFIG.value is not None:
        specified["config"], specified["config_file"] = CONFIG.value, config_file()
        overrides = config_flags.get_override_values(flags.FLAGS["config"])
        specified["overrides"] = dict(overrides)
    proposes = verb in ("list", "run") and GROUP.value is None
    return settings.Options(verb, workdir, task_file, proposes, **specified)


def run_groups(sweep: Sweep, groups: list[Group] | Shard, launch: Callable) -> None:
    """Run groups with a launcher, and print the status.

    Exit with code 1 if a group failed or was cancelled, and with 128 + signal number if
    a signal stopped the sweep; see `sweeps.runner`.
    """
    try:
        arguments = cluster.arguments()
        if arguments and LAUNCHER.value == "local":
            part_name = re.sub(r"\W+", "_", GROUP.value or SHARD.value or "all")
            multihost.run(sweep, groups, part_name, cluster.process(), arguments)
        else:
            launch(sweep, groups)
        # with groups that follow from new results
        grown = sweep.extended(propose=False)
        rows = collect(grown)
    except Stopped as stopped:
        print(
            f"sweep.py: {stopped}. Rerun the same command to resume.", file=sys.stderr
        )
        sys.exit(1 if stopped.number is None else 128 + stopped.number)
    except BrokenPipeError:
        raise  # handled by `run`
    except OSError as error:  # for example, a full disk
        fail(
            f"{describe(error)} What is done in {sweep.workdir} is safe; fix this and "
            f"rerun the same command."
        )
    status.print_status(grown, rows)
    num_left = count_unfinished(grown.plan, rows)
    if SHARD.value and num_left and sweep.grows:
        print("Rerun this when the other shards are done: more groups may follow.")
    if any(row["status"] == "failed" for row in rows):
        sys.exit(1)
    is_whole = SHARD.value is None and GROUP.value is None
    if num_left and is_whole and LAUNCHER.value != "local":
        print(
            f"sweep.py: {num_left} trials are not done; the lines above say how their "
            f"tasks ended. Rerun the same command to resume.",
            file=sys.stderr,
        )
        sys.exit(1)


def take_workdirs(words: list[str]) -> tuple[list[str], list[str]]:
    """Remove all --workdir flags but the first from a command line.

    Returns:
        The remaining command line, and the values of the removed flags.
    """
    kept, workdirs, words_left = [], [], iter(words)
    for word in words_left:
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name == "workdir":
            workdirs.append(value if equals else next(words_left, ""))
            if not workdirs[-1]:
                fail(
                    "--workdir needs the folder of a sweep, as in --workdir=runs/heads."
                )
        else:
            kept.append(word)
    return [*(f"--workdir={workdir}" for workdir in workdirs[:1]), *kept], workdirs[1:]


def cli() -> None:
    """Run as a script."""
    if len(sys.argv) < 2 or sys.argv[1] not in (*VERBS, "--help", "-h"):
        fail(
            f"The first argument must be one of {', '.join(VERBS)}, as in python "
            f"sweep.py list --config=configs/numbers.py --ablation=heads --seeds=3"
        )
    verb, more = "", []
    if sys.argv[1] in VERBS:
        verb = sys.argv.pop(1)
        sys.argv[1:], more = take_workdirs(sys.argv[1:])
    if more and verb != "report":
        fail(f"{verb} takes one --workdir, and {1 + len(more)} were given.")
    run(lambda: main(verb, more))


if __name__ == "__main__":
    cli()
