"""Facts of the machine itself: cores, memory, limits, disks. Files and system calls alone.

`root` stands for / where the kernel's files are read, so that tests can have machines of their own.
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
    """`output`: the folder that runs will be written to."""
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


def cores(root: Path = ROOT) -> dict[str, Any]:
    """There are, and this process may use."""
    return {"all": os.cpu_count(), "usable": len(os.sched_getaffinity(0))}


def memory(root: Path = ROOT) -> dict[str, int]:
    """Bytes: total and available, as the kernel counts them."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if ":" in line}
    return {
        "total": kilobytes["MemTotal"] * 1024,
        "available": kilobytes.get("MemAvailable", kilobytes["MemFree"]) * 1024,
    }


def cgroup_limits(root: Path = ROOT) -> dict[str, Any]:
    """What a container or a batch system allows: the narrowest limit on the way up, or None.

    version, cores, memory (bytes), memory_used (where that limit stands), processes.
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
    """Controllers -> this process's group: "" for version 2."""
    groups = {}
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        groups[controllers] = group
    return groups


def _folders(root: Path, controllers: str, group: str) -> list[Path]:
    """The group's folder and those above it, where they are mounted."""
    base = root / "sys/fs/cgroup"
    if controllers:
        base /= controllers.removeprefix("name=")
    elif not (base / "cgroup.controllers").exists():
        base /= "unified"
    # In a container, what is mounted may be the group itself, under no name.
    folder = base / group.strip("/")
    if not folder.is_dir():
        folder = base
    folders = [folder, *folder.parents]
    return [item for item in folders if item.is_relative_to(base) and item.is_dir()]


def _quota(folder: Path) -> float | None:
    """Cores that the scheduler grants."""
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
    """Bytes and files that a file system holds and has left for this user."""
    found = os.statvfs(folder)
    return {
        "path": str(folder),
        "total": found.f_blocks * found.f_frsize,
        "free": found.f_bavail * found.f_frsize,
        "files_free": found.f_favail if found.f_files else None,
    }


def limits() -> dict[str, int | None]:
    """The soft limits of a process; None: unlimited."""
    kinds = {
        "open_files": resource.RLIMIT_NOFILE,
        "locked_memory": resource.RLIMIT_MEMLOCK,
        "processes": resource.RLIMIT_NPROC,
    }
    softs = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: None if soft == resource.RLIM_INFINITY else soft for name, soft in softs.items()}


def output_folder(output: Path) -> dict[str, Any]:
    """Whether runs can be written, and the room there is: tried, in what of the path exists."""
    there = next(folder for folder in (output, *output.parents) if folder.exists())
    found: dict[str, Any] = {"asked": str(output), **space(there), "problem": None}
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"hvdtrain doctor")
            file.flush()
    except OSError as error:
        found["problem"] = error.strerror
    return found


def single_copy() -> bool:
    """Whether processes may read each other's memory (Open MPI does, within a host)."""
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
    """Interface -> Mbit/s, where the driver tells."""
    speeds = {}
    for path in (root / "sys/class/net").glob("*/speed"):
        try:
            speed = int(path.read_text())
        except (OSError, ValueError):
            continue
        if speed > 0:
            speeds[path.parent.name] = speed
    return speeds
