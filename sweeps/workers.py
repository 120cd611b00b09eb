"""Which devices of this machine train a group: a GPU, all of them, or some cores."""

import os
import subprocess
from typing import NamedTuple


class Worker(NamedTuple):
    """Where the processes of one group run."""

    environment: dict  # added to ours
    cores: set[int] | None = None  # None: all


def local_workers(cores: int | None = None) -> list[Worker]:
    """Return a worker per GPU; without GPUs one, or one per `cores` cores.

    Raises:
        ValueError: there are fewer cores than that, or there are GPUs.
    """
    found = [Worker(environment) for environment in visible_gpus() or [{}]]
    if cores is None:
        return found
    if any(worker.environment for worker in found):
        raise ValueError(
            "--resources=cores is for machines without GPUs; set JAX_PLATFORMS=cpu to "
            "leave the GPUs alone."
        )
    if not hasattr(os, "sched_getaffinity"):
        raise ValueError("--resources=cores needs Linux.")
    available = sorted(os.sched_getaffinity(0))
    if not isinstance(cores, int) or not 1 <= cores <= len(available):
        raise ValueError(
            f"--resources=cores must be from 1 to {len(available)}, the number of "
            f"available cores; got {cores}."
        )
    starts = range(0, len(available) - cores + 1, cores)
    return [Worker({}, set(available[start : start + cores])) for start in starts]


def visible_gpus() -> list[dict]:
    """Return the environment that selects each GPU; empty if there are none."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        try:
            listing = subprocess.run(
                ["nvidia-smi", "-L"], capture_output=True, text=True
            ).stdout
        except FileNotFoundError:
            return []
        gpus = [line for line in listing.splitlines() if line.startswith("GPU")]
        names = [str(index) for index in range(len(gpus))]
    else:
        names = [name for name in visible.split(",") if name]
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names]
