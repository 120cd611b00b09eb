"""Configure the environment that JAX reads; scripts import this before JAX."""

# isort: off
import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until `commandline.run` has parsed the flags, let Ctrl-C end the process at once:
    # a KeyboardInterrupt would print a traceback, or be swallowed by an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from headcount.runtime import platform  # noqa: E402  after the handler is set

# isort: on
platform.check_environment()
platform.setup()
