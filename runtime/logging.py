"""Log lines and progress: a rich progress bar on a terminal, plain lines elsewhere."""

import contextlib
import functools
import logging
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent  # as written in log records: not resolved


class Progress:
    """Show progress: a rich bar on a terminal, else a plain line every `seconds`."""

    def __init__(self, total: int, done: int = 0, unit: str = "step", seconds=10.0):
        self.total, self.done, self.unit, self.seconds = total, done, unit, seconds
        self.first, self.start = done, time.monotonic()
        self.last_line = self.start
        self.bar = None
        if sys.stderr.isatty() and not say.muted:
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
        """Set the number of completed units, and show it."""
        self.done = done
        if self.bar is not None:
            self.bar.update(self.task, completed=done, text=text)
            return
        now = time.monotonic()
        if now - self.last_line >= self.seconds or done == self.total:
            self.last_line = now
            rate = (done - self.first) / max(now - self.start, 1e-9)
            remaining = f"  {clock((self.total - done) / rate)} left" if rate else ""
            say(f"{self.unit} {done}/{self.total}  {text}{remaining}")

    def close(self) -> None:
        """Stop the bar, leaving it on the screen."""
        if self.bar is not None:
            self.bar.stop()


@contextlib.contextmanager
def heartbeat(text: str) -> Iterator[None]:
    """Log every 30 seconds, while the block runs, that it is still running."""
    start, is_over = time.monotonic(), threading.Event()

    def beat():
        while not is_over.wait(30):
            say(f"{text}, for {clock(time.monotonic() - start)} so far.")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@functools.cache
def console():
    """Return the console on standard error, which bars and log lines share."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """Log a line for the user, above the progress bar if there is one."""
    if say.muted:
        return
    if sys.stderr.isatty():
        console().print(text, markup=False, soft_wrap=True)
    else:
        print(text, file=sys.stderr, flush=True)


say.muted = False  # True in all processes but the first


class SayHandler(logging.Handler):
    """Show all records from the packages `data` and `attention`, and warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        is_ours = record.pathname.startswith(
            (str(ROOT / "data"), str(ROOT / "attention"))
        )
        if is_ours or record.levelno >= logging.WARNING:
            say(record.getMessage())


def show_log() -> None:
    """Print the log records of absl, which our packages use, and of attention."""
    from absl import logging as absl_logging

    attention = logging.getLogger("headcount.attention")  # which has no absl
    for logger in (absl_logging.get_absl_logger(), attention):
        logger.handlers = [SayHandler()]
        logger.setLevel(logging.INFO)
        logger.propagate = False


def clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds."""
    if seconds == float("inf"):
        return "?"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened to fit into a sentence.

    Words stay whole: part of a path would name another file.
    """
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return textwrap.shorten(line.rstrip("."), 300, placeholder=" ...")
