"""Facts that take a process of their own: MPI's version, GPUs, whether Horovod loads."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

LIMIT_S = 30.0
# Importing torch takes seconds; loading the same libraries takes a fraction of one.
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
    """Each takes some time: they are run at once, in threads."""
    return {"mpi": mpi_version, "gpus": gpus, "horovod_loads": horovod_loads}


def mpi_version() -> str | None:
    """Of the mpirun on PATH; None: there is none."""
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
    """NVIDIA's, as the driver tells. `problem`: there is a driver, but it does not answer."""
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
    """What Horovod was built with, where its native library loads beside this torch."""
    problem = ""
    for program in (_LOAD, _IMPORT):  # the import is the judge where the short way fails
        done = _run([sys.executable, "-c", program])
        lines = done.stdout.strip().splitlines()
        if done.returncode == 0 and lines:
            found: dict[str, Any] = json.loads(lines[-1])
            return found | {"problem": None}
        words = done.stderr.strip().splitlines()
        problem = words[-1][:500] if words else f"it ended with code {done.returncode}"
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
