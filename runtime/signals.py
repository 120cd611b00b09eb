"""Record SIGTERM, SIGINT and SIGHUP, so that the training loop can save and stop."""

import os
import signal
import threading
import time

import jax
from jax.experimental.multihost_utils import reached_preemption_sync_point

REPEAT_SECONDS = 5.0  # repeated signals within this time are ignored
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


class StopSignal:
    """Records the first signal; a later one ends the process immediately.

    A signal to a process group often arrives twice, directly and from a parent process,
    so repeats within `REPEAT_SECONDS` are ignored. Python runs signal handlers only
    between bytecode instructions, which an evaluation or a compilation may delay by
    many seconds. Therefore, a thread acknowledges the signal immediately.
    """

    def __init__(self):
        self.number, self.received_at, self.is_passed_on = None, None, False
        self.answered = threading.Lock()
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self.acknowledge, args=(read,), daemon=True).start()
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started with nohup, so it must outlive the terminal
            signal.signal(number, self.receive)

    def acknowledge(self, pipe: int) -> None:
        """Wait for the first signal, and answer it."""
        while number := os.read(pipe, 1):
            if number[0] in SIGNALS:
                self.answer(number[0])
                return

    def answer(self, number: int) -> None:
        """Print that a signal has arrived, unless that is already printed."""
        if self.answered.acquire(blocking=False):
            name = signal.Signals(number).name
            text = "finishing what is being computed and saving, then exiting."
            os.write(2, f"{name}: {text}\n".encode())

    def receive(self, number, frame):
        """Record the first signal, or end the process after a later one."""
        if self.number is None:
            self.number, self.received_at = number, time.monotonic()
            self.answer(number)
        elif time.monotonic() - self.received_at > REPEAT_SECONDS:
            os._exit(128 + number)

    def reached(self, count: int) -> bool:
        """Return whether to stop at the count-th call, the same in all processes.

        In a multi-process run, JAX's preemption notifier informs the other processes.
        It listens for SIGTERM with its own handler, so send that to this process.
        """
        if not jax.distributed.is_initialized():
            return self.number is not None
        if self.number is not None and not self.is_passed_on:
            self.is_passed_on = True
            os.kill(os.getpid(), signal.SIGTERM)
        if not reached_preemption_sync_point(count):
            return False
        self.number = self.number or signal.SIGTERM
        return True
