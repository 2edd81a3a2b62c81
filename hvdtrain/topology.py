"""The position of this process among the workers, read from the launcher's environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hvdtrain.errors import UsageError
from hvdtrain.slurm import is_step

# Set by `hvdtrain launch` where OMP_NUM_THREADS is its own: a host's cores by its workers.
CORES_SHARED_OUT = "HVDTRAIN_CORES_SHARED_OUT"


class Start(NamedTuple):
    """A launcher of several processes, with the environment variables that it sets in each."""

    launcher: str
    size: str
    rank: str
    local_rank: str


# horovodrun sets its own names under Gloo and Open MPI's under MPI. An mpirun of the Open MPI that
# Horovod was built with works too; under another one, Horovod finds no other process.
_JOINED = (
    Start("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK"),
    Start(
        "an mpirun of another MPI than Horovod's",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
)
# Tasks of a step, which hvdtrain.slurm connects. SLURM_NTASKS would be no criterion: it is also set
# in batch scripts and interactive shells of Slurm, which are not steps of several tasks.
_SRUN = Start("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
# Launchers whose processes Horovod does not connect.
_FOREIGN = (
    Start("torchrun, or the like,", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    Start("another MPI's launcher", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
)


@dataclass(frozen=True)
class Topology:
    """Rank and world size of this process, and its rank within the host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launched: bool = False  # by horovodrun, mpirun or srun; not by a foreign launcher
    start: Start | None = None  # the launcher, if any

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Topology:
        """Read the launcher's variables, or return a single process; UsageError if some are bad."""
        for start in (*_JOINED, _SRUN):
            named = start.rank in environment or start.size in environment
            if is_step(environment) if start is _SRUN else named:
                names = (start.rank, start.size, start.local_rank)
                rank, size, local_rank = (_integer(environment, name) for name in names)
                return cls(rank, size, local_rank, launched=True, start=start)
        for start in _FOREIGN:
            if (size := _integer(environment, start.size, default=1)) > 1:
                rank = _integer(environment, start.rank, default=0)
                local_rank = _integer(environment, start.local_rank, default=0)
                return cls(rank, size, local_rank, start=start)
        return cls()

    @property
    def place(self) -> str:
        """Return rank and host for messages: 'rank 3 on node1'."""
        return f"rank {self.rank} on {socket.gethostname()}"

    def check_joined(self, size: int) -> None:
        """Raise UsageError if several processes were started, but only `size` = 1 is connected."""
        if self.start is None or not size == 1 < self.size:
            return
        raise UsageError(
            f"{self.start.size}={self.size}: {self.start.launcher} has started this process as one "
            f"of {self.size}, but Horovod does not connect them: each would do all the work by "
            f"itself. Use `horovodrun -np {self.size} ...` or "
            f"`hvdtrain launch -np {self.size} -- ...`; for a process by itself, "
            f"unset {self.start.size}"
        )


def _integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a whole number; for other text `default`, or raise UsageError without one."""
    text = environment.get(name, "")
    if text.isdigit():
        return int(text)
    if default is not None:
        return default
    raise UsageError(
        f"environment variable {name}={text!r}: a whole number was expected "
        "(start workers with horovodrun)"
    )
