"""The trees of Debian's and Ubuntu's releases, made by debootstrap and kept as tar files."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from hvdtrain.errors import PreflightError
from tests.campaigns.machines.host_settings import UBUNTU
from tests.campaigns.machines.machine import PATH

TOOLS = {
    "debootstrap": "debootstrap",
    "unshare": "util-linux",
    "apt-config": "apt",
    "dpkg": "dpkg",
    "git": "git",
}
OTHER_PROCESSORS = Path("/proc/sys/fs/binfmt_misc")
QEMU = {"arm64": "qemu-aarch64", "amd64": "qemu-x86_64"}
LINES = 15


def why_not(architectures: set[str]) -> str | None:
    """Return what this machine lacks to make machines of these architectures, or None."""
    if os.geteuid() != 0:
        return "machines are trees entered by chroot, which needs root"
    missing = {package for tool, package in TOOLS.items() if not shutil.which(tool)}
    if missing:
        return f"to make machines, install: apt-get install {' '.join(sorted(missing))}"
    for other in sorted(architectures - {own_architecture()}):
        if not (OTHER_PROCESSORS / QEMU[other]).exists():
            return (
                f"to run programs of {other} here, install qemu-user-static and binfmt-support "
                f"with apt-get, mount binfmt_misc at {OTHER_PROCESSORS}, and run "
                f"update-binfmts --enable {QEMU[other]}"
            )
    return None


def own_architecture() -> str:
    """Return the architecture of this machine, as Debian names it."""
    command = ["dpkg", "--print-architecture"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def image(release: str, architecture: str, mirror: str, folder: Path) -> Path:
    """Return the tar file of a release, made if it is absent. Raises PreflightError."""
    kept = folder / f"{release}-{architecture}.tar"
    if kept.exists():
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{release}-", dir=folder) as scratch:
        root, unfinished = Path(scratch, "root"), Path(scratch, kept.name)
        bootstrap = ["debootstrap", "--variant=minbase", f"--arch={architecture}"]
        script = []
        if release in UBUNTU:  # a Debian's debootstrap may not know the release by name
            bootstrap.append("--components=main,universe")
            script.append("/usr/share/debootstrap/scripts/gutsy")
        # In a mount namespace, so that no mount is left in the tree when this is interrupted.
        own = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        _run([*own, *bootstrap, release, str(root), mirror, *script])
        pack = ["tar", "--create", "--numeric-owner", "--file", str(unfinished)]
        _run([*pack, "--directory", str(root), "."])
        unfinished.rename(kept)
    return kept


def unpack(tar: Path, root: Path) -> None:
    """Unpack the tree of a release into an empty folder."""
    root.mkdir(parents=True)
    flags = ["--extract", "--numeric-owner", "--preserve-permissions", "--file", str(tar)]
    _run(["tar", *flags, "--directory", str(root)])


def _run(command: list[str]) -> None:
    environment = {"PATH": PATH, "LANG": "C.UTF-8"}
    proxies = {name: it for name, it in os.environ.items() if name.lower().endswith("_proxy")}
    done = subprocess.run(
        command,
        env=environment | proxies,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-LINES:])
        raise PreflightError(f"{command[0]} failed ({' '.join(command)}):\n{tail}")
