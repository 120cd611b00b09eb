"""Trackers: where a run's metrics can be watched, besides metrics.jsonl.

`train.tracker` names them. A tracker gets the numbers of each row, and never stops a
run: without its library, network or login there is a warning, and training goes on.
"""

import json
import os
import time
import uuid
from pathlib import Path

from headcount.runtime.logging import say
from headcount.runtime.workdir import read_json, write_json

RECORD = "wandb.json"  # in the workdir: the id by which a resumed run is continued
FILES = ("config.json", "trials.json", "run.json", "metrics.jsonl")  # of the artifact


class TensorBoard:
    """An event file in the workdir."""

    FLUSH_SECONDS = 10.0

    def __init__(self, workdir: Path, step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self.event, self.scalar = Event, scalar
        # Not a SummaryWriter: its thread and its exit handler print tracebacks when the
        # disk is full.
        self.writer, self.flushed_at = EventsWriter(str(workdir / "events")), 0.0
        # TensorBoard then hides what a killed run wrote after its last checkpoint.
        start = SessionLog(status=SessionLog.START)
        self.writer.write_event(
            Event(wall_time=time.time(), step=step + 1, session_log=start)
        )

    def write(self, step: int, trial: int, numbers: dict) -> None:
        """Add a row of one trial."""
        for name, value in numbers.items():
            summary = self.scalar(f"trial_{trial}/{name}", value)
            event = self.event(wall_time=time.time(), step=step, summary=summary)
            self.writer.write_event(event)
        if time.monotonic() > self.flushed_at + self.FLUSH_SECONDS:
            self.writer.flush()
            self.flushed_at = time.monotonic()

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


class WandB:
    """A run of Weights & Biases with the run's config; a resumed run continues it.

    The runs of a sweep are in the group of its folder's name. WANDB_MODE, WANDB_PROJECT
    and the other variables of wandb work as in its documentation.
    """

    def __init__(self, workdir: Path, step: int):
        import wandb  # noqa: F401  fails before files are read if it is not installed

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
        """Add a row of one trial."""
        row = {f"trial_{trial}/{name}": value for name, value in numbers.items()}
        self.run.log({"step": step, **row})

    def close(self) -> None:
        """Add a table of evaluations and the run's files, and end the record."""
        lines = (self.workdir / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "dev_loss" in row]
        add_table(self.run, "evaluations", rows)
        add_files(self.run, "run", self.workdir, FILES)
        self.run.finish()


def start_wandb(workdir: Path, is_new: bool, config: dict, **options):
    """Start or continue the record of a folder; return wandb's run.

    Args:
        workdir: has wandb.json, by which a record is continued.
        is_new: start another record, even if there is one.
        config, options: of `wandb.init`.
    """
    import wandb

    path = workdir / RECORD
    if is_new or not path.exists():
        write_json(path, {"id": uuid.uuid4().hex})
    options |= {"id": read_json(path)["id"], "resume": "allow", "dir": str(workdir)}
    if "WANDB_PROJECT" not in os.environ:
        options["project"] = "headcount"
    try:
        # init would ask for a key in a terminal, and training would wait for it
        if "WANDB_MODE" not in os.environ and not wandb.login(prompt=False):
            raise ValueError("no login")
        return wandb.init(config=config, **options)
    except Exception as error:  # no login or no network; it raises many types
        say(f"Weights & Biases: {first_line(error)}; recording offline.")
        return wandb.init(config=config, **options, mode="offline")


def add_table(run, name: str, rows: list[dict]) -> None:
    """Add a table to a record of Weights & Biases, unless it has no rows."""
    import wandb

    if rows:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        cells = [[row.get(column) for column in columns] for row in rows]
        table = wandb.Table(columns=columns, data=cells, allow_mixed_types=True)
        run.log({name: table})


def add_files(run, kind: str, folder: Path, names) -> None:
    """Add those files of a folder that exist to a record, as an artifact."""
    import wandb

    artifact = wandb.Artifact(f"{kind}-{run.id}", type=kind)
    for name in names:
        if (folder / name).exists():
            artifact.add_file(str(folder / name), name=name)
    run.log_artifact(artifact)


def record_report(
    workdir: Path, names: list[str], tables: dict[str, list[dict]], config: dict
) -> None:
    """Add the report of a sweep to Weights & Biases; log why if that fails.

    Args:
        workdir: of the sweep, whose groups are the runs of the same group.
        names: of the report's files.
        tables: rows by the name of a table.
        config: the sweep's settings.
    """
    attempt("wandb", _record_report, workdir, names, tables, config)


def _record_report(workdir, names, tables, config) -> None:
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
    """Return the names in train.tracker; ValueError if there is no such tracker."""
    names = [] if text == "none" else text.split(",")
    for name in names:
        if name not in TRACKERS:
            raise ValueError(
                f"train.tracker must be none, or names of {', '.join(TRACKERS)} with "
                f"commas between them, got {text!r}."
            )
    return names


def start_trackers(names, workdir: Path, step: int) -> list:
    """Return the trackers that can be started; log why another one can't.

    Args:
        names: in `TRACKERS`.
        workdir: of the run.
        step: updates done before.
    """
    return [
        Forgiving(name, tracker)
        for name in names
        if (tracker := attempt(name, TRACKERS[name], workdir, step)) is not None
    ]


def attempt(name: str, function, *arguments):
    """Return what a function of a tracker returns; log an error of any type.

    A tracker may fail in ways that are its own, and must not stop a training.
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
    return None


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Forgiving:
    """A tracker whose errors are logged; after one it gets no more rows."""

    def __init__(self, name: str, tracker):
        self.name, self.tracker = name, tracker

    def write(self, *row) -> None:
        """See `TensorBoard.write`."""
        if self.tracker is not None and attempt(self.name, self.send, *row) is None:
            self.tracker = None

    def send(self, *row) -> bool:
        """Pass a row on."""
        self.tracker.write(*row)
        return True

    def close(self) -> None:
        """See `TensorBoard.close`."""
        if self.tracker is not None:
            attempt(self.name, self.tracker.close)
