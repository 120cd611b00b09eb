"""Train every arm of an ablation with many seeds, and report what can be believed.

    python sweep.py run --config=configs/multi30k.py --ablation=heads --seeds=16 \\
      --workdir=runs/heads
    python sweep.py report --workdir=runs/heads

`list` shows what would run and how long it would take, `run` runs it, `status` shows
how far it is, `report` writes report.html and report.md. The same command again goes
on where a sweep was stopped or killed. Any key of the config can be set, as in
train.py. A workdir remembers its sweep: later calls need --workdir alone.
"""

import re
import sys
import tempfile
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from headcount.configs.commandline import describe, fail, one_sentence, path_of, run
from headcount.runtime import cluster

VERBS = ("list", "run", "status", "report")
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file that every arm starts from.", lock_config=True
)
ABLATION = flags.DEFINE_string(
    "ablation", None, "Function in configs/ablations.py, or FILE.py:FUNCTION."
)
SEEDS = flags.DEFINE_integer(
    "seeds", None, "Seeds of every arm; default: the config's seeds."
)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder that the sweep is kept in.")
MATCH = flags.DEFINE_enum(
    "match",
    None,
    ["parameters", "flops"],
    "Give every arm the baseline's parameters or multiply-adds by model.mlp_dim.",
)
TUNE = flags.DEFINE_multi_string(
    "tune",
    [],
    "KEY=VALUE,VALUE,...: try a nuisance setting in every arm and keep the value that "
    "is best on dev, as in --tune=optimizer.learning_rate=0.002,0.005; with --search "
    "also KEY=LOW:HIGH.",
)
SEARCH = flags.DEFINE_string(
    "search",
    None,
    "optuna:N: let Optuna propose N nuisance settings for every arm, of --tune or of "
    "all keys that the ablation names.",
)
SEARCH_SEEDS = flags.DEFINE_integer(
    "search_seeds",
    None,
    "Seeds that a nuisance setting is tried with, none reported; default: 1.",
    1,
)
CHECKPOINT = flags.DEFINE_enum(
    "checkpoint",
    None,
    ["best", "last", "average"],
    "Parameters that are scored: best on dev (the default), last, or the mean of those "
    "kept.",
)
METRIC = flags.DEFINE_string(
    "metric",
    None,
    "Score that arms are compared by; default: train.best_metric's, for dev_loss bleu.",
)
TEST_SPLIT = flags.DEFINE_string(
    "test_split", None, "Split of the final scores; default: the corpus's test split."
)
GROUP_SIZE = flags.DEFINE_integer(
    "group_size", None, "Trials that train as one program, at most; default: 16.", 1
)
GROUP = flags.DEFINE_string("group", None, "Run only the group of this number or name.")
SHARD = flags.DEFINE_string("shard", None, "i/n: run every n-th group from i on.")
LAUNCHER = flags.DEFINE_enum(
    "launcher", "local", ["local", "ray", "slurm"], "Where groups run."
)
ADDRESS = flags.DEFINE_string(
    "address",
    None,
    "HOST:PORT of a Ray cluster; default: one on this machine. With --launcher=slurm: "
    "local, to try a sweep out without Slurm.",
)
RESOURCES = flags.DEFINE_multi_string(
    "resources",
    [],
    "KEY=VALUE of what a group takes, for Ray (num_gpus=1) or submitit "
    "(timeout_min=600, slurm_partition=gpu); or cores=1, of a machine without GPUs.",
)
NOTE = flags.DEFINE_string("note", None, "A sentence that the report repeats.")
EXAMPLES = flags.DEFINE_integer(
    "examples", 5, "Sentences in the report with their translations.", 0
)
CALIBRATE = flags.DEFINE_bool(
    "calibrate", True, "Train a few steps for the expected time that `list` shows."
)
flags.adopt_module_key_flags(cluster)  # so that --help has them


