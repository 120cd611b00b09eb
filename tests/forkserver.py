"""Run scripts in forks of a process that has imported their libraries already.

Every fork is a process of its own that runs a script from its first line, with its own
arguments, streams and exit code. Only the libraries are imported once, which takes
seconds that hundreds of command lines would each spend otherwise.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What the scripts import. None of these may define a flag that only some scripts have,
# nor start JAX's backend, whose threads do not survive a fork.
LIBRARIES = (
    "headcount.runtime.bootstrap",
    *("jax", "flax.nnx", "optax", "orbax.checkpoint", "grain", "tensorboardX"),
    *("rich.console", "rich.progress", "rich.table", "ml_collections.config_flags"),
    *("headcount.tasks", "headcount.configs.commandline", "headcount.training.loop"),
    *("headcount.training.restore", "headcount.training.dry_run"),
    *("headcount.analysis.tables", "headcount.analysis.pruning"),
    "headcount.analysis.plots",
)


class ForkServer:
    """Starts the server when it is first needed, and talks to it."""

    def __init__(self):
        self.process = None

    def run(
        self,
        args: list,
        stdin: bytes = b"",
        cwd: Path = ROOT,
        before: str = "",
        timeout: float = 300,
    ) -> subprocess.CompletedProcess:
        """Run a script, and return its exit code and what it wrote, as text.

        Args:
            args: its name and its arguments.
            stdin: what it can read.
            cwd: where it runs.
            before: Python code that runs first, in the same process.
            timeout: seconds until it is killed.

        Raises:
            subprocess.TimeoutExpired: it was killed.
        """
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            atexit.register(self.close)
        args = [str(arg) for arg in args]
        with tempfile.TemporaryDirectory() as folder:
            names = [os.path.join(folder, name) for name in ("in", "out", "err")]
            Path(names[0]).write_bytes(stdin)
            order = {"args": args, "cwd": str(cwd), "streams": names}
            order |= {"before": before, "timeout": timeout}
            print(json.dumps(order), file=self.process.stdin)
            self.process.stdin.flush()
            code = json.loads(self.process.stdout.readline())
            out, err = (Path(name).read_text() for name in names[1:])
        if code is None:
            raise subprocess.TimeoutExpired(args, timeout, out, err)
        return subprocess.CompletedProcess(args, code, out, err)

    def close(self) -> None:
        """End the server."""
        self.process.stdin.close()
        self.process.wait()


def serve() -> None:
    """Run a script for every order on standard input; answer with its exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is not an answer
    sys.path[0] = str(ROOT)
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()  # or every fork copies all objects when it ends
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            run_script(order)
            return
        print(json.dumps(wait(child, order["timeout"])), file=answers, flush=True)


def run_script(order: dict) -> None:
    """Become the script of an order."""
    for number, name in enumerate(order["streams"]):
        opened = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, closefd=False)  # noqa: SIM115
        for number, mode in enumerate(("r", "w", "w"))
    )
    os.chdir(order["cwd"])
    sys.argv = order["args"]
    exec(order["before"], {})
    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")


def wait(child: int, timeout: float) -> int | None:
    """Return the exit code of a process, or None after killing it."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    serve()
