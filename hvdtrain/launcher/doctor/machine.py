"""Facts of the machine: cores, memory, limits, disks, read from files and system calls.

`root` replaces / for the kernel's files, so that tests can describe other machines.
"""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path("/")
UNLIMITED = 1 << 60  # cgroup v1 writes a number about 2^63 for "no limit"


def machine_sources(output: str) -> dict[str, Callable[[], Any]]:
    """Return the sources of the machine facts. `output`: the folder where runs will be written."""
    return {
        "cores": cores,
        "memory": memory,
        "cgroup": cgroup_limits,
        "shm": lambda: space(Path("/dev/shm")),
        "limits": limits,
        "output": lambda: output_folder(Path(output)),
        "infiniband": lambda: Path("/sys/class/infiniband").is_dir(),
        "single_copy": single_copy,
        "speeds": link_speeds,
    }


def cores() -> dict[str, Any]:
    """Return the number of cores of the machine, and of those that this process may use."""
    return {"all": os.cpu_count(), "usable": len(os.sched_getaffinity(0))}


def memory(root: Path = ROOT) -> dict[str, int]:
    """Return total and available memory in bytes, as the kernel counts them."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if ":" in line}
    return {
        "total": kilobytes["MemTotal"] * 1024,
        "available": kilobytes.get("MemAvailable", kilobytes["MemFree"]) * 1024,
    }


def cgroup_limits(root: Path = ROOT) -> dict[str, Any]:
    """Return the limits set by a container or batch system: the tightest of all enclosing cgroups.

    Keys: version, cores, memory (bytes), memory_used (of the cgroup with that limit), processes.
    None: no limit.
    """
    own = _own_groups(root)
    found: dict[str, Any] = {
        "version": 2 if set(own) == {""} else 1,
        "cores": None,
        "memory": None,
        "memory_used": None,
        "processes": None,
    }
    for controllers, group in own.items():
        for folder in _folders(root, controllers, group):
            _narrow(found, "cores", _quota(folder))
            memory_limit = _number(folder, "memory.max", "memory.limit_in_bytes")
            if _narrow(found, "memory", memory_limit):
                found["memory_used"] = _number(folder, "memory.current", "memory.usage_in_bytes")
            _narrow(found, "processes", _number(folder, "pids.max"))
    return found


def _own_groups(root: Path) -> dict[str, str]:
    """Return controllers -> this process's group; the controllers of version 2 are ""."""
    groups = {}
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        groups[controllers] = group
    return groups


def _folders(root: Path, controllers: str, group: str) -> list[Path]:
    """Return the group's folder and its ancestors, as far as they are mounted."""
    base = root / "sys/fs/cgroup"
    if controllers:
        base /= controllers.removeprefix("name=")
    elif not (base / "cgroup.controllers").exists():
        base /= "unified"
    # In a container, the mount may be the group itself, without its path.
    folder = base / group.strip("/")
    if not folder.is_dir():
        folder = base
    folders = [folder, *folder.parents]
    return [item for item in folders if item.is_relative_to(base) and item.is_dir()]


def _quota(folder: Path) -> float | None:
    """Return the CPU quota in cores; None if there is none."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
            return None if quota == "max" else int(quota) / int(period)
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        return quota_us / int((folder / "cpu.cfs_period_us").read_text()) if quota_us > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _number(folder: Path, *names: str) -> int | None:
    for name in names:
        try:
            value = int((folder / name).read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
        return value if value < UNLIMITED else None
    return None


def _narrow(found: dict[str, Any], name: str, limit: float | None) -> bool:
    if limit is None or (found[name] is not None and found[name] <= limit):
        return False
    found[name] = limit
    return True


def space(folder: Path) -> dict[str, Any]:
    """Return the size of a file system, and the bytes and files left for this user."""
    found = os.statvfs(folder)
    return {
        "path": str(folder),
        "total": found.f_blocks * found.f_frsize,
        "free": found.f_bavail * found.f_frsize,
        "files_free": found.f_favail if found.f_files else None,
    }


def limits() -> dict[str, int | None]:
    """Return the soft limits of this process; None: unlimited."""
    kinds = {
        "open_files": resource.RLIMIT_NOFILE,
        "locked_memory": resource.RLIMIT_MEMLOCK,
        "processes": resource.RLIMIT_NPROC,
    }
    softs = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: None if soft == resource.RLIM_INFINITY else soft for name, soft in softs.items()}


def output_folder(output: Path) -> dict[str, Any]:
    """Return whether runs can be written (tested in the nearest existing folder) and space left."""
    existing = next(folder for folder in (output, *output.parents) if folder.exists())
    found: dict[str, Any] = {"asked": str(output), **space(existing), "problem": None}
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"hvdtrain doctor")
            file.flush()
    except OSError as error:
        found["problem"] = error.strerror
    return found


def single_copy() -> bool:
    """Return whether processes may read each other's memory, as Open MPI does within a host."""
    library = ctypes.CDLL(None, use_errno=True)
    source, target = ctypes.create_string_buffer(b"hvdtrain"), ctypes.create_string_buffer(8)

    class Stretch(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    local = Stretch(ctypes.addressof(target), 8)
    remote = Stretch(ctypes.addressof(source), 8)
    copied = library.process_vm_readv(
        os.getpid(), ctypes.byref(local), ctypes.c_ulong(1), ctypes.byref(remote),
        ctypes.c_ulong(1), ctypes.c_ulong(0),
    )  # fmt: skip
    return bool(copied == 8)


def link_speeds(root: Path = ROOT) -> dict[str, int]:
    """Return interface -> Mbit/s, for the interfaces whose driver reports it."""
    speeds = {}
    for path in (root / "sys/class/net").glob("*/speed"):
        try:
            speed = int(path.read_text())
        except (OSError, ValueError):
            continue
        if speed > 0:
            speeds[path.parent.name] = speed
    return speeds
