"""Where this process stands among the workers, as the launcher's environment tells it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.slurm import is_step

# What horovodrun gives each worker: its own names under Gloo, Open MPI's under MPI. And what
# srun gives each task.
_GLOO_NAMES = {
    "rank": "HOROVOD_RANK",
    "size": "HOROVOD_SIZE",
    "local_rank": "HOROVOD_LOCAL_RANK",
}
_OPEN_MPI_NAMES = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
}
_SLURM_NAMES = {
    "rank": "SLURM_PROCID",
    "size": "SLURM_STEP_NUM_TASKS",
    "local_rank": "SLURM_LOCALID",
}


@dataclass(frozen=True)
class Topology:
    """Rank and world size, and the same within this host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launched: bool = False  # by horovodrun, mpirun or srun; False: a single process of its own

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Topology:
        """Read the launcher's variables; without them, a single process.

        Raises UsageError when the variables are there but make no sense.
        """
        for names in (_GLOO_NAMES, _OPEN_MPI_NAMES, _SLURM_NAMES):
            if names["rank"] in environment and (names is not _SLURM_NAMES or is_step(environment)):
                return cls(
                    **{field: _integer(environment, name) for field, name in names.items()},
                    launched=True,
                )
        return cls()

    @property
    def place(self) -> str:
        """Rank and host, as messages name them."""
        return f"rank {self.rank} on {socket.gethostname()}"


def _integer(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        raise UsageError(
            f"environment variable {name}={text!r}: a whole number was expected "
            "(start workers with horovodrun)"
        )
    return int(text)
