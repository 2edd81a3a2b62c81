"""The horovodrun command of a job, and what goes into its environment. Nothing is run here."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launcher.tickets import Orders
from hvdtrain.pulse import RING_TOKEN
from hvdtrain.topology import Topology

# Of the user's variables, those that the engines themselves need: Gloo's horovodrun puts its whole
# environment on every worker's command line, where all users of a host can read it.
PASSED_ON = frozenset(
    ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "OMP_NUM_THREADS", "PATH")
    + ("PYTHONPATH", "SHELL", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV", "XDG_CACHE_HOME")
)
SECRET_WORDS = ("SECRET", "TOKEN", "PASSWORD", "KEY", "CREDENTIAL")


@dataclass(frozen=True)
class Engine:
    """What horovodrun is told."""

    workers: int
    controller: str  # gloo or mpi
    hosts: Sequence[tuple[str, int]]  # name and workers
    interface: str | None  # of the network; None: horovodrun finds one
    start_timeout_s: int
    verbose: bool = False
    mpi_prefix: str | None = None  # where other hosts find Open MPI; None: on their PATH


def agent_argv(job: str) -> list[str]:
    """Starts an agent (hvdtrain/launcher/agent.py), and so a worker."""
    return [sys.executable, "-m", "hvdtrain.launcher.agent", job]


def horovodrun_argv(engine: Engine, worker: Sequence[str]) -> list[str]:
    """Starts the command `worker` as often as there are workers."""
    here = Path(sys.executable)
    argv = [str(here.parent / "horovodrun"), "-np", str(engine.workers), f"--{engine.controller}"]
    argv += ["-H", ",".join(f"{name}:{slots}" for name, slots in engine.hosts)]
    argv += ["--disable-cache"]  # its cached checks go stale when hosts change
    argv += ["--start-timeout", str(engine.start_timeout_s)]
    if engine.interface:
        argv += ["--network-interface", engine.interface]
    if engine.controller == "mpi" and engine.mpi_prefix:
        argv += [f"--mpi-args=--prefix {shlex.quote(engine.mpi_prefix)}"]
    if engine.verbose:
        argv += ["--verbose"]
    return [*argv, *worker]


def engine_environment(
    environment: Mapping[str, str], settings: Mapping[str, str], ssh_folder: Path | None
) -> dict[str, str]:
    """Of `environment`, what horovodrun itself needs; `settings` where the user has none.

    `ssh_folder` holds the `ssh` that keeps host keys checked, and comes first on PATH.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name in PASSED_ON or (name.startswith(ENGINE_PREFIXES) and not _is_secret(name))
    }
    folders = [str(ssh_folder)] if ssh_folder else []
    folders += [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    return {**settings, **kept, "PATH": os.pathsep.join(folders), "PYTHONUNBUFFERED": "1"}


def find_mpirun() -> str | None:
    """As horovodrun finds it: in the environment's own folder first."""
    here = str(Path(sys.executable).parent)
    return shutil.which("mpirun", path=os.pathsep.join([here, os.environ.get("PATH", os.defpath)]))


def find_controller(wanted: str) -> str:
    """For `auto`: Open MPI, told to yield, is the faster one where workers fill the cores.

    Raises UsageError for `mpi` where horovodrun could not use it.
    """
    if wanted == "gloo":
        return wanted
    mpirun = find_mpirun()
    if mpirun and is_open_mpi(mpirun):
        return "mpi"
    if wanted == "auto":
        return "gloo"
    found = f"{mpirun} is not Open MPI's" if mpirun else "there is no mpirun on PATH"
    raise UsageError(f"--controller=mpi: {found}; use --controller gloo")


def is_open_mpi(mpirun: str) -> bool:
    """Whether it is one that horovodrun's options fit."""
    command = [mpirun, "--version"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return "(Open MPI) 4." in answer.stdout


def mpi_prefix() -> str | None:
    """The environment's own folder, where Open MPI is installed in it: other hosts have it there.
    A shell that ssh starts has no such folder on its PATH.
    """
    mpirun, folder = find_mpirun(), Path(sys.prefix)
    return str(folder) if mpirun and Path(mpirun).is_relative_to(folder) else None


def _is_secret(name: str) -> bool:
    return any(word in name for word in SECRET_WORDS)


@dataclass(frozen=True)
class EngineSetting:
    """One environment variable."""

    name: str
    value: str
    why: str


def settings_for(
    controller: str, environment: Mapping[str, str], watchdog_timeout_s: float, ours: bool
) -> list[EngineSetting]:
    """The settings of a job. `ours`: its workers are `hvdtrain train`, which sets its own."""
    stall_s = str(max(1, round(watchdog_timeout_s)))
    found = [
        EngineSetting(
            "HOROVOD_FUSION_THRESHOLD",
            "0",
            "each tensor by itself: runs repeat, and it is the fastest on few workers",
        ),
    ]
    if controller == "mpi":
        found.append(
            EngineSetting(
                "OMPI_MCA_mpi_yield_when_idle",
                "1",
                "Open MPI spins while it waits, which takes compute time from full cores",
            )
        )
    if not ours:
        found += [
            EngineSetting(
                "HOROVOD_STALL_CHECK_TIME_SECONDS",
                str(max(1, min(60, round(watchdog_timeout_s / 2)))),
                "Horovod warns when some ranks wait for others",
            ),
            EngineSetting(
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
                stall_s,
                "and ends the job, as --watchdog-timeout-s says",
            ),
        ]
    return [setting for setting in found if setting.name not in environment]


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
