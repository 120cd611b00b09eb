"""What a run says while it runs: metrics.jsonl, TensorBoard, and a progress line."""

import contextlib
import json
import time
from pathlib import Path

import numpy as np

from headcount.runtime.workdir import is_like, parsed

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("source", "target")


class MetricsWriter:
    """Append rows to metrics.jsonl and to TensorBoard's event file.

    Rows after `step` are dropped at the start: they belong to updates that a killed
    run had done after its last checkpoint, and that will be done again. One that is
    `silent` writes nothing: of several processes one does.
    """

    def __init__(self, workdir: Path, step: int, silent: bool = False):
        self.file = self.board = None
        self.silent = silent
        if silent:
            return
        self.path = workdir / "metrics.jsonl"
        text = self.path.read_text(errors="replace") if self.path.exists() else ""
        rows = text.splitlines()
        kept = [line for line in rows if (row := row_of(line)) and row["step"] <= step]
        kept = "".join(row + "\n" for row in kept)  # the last may have lost its end
        if kept != text:
            part = self.path.with_suffix(".part")
            part.write_text(kept)
            part.replace(self.path)
        self.file = self.path.open("a", buffering=1)
        self.workdir, self.step = workdir, step

    def write(self, step: int, trial: int, **values) -> None:
        """Write one row; numbers go to TensorBoard too. What is not finite is null.

        Raises:
            OSError: the row can't be written, as on a full disk.
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
                f"{self.path} can't be written at step {step} ({error.strerror}); make "
                f"room and run the same command again: the checkpoints are intact."
            ) from error
        if self.board is None:  # imported late: it takes a second
            from tensorboardX import SummaryWriter

            # Without an end to its queue: once its thread has met a full disk and died,
            # nobody empties that, and who puts into a full one waits forever.
            self.board = SummaryWriter(
                str(self.workdir), purge_step=self.step + 1, max_queue=0
            )
        for name, value in values.items():
            if isinstance(value, int | float):
                self.board.add_scalar(f"trial_{trial}/{name}", value, step)

    def close(self) -> None:
        """Close both files."""
        if self.silent:
            return
        with contextlib.suppress(OSError):  # `write` has said what could not be written
            self.file.close()
        if self.board is not None:
            with contextlib.suppress(OSError):
                self.board.close()


def row_of(line: str) -> dict | None:
    """The row of a line, if it is whole: the last one of a killed run may not be."""
    try:
        row = parsed(line)
    except ValueError:
        return None
    return row if is_like(row, {"step": 0, "trial": 0}) else None


def metrics_of(workdir: Path) -> list[dict]:
    """The whole lines of a run's metrics.jsonl."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [row for line in lines if (row := row_of(line)) is not None]


def is_evaluated(workdir: Path, step: int) -> bool:
    """Whether metrics.jsonl has scores on dev of a step."""
    rows = metrics_of(workdir)
    return any(row["step"] == step and "dev_loss" in row for row in rows)


class Window:
    """Averages of what the steps since the last row reported, and their pace.

    No checkpoint holds them: the first row after a restart is of the steps since then.
    """

    def __init__(self, shape: tuple[int, int, int]):
        self.shape = shape  # B, S, T: for the share of real tokens
        self.ideal_seconds = None  # that an update of one trial takes at the peak
        self.text, self.metrics = "", []
        self.start_clock()
        self.compiling = True

    def start_clock(self) -> None:
        """Measure the pace from the steps to come alone."""
        self.compiling = False
        self.untimed, self.start = len(self.metrics), time.monotonic()
        self.input_wait = self.pause = 0.0

    @contextlib.contextmanager
    def waiting(self):
        """Time in which the input pipeline is waited for."""
        start = time.monotonic()
        yield
        self.input_wait += time.monotonic() - start

    @contextlib.contextmanager
    def paused(self):
        """Time that is not training."""
        start = time.monotonic()
        yield
        self.pause += time.monotonic() - start

    def add(self, metrics: dict) -> np.ndarray:
        """Take in the metrics of a step, each of shape R; the trials that diverged."""
        self.metrics.append(metrics)
        return np.flatnonzero(metrics["diverged"])

    def rows(self) -> dict[int, dict]:
        """A row of every trial that was updated, and a new window."""
        of = {
            name: np.stack([m[name] for m in self.metrics]) for name in self.metrics[0]
        }
        updated = of.pop("updated")
        for side in SIDES:
            of[f"{side}_tokens"] = of[f"{side}_tokens"] * updated
        steps, pace = np.maximum(updated.sum(0), 1), self.pace(of, updated)
        target, source = of["target_tokens"].sum(0), of["source_tokens"].sum(0)
        loss = np.where(updated, of["loss"], 0.0) * of["target_tokens"]
        loss = loss.sum(0) / np.maximum(target, 1)
        B, S, T = self.shape
        rows = {}
        for trial in np.flatnonzero(updated.any(0)).tolist():
            last = np.flatnonzero(updated[:, trial])[-1]
            rows[trial] = {
                "loss": float(loss[trial]),
                "gradient_norm": float(of["gradient_norm"][last, trial]),
                "learning_rate": float(of["learning_rate"][last, trial]),
                "source_fill": float(source[trial] / (steps[trial] * B * S)),
                "target_fill": float(target[trial] / (steps[trial] * B * T)),
                **pace,
            }
        self.text = spread("loss", [row["loss"] for row in rows.values()])
        if pace:
            self.text += f"  {pace['tokens_per_second']:,.0f} tokens/s"
            self.text += f"  input wait {pace['input_wait_share']:.0%}"
        if "flops_utilisation" in pace:
            self.text += f"  {pace['flops_utilisation']:.0%} of peak FLOP/s"
        self.metrics = []
        self.start_clock()
        return rows

    def pace(self, of: dict, updated) -> dict:
        """Of all trials: real tokens a second since the clock started, and the like."""
        seconds = time.monotonic() - self.start - self.pause
        steps = len(self.metrics) - self.untimed
        if steps == 0:
            return {}
        tokens = sum(of[f"{side}_tokens"][self.untimed :].sum() for side in SIDES)
        pace = {
            "tokens_per_second": float(tokens / seconds),
            "steps_per_second": steps / seconds,
            "input_wait_share": self.input_wait / seconds,
        }
        if self.ideal_seconds is not None:
            ideal = updated[self.untimed :].sum() * self.ideal_seconds
            pace["flops_utilisation"] = float(ideal / seconds)
        return pace


def spread(name: str, values: list[float]) -> str:
    """A number of every trial in a few words: the mean and the standard deviation."""
    if not values:
        return ""
    text = f"{name} {np.mean(values):.3f}"
    return text + (f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else "")
