"""The installation of Horovod: choose what to build with, build or take it, install, check."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hvdtrain.errors import PreflightError
from hvdtrain.horovod_build.build import build_wheel
from hvdtrain.horovod_build.commands import run
from hvdtrain.horovod_build.cuda import find_cuda, has_gpu
from hvdtrain.horovod_build.environment import NEWEST_TORCH, Environment
from hvdtrain.horovod_build.mpi import INSTALL_HINT, find_mpi
from hvdtrain.horovod_build.requirements import (
    build_requirements,
    explain_missing,
    missing_requirements,
)
from hvdtrain.horovod_build.wheel import Choice, cached_wheel, obtain_wheel, wheel_inputs
from hvdtrain.interpreter import module_argv

ALL_REDUCE_TIMEOUT_S = 120

Say = Callable[[str], None]


def choose(
    environment: Environment, say: Say, *, cuda: bool | None = None, with_mpi: bool = True
) -> Choice:
    """Return what to build for this machine and environment.

    `cuda`: True demands it, also without a GPU; None: where torch has it and the machine a GPU.
    `with_mpi`: False leaves MPI out where there is one. Raises PreflightError.
    """
    torch = environment.require_torch()
    mpi = find_mpi(environment) if with_mpi else None
    choice = Choice(environment, torch, mpi, find_cuda(environment, torch, cuda))
    if torch.release > NEWEST_TORCH:
        newest = ".".join(map(str, NEWEST_TORCH))
        say(f"torch {torch.version} is newer than {newest}, the newest that was tried: trying it")
    if with_mpi and mpi is None:
        say(
            "no Open MPI 4 here: Horovod gets Gloo alone. For Open MPI too, which is faster on one "
            f"host: {INSTALL_HINT}, and run this again"
        )
    if cuda is None and torch.cuda is None and has_gpu():
        say(
            f"this machine has a GPU, but torch {torch.version} is a build for CPUs: so is this "
            "Horovod. For the GPU install a CUDA build of torch, and run this again"
        )
    return choice


def obtain(choice: Choice, say: Say) -> Path:
    """Return the wheel of a choice, from the cache or built now. Raises PreflightError."""
    inputs = wheel_inputs(choice)
    if cached := cached_wheel(inputs):
        say(f"{choice.text}: the wheel is in the cache")
        return cached
    if missing := missing_requirements(build_requirements(choice.environment.python_header)):
        raise PreflightError(explain_missing(missing))
    say(f"building {choice.text}: a few minutes, once")
    started = time.monotonic()
    wheel = obtain_wheel(inputs, partial(build_wheel, choice, say), say)
    say(f"built in {time.monotonic() - started:.0f} s; kept as {wheel}")
    return wheel


def install(choice: Choice, wheel: Path, say: Say) -> None:
    """Install the wheel in place of any other Horovod; check it on two processes."""
    choice.environment.reinstall(wheel)
    check(choice, say)


def unpacked(wheel: Path) -> Path:
    """Return a folder beside a wheel of the cache with what is in it, for Python's path."""
    folder = wheel.parent / "unpacked"
    if not folder.exists():
        try:
            with tempfile.TemporaryDirectory(dir=wheel.parent) as begun:
                whole = Path(begun, "whole")
                shutil.unpack_archive(wheel, whole, "zip")
                whole.rename(folder)
        except OSError as error:
            if not folder.exists():  # by another process
                raise PreflightError(f"{folder} cannot be written: {error.strerror}") from error
    return folder


def write_wheel(wheel: Path, folder: Path) -> Path:
    """Copy the wheel into `folder`, for other hosts and images. Raises PreflightError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, folder))
    except OSError as error:
        raise PreflightError(f"{folder} cannot be written: {error.strerror}") from error


def check(choice: Choice, say: Say) -> None:
    """Run an all-reduce over two processes with each controller of the installed Horovod.

    Raises PreflightError when one fails, or Horovod lacks a part that was to be built.
    """
    scripts = choice.environment.scripts
    variables = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    horovodrun = str(scripts / "horovodrun")
    built = run([horovodrun, "--check-build"], "run horovodrun --check-build", variables)
    parts = ["PyTorch", "Gloo", *["MPI"] * bool(choice.mpi), *["NCCL"] * bool(choice.cuda)]
    if absent := [part for part in parts if f"[X] {part}" not in built]:
        raise PreflightError(f"the built Horovod lacks {', '.join(absent)}:\n{built}")
    for controller in choice.controllers:
        command = [horovodrun, "-np", "2", f"--{controller}"]
        command += module_argv("hvdtrain.exchange.prove", str(choice.environment.python))
        what = f"all-reduce over 2 processes with {controller}"
        run(command, what, variables, timeout_s=ALL_REDUCE_TIMEOUT_S)
    say(f"passed: all-reduce over 2 processes with {' and '.join(choice.controllers)}")
