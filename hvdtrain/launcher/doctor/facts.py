"""Facts of a host. The quick part imports no library; the rest also runs child processes.

`root` replaces / for the kernel's files, so that tests can describe other machines.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import runpy
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hvdtrain import __version__, cgroups
from hvdtrain.files import nearest_existing, why_not_written
from hvdtrain.interpreter import WITHOUT_FOLDER
from hvdtrain.launcher.doctor.gpu_facts import gpus
from hvdtrain.launcher.horovodrun import mpi_of
from hvdtrain.launcher.processes import boot_id, own_passwd_entry, run_child
from hvdtrain.network import interfaces

Sources = dict[str, Callable[[], Any]]  # fact -> function that determines it
PACKAGES = ("torch", "torchvision", "horovod", "mpi4py", "numpy")
HVDTRAIN = Path(__file__).resolve().parents[2]
ROOT = Path("/")
CHILD_LIMIT_S = 30.0


def gather(sources: Mapping[str, Callable[[], Any]]) -> dict[str, dict[str, Any]]:
    """Call every source; return results in `values` and exceptions, as text, in `errors`."""
    values: dict[str, Any] = {}
    errors: dict[str, Any] = {}
    for name, source in sources.items():
        try:
            values[name] = source()
        except Exception as error:  # one failing fact must not hide the others
            errors[name] = f"{type(error).__name__}: {error}"
    return {"values": values, "errors": errors}


def quick_sources(folders: Sequence[str]) -> Sources:
    """Return the sources of the quick part. `folders`: paths of the one where workers will be
    started, the best first.
    """
    usable = [path for path in folders if Path(path).is_dir() and os.access(path, os.X_OK)]
    return {
        "hostname": socket.gethostname,
        "machine": machine,
        "python": platform.python_version,
        "executable": lambda: sys.executable,
        "packages": package_versions,
        "torch_build": torch_build,
        "horovod_built_for": horovod_built_for,
        "hvdtrain": lambda: {
            "version": __version__,
            "folder": str(HVDTRAIN),
            "sha256": source_hash(HVDTRAIN),
        },
        "horovodrun": lambda: shutil.which("horovodrun"),
        "mpirun": lambda: shutil.which("mpirun"),
        "user": user,
        "working_directory": lambda: {"path": [*usable, folders[-1]][0], "usable": bool(usable)},
        "cores": lambda: {"all": os.cpu_count(), "usable": cgroups.usable_cores()},
        "memory": memory,
        "cgroup": cgroups.limits,
        "shm": lambda: space(Path("/dev/shm")),
        "interfaces": interfaces,
        "ssh_client": lambda: os.environ.get("SSH_CONNECTION", "").split()[:1],
    }


def slow_sources(output: str) -> Sources:
    """Return the other sources. `output`: the folder where runs will be written."""
    return {
        "mpi": mpi_version,
        "gpus": gpus,
        "horovod_loads": horovod_loads,
        "torchvision_problem": torchvision_problem,
        "limits": limits,
        "output": lambda: output_folder(Path(output)),
        "infiniband": lambda: Path("/sys/class/infiniband").is_dir(),
        "single_copy": single_copy,
        "speeds": link_speeds,
    }


def machine(root: Path = ROOT) -> str | None:
    """Return a text that only two names of one machine share: the boot of its kernel, its name, and
    the namespaces that make containers on one kernel machines of their own. None: not readable.
    """
    try:
        boot = boot_id(root)
        spaces = [str((root / "proc/self/ns" / name).readlink()) for name in ("net", "uts")]
    except OSError:
        return None
    return " ".join([boot, socket.gethostname(), *spaces])


def package_versions() -> dict[str, str | None]:
    """Return name -> installed version; None where a package is not installed."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def torch_build() -> dict[str, str | None] | None:
    """Return the full version of the installed torch, and the CUDA that it is built for, if any.

    The version of the package may lack the local part, which names the build: 2.14.1 of
    2.14.1+cu130. None: not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    names = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return {"version": str(names["__version__"]), "cuda": names.get("cuda")}


def horovod_built_for() -> str | None:
    """Return the torch version that Horovod was compiled for, from its build metadata."""
    try:
        file = metadata.distribution("horovod").locate_file("horovod/metadata.json")
        version = json.loads(Path(str(file)).read_text("utf-8")).get("pytorch")
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return None
    return str(version) if version else None


def source_hash(folder: Path) -> str:
    """Return the SHA-256 of a package's Python files: checkouts of one version may differ."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def user() -> dict[str, Any]:
    """Return name, uid and home folder of the user that runs the probe; a user without a line in
    passwd is called by the number.
    """
    number, entry = os.getuid(), own_passwd_entry()
    if entry is None:
        return {"name": str(number), "uid": number, "home": os.environ.get("HOME", "/")}
    return {"name": entry.pw_name, "uid": number, "home": entry.pw_dir}


def mpi_version() -> str | None:
    """Return the version of the mpirun on PATH; None if there is none."""
    mpirun = shutil.which("mpirun")
    return mpi_of(mpirun) if mpirun else None


