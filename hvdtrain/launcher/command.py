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
from hvdtrain.launcher.placement import ENGINE_PREFIXES

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
