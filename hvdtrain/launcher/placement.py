"""Where a worker stands among the others, and the environment that it gets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.launcher.orders import Orders
from hvdtrain.pulse import RING_TOKEN
from hvdtrain.topology import Topology

# What the engines give their workers, and settings of theirs: as this host has them.
ENGINE_PREFIXES = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "ORTE_", "NCCL_")
# What belongs to a host and a login rather than to the user's work.
HOST_NAMES = frozenset(
    ("HOME", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "TMPDIR", "USER")
    + ("XDG_RUNTIME_DIR", "_")
)
HOST_PREFIXES = ("SSH_", "XDG_SESSION_")
# By which the launcher tells where rank 0 is, once that is settled.
MASTER_ADDR, MASTER_PORT = "HVDTRAIN_MASTER_ADDR", "HVDTRAIN_MASTER_PORT"
_LOCAL_SIZES = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


@dataclass(frozen=True)
class Placement:
    """One worker's."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Placement:
        """As horovodrun or mpirun tells it. Raises UsageError when neither has."""
        topology = Topology.from_environment(environment)
        sizes = [environment[name] for name in _LOCAL_SIZES if name in environment]
        if not topology.launched or not sizes:
            raise UsageError("agents are started by `hvdtrain launch`, through horovodrun")
        return cls(topology.rank, topology.size, topology.local_rank, int(sizes[0]))


def worker_environment(
    orders: Orders, placement: Placement, environment: Mapping[str, str]
) -> dict[str, str]:
    """The user's variables, this host's own, the engine's, and the names that scripts look for.

    Compute threads are shared out over the workers of a host, unless OMP_NUM_THREADS says so.
    """
    of_host = {
        name: value
        for name, value in environment.items()
        if name in HOST_NAMES or name.startswith((*HOST_PREFIXES, *ENGINE_PREFIXES))
    }
    of_user = {
        name: value
        for name, value in orders.environment.items()
        if name not in HOST_NAMES and not name.startswith(HOST_PREFIXES)
    }
    of_job = {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_size),
        "MASTER_ADDR": environment.get(MASTER_ADDR, "127.0.0.1"),
        "MASTER_PORT": environment.get(MASTER_PORT, "29500"),
        RING_TOKEN: orders.ring_token,
    }
    cores = len(os.sched_getaffinity(0))
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // placement.local_size)),
        "PYTHONUNBUFFERED": "1",  # a log that lags behind explains nothing
        "PYTHONFAULTHANDLER": "1",  # a SIGABRT, ours or native code's, leaves Python stacks
    }
    # horovodrun sets PYTHONUNBUFFERED for the agent; here it is the user's.
    own = {name: value for name, value in environment.items() if name not in defaults}
    return own | defaults | of_user | of_host | of_job
