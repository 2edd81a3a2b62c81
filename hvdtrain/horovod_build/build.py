"""The build: from Horovod's published source to a wheel.

The steps leave their results in one folder, so that a build that was interrupted is continued:
tools (CMake, setuptools), the edited source with its object files, CUDA's compiler, the wheel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.cgroups import limits, usable_cores
from hvdtrain.errors import PreflightError
from hvdtrain.horovod_build.commands import end
from hvdtrain.horovod_build.cuda import build_variables, complete_toolkit
from hvdtrain.horovod_build.edits import (
    HOROVOD_SHA256,
    HOROVOD_VERSION,
    apply_edits,
    edits_for,
)
from hvdtrain.horovod_build.environment import Torch
from hvdtrain.horovod_build.mpi import Mpi
from hvdtrain.horovod_build.wheel import Choice

# CMake 3.26 supports C++20 for every compiler that torch supports; 4 is the newest tested.
BUILD_TOOLS = (
    *("cmake>=3.26,<5", "packaging>=23,<30", "pip>=23", "setuptools>=65,<100", "wheel>=0.40,<1"),
)
COMPILER_BYTES = 2 << 30  # of memory, that a compiler of torch's headers takes at the most
LOOK_EVERY_S = 0.5
NOTICE_EVERY_PERCENT = 25  # where the output is not a terminal


def build_wheel(choice: Choice, say: Callable[[str], None], work: Path, log: Path) -> Path:
    """Build the wheel of a choice within `work`; return its path. Raises PreflightError.

    The message has the first error and the path of the log.
    """
    environment = choice.environment
    if choice.mpi and choice.mpi.source == "pip" and " " in str(environment.prefix):
        raise PreflightError(
            f"Horovod cannot be built in a path with a space ({environment.prefix}): Open MPI's "
            "compiler wrapper does not quote it. Move the environment, or install Open MPI 4 on "
            "the system, or build without MPI"
        )
    steps = Steps(work, log, say)
    tools, source = work / "tools", work / f"horovod-{HOROVOD_VERSION}"
    install = [*environment.installer, "--quiet", "--target"]
    steps.once("install the build tools", tools, [*install, str(tools), *BUILD_TOOLS])
    variables = _variables(choice, work, steps)
    requirement = work / "horovod.txt"
    requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n")
    steps.once(
        "download Horovod",
        work / "sdist",
        [*environment.pip, "download", "--no-deps", "--no-build-isolation"]
        + ["--no-binary", "horovod", "--dest", str(work / "sdist")]
        + ["--requirement", str(requirement)],
        variables,
    )
    if not (work / "edited").exists():
        _unpack(next((work / "sdist").glob("horovod-*.tar.gz")), work)
        has_mpi, as_published = choice.mpi is not None, choice.as_published
        apply_edits(source, edits_for(has_mpi=has_mpi, as_published=as_published))
        (work / "edited").touch()
    steps.run(
        "build Horovod",
        [*environment.pip, "wheel", "--verbose", "--no-deps", "--no-build-isolation"]
        + ["--no-cache-dir", "--no-index", "--wheel-dir", str(work / "wheel"), str(source)],
        variables,
        shows_progress=True,
    )
    return next((work / "wheel").glob("horovod-*.whl"))


def _variables(choice: Choice, work: Path, steps: Steps) -> dict[str, str]:
    """Return the environment of the build, with CUDA's compiler installed if it is needed."""
    environment, mpi, cuda, tools = choice.environment, choice.mpi, choice.cuda, work / "tools"
    variables = clean_variables(dict(os.environ)) | build_flags(choice.torch, mpi)
    variables["PYTHONPATH"] = str(tools)
    variables["HOROVOD_CMAKE"] = str(tools / "bin" / "cmake")
    variables.setdefault("MAKEFLAGS", f"-j{parallel_compilers()}")
    path = [str(environment.scripts), variables["PATH"]]
    if cuda:
        root = cuda.root
        if root is None:
            target = work / "cuda"  # not on Python's path, where torch has its parts of CUDA
            install = [*environment.installer, "--quiet", "--target", str(target), cuda.package]
            steps.once(f"install CUDA's compiler ({cuda.toolkit})", target, install)
            root = complete_toolkit(target)
        variables |= build_variables(cuda, root)
        path.insert(0, f"{root}/bin")
    variables["PATH"] = os.pathsep.join(path)
    if mpi and mpi.source == "pip":
        # By default the wrapper would store the path of this environment in the wheel.
        variables["OMPI_LDFLAGS"] = f"-L{environment.prefix / 'lib'}"
    return variables


