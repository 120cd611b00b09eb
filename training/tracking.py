"""Trackers: where a run's metrics can be watched, besides metrics.jsonl.

`train.tracker` names them. A tracker gets the numbers of each row, and never stops a
run: without its library, network or login there is a warning, and training goes on.
"""

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
        import wandb

        self.wandb, self.workdir = wandb, workdir
        folder, path = workdir.resolve(), workdir / RECORD
        if step == 0 or not path.exists():
            write_json(path, {"id": uuid.uuid4().hex})
        in_sweep = folder.parent.name == "groups"
        options = {
            "id": read_json(path)["id"],
            "resume": "allow",
            "dir": str(workdir),
            "name": folder.name,
            "group": folder.parent.parent.name if in_sweep else None,
            "config": read_json(workdir / "config.json")
            | {"trials": read_json(workdir / "trials.json")},
        }
        if "WANDB_PROJECT" not in os.environ:
            options["project"] = "headcount"
        try:
            # init would ask for a key in a terminal, and training would wait for it
            if "WANDB_MODE" not in os.environ and not wandb.login(prompt=False):
                raise ValueError("no login")
            self.run = wandb.init(**options)
        except Exception as error:  # no login or no network; it raises many types
            say(f"Weights & Biases: {first_line(error)}; recording offline.")
            self.run = wandb.init(**options, mode="offline")
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, trial: int, numbers: dict) -> None:
        """Add a row of one trial."""
        row = {f"trial_{trial}/{name}": value for name, value in numbers.items()}
        self.run.log({"step": step, **row})

    def close(self) -> None:
        """Add the run's files as an artifact, and end the record."""
        artifact = self.wandb.Artifact(f"run-{self.run.id}", type="run")
        for path in (self.workdir / name for name in FILES):
            if path.exists():
                artifact.add_file(str(path))
        self.run.log_artifact(artifact)
        self.run.finish()


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
