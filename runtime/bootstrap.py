"""Import this before JAX, in scripts: it sets what JAX reads when it is imported."""

# isort: off
import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until `commandline.run` has read the flags, Ctrl-C ends the process at once: a
    # KeyboardInterrupt would be printed with a traceback, or swallowed by an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from headcount.runtime import platform  # noqa: E402  after the handler is set

# isort: on
platform.check_environment()
platform.setup()
