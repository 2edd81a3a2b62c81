"""Build of Horovod's wheel from its source distribution, with a cache outside the checkout.

The cache key is a hash of all inputs of the build, so a second checkout or setup takes the wheel
in a second instead of building it for minutes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdtrain.errors import PreflightError
from launch.install.horovod_source import (
    ADDED,
    EDITS,
    HOROVOD_SHA256,
    HOROVOD_VERSION,
    apply_edits,
)
from launch.install.machine import Mpi

# CMake 3.26 supports C++17 for every compiler that torch supports; 4 is the newest tested.
BUILD_TOOLS = ("cmake>=3.26,<5", "setuptools>=65,<100", "wheel>=0.40,<1", "packaging>=23,<30")


def cache_folder() -> Path:
    """Return the folder of wheels and build logs: `$XDG_CACHE_HOME/hvdtrain/horovod`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hvdtrain" / "horovod"


@dataclass(frozen=True)
class WheelInputs:
    """All inputs that determine the wheel's binary."""

    horovod_sha256: str
    edits_sha256: str
    torch: str
    cuda: str | None
    python: str
    machine: str
    libc: str
    mpi: str
    compiler: str
    flags: tuple[tuple[str, str], ...]

    @property
    def key(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def build_flags(cuda: str | None) -> dict[str, str]:
    """Return Horovod's build switches: PyTorch only, Gloo, MPI, and NCCL if torch has CUDA."""
    flags = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI": "1",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    }
    if cuda:
        flags |= {"HOROVOD_GPU": "CUDA", "HOROVOD_GPU_OPERATIONS": "NCCL"}
    return flags


def wheel_inputs(torch_version: str, cuda: str | None, python_abi: str, mpi: Mpi) -> WheelInputs:
    """Return the inputs for this machine and the environment that will hold the wheel."""
    return WheelInputs(
        horovod_sha256=HOROVOD_SHA256,
        edits_sha256=edits_sha256(),
        torch=torch_version,
        cuda=cuda,
        python=python_abi,
        machine=platform.machine(),
        libc="-".join(platform.libc_ver()),
        mpi=mpi.identity,
        compiler=compiler_identity(),
        flags=tuple(sorted(build_flags(cuda).items())),
    )


def edits_sha256() -> str:
    """Return a hash of the edits to Horovod's source, and of the files added to it."""
    added = [Path(__file__).with_name(name).read_text("utf-8") for name in ADDED]
    edits = json.dumps([*(asdict(edit) for edit in EDITS), *added])
    return hashlib.sha256(edits.encode()).hexdigest()


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


def obtain_wheel(inputs: WheelInputs, python: Path, mpi: Mpi) -> Path:
    """Take the wheel from the cache, or build it there.

    `python` is the interpreter of the environment that holds torch (and pip's Open MPI if that is
    used). Of two concurrent setups one builds and the other waits.
    Raises PreflightError when the build fails, with the first error and the path of the log.
    """
    if found := cached_wheel(inputs):
        return found
    if mpi.source == "pip" and " " in str(python):
        raise PreflightError(
            f"Horovod cannot be built in a path with a space ({python}): Open MPI's compiler "
            "wrapper does not quote it. Move the checkout, or install Open MPI 4 on the system"
        )
    folder = cache_folder() / inputs.key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _build_once(folder, inputs, python, mpi)
    except OSError as error:
        raise PreflightError(
            f"the cache {folder} cannot be written: {error.strerror or error} "
            "(set XDG_CACHE_HOME to use another folder)"
        ) from error


def _build_once(folder: Path, inputs: WheelInputs, python: Path, mpi: Mpi) -> Path:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wheel = cached_wheel(inputs)
        if wheel is None:
            with tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-") as scratch:
                built = _build(Path(scratch), folder / "build.log", inputs, python, mpi)
                wheel = _publish(built, folder)
            (folder / "inputs.json").write_text(json.dumps(asdict(inputs), indent=2) + "\n")
    return wheel


def _publish(built: Path, folder: Path) -> Path:
    """Copy under another name and rename: a wheel in the cache is complete or absent."""
    partial = folder / (built.name + ".partial")
    shutil.copyfile(built, partial)
    return partial.rename(folder / built.name)


def _build(scratch: Path, log: Path, inputs: WheelInputs, python: Path, mpi: Mpi) -> Path:
    tools = scratch / "tools"
    environment = _build_environment(tools, inputs, python, mpi)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    requirement = scratch / "horovod.txt"
    requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n")
    sdist = scratch / "sdist"
    with log.open("w") as output:

        def step(what: str, command: list[str]) -> None:
            output.write(f"\n### {what}: {' '.join(command)}\n")
            output.flush()
            done = subprocess.run(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
            )
            if done.returncode != 0:
                error = first_error(log.read_text(errors="replace"))
                raise PreflightError(
                    f"could not {what} (exit code {done.returncode}): {error}\nfull log: {log}"
                )

        step("install the build tools", [*pip, "install", "--target", str(tools), *BUILD_TOOLS])
        step(
            "download Horovod",
            [*pip, "download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod"]
            + ["--dest", str(sdist), "--requirement", str(requirement)],
        )
        source = _unpack(next(sdist.glob("horovod-*.tar.gz")), scratch / "source")
        apply_edits(source)
        step(
            "build Horovod",
            [*pip, "wheel", "--verbose", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
            + ["--wheel-dir", str(scratch / "wheel"), str(source)],
        )
    return next((scratch / "wheel").glob("horovod-*.whl"))


def _build_environment(tools: Path, inputs: WheelInputs, python: Path, mpi: Mpi) -> dict[str, str]:
    environment = dict(os.environ)
    for name in [name for name in environment if name.startswith("HOROVOD_")]:
        del environment[name]
    environment |= dict(inputs.flags)
    environment["PYTHONPATH"] = str(tools)
    environment["HOROVOD_CMAKE"] = str(tools / "bin" / "cmake")
    environment.setdefault("MAKEFLAGS", f"-j{os.cpu_count() or 1}")
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    if mpi.source == "pip":
        # By default the wrapper would store the path of this environment in the cached wheel.
        environment["OMPI_LDFLAGS"] = f"-L{python.parent.parent / 'lib'}"
    return environment


def _unpack(archive: Path, into: Path) -> Path:
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(into, filter="data")
        else:  # a Python without PEP 706; the archive's hash was checked above
            tar.extractall(into)
    return into / f"horovod-{HOROVOD_VERSION}"


def first_error(log_text: str) -> str:
    """Return the first line that a compiler, CMake or pip marks as an error, and the next line."""
    lines = log_text.splitlines()
    for pattern in (r"\berror: |undefined reference", r"CMake Error", r"ERROR: |Error"):
        for number, line in enumerate(lines):
            # pip's summary line does not name the cause.
            if re.search(pattern, line) and "subprocess-exited-with-error" not in line:
                return "\n".join(part.strip() for part in lines[number : number + 2])
    return lines[-1].strip() if lines else "the log is empty"
