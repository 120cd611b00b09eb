"""Peak FLOP/s of the devices, compilation time, and profiler traces."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headcount.runtime.logging import say
from headcount.runtime.topology import CHIPS

SIZE = 1024  # of the square matrices for measuring a CPU's peak, per device


def peak_flops() -> float | None:
    """Return the total peak FLOP/s of all devices, or None if unknown.

    A CPU's peak is measured with a large float32 matrix product.
    """
    kind = jax.devices()[0].device_kind
    if jax.default_backend() == "cpu":
        return measured_flops() * jax.process_count()
    fitting = [chip for chip in CHIPS.values() if kind in chip.kinds]
    return fitting[0].flops * jax.device_count() if fitting else None


def measured_flops() -> float:
    """Measure float32 matrix products on all local devices; return the best of five."""
    devices = jax.local_devices()
    mesh = Mesh(devices, ("data",))
    rows, replicated = (
        NamedSharding(mesh, PartitionSpec(*of)) for of in (["data"], [])
    )
    x = jax.device_put(np.ones((len(devices) * SIZE, SIZE), np.float32), rows)
    y = jax.device_put(np.ones((SIZE, SIZE), np.float32), replicated)
    product = jax.jit(jnp.matmul)
    seconds = []
    with jax.set_mesh(mesh):  # the training mesh may have devices of other processes
        product(x, y).block_until_ready()
        for _ in range(5):
            start = time.perf_counter()
            product(x, y).block_until_ready()
            seconds.append(time.perf_counter() - start)
    return 2 * len(devices) * SIZE**3 / min(seconds)


class CompileClock:
    """Counts the seconds spent compiling programs or reading them from the cache."""

    def __init__(self):
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self.add)

    def add(self, event: str, seconds: float, **_) -> None:
        """Receive an event of `jax.monitoring`."""
        if event == "/jax/core/compile/backend_compile_duration":
            self.seconds += seconds


class Profile:
    """Traces some steps into WORKDIR/profile, for XProf, TensorBoard and Perfetto.

    In a multi-process run, only the first process is traced.

    Args:
        workdir: the run's folder.
        steps: the step after which the trace starts, and its number of steps; None: no
            trace.
    """

    def __init__(self, workdir: Path, steps: tuple[int, int] | None):
        self.folder, self.running = workdir / "profile", False
        self.start, self.stop = (steps[0], sum(steps)) if steps else (None, None)

    def ends(self, step: int) -> list[int]:
        """Return the steps at which the trace starts and ends, or [] without a trace.

        If a run at `step` is already past the trace, log that.
        """
        if self.stop is None:
            return []
        if step >= self.stop:
            say(f"No trace: the run is past the steps of --profile (now at {step}).")
        return [self.start, self.stop]

    def is_due(self, step: int) -> bool:
        """Return whether the trace must start or end at a step."""
        if self.stop is None or jax.process_index() != 0:
            return False
        return self.running != (self.start <= step < self.stop)

    def at(self, step: int, state) -> None:
        """Start or end the trace if that is due, after waiting for `state`."""
        if not self.is_due(step):
            return
        jax.block_until_ready(state)
        if self.running:
            self.close()
        else:
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
            self.running = True

    def close(self) -> None:
        """End the trace if it is running; log an error if it can't be written."""
        if not self.running:
            return
        self.running = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            say(f"The trace could not be written to {self.folder}: {error}")
        else:
            say(f"Wrote a trace for XProf and Perfetto to {self.folder}")


def steps_to_profile(text: str | None, num_steps: int) -> tuple[int, int] | None:
    """Parse --profile=START:STEPS.

    Raises:
        ValueError: it has another format, or starts after the run's last step.
    """
    if text is None:
        return None
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"--profile must be START:STEPS, as in 100:20, got {text!r}.")
    start, steps = map(int, parts)
    if steps < 1:
        raise ValueError(f"--profile must trace at least one step, got {text!r}.")
    if start >= num_steps:
        raise ValueError(
            f"--profile must begin before train.num_steps={num_steps}, got {text!r}."
        )
    return start, steps
