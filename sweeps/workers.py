"""Assign devices of this machine to groups: one GPU, all devices, or some CPU cores."""

import os
import subprocess
from typing import NamedTuple


class Worker(NamedTuple):
    """The devices on which the processes of one group run."""

    environment: dict  # environment variables to add
    cores: set[int] | None = None  # CPU cores; None: all


def local_workers(cores: int | None = None) -> list[Worker]:
    """Return one worker per GPU; without GPUs, one in total or one per `cores` cores.

    Raises:
        ValueError: `cores` is given, but there are fewer cores, or there are GPUs.
    """
    workers = [Worker(environment) for environment in visible_gpus() or [{}]]
    if cores is None:
        return workers
    if any(worker.environment for worker in workers):
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
    """Return one set of environment variables per GPU, which selects it."""
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
        names = [name for name in visible.split(",") if name not in ("", "-1")]
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names]
