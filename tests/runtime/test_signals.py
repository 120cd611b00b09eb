"""Stopping: a signal is acknowledged while the main thread is in compiled code."""

import signal
import subprocess
import sys

BUSY = """
import hashlib, os, signal, threading, time
from headcount.runtime.signals import StopSignal

stop, seen = StopSignal(), []

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    while not stop.answered.locked():
        time.sleep(0.001)
    seen.append(stop.number)  # None: Python's own handler has not run yet

thread = threading.Timer(0.05, interrupt)
thread.start()
hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # in C, as an evaluation is
thread.join()
print(seen, int(stop.number))
"""

AT_EXIT = """
import atexit, os, signal
from headcount.configs import commandline

def main():
    atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))

commandline.run(main)
"""


def test_a_signal_is_acknowledged_at_once_and_only_once():
    ran = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True)
    assert ran.stdout == "[None] 2\n", ran.stderr
    (line,) = ran.stderr.splitlines()
    assert line.startswith("SIGINT: ") and line.endswith("saving, then exiting.")


def test_a_script_interrupted_at_its_very_end_ends_without_a_traceback():
    command = [sys.executable, "-c", AT_EXIT]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (-signal.SIGINT, "")
