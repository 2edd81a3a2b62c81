"""The position of this process among the workers, read from the launcher's environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hvdtrain.errors import UsageError
from hvdtrain.slurm import is_step, whole_number

# Set by `hvdtrain launch` where OMP_NUM_THREADS is its own: a host's cores by its workers.
CORES_SHARED_OUT = "HVDTRAIN_CORES_SHARED_OUT"
SINGLE_WORKER = "add --single-worker (in a script single_worker=True)"


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
# Tasks of a step, which hvdtrain.slurm connects.
_SRUN = Start("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
# Launchers whose processes Horovod does not connect.
_FOREIGN = (
    Start("torchrun, or the like,", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    Start("another MPI's launcher", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
)
# Jobs of several tasks or hosts in which this process was started alone: by a batch script or an
# interactive shell of Slurm, or in each container of a job that was made for torchrun.
_ALONE_IN = ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "PET_NNODES")
FIRST_OF_SLURMS_OWN = 0xFFFF_FF00  # steps that Slurm makes itself, such as interactive shells


@dataclass(frozen=True)
class Topology:
    """Rank and world size of this process, and its rank within the host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launched: bool = False  # by horovodrun, mpirun or srun; not by a foreign launcher
    start: Start | None = None  # the launcher, if any
    alone_in: str = ""  # what says that this process, which has no launcher, has a job of several

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Topology:
        """Read the launcher's variables, or return a single process; UsageError if some are bad."""
        for start in (*_JOINED, _SRUN):
            named = start.rank in environment or start.size in environment
            if is_step(environment) if start is _SRUN else named:
                problem = "a whole number was expected (start workers with horovodrun)"
                rank, size, local_rank = (
                    whole_number(environment, name, problem=problem)
                    for name in (start.rank, start.size, start.local_rank)
                )
                return cls(rank, size, local_rank, launched=True, start=start)
        for start in _FOREIGN:
            defaults = {start.rank: 0, start.size: 1, start.local_rank: 0}
            rank, size, local_rank = (
                whole_number(environment, name, default) for name, default in defaults.items()
            )
            if size > 1:
                return cls(rank, size, local_rank, start=start)
        return cls(alone_in=_job_around(environment))

    @property
    def rank_and_host(self) -> str:
        """Return rank and host for messages: 'rank 3 on node1'."""
        return f"rank {self.rank} on {socket.gethostname()}"

    @property
    def in_job_of_several(self) -> str:
        """Return the variable and value that show several processes or hosts; empty for one."""
        if self.start and self.size > 1:
            return f"{self.start.size}={self.size}"
        return self.alone_in

    def by_itself(self) -> Topology:
        """Return the place of a worker that is meant to be the only one. Raises UsageError if
        Horovod connects it with others.
        """
        if self.launched and self.size > 1:
            raise UsageError(f"--single-worker: this is one of {self.size} workers: leave it out")
        return Topology(local_rank=self.local_rank)

    def check_joined(self, size: int) -> None:
        """Raise UsageError if several processes were started, or have been asked for, but only
        `size` = 1 is connected.
        """
        if size > 1 or not self.in_job_of_several:
            return
        number = str(self.size) if self.start else "N"
        problem = (
            f"{self.start.launcher} has started this process as one of {number}, but Horovod does "
            "not connect them: each would do all the work by itself"
            if self.start
            else "this process was started by itself in a job of several, and would do all the work"
        )
        raise UsageError(
            f"{self.in_job_of_several}: {problem}. Use `hvdtrain launch -np {number} -- ...`, "
            f"`horovodrun -np {number} ...` or, in a job of Slurm, `srun -n {number} ...`; for one "
            f"worker, {SINGLE_WORKER} or unset {self.in_job_of_several.partition('=')[0]}"
        )


def _job_around(environment: Mapping[str, str]) -> str:
    """Return the variable and value that show a job of several processes; empty without one."""
    step = environment.get("SLURM_STEP_ID", "")
    is_task = step.isdigit() and int(step) < FIRST_OF_SLURMS_OWN  # of one, started by srun
    for name in _ALONE_IN:
        value = environment.get(name, "")
        most = value.rpartition(":")[2]  # torchrun: from:to
        if most.isdigit() and int(most) > 1 and not (is_task and name.startswith("SLURM_")):
            return f"{name}={value}"
    return ""
