"""The request to stop: SIGTERM or Ctrl-C, in one process of a run or in all."""

import os
import signal


class StopSignal:
    """Remembers a SIGTERM or Ctrl-C, so that the loop can save and end."""

    def __init__(self):
        self.name, self.is_passed_on = None, False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)

    def receive(self, number, frame):
        """Note the signal; a second one ends the process at once."""
        self.name = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)

    def reached(self, count: int) -> bool:
        """Whether to stop here, at the count-th call.

        Of several processes all stop at the same count, whichever was asked. There JAX
        takes the signals (and what else its preemption notice is) from `receive`.
        """
        import jax
        from jax.experimental.multihost_utils import reached_preemption_sync_point

        if not jax.distributed.is_initialized():
            return self.name is not None
        if self.name is not None and not self.is_passed_on:
            self.is_passed_on = True
            os.kill(os.getpid(), signal.SIGTERM)
        if not reached_preemption_sync_point(count):
            return False
        self.name = self.name or signal.SIGTERM.name
        return True
