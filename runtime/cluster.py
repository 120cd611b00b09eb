"""The flags of a run of several processes, alike in train.py, eval.py and sweep.py."""

import os

from absl import flags

COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "HOST:PORT of process 0, where several processes make one run; auto: as Slurm, "
    "Open MPI, Kubernetes or a TPU pod tells.",
)
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Processes of the run.")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Number of this one, from 0 on.")
COORDINATOR_TIMEOUT = flags.DEFINE_integer(
    "coordinator_timeout", 300, "Seconds in which all processes must have come.", 1
)


FLAGS = COORDINATOR, NUM_PROCESSES, PROCESS_ID, COORDINATOR_TIMEOUT
# How clusters that start several processes on a host number them; others start one.
RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def connect() -> None:
    """Meet the other processes as the flags say, see `runtime.distributed.connect`."""
    from headcount.runtime import distributed as hosts

    hosts.connect(*(flag.value for flag in FLAGS))


def arguments() -> list[str]:
    """The flags that were given, for another script that this process starts."""
    return [f"--{flag.name}={flag.value}" for flag in FLAGS if flag.present]


def process() -> str:
    """A name for this process among those of its host."""
    if PROCESS_ID.value is not None:
        return str(PROCESS_ID.value)
    return next((os.environ[name] for name in RANKS if name in os.environ), "only")
