"""Software facts of a host. The quick part (versions, user, paths, network interfaces) imports no
library; the rest (MPI, GPUs, Horovod's native library) runs child processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import pwd
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.launcher.addresses import interfaces

PACKAGES = ("torch", "torchvision", "horovod", "mpi4py", "numpy")
HVDTRAIN = Path(__file__).resolve().parents[2]


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


def quick_sources(working_directory: str) -> dict[str, Callable[[], Any]]:
    """Return the sources of the quick part. `working_directory`: where workers will be started."""
    return {
        "hostname": socket.gethostname,
        "python": platform.python_version,
        "executable": lambda: sys.executable,
        "packages": package_versions,
        "horovod_built_for": horovod_built_for,
        "hvdtrain": lambda: {
            "version": __version__,
            "folder": str(HVDTRAIN),
            "sha256": source_hash(HVDTRAIN),
        },
        "horovodrun": lambda: shutil.which("horovodrun"),
        "mpirun": lambda: shutil.which("mpirun"),
        "user": user,
        "working_directory": lambda: folder_state(Path(working_directory)),
        "interfaces": interfaces,
        "ssh_client": lambda: os.environ.get("SSH_CONNECTION", "").split()[:1],
    }


def package_versions() -> dict[str, str | None]:
    """Return name -> installed version; None where a package is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def horovod_built_for() -> str | None:
    """Return the torch version that Horovod was compiled for, from its build metadata."""
    try:
        file = metadata.distribution("horovod").locate_file("horovod/metadata.json")
        found = json.loads(Path(str(file)).read_text("utf-8")).get("pytorch")
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return None
    return str(found) if found else None


def source_hash(folder: Path) -> str:
    """Return the SHA-256 of a package's Python files: checkouts of one version may differ."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def user() -> dict[str, Any]:
    """Return name, uid and home folder of the user that runs the probe."""
    entry = pwd.getpwuid(os.getuid())
    return {"name": entry.pw_name, "uid": entry.pw_uid, "home": entry.pw_dir}


def folder_state(folder: Path) -> dict[str, Any]:
    """Return the path, and whether it is a folder that can be entered."""
    return {"path": str(folder), "usable": folder.is_dir() and os.access(folder, os.X_OK)}


LIMIT_S = 30.0
# Importing torch takes seconds; loading the same libraries takes a fraction of a second.
_LOAD = """
import ctypes, importlib.util, json, pathlib, sys
def folder_of(name):
    return pathlib.Path(importlib.util.find_spec(name).origin).parent
for name in ("c10", "torch_cpu", "torch", "torch_python"):
    ctypes.CDLL(str(folder_of("torch") / "lib" / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
(native,) = (folder_of("horovod") / "torch").glob("mpi_lib_v2*.so")
loaded = ctypes.CDLL(str(native))
found = {name: bool(getattr(loaded, f"horovod_{name}_built")()) for name in ("gloo", "mpi", "nccl")}
version = {}
exec((folder_of("torch") / "version.py").read_text(), version)
found |= {"torch": version["__version__"], "cuda": version["cuda"]}
sys.stdout.write("\\n" + json.dumps(found) + "\\n")
"""
_IMPORT = """
import json, sys
import torch
import horovod.torch as hvd
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gloo": bool(hvd.gloo_built()),
         "mpi": bool(hvd.mpi_built()), "nccl": bool(hvd.nccl_built())}
sys.stdout.write("\\n" + json.dumps(found) + "\\n")
"""


def child_sources() -> dict[str, Callable[[], Any]]:
    """Return the sources that run child processes; the probe runs them concurrently, in threads."""
    return {"mpi": mpi_version, "gpus": gpus, "horovod_loads": horovod_loads}


def mpi_version() -> str | None:
    """Return the version of the mpirun on PATH; None if there is none."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return None
    done = _run([mpirun, "--version"])
    found = re.search(r"\(Open MPI\) ([\w.]+)", done.stdout)
    if found:
        return f"Open MPI {found.group(1)}"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[0][:80] if lines else f"{mpirun} (exit code {done.returncode})"


def gpus() -> dict[str, Any]:
    """Return the NVIDIA GPUs that the driver reports. `problem`: why nvidia-smi failed, or None."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"list": [], "problem": None}
    query = ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    done = _run([program, *query])
    if done.returncode != 0:
        return {"list": [], "problem": (done.stdout + done.stderr).strip()[:300]}
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line]
    keys = ("name", "driver", "memory_mb")
    return {"list": [dict(zip(keys, row, strict=False)) for row in rows], "problem": None}


def horovod_loads() -> dict[str, Any]:
    """Load Horovod's native library beside the installed torch.

    Return what it was built with, and `problem`: why it does not load, or None.
    """
    problem = ""
    for program in (_LOAD, _IMPORT):  # a full import decides where direct loading fails
        done = _run([sys.executable, "-c", program])
        lines = done.stdout.strip().splitlines()
        if done.returncode == 0 and lines:
            found: dict[str, Any] = json.loads(lines[-1])
            return found | {"problem": None}
        lines = done.stderr.strip().splitlines()
        problem = lines[-1][:500] if lines else f"it ended with code {done.returncode}"
    return {"problem": problem}


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
        check=False,
    )
