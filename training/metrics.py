"""What a run reports while it trains: metrics.jsonl and its trackers."""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headcount.data.examples import segments_of
from headcount.runtime.files import open_append, write
from headcount.runtime.schema import Number, matches
from headcount.runtime.workdir import parse_json
from headcount.training.tracking import FAILED, attempt, start_trackers

ROW = {"step": Number(0), "trial": Number(0)}


class MetricsWriter:
    """Append rows to metrics.jsonl, and pass them on to the trackers.

    Rows after `step` are dropped on construction: a killed run wrote them after its
    last checkpoint, and will repeat those updates.

    Args:
        workdir: the run's folder.
        step: number of updates already done.
        silent: write nothing; true in all processes but the first.
        trackers: names in `training.tracking.TRACKERS`.
    """

    def __init__(
        self,
        workdir: Path,
        step: int,
        silent: bool = False,
        trackers: Sequence[str] = ("tensorboard",),
    ):
        self.file, self.boards, self.trackers = None, None, trackers
        self.silent = silent
        if silent:
            return
        self.path = workdir / "metrics.jsonl"
        text = self.path.read_text(errors="replace") if self.path.exists() else ""
        lines = text.splitlines()
        complete = [x for x in lines if (row := parse_row(x)) and row["step"] <= step]
        complete = "".join(line + "\n" for line in complete)
        if complete != text:
            write(self.path, complete)
        self.file = open_append(self.path)
        self.workdir, self.step = workdir, step

    def write(self, step: int, trial: int, **values) -> None:
        """Write one row, and send its numbers to the trackers.

        Non-finite values are written as null.

        Raises:
            OSError: the row can't be written, for example because the disk is full.
        """
        if self.silent:
            return
        values = {
            name: None if isinstance(value, float) and not np.isfinite(value) else value
            for name, value in values.items()
        }
        try:
            self.file.write(json.dumps({"step": step, "trial": trial, **values}) + "\n")
        except OSError as error:
            raise OSError(
                f"{self.path} can't be written at step {step} ({error.strerror}); free "
                f"some space and rerun the same command: the checkpoints are intact."
            ) from error
        if self.boards is None:  # late: importing their libraries takes a second
            self.boards = start_trackers(self.trackers, self.workdir, self.step)
        numbers = {k: v for k, v in values.items() if isinstance(v, int | float)}
        for name, board in list(self.boards.items()):
            if attempt(name, board.write, step, trial, numbers) is FAILED:
                del self.boards[name]

    def close(self) -> None:
        """Close the file and the trackers; `write` has already reported a full disk.

        A second call does nothing.
        """
        if self.silent:
            return
        with contextlib.suppress(OSError):
            self.file.close()
        boards, self.boards = self.boards or {}, {}
        for name, board in boards.items():
            attempt(name, board.close)


def parse_row(line: str) -> dict | None:
    """Parse a line of metrics.jsonl; return None if it is cut off by a kill."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if not matches(row, ROW):
        return None
    return row if all(map(_is_number_or_null, row.values())) else None


def _is_number_or_null(value) -> bool:
    """Return whether a value is null, or a number that fits a float.

    JSON also allows 1e999 and integers of any length, which don't fit.
    """
    if not isinstance(value, int | float):
        return value is None
    return abs(value) <= sys.float_info.max


def read_metrics(workdir: Path) -> list[dict]:
    """Read the complete rows of a run's metrics.jsonl."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [row for line in lines if (row := parse_row(line)) is not None]


class Window:
    """Averages and throughput over the steps since the last logged row.

    Checkpoints don't include it: the first row after a restart covers only the steps
    since the restart.

    Args:
        spec: shapes of one trial's batch; see `tasks.base.Batches`.
    """

    def __init__(self, spec: dict):
        self.capacity = {  # tokens per batch, padding included
            field: int(np.prod(array.shape))
            for field, array in segments_of(spec).items()
        }
        self.ideal_seconds = None  # per update of one trial at peak FLOP/s
        self.text, self.metrics = "", []
        self.start_clock()
        self.compiling = True

    def start_clock(self) -> None:
        """Start measuring throughput from now on."""
        self.compiling = False
        self.untimed, self.start = len(self.metrics), time.monotonic()
        self.input_wait = self.pause = 0.0

    @contextlib.contextmanager
    def waiting(self):
        """Count this block as time spent waiting for input."""
        start = time.monotonic()
        yield
        self.input_wait += time.monotonic() - start

    @contextlib.contextmanager
    def paused(self):
        """Exclude this block from throughput timing."""
        start = time.monotonic()
        yield
        self.pause += time.monotonic() - start

    def add(self, metrics: dict) -> np.ndarray:
        """Add the metrics of a step, each of shape R; return the diverged trials."""
        self.metrics.append(metrics)
        return np.flatnonzero(metrics["diverged"])

    def rows(self) -> dict[int, dict]:
        """Return a row for every trial that was updated, and start a new window."""
        stacked = {
            name: np.stack([m[name] for m in self.metrics])
            for name in self.metrics[0]
            if name != "tokens"
        }
        updated = stacked["updated"]
        tokens = {
            field: np.stack([m["tokens"][field] for m in self.metrics]) * updated
            for field in self.capacity
        }
        steps, pace = np.maximum(updated.sum(0), 1), self.throughput(tokens, updated)
        weight = stacked["weight"].astype(float) * updated
        loss = (np.where(updated, stacked["loss"], 0.0) * weight).sum(0)
        loss /= np.maximum(weight.sum(0), 1)
        largest = np.where(updated, stacked["gradient_norm"], 0.0).max(0)
        rows = {}
        for trial in np.flatnonzero(updated.any(0)).tolist():
            last = np.flatnonzero(updated[:, trial])[-1]
            rows[trial] = {
                "loss": float(loss[trial]),
                "gradient_norm": float(stacked["gradient_norm"][last, trial]),
                "largest_gradient_norm": float(largest[trial]),
                "learning_rate": float(stacked["learning_rate"][last, trial]),
                **{
                    f"{field}_fill": float(
                        tokens[field].sum(0)[trial] / (steps[trial] * capacity)
                    )
                    for field, capacity in self.capacity.items()
                },
                **pace,
            }
        self.text = mean_and_sd("loss", [row["loss"] for row in rows.values()])
        if pace:
            self.text += f"  {pace['tokens_per_second']:,.0f} tokens/s"
            self.text += f"  input wait {pace['input_wait_share']:.0%}"
        if "flops_utilisation" in pace:
            self.text += f"  {pace['flops_utilisation']:.0%} of peak FLOP/s"
        self.metrics = []
        self.start_clock()
        return rows

    def throughput(self, tokens: dict, updated) -> dict:
        """Return non-padding tokens per second over all trials, and related rates."""
        seconds = time.monotonic() - self.start - self.pause
        steps = len(self.metrics) - self.untimed
        if steps == 0:
            return {}
        count = sum(counts[self.untimed :].sum() for counts in tokens.values())
        rates = {
            "tokens_per_second": float(count / seconds),
            "steps_per_second": steps / seconds,
            "input_wait_share": self.input_wait / seconds,
        }
        if self.ideal_seconds is not None:
            ideal = updated[self.untimed :].sum() * self.ideal_seconds
            rates["flops_utilisation"] = float(ideal / seconds)
        return rates


def mean_and_sd(name: str, values: list[float]) -> str:
    """Format the mean over trials and, if there are several, the standard deviation."""
    if not values:
        return ""
    text = f"{name} {np.mean(values):.3f}"
    return text + (f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else "")
