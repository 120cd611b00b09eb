"""Experiment trackers, which get a run's metrics in addition to metrics.jsonl.

`train.tracker` names them. A tracker gets the numbers of each row. It never stops a
run: if its library, the network or a login is missing, training logs a warning and
continues.
"""

import json
import os
import time
import uuid
from pathlib import Path

from headcount.runtime.logging import first_line, say
from headcount.runtime.workdir import read_json, write_json

RECORD = "wandb.json"  # in the workdir: the id of the wandb run to resume
FAILED = object()  # result of `attempt` after an error
FILES = ("config.json", "trials.json", "run.json", "metrics.jsonl")  # of the artifact


class TensorBoard:
    """An event file in the workdir."""

    FLUSH_SECONDS = 10.0

    def __init__(self, workdir: Path, step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self.event, self.scalar = Event, scalar
        # not SummaryWriter: its thread and exit handler print tracebacks if the disk is
        # full
        self.writer, self.flushed_at = EventsWriter(str(workdir / "events")), 0.0
        # lets TensorBoard hide what a killed run wrote after its last checkpoint
        start = SessionLog(status=SessionLog.START)
        self.writer.write_event(
            Event(wall_time=time.time(), step=step + 1, session_log=start)
        )

    def write(self, step: int, trial: int, numbers: dict) -> None:
        """Write the numbers of one trial's row."""
        for name, value in numbers.items():
            summary = self.scalar(f"trial_{trial}/{name}", value)
            event = self.event(wall_time=time.time(), step=step, summary=summary)
            self.writer.write_event(event)
        if time.monotonic() > self.flushed_at + self.FLUSH_SECONDS:
            self.writer.flush()
            self.flushed_at = time.monotonic()

    def close(self) -> None:
        """Flush and close the event file."""
        self.writer.close()


class WandB:
    """A run of Weights & Biases with the run's config; a resumed run continues it.

    All runs of a sweep are in one wandb group, named after the sweep's folder.
    WANDB_MODE, WANDB_PROJECT and the other environment variables work as documented by
    wandb.
    """

    def __init__(self, workdir: Path, step: int):
        import wandb  # noqa: F401  if not installed, fail before any file is read

        self.workdir, folder = workdir, workdir.resolve()
        in_sweep = folder.parent.name == "groups"
        self.run = start_wandb(
            workdir,
            is_new=step == 0,
            name=folder.name,
            group=folder.parent.parent.name if in_sweep else None,
            config=read_json(workdir / "config.json")
            | {"trials": read_json(workdir / "trials.json")},
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, trial: int, numbers: dict) -> None:
        """Log the numbers of one trial's row."""
        row = {f"trial_{trial}/{name}": value for name, value in numbers.items()}
        self.run.log({"step": step, **row})

    def close(self) -> None:
        """Log a table of evaluations and the run's files, and finish the wandb run."""
        lines = (self.workdir / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "dev_loss" in row]
        add_table(self.run, "evaluations", rows)
        add_files(self.run, "run", self.workdir, FILES)
        self.run.finish()


def start_wandb(workdir: Path, is_new: bool, config: dict, **options):
    """Start or resume the wandb run of a folder.

    Args:
        workdir: folder with wandb.json, which holds the id of a run to resume.
        is_new: start a new run, even if the folder has one.
        config, options: arguments of `wandb.init`.
    """
    import wandb

    path = workdir / RECORD
    if is_new or not path.exists():
        write_json(path, {"id": uuid.uuid4().hex})
    options |= {"id": read_json(path)["id"], "resume": "allow", "dir": str(workdir)}
    if "WANDB_PROJECT" not in os.environ:
        options["project"] = "headcount"
    try:
        # in a terminal, init would prompt for an API key, which would block training
        if "WANDB_MODE" not in os.environ and not wandb.login(prompt=False):
            raise ValueError("no login")
        return wandb.init(config=config, **options)
    except Exception as error:  # no login or no network; it raises many types
        say(f"Weights & Biases: {first_line(error)}; recording offline.")
        return wandb.init(config=config, **options, mode="offline")


def add_table(run, name: str, rows: list[dict]) -> None:
    """Log a table to a wandb run, unless the table has no rows."""
    import wandb

    if rows:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        cells = [[row.get(column) for column in columns] for row in rows]
        table = wandb.Table(columns=columns, data=cells, allow_mixed_types=True)
        run.log({name: table})


def add_files(run, kind: str, folder: Path, names) -> None:
    """Log the files of a folder as an artifact; skip those that don't exist."""
    import wandb

    artifact = wandb.Artifact(f"{kind}-{run.id}", type=kind)
    for name in names:
        if (folder / name).exists():
            artifact.add_file(str(folder / name), name=name)
    run.log_artifact(artifact)


def record_report(
    workdir: Path, names: list[str], tables: dict[str, list[dict]], config: dict
) -> None:
    """Log the report of a sweep to Weights & Biases.

    Args:
        workdir: the sweep's folder; the report joins the wandb group of its runs.
        names: names of the report's files.
        tables: rows by table name.
        config: the sweep's settings.
    """
    run = start_wandb(
        workdir,
        is_new=False,
        config=config,
        name="report",
        group=workdir.resolve().name,
        job_type="report",
    )
    for name, rows in tables.items():
        add_table(run, name, rows)
    add_files(run, "report", workdir, names)
    run.finish()


TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB}


def tracker_names(text: str) -> list[str]:
    """Parse train.tracker; raise a ValueError if there is no such tracker."""
    names = [] if text == "none" else text.split(",")
    for name in names:
        if name not in TRACKERS:
            raise ValueError(
                f"train.tracker must be none, or names of {', '.join(TRACKERS)} with "
                f"commas between them, got {text!r}."
            )
    return names


def start_trackers(names, workdir: Path, step: int) -> dict:
    """Start trackers by name; leave out those that can't be started, and log why.

    Args:
        names: names in `TRACKERS`.
        workdir: the run's folder.
        step: number of updates already done.
    """
    started = {name: attempt(name, TRACKERS[name], workdir, step) for name in names}
    return {name: board for name, board in started.items() if board is not FAILED}


def attempt(name: str, function, *arguments):
    """Call a tracker's function; log any exception that it raises, and return FAILED.

    Trackers raise exceptions of many types, and none may stop training.
    """
    try:
        return function(*arguments)
    except ImportError:
        say(
            f"train.tracker={name}: its package is not installed, so it records "
            f"nothing; pip install -r requirements-tracking.txt."
        )
    except Exception as error:
        say(
            f"train.tracker={name} failed and records nothing more: {first_line(error)}"
        )
    return FAILED
