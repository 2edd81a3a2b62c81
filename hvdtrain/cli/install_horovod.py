"""`hvdtrain install-horovod`: build Horovod for the torch of this environment, and install it."""

import sys
import time
from pathlib import Path
from typing import Any

from hvdtrain.cli.flags import NEGATABLE, Command, Flag
from hvdtrain.errors import EXIT_OK, refuse
from hvdtrain.log import say
from hvdtrain.topology import Topology

FLAGS = (
    Flag(
        "--wheel-dir",
        "write the wheel into DIR, for other hosts and images, instead of installing it",
        metavar="DIR",
    ),
    Flag(
        "--cuda",
        "build for GPUs also where there is none, or never (default: where torch has CUDA and "
        "the machine a GPU)",
        bool,
        more=NEGATABLE,
    ),
    Flag(
        "--mpi",
        "build with the Open MPI 4 of the system or of this environment, if there is one "
        "(default), or with Gloo alone",
        bool,
        default=True,
        more=NEGATABLE,
    ),
)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Build, install and check; return the exit code. Raises UsageError, PreflightError."""
    from hvdtrain.horovod_build import install
    from hvdtrain.horovod_build.environment import Environment

    if topology.launched:
        problems.append("install-horovod is not for workers: start it alone, without horovodrun")
    refuse(problems)

    def note(text: str) -> None:
        say(f"install-horovod: {text}")

    started = time.monotonic()
    environment = Environment(Path(sys.executable))
    folder = arguments["wheel_dir"]
    if not folder:
        environment.check_writable()
    choice = install.choose(environment, note, cuda=arguments["cuda"], with_mpi=arguments["mpi"])
    wheel = install.obtain(choice, note)
    if folder:
        written = install.write_wheel(wheel, Path(folder))
        note(f"{choice.text}: wrote {written}")
        return EXIT_OK
    install.install(choice, wheel, note)
    note(f"{choice.text}: installed, {time.monotonic() - started:.0f} s in all")
    return EXIT_OK


COMMAND = Command(
    "build Horovod for the torch of this environment, and install it",
    "Build Horovod for the torch of the active environment, keep the wheel in the cache, install "
    "it, and check it by an all-reduce over two processes. Nothing else there changes, "
    "except that Horovod's requirements are installed where they are absent. Exit code 3: it "
    "cannot be built here.",
    FLAGS,
    run,
)
