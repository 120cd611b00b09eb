"""Multi-process runs: connect, agree on decisions, and end together.

Every process runs the same program on its own devices, so all processes must take the
same decisions: information that only one of them has is gathered first. Process 0 does
what must be done only once.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from headcount.runtime.files import write
from headcount.runtime.logging import say
from headcount.runtime.workdir import differences, environment, summarize

HEARTBEAT = 20  # seconds without a heartbeat after which a process counts as lost
SHUTDOWN = 60  # seconds to wait for the other processes at exit


def check_flags(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Raise a ValueError unless the three flags are consistent."""
    counts = {"--num_processes": num_processes, "--process_id": process_id}
    provided = [name for name, value in counts.items() if value is not None]
    if coordinator is None or coordinator == "auto":
        if provided:
            raise ValueError(
                f"{' and '.join(provided)} needs --coordinator=HOST:PORT, the address "
                f"of process 0."
            )
        return
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"--coordinator must be HOST:PORT, as in 10.0.0.1:8476, or auto, got "
            f"{coordinator!r}."
        )
    if len(provided) < len(counts):
        raise ValueError(
            f"--coordinator={coordinator} needs --num_processes, and in each process "
            f"its own --process_id from 0 on."
        )
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise ValueError(
            f"--process_id must be from 0 to below --num_processes={num_processes}, "
            f"got {process_id}."
        )


def check_bind_address(bind_address: str | None, coordinator: str | None) -> None:
    """Raise a ValueError unless --bind_address is HOST:PORT and has a coordinator."""
    if bind_address is None:
        return
    host, _, port = bind_address.rpartition(":")
    if coordinator is None or not host or not port.isdecimal() or int(port) >= 2**16:
        raise ValueError(
            f"--bind_address must be HOST:PORT, as in 10.0.0.1:8476, and needs "
            f"--coordinator; got {bind_address!r}."
        )


def lists_hosts() -> bool:
    """Return whether this is a TPU pod that lists its hosts, as GKE's do."""
    return "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")


def connect(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    seconds: int,
    bind_address: str | None = None,
) -> None:
    """Connect to the other processes of the run, if there are any.

    Args:
        coordinator: HOST:PORT of process 0. "auto": detected by `jax.distributed` from
            Slurm, Open MPI, Kubernetes or a TPU pod. None: a single process, except on
            a TPU pod that lists its hosts in TPU_WORKER_HOSTNAMES.
        num_processes, process_id: None with "auto".
        seconds: timeout for all processes to connect.
        bind_address: HOST:PORT at which process 0 listens; None: all its addresses.

    Raises:
        ValueError: the flags are inconsistent, or process 0 doesn't answer.
    """
    check_flags(coordinator, num_processes, process_id)
    check_bind_address(bind_address, coordinator)
    if coordinator is None and not lists_hosts():
        check_devices()
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
        f"Not all processes of the run connected to {coordinator or 'process 0'} "
        f"within {seconds} seconds, or another program listens at that address.",
        status=2,
    )
    try:
        jax.distributed.initialize(
            None if is_auto else coordinator,
            num_processes,
            process_id,
            coordinator_bind_address=bind_address,
            initialization_timeout=seconds,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=SHUTDOWN,
        )
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        fix = (
            "give --coordinator=HOST:PORT, --num_processes and --process_id"
            if is_auto
            else "choose another port"
        )
        raise ValueError(
            f"--coordinator={coordinator or 'auto'} can't be used here ({why}); {fix}."
        ) from error
    on_abort(
        "Another process of this run stopped (its log says why), so this one stops "
        "too. Rerun the same command in all processes to resume from the last "
        "checkpoint.",
        status=1,
    )
    say.muted = not is_first()
    say(f"{jax.process_count()} processes with {jax.device_count()} devices.")


def check_devices() -> None:
    """Raise a ValueError if JAX finds no device of the requested platform."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: no plugin
        platforms = os.environ.get("JAX_PLATFORMS")
        fix = (
            f"change JAX_PLATFORMS={platforms}"
            if platforms
            else "set JAX_PLATFORMS=cpu"
        )
        reason = str(error).split("\n")[0].rstrip(".") or "no plugin is installed"
        raise ValueError(f"JAX finds no device ({reason}); {fix}.") from None


def await_address(address: str, seconds: float) -> None:
    """Wait until something listens at HOST:PORT.

    Raises:
        ValueError: nothing does within `seconds`.
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
    """Print a sentence and exit when JAX's runtime aborts because a process was lost.

    The runtime aborts from its own thread, without an exception that Python can catch.
    """

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def receive(number):
        os.write(2, f"{sys.argv[0].rsplit('/', 1)[-1]}: {sentence}\n".encode())
        os._exit(status)

    on_abort.callback = receive  # ctypes keeps no reference to it
    ctypes.CDLL(None).signal(signal.SIGABRT, receive)


