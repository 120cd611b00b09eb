"""Flags with which the processes of a run connect, shared by all scripts."""

import os

from absl import flags

from headcount.runtime import distributed

COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "Multi-process runs: HOST:PORT of process 0; auto: as detected from "
    "Slurm, Open MPI, Kubernetes or a TPU pod.",
)
NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "Number of processes of the run."
)
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Number of this process, from 0.")
COORDINATOR_TIMEOUT = flags.DEFINE_integer(
    "coordinator_timeout", 300, "Seconds to wait for all processes to connect.", 1
)
BIND_ADDRESS = flags.DEFINE_string(
    "bind_address",
    None,
    "HOST:PORT that process 0 listens at, such as an address of an internal network. "
    "Default: the coordinator's port on all addresses.",
)
FLAGS = COORDINATOR, NUM_PROCESSES, PROCESS_ID, COORDINATOR_TIMEOUT, BIND_ADDRESS
# Environment variables that distinguish several processes on one host.
RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def connect() -> None:
    """Connect according to the flags; see `runtime.distributed.connect`."""
    distributed.connect(*(flag.value for flag in FLAGS))


def arguments() -> list[str]:
    """Return the connection flags to pass to scripts that this process starts.

    These are this process's own flags. On a TPU pod that lists its hosts,
    --coordinator=auto is added, so that the hosts of a sweep work on the same group.
    """
    own_flags = [f"--{flag.name}={flag.value}" for flag in FLAGS if flag.present]
    is_found = not COORDINATOR.present and distributed.lists_hosts()
    return [*own_flags, f"--{COORDINATOR.name}=auto"] if is_found else own_flags


def process() -> str:
    """Return a name for this process that is unique on its host."""
    if PROCESS_ID.value is not None:
        return str(PROCESS_ID.value)
    return next((os.environ[name] for name in RANKS if name in os.environ), "only")