def build_flags(torch: Torch, mpi: Mpi | None) -> dict[str, str]:
    """Return Horovod's build switches: PyTorch only, Gloo, and MPI where there is one."""
    return {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_NVTX": "1",
        "HOROVOD_WITH_GLOO": "1",
        f"HOROVOD_{'WITH' if mpi else 'WITHOUT'}_MPI": "1",
        "HVDTRAIN_CXX_STANDARD": str(torch.cxx_standard),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    }


def clean_variables(variables: dict[str, str]) -> dict[str, str]:
    """Return variables without those that would choose other parts of Horovod or a library."""
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith("HOROVOD_") and name not in ("CCL_ROOT", "PYTHONHOME")
    }


def parallel_compilers() -> int:
    """Return how many compilers may run at once: one a core, as far as memory allows."""
    try:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        memory_bytes = COMPILER_BYTES
    memory_bytes = min(memory_bytes, limits()["memory"] or memory_bytes)
    return max(1, min(usable_cores(), memory_bytes // COMPILER_BYTES))


@dataclass(frozen=True)
class Steps:
    """The commands of a build, one after the other, with one log."""

    work: Path
    log: Path
    say: Callable[[str], None]

    def once(
        self,
        what: str,
        result: Path,
        command: list[str],
        variables: dict[str, str] | None = None,
    ) -> None:
        """Run a command that fills the folder `result`, unless it has done so before."""
        done = result.with_name(f"{result.name}.done")
        if not done.exists():
            self.run(what, command, variables)
            done.touch()

    def run(
        self,
        what: str,
        command: list[str],
        variables: dict[str, str] | None = None,
        shows_progress: bool = False,
    ) -> None:
        """Run a command with its output in the log. Raises PreflightError with its first error."""
        with self.log.open("a") as output:
            output.write(f"\n### {what}: {' '.join(command)}\n")
            output.flush()
            began = self.log.stat().st_size
            process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        try:
            progress = Progress(self.log, began, self.say) if shows_progress else None
            while process.poll() is None:
                time.sleep(LOOK_EVERY_S)
                if progress:
                    progress.look()
        finally:
            end(process)
        if process.returncode != 0:
            with self.log.open(errors="replace") as text:
                text.seek(began)
                error = first_error(text.read())
            raise PreflightError(
                f"could not {what} (exit code {process.returncode}): {error}\nfull log: {self.log}"
            )


class Progress:
    """How far the compilation is, as make notes it in the log, and how long it will take."""

    def __init__(self, log: Path, began: int, say: Callable[[str], None]) -> None:
        self._log, self._offset, self._say = log, began, say
        self._started = time.monotonic()
        self._first: tuple[int, float] | None = None  # percent, seconds
        self._shown = 0

    def look(self) -> None:
        """Print a line where there is progress: each percent on a terminal, else each quarter."""
        with self._log.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
            self._offset += len(text)
        percentages = re.findall(rb"^\s*\[ *(\d+)%\]", text, re.MULTILINE)
        if not percentages:
            return
        percent, now = int(percentages[-1]), time.monotonic() - self._started
        self._first = self._first or (percent, now)
        if sys.stdout.isatty():
            print(f"\r  {self._line(percent, now)} \x1b[K", end="", flush=True)
            if percent == 100:
                print(flush=True)
        elif percent >= self._shown + NOTICE_EVERY_PERCENT:
            self._shown = percent
            self._say(self._line(percent, now))

    def _line(self, percent: int, now_s: float) -> str:
        assert self._first is not None
        line = f"compiling: {percent} % after {now_s:.0f} s"
        done = percent - self._first[0]
        if done > 0 and percent < 100:
            rest_s = (100 - percent) * (now_s - self._first[1]) / done
            line += f", about {rest_s:.0f} s left"
        return line


def _unpack(archive: Path, into: Path) -> None:
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(into, filter="data")
        else:  # a Python without PEP 706; the archive's hash was checked by pip
            tar.extractall(into)


def first_error(log_text: str) -> str:
    """Return the first line that a compiler, CMake or pip marks as an error, and the next line."""
    lines = log_text.splitlines()
    for pattern in (r"\berror: |undefined reference", r"CMake Error", r"ERROR: |Error"):
        for number, line in enumerate(lines):
            # pip's summary line does not name the cause.
            if re.search(pattern, line) and "subprocess-exited-with-error" not in line:
                return "\n".join(part.strip() for part in lines[number : number + 2])
    return lines[-1].strip() if lines else "the log is empty"