def is_first() -> bool:
    """Return whether this is process 0, which writes files and logs for all."""
    return jax.process_index() == 0


def gather(value) -> list:
    """Gather a JSON-serializable value from every process, ordered by process index.

    This is a collective operation: every process must call it.
    """
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(text.size)).ravel()
    # pad to a power of 2: each length needs a compilation, so use only a few
    padded = np.zeros(max(256, 1 << int(sizes.max() - 1).bit_length()), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded)
    return [
        json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)
    ]


@contextlib.contextmanager
def fail_together():
    """Fail in all processes if the block fails in any of them.

    Raises:
        ValueError: the block failed in another process; the message includes its error.
    """
    own_error = None
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        own_error = error
    messages = gather(None if own_error is None else str(own_error))
    bad = [index for index, sentence in enumerate(messages) if sentence is not None]
    if not bad:
        return
    leave()
    if own_error is None:
        own_error = ValueError(f"Process {bad[0]} failed: {messages[bad[0]]}")
    raise own_error


def check_same_run(
    workdir: Path, config: dict, trials: list[dict], no_cpu_kernel: str | None
) -> None:
    """Raise a ValueError unless all processes train the same run in one workdir.

    Args:
        no_cpu_kernel: reason why this process can't use the CPU attention kernels, or
            None.
    """
    facts = environment()
    software = facts["versions"] | {"commit": facts["commit"]}
    has_commits = None not in gather(facts["commit"])  # None where git is missing
    check_same("software", software, may_differ=() if has_commits else ("commit",))
    reasons = gather(no_cpu_kernel)
    without = [index for index, reason in enumerate(reasons) if reason is not None]
    if 0 < len(without) < len(reasons):
        leave()
        raise ValueError(
            f"Process {without[0]} can't compile the CPU attention kernels "
            f"({reasons[without[0]]}), and others can; install a C++ compiler there, "
            f"or set CXX=none in all processes."
        )
    check_same("config", config, may_differ=("data.directory",))
    check_same("list of trials", trials)
    check_same_folder(workdir)


def check_same_folder(workdir: Path) -> None:
    """Raise a ValueError unless all processes see a file that process 0 writes."""
    token, mark = workdir / ".hosts", os.urandom(8).hex()
    try:
        with fail_together():
            if is_first():
                write(token, mark)
        mark = gather(mark)[0]
        with fail_together():
            if not token.exists() or token.read_text() != mark:
                raise ValueError(
                    f"{workdir} is not the folder of process 0; --workdir must lie on "
                    f"a file system that all hosts share."
                )
    finally:
        if is_first():
            token.unlink(missing_ok=True)


def check_same(what: str, value, may_differ: tuple[str, ...] = ()) -> None:
    """Raise a ValueError unless all processes have the same value."""
    first = gather(value)[0]
    with fail_together():
        names = "in process 0", "here"
        if differ := differences(first, value, may_change=may_differ, names=names):
            raise ValueError(
                f"The {what} differs from that of process 0: {summarize(differ)}."
            )


def leave() -> None:
    """Disconnect from the other processes, which must call this too."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


@contextlib.contextmanager
def wait_for_abort(errors: tuple[type[Exception], ...] = (RuntimeError,)):
    """Let the runtime end this process if the loss of another process causes an error.

    When a process is lost, collective operations in the others fail with various
    exceptions that don't name the cause. The runtime detects the loss within a
    heartbeat and aborts (`on_abort`), so wait for that before reraising an exception.
    """
    try:
        yield
    except errors:
        if jax.distributed.is_initialized():
            time.sleep(2 * HEARTBEAT)
        raise


@contextlib.contextmanager
def exit_at_once():
    """In a multi-process run, end this process immediately if the block fails.

    Otherwise JAX would wait at exit for the other processes, which wait for this one.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        status = 1
        if isinstance(error, SystemExit):  # the reason is already printed
            status = error.code
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    leave()