def main():
    """Put the sweep together, then do what the verb says."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # the devices are for the trials

    from headcount.runtime import distributed as hosts
    from headcount.sweeps import launchers, opening, pod, runner, show

    with one_sentence(), tempfile.TemporaryDirectory() as nowhere:
        hosts.check_flags(*(flag.value for flag in cluster.FLAGS[:3]))
        if cluster.arguments() and LAUNCHER.value == "ray":
            raise ValueError(
                "A Ray task is one process; --coordinator goes with --launcher=local, "
                "or with slurm and jobs of several tasks."
            )
        others = [x for x in RESOURCES.value if not x.startswith("cores=")]
        resources = RESOURCES.value if cluster.arguments() else others
        given = ["address"] * bool(ADDRESS.value) + ["resources"] * bool(resources)
        if given and LAUNCHER.value == "local":
            raise ValueError(
                f"--{given[0]} says nothing of groups that run here, but for "
                f"--resources=cores=1 on one machine; it goes with --launcher=ray or "
                f"--launcher=slurm."
            )
        if WORKDIR.value is None and VERB != "list":
            raise ValueError("--workdir is needed: the folder that the sweep is in.")
        workdir = Path(nowhere) if WORKDIR.value is None else path_of(WORKDIR)
        if VERB == "list" and CONFIG.value and not (workdir / "sweep.json").exists():
            workdir = Path(nowhere)  # or run would have to keep what was only listed
        if workdir == Path(nowhere):
            for flag, value in ((CONFIG, "configs/numbers.py"), (ABLATION, "heads")):
                if flag.value is None:
                    raise ValueError(
                        f"--{flag.name} is needed, as in --{flag.name}={value}."
                    )
        sweep = opening.open_sweep(options(workdir))
        groups = opening.chosen(sweep, GROUP.value, SHARD.value)
        if VERB == "list":
            show.print_list(sweep, CALIBRATE.value)
        elif VERB == "status":
            show.print_status(sweep, sweep.rows())
        else:
            rows = sweep.collect()
        if VERB == "report":
            from headcount.sweeps import reporting

            reporting.write(sweep, rows, EXAMPLES.value)
    if VERB != "run":
        return
    try:
        arguments = cluster.arguments()
        if arguments and LAUNCHER.value == "local":
            part = re.sub(r"\W+", "_", GROUP.value or SHARD.value or "all")
            rows = pod.run(sweep, groups, part, cluster.process(), arguments)
        else:
            launch = launchers.LAUNCHERS[LAUNCHER.value]
            rows = launch(sweep, groups, ADDRESS.value, RESOURCES.value)
    except runner.Stopped as stopped:
        print(f"sweep.py: {stopped}: the same command goes on.", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        raise  # to `run`
    except OSError as error:  # as on a full disk
        fail(
            f"{describe(error)} What is done in {workdir} is kept: mend that, and the "
            f"same command goes on."
        )
    # with the trials that a search has chosen, which are among the rows
    show.print_status(sweep.extended(propose=False), rows)
    if any(row["status"] == "failed" for row in rows):
        sys.exit(1)


def options(workdir: Path):
    """The flags that say which sweep it is."""
    from headcount.sweeps.opening import Options

    return Options(
        config=CONFIG.value,
        config_file=config_flags.get_config_filename(flags.FLAGS["config"])
        if CONFIG.value is not None
        else None,
        overrides=dict(config_flags.get_override_values(flags.FLAGS["config"]))
        if CONFIG.value is not None
        else {},
        ablation=ABLATION.value,
        seeds=SEEDS.value,
        workdir=workdir,
        match=MATCH.value,
        tune=TUNE.value,
        search=SEARCH.value,
        search_seeds=SEARCH_SEEDS.value,
        checkpoint=CHECKPOINT.value,
        metric=METRIC.value,
        test_split=TEST_SPLIT.value,
        group_size=GROUP_SIZE.value,
        note=NOTE.value,
        verb=VERB,
        proposes=VERB in ("list", "run") and GROUP.value is None,
    )


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in (*VERBS, "--help"):
        fail(
            f"Say what to do first, one of {', '.join(VERBS)}, as in python sweep.py "
            f"list --config=configs/numbers.py --ablation=heads --seeds=3"
        )
    if sys.argv[1] in VERBS:
        VERB = sys.argv.pop(1)
    run(main)
