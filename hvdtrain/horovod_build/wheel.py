"""What a wheel of Horovod is built for and with, and the cache of wheels by the hash of that."""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdtrain.errors import PreflightError
from hvdtrain.horovod_build.cuda import Cuda
from hvdtrain.horovod_build.edits import HOROVOD_SHA256, HOROVOD_VERSION, edits_sha256
from hvdtrain.horovod_build.environment import Environment, Torch
from hvdtrain.horovod_build.mpi import Mpi


def cache_folder() -> Path:
    """Return the folder of wheels and build logs: `$XDG_CACHE_HOME/hvdtrain/horovod`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hvdtrain" / "horovod"


@dataclass(frozen=True)
class Choice:
    """What Horovod is built for and with."""

    environment: Environment
    torch: Torch
    mpi: Mpi | None
    cuda: Cuda | None
    as_published: bool = False  # but for the edits without which it cannot be built

    @property
    def text(self) -> str:
        device = f"GPUs (CUDA {self.cuda.version}, NCCL {self.cuda.nccl})" if self.cuda else "CPUs"
        mpi = f"Open MPI {self.mpi.version}" if self.mpi else "no MPI"
        version = f"{HOROVOD_VERSION} as published" if self.as_published else HOROVOD_VERSION
        return f"Horovod {version} for torch {self.torch.version}, {device}, Gloo, {mpi}"

    @property
    def controllers(self) -> tuple[str, ...]:
        return ("gloo", "mpi") if self.mpi else ("gloo",)


@dataclass(frozen=True)
class WheelInputs:
    """All inputs that determine the wheel's binary."""

    horovod_sha256: str
    edits_sha256: str
    torch: str
    torch_old_abi: bool
    cxx_standard: int
    python: str
    machine: str
    libc: str
    mpi: str | None
    cuda: str | None
    compiler: str

    @property
    def key(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def wheel_inputs(choice: Choice) -> WheelInputs:
    """Return the inputs for this machine and the environment that will hold the wheel."""
    torch, mpi, cuda = choice.torch, choice.mpi, choice.cuda
    return WheelInputs(
        horovod_sha256=HOROVOD_SHA256,
        edits_sha256=edits_sha256(has_mpi=mpi is not None, as_published=choice.as_published),
        torch=torch.version,
        torch_old_abi=torch.old_abi,
        cxx_standard=torch.cxx_standard,
        python=choice.environment.abi,
        machine=platform.machine(),
        libc="-".join(platform.libc_ver()),
        mpi=mpi.identity if mpi else None,
        cuda=cuda.identity if cuda else None,
        compiler=compiler_identity(),
    )


def compiler_identity() -> str:
    """Return the C++ compiler, the first line of its version output, and the user's flags."""
    compiler = os.environ.get("CXX", "c++")
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
        version = done.stdout.partition("\n")[0]
    except OSError:
        version = "none"
    flags = [os.environ.get(name, "") for name in ("CXXFLAGS", "LDFLAGS")]
    return " | ".join([compiler, version, *flags])


def cached_wheel(inputs: WheelInputs) -> Path | None:
    """Return the cached wheel built from exactly these inputs; None if there is none."""
    return next((cache_folder() / inputs.key).glob("horovod-*.whl"), None)


def obtain_wheel(
    inputs: WheelInputs, build: Callable[[Path, Path], Path], say: Callable[[str], None]
) -> Path:
    """Take the wheel from the cache, or build it there.

    `build` receives a folder to work in and the path of a log, and returns the path of the wheel.
    What it leaves in the folder is there again after an interruption or a failure. Of two
    concurrent set-ups one builds and the other waits.
    Raises PreflightError when the build fails, or the cache cannot be written.
    """
    if cached := cached_wheel(inputs):
        return cached
    folder = cache_folder() / inputs.key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / "lock", say):
            wheel = cached_wheel(inputs)
            if wheel is None:
                work = _work_folder(folder)
                wheel = _publish(build(work, folder / "build.log"), folder)
                (folder / "inputs.json").write_text(json.dumps(asdict(inputs), indent=2) + "\n")
                shutil.rmtree(work, ignore_errors=True)
        return wheel
    except OSError as error:
        raise PreflightError(
            f"the cache {folder} cannot be written: {error.strerror or error} "
            "(set XDG_CACHE_HOME to use another folder)"
        ) from error


def _work_folder(folder: Path) -> Path:
    """Return a folder to build in. Compiler wrappers do not quote paths, so it has no space."""
    if " " in str(folder):
        return Path(tempfile.mkdtemp(prefix="hvdtrain-horovod-"))
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return work


@contextmanager
def _alone(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is building the same wheel; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _publish(built: Path, folder: Path) -> Path:
    """Copy under another name and rename: a wheel in the cache is complete or absent."""
    partial = folder / (built.name + ".partial")
    shutil.copyfile(built, partial)
    return partial.rename(folder / built.name)
