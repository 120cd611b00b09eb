"""Several processes of one run: how they meet, what they agree on, how they end.

Every process runs the same program on its own devices, so all must take the same
decisions: what one of them alone knows is shared. What needs only one, process 0 does.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from headcount.runtime.logging import say
from headcount.runtime.workdir import HAS_KERNELS, differing, environment, summary

HEARTBEAT = 20  # seconds without a sign of life after which a process is given up
SHUTDOWN = 60  # seconds that a process waits for the others to end too
# The runtime's words where a process does not answer; there is no type of error for it.
LOST = re.compile(
    r"gloo|nccl|barrier|coordination|heartbeat|unavailable|deadline.exceeded|"
    r"connection (closed|reset)|socket closed",
    re.IGNORECASE,
)


def check_flags(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Raise a ValueError unless the flags of these names go together."""
    counts = {"--num_processes": num_processes, "--process_id": process_id}
    given = [name for name, value in counts.items() if value is not None]
    if coordinator is None or coordinator == "auto":
        if given:
            raise ValueError(
                f"{' and '.join(given)} needs --coordinator=HOST:PORT, the address of "
                f"process 0."
            )
        return
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"--coordinator must be HOST:PORT, as in 10.0.0.1:8476, or auto, got "
            f"{coordinator!r}."
        )
    if len(given) < len(counts):
        raise ValueError(
            f"--coordinator={coordinator} needs --num_processes, and in each process "
            f"its own --process_id from 0 on."
        )
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise ValueError(
            f"--process_id must be from 0 to below --num_processes={num_processes}, "
            f"got {process_id}."
        )


def connect(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    seconds: int,
) -> None:
    """Meet the other processes of the run; do nothing where there are none.

    Args:
        coordinator: HOST:PORT of process 0; "auto": as the cluster tells (Slurm, Open
            MPI, Kubernetes, TPU pods: what `jax.distributed` detects); None: alone, but
            on a TPU pod that names its hosts in TPU_WORKER_HOSTNAMES as with "auto".
        num_processes, process_id: None with "auto".
        seconds: in which all must have come.

    Raises:
        ValueError: the flags don't go together, or process 0 doesn't answer.
    """
    check_flags(coordinator, num_processes, process_id)
    on_pod = "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
    if coordinator is None and not on_pod:
        if jax.process_count() > 1:
            raise ValueError(
                f"This is one of the {jax.process_count()} hosts of a TPU pod; add "
                f"--coordinator=auto."
            )
        return
    is_auto = coordinator in (None, "auto")
    if process_id:
        await_address(coordinator, seconds)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    on_abort(
        f"Not all processes of the run have come to {coordinator or 'their first'} "
        f"within {seconds} seconds, or it is not process 0 that answers there.",
        status=2,
    )
    try:
        jax.distributed.initialize(
            None if is_auto else coordinator,
            num_processes,
            process_id,
            initialization_timeout=seconds,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=SHUTDOWN,
        )
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        mend = (
            "give --coordinator=HOST:PORT, --num_processes and --process_id"
            if is_auto
            else "choose another port"
        )
        raise ValueError(
            f"--coordinator={coordinator or 'auto'} can't be used here ({why}); {mend}."
        ) from error
    on_abort(
        "Another process of this run has stopped; its log says why. So does this one; "
        "the same command in all processes goes on from the last checkpoint.",
        status=1,
    )
    say.muted = not is_first()
    say(f"{jax.process_count()} processes with {jax.device_count()} devices.")


def await_address(address: str, seconds: float) -> None:
    """Wait until something listens there.

    Raises:
        ValueError: nothing did in time.
    """
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise ValueError(
                    f"No coordinator answers at {address} within {seconds} seconds "
                    f"({error}); start process 0 too, on that host."
                ) from None
        time.sleep(0.2)


def on_abort(sentence: str, status: int) -> None:
    """End with a sentence where the runtime aborts, as it does when a process is lost.

    From a thread of its own and with no error that Python could catch.
    """

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def receive(number):
        os.write(2, f"{sys.argv[0].rsplit('/', 1)[-1]}: {sentence}\n".encode())
        os._exit(status)

    on_abort.kept = receive  # C does not count as a reference
    ctypes.CDLL(None).signal(signal.SIGABRT, receive)


def is_first() -> bool:
    """Whether this process writes and speaks for all."""
    return jax.process_index() == 0


def share(value) -> list:
    """What every process has, in their order; anything that JSON holds.

    All processes must call it at the same place.
    """
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(text.size)).ravel()
    # few lengths, since each is a program
    padded = np.zeros(max(256, 1 << int(sizes.max() - 1).bit_length()), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded)
    return [
        json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)
    ]


@contextlib.contextmanager
def together():
    """Around what a process does by itself: where one of them fails, all do.

    Raises:
        ValueError: another process can't do it; the sentence is its own.
    """
    own = None
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        own = error
    said = share(None if own is None else str(own))
    bad = [index for index, sentence in enumerate(said) if sentence is not None]
    if not bad:
        return
    leave()
    if own is None:
        own = ValueError(f"Process {bad[0]} can't go on: {said[bad[0]]}")
    raise own


def check_same_run(workdir: Path, config: dict, trials: list[dict]) -> None:
    """Raise a ValueError unless all processes train this, in one workdir."""
    token = workdir / ".hosts"
    with together():
        if is_first():
            token.write_text(os.urandom(8).hex())
    here = environment()
    software = here["versions"] | {"commit": here["commit"]}
    has_commits = None not in share(here["commit"])  # not so where one lacks git
    check_same("software", software, may_differ=() if has_commits else ("commit",))
    kernels = share(here["native_attention"])
    without = [index for index, told in enumerate(kernels) if told not in HAS_KERNELS]
    if 0 < len(without) < len(kernels):
        leave()
        raise ValueError(
            f"process {without[0]} can't compile the kernels of attention on CPUs "
            f"({kernels[without[0]]}), and others can; install a C++ compiler there, "
            f"or set CXX=none for all."
        )
    check_same("config", config, may_differ=("data.directory",))
    check_same("list of trials", trials)
    mark = share(is_first() and token.read_text())[0]
    with together():
        if not token.exists() or token.read_text() != mark:
            raise ValueError(
                f"{workdir} is not the folder of process 0; --workdir must lie on a "
                f"file system that all hosts share."
            )


def check_same(what: str, value, may_differ: tuple[str, ...] = ()) -> None:
    """Raise a ValueError unless all processes have the same value."""
    first = share(value)[0]
    with together():
        if differences := differing(first, value, may_change=may_differ):
            differences = summary(differences).replace("there", "in process 0")
            raise ValueError(
                f"the {what} differs from that of process 0: {differences}."
            )


def leave() -> None:
    """End the run with the other processes, which come here too."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


@contextlib.contextmanager
def given_up():
    """Wait for the runtime's verdict where an error says that a process was lost.

    The runtime then aborts this process, see `on_abort`; any other error goes on.
    """
    try:
        yield
    except Exception as error:
        if jax.distributed.is_initialized() and LOST.search(str(error)):
            time.sleep(2 * HEARTBEAT)
        raise


@contextlib.contextmanager
def at_once():
    """End this process at once where it fails alone.

    Python would wait for the others at its end, and they for what this one owes them.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        status = 1
        if isinstance(error, SystemExit):  # has said why
            status = error.code
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    leave()
