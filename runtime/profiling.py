"""How much of its device a run uses, how long it compiles, and a trace of it."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headcount.runtime.logging import say
from headcount.runtime.topology import CHIPS

SIZE = 1024  # of the square matrices that tell a CPU's rate, a device


def peak_flops() -> float | None:
    """FLOP/s of all devices together at their peak; None: not known.

    A CPU's is the rate of a large float32 product, measured here, times the processes.
    """
    kind = jax.devices()[0].device_kind
    if jax.default_backend() == "cpu":
        return measured_flops() * jax.process_count()
    fitting = [chip for chip in CHIPS.values() if kind in chip.kinds]
    return fitting[0].flops * jax.device_count() if fitting else None


def measured_flops() -> float:
    """FLOP/s of a product of matrices in float32 by all devices here, best of five."""
    devices = jax.local_devices()
    mesh = Mesh(devices, ("data",))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*of)) for of in (["data"], []))
    x = jax.device_put(np.ones((len(devices) * SIZE, SIZE), np.float32), rows)
    y = jax.device_put(np.ones((SIZE, SIZE), np.float32), whole)
    product = jax.jit(jnp.matmul)
    seconds = []
    with jax.set_mesh(mesh):  # training's may have devices of other processes
        product(x, y).block_until_ready()
        for _ in range(5):
            start = time.perf_counter()
            product(x, y).block_until_ready()
            seconds.append(time.perf_counter() - start)
    return 2 * len(devices) * SIZE**3 / min(seconds)


class CompileClock:
    """Seconds that XLA has compiled, or read programs from its cache, so far."""

    def __init__(self):
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self.add)

    def add(self, event: str, seconds: float, **_) -> None:
        """Take in an event of JAX."""
        if event == "/jax/core/compile/backend_compile_duration":
            self.seconds += seconds


class Profile:
    """Traces some steps into WORKDIR/profile, for XProf, TensorBoard and Perfetto.

    Of several processes the first one does.

    Args:
        workdir: of the run.
        steps: the step after which the trace begins, and how many it holds.
    """

    def __init__(self, workdir: Path, steps: tuple[int, int] | None):
        self.folder, self.running = workdir / "profile", False
        self.start, self.stop = (steps[0], sum(steps)) if steps else (None, None)

    def ends(self, step: int) -> list[int]:
        """The steps where it begins and ends, of a run that goes on from `step`."""
        if self.stop is None:
            return []
        if step >= self.stop:
            say(f"There is no trace: the steps of --profile were done before {step}.")
        return [self.start, self.stop]

    def is_due(self, step: int) -> bool:
        """Whether it begins or ends there."""
        if self.stop is None or jax.process_index() != 0:
            return False
        return self.running != (self.start <= step < self.stop)

    def at(self, step: int, state) -> None:
        """Begin or end where it is due; `state` is what the steps before make."""
        if not self.is_due(step):
            return
        jax.block_until_ready(state)
        if self.running:
            self.close()
        else:
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
            self.running = True

    def close(self) -> None:
        """Write what there is, if it runs; training outlives a trace that can't be."""
        if not self.running:
            return
        self.running = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            say(f"{self.folder} has no trace, for it can't be written: {error}")
        else:
            say(f"A trace for XProf and Perfetto: {self.folder}")


def steps_to_profile(text: str | None, num_steps: int) -> tuple[int, int] | None:
    """START:STEPS as two numbers; training ends after `num_steps`.

    Raises:
        ValueError: it is something else, or begins too late.
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
