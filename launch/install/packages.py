"""Installation of Debian packages without starting their services, now or at boot."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def install(packages: list[str], run: Run, policy: Path = POLICY) -> None:
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