# Importing torch takes seconds; loading the same libraries takes a fraction of a second.
_LOAD_TORCH = """
import ctypes, importlib.util, json, pathlib, sys
def folder_of(name):
    return pathlib.Path(importlib.util.find_spec(name).origin).parent
for name in ("c10", "torch_cpu", "torch", "torch_python"):
    ctypes.CDLL(str(folder_of("torch") / "lib" / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
"""
_LOAD_HOROVOD = """
(native,) = (folder_of("horovod") / "torch").glob("mpi_lib_v2*.so")
loaded = ctypes.CDLL(str(native))
found = {name: bool(getattr(loaded, f"horovod_{name}_built")()) for name in ("gloo", "mpi", "nccl")}
found["gpu_tensors"] = bool(loaded.horovod_cuda_built() or loaded.horovod_rocm_built())
version = {}
exec((folder_of("torch") / "version.py").read_text(), version)
found |= {"torch": version["__version__"], "cuda": version["cuda"]}
sys.stdout.write("\\n" + json.dumps(found) + "\\n")
"""
_IMPORT_HOROVOD = """
import json, sys, torch, horovod.torch as hvd
found = {name: bool(getattr(hvd, f"{name}_built")()) for name in ("gloo", "mpi", "nccl")}
found["gpu_tensors"] = bool(hvd.cuda_built() or hvd.rocm_built())
found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
sys.stdout.write("\\n" + json.dumps(found) + "\\n")
"""


def horovod_loads() -> dict[str, Any]:
    """Load Horovod's native library beside the installed torch.

    Return what it was built with, and `problem`: why it does not load, or None.
    """
    output, problem = _try(_LOAD_TORCH + _LOAD_HOROVOD, _IMPORT_HOROVOD)
    features: dict[str, Any] = {} if problem else json.loads(output)
    return features | {"problem": problem}


def torchvision_problem() -> str | None:
    """Return why torchvision cannot be imported, such as a build for another torch, or None."""
    loading = 'ctypes.CDLL(str(folder_of("torchvision") / "_C.so"))'
    return _try(_LOAD_TORCH + loading, "import torchvision")[1]


def _try(loading: str, importing: str) -> tuple[str, str | None]:
    """Run `loading`, and if that fails `importing`, which decides. Return the last line of output,
    and the last line of the error, or None.
    """
    for program in (loading, importing):
        done = run_child([sys.executable, "-c", WITHOUT_FOLDER + program], CHILD_LIMIT_S)
        if done.returncode == 0:
            return done.stdout.strip().rpartition("\n")[2], None
    error = done.stderr.strip().rpartition("\n")[2]
    return "", error[:500] or f"it ended with code {done.returncode}"


def memory(root: Path = ROOT) -> dict[str, int]:
    """Return total and available memory in bytes, as the kernel counts them."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if ":" in line}
    return {"total": kilobytes["MemTotal"] * 1024, "available": kilobytes["MemAvailable"] * 1024}


def space(folder: Path) -> dict[str, Any]:
    """Return the size of a file system, and the bytes and files left for this user."""
    stats = os.statvfs(folder)
    return {
        "path": str(folder),
        "total": stats.f_blocks * stats.f_frsize,
        "free": stats.f_bavail * stats.f_frsize,
        "files_free": stats.f_favail if stats.f_files else None,
    }


def limits() -> dict[str, int | None]:
    """Return the soft limits of this process; None: unlimited."""
    from resource import RLIM_INFINITY, RLIMIT_MEMLOCK, RLIMIT_NOFILE, RLIMIT_NPROC, getrlimit

    ids = {"open_files": RLIMIT_NOFILE, "locked_memory": RLIMIT_MEMLOCK, "processes": RLIMIT_NPROC}
    softs = {name: getrlimit(number)[0] for name, number in ids.items()}
    return {name: None if soft == RLIM_INFINITY else soft for name, soft in softs.items()}


def output_folder(output: Path) -> dict[str, Any]:
    """Return whether runs can be written (tested in the nearest existing folder) and space left."""
    existing = nearest_existing(output)
    problem: str | None = None
    try:
        with tempfile.TemporaryFile(dir=existing, buffering=0) as file:
            file.write(b"hvdtrain doctor")
    except OSError as error:
        problem = why_not_written(existing, error)
    return {"asked": str(output), **space(existing), "problem": problem}


def single_copy() -> bool:
    """Return whether processes may read each other's memory, as Open MPI does within a host."""
    import ctypes  # late: the quick part does without it

    source, target = ctypes.create_string_buffer(b"hvdtrain"), ctypes.create_string_buffer(8)
    iovec, one = ctypes.c_size_t * 2, ctypes.c_ulong(1)  # struct iovec: address and length
    local, remote = (iovec(ctypes.addressof(buffer), 8) for buffer in (target, source))
    read = ctypes.CDLL(None).process_vm_readv
    return bool(read(os.getpid(), local, one, remote, one, ctypes.c_ulong(0)) == 8)


def link_speeds(root: Path = ROOT) -> dict[str, int]:
    """Return interface -> Mbit/s, for the interfaces whose driver reports it."""
    speeds = {}
    for path in (root / "sys/class/net").glob("*/speed"):
        with contextlib.suppress(OSError, ValueError):
            speed = int(path.read_text())
            if speed > 0:
                speeds[path.parent.name] = speed
    return speeds
