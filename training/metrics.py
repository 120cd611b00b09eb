"""What a run says while it runs: metrics.jsonl, TensorBoard, and a progress line."""

import json
import sys
import time
from pathlib import Path


class MetricsWriter:
    """Append rows to metrics.jsonl and to TensorBoard's event file.

    Rows after `step` are dropped at the start: they belong to updates that a killed
    run had done after its last checkpoint, and that will be done again.
    """

    def __init__(self, workdir: Path, step: int):
        self.path = workdir / "metrics.jsonl"
        rows = self.path.read_text().splitlines() if self.path.exists() else []
        kept = [row for row in rows if is_row(row) and json.loads(row)["step"] <= step]
        if kept != rows:
            part = self.path.with_suffix(".part")
            part.write_text("".join(row + "\n" for row in kept))
            part.replace(self.path)
        self.file = self.path.open("a", buffering=1)
        self.workdir, self.step, self.board = workdir, step, None

    def write(self, step: int, trial: int, **values) -> None:
        """Write one row; numbers go to TensorBoard too."""
        self.file.write(json.dumps({"step": step, "trial": trial, **values}) + "\n")
        if self.board is None:  # imported late: it takes a second
            from tensorboardX import SummaryWriter

            self.board = SummaryWriter(str(self.workdir), purge_step=self.step + 1)
        for name, value in values.items():
            if isinstance(value, int | float):
                self.board.add_scalar(f"trial_{trial}/{name}", value, step)

    def close(self) -> None:
        """Flush both files."""
        self.file.close()
        if self.board is not None:
            self.board.close()


def is_row(line: str) -> bool:
    """Whether a line is whole: the last one of a killed run may not be."""
    try:
        return "step" in json.loads(line)
    except json.JSONDecodeError:
        return False


class Progress:
    """A rich bar on a terminal; elsewhere a plain line every `seconds`."""

    def __init__(self, total: int, done: int = 0, unit: str = "step", seconds=10.0):
        self.total, self.done, self.unit, self.seconds = total, done, unit, seconds
        self.first, self.start = done, time.monotonic()
        self.last_line = self.start
        self.bar = None
        if sys.stderr.isatty():
            from rich import progress

            self.bar = progress.Progress(
                progress.TextColumn(f"{unit} {{task.completed}}/{{task.total}}"),
                progress.BarColumn(),
                progress.TextColumn("{task.fields[text]}"),
                progress.TimeElapsedColumn(),
                progress.TextColumn("left"),
                progress.TimeRemainingColumn(),
                console=console(),
            )
            self.task = self.bar.add_task("", total=total, completed=done, text="")
            self.bar.start()

    def update(self, done: int, text: str = "") -> None:
        """Report `done` of the total."""
        self.done = done
        if self.bar is not None:
            self.bar.update(self.task, completed=done, text=text)
            return
        now = time.monotonic()
        if now - self.last_line >= self.seconds or done == self.total:
            self.last_line = now
            rate = (done - self.first) / max(now - self.start, 1e-9)
            left = (self.total - done) / rate if rate else float("inf")
            say(f"{self.unit} {done}/{self.total}  {text}  {clock(left)} left")

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.stop()


def console():
    """Rich's console on standard error, one for the bar and the lines above it."""
    from rich.console import Console

    if not hasattr(console, "shared"):
        console.shared = Console(stderr=True, highlight=False)
    return console.shared


def say(text: str) -> None:
    """A line for the user, above the bar where there is one."""
    if sys.stderr.isatty():
        console().print(text, markup=False, soft_wrap=True)
    else:
        print(text, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    if seconds == float("inf"):
        return "?"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
