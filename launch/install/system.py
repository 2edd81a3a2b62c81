"""The system's packages that a checkout and its tests need, and their installation on Debian.

Packages are installed without starting their services, now or at boot.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.horovod_build.requirements import Requirement, build_requirements

POLICY = Path("/usr/sbin/policy-rc.d")  # consulted by packages before they start a service
REFUSE = "#!/bin/sh\n# Written by launch/setup while it installs packages.\nexit 101\n"
SERVICES = {
    "openssh-server": ("ssh.service", "ssh.socket"),
    "munge": ("munge.service",),
    "slurmctld": ("slurmctld.service",),
    "slurmd": ("slurmd.service",),
}

Run = Callable[[list[str], str], object]


def _find_venv() -> str | None:
    return "venv" if importlib.util.find_spec("ensurepip") else None


def _tool(name: str, why: str, debian_package: str, program: str | None = None) -> Requirement:
    """Return the requirement of a program on PATH or in the sbin folders, which may not be on a
    user's PATH.
    """
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return Requirement(name, why, debian_package, lambda: shutil.which(program or name, path=path))


REQUIREMENTS = (
    *build_requirements(Path(sysconfig.get_paths()["include"]) / "Python.h"),
    Requirement("Python venv", "hvdtrain is installed in .venv", "python3-venv", _find_venv),
    _tool("ssh client", "horovodrun reaches hosts by ssh", "openssh-client", "ssh"),
)

# The test suite needs these too: it builds hosts from namespaces, and skips those tests if one is
# missing.
TEST_REQUIREMENTS = (
    _tool("ssh server", "test hosts are reached by ssh", "openssh-server", "sshd"),
    _tool("ip", "test hosts have networks", "iproute2"),
    _tool("unshare", "test hosts are namespaces", "util-linux"),
    _tool("tcsh", "a host's login shell may be csh", "tcsh"),
    _tool("fish", "a host's login shell may be fish", "fish"),
    _tool("spin", "the protocols between ranks are modelled", "spin"),
    _tool("munged", "test hosts have a Slurm", "munge"),
    _tool("slurmctld", "test hosts have a Slurm", "slurmctld"),
    _tool("slurmd", "test hosts have a Slurm", "slurmd"),
    _tool("srun", "test hosts have a Slurm", "slurm-client"),
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
