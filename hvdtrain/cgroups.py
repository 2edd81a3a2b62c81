"""What a process may use of its machine: limits of containers and batch systems (cgroups, Slurm).

`root` replaces / for the kernel's files, so that tests can describe other machines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path("/")
GIB = 1 << 30
KEYS = ("cores", "memory", "memory_used", "processes", "processes_used")
USED = {
    "memory": ("memory.current", "memory.usage_in_bytes"),
    "processes": ("pids.current",),
}
FEW = 4  # processes and threads that may have ended again
UNLIMITED = 1 << 60  # cgroup v1 writes a number about 2^63 for "no limit"


def usable_cores(environment: Mapping[str, str] = os.environ, root: Path = ROOT) -> int:
    """Return how many cores this process and those beside it may use, at least 1.

    The least of the cores that the scheduler allows (affinity), the quota of the container, rounded
    down, since threads beyond a quota wait for one another, and the cores that Slurm has allocated
    on this host.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    if quota := limits(root)["cores"]:
        cores = min(cores, int(quota))
    allocated = environment.get("SLURM_CPUS_ON_NODE", "")
    if allocated.isdigit():
        cores = min(cores, int(allocated))
    return max(1, cores)


def limits(root: Path = ROOT) -> dict[str, Any]:
    """Return the limits set by a container or batch system: the tightest of all enclosing cgroups.

    Keys: version, cores, memory (bytes), processes (and threads), and memory_used, processes_used
    of these cgroups. None: no limit.
    """
    groups = list(_groups(root))
    tightest: dict[str, Any] = {
        "version": 1 if any(controllers for controllers, _ in groups) else 2
    }
    tightest |= dict.fromkeys(KEYS)
    for folder in (folder for _, folders in groups for folder in folders):
        for name, limit in (
            ("cores", _quota(folder)),
            ("memory", _number(folder, "memory.max", "memory.limit_in_bytes")),
            ("processes", _number(folder, "pids.max")),
        ):
            if limit is not None and (tightest[name] is None or limit < tightest[name]):
                tightest[name] = limit
                if name in USED:
                    tightest[f"{name}_used"] = _number(folder, *USED[name])
    return tightest


def memory_kills(root: Path = ROOT) -> int:
    """Return how many processes of this process's container or job the kernel has killed because
    its memory limit was reached; 0 where there is no such count.
    """
    names = ("memory.events", "memory.oom_control")  # versions 2 and 1
    files = (folders[0] / name for _, folders in _groups(root) if folders for name in names)
    return max((_counted(file, "oom_kill") for file in files), default=0)


def explain_kills(killed: int = 0, limit: int | None = None) -> str:
    """Return in words what `memory_kills` has counted; empty if the kernel has killed none.

    `limit`: of memory, in bytes.
    """
    if not killed:
        return ""
    these = "a process" if killed == 1 else f"{killed} processes"
    size = f", {limit / GIB:.2f} GiB," if limit else ""
    return f"the kernel has killed {these}, as the memory of the container or job{size} was full"


def explain_full(root: Path = ROOT) -> str:
    """Return in words that the container or job has as many processes as it may; empty if not."""
    cgroup = limits(root)
    most, used = cgroup["processes"], cgroup["processes_used"] or 0
    if most is None or used < most - FEW:
        return ""
    return f"the container or job has {used} of {most} processes and threads: raise that limit"


def _groups(root: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield the controllers (empty: version 2) of each cgroup of this process, and the folders of
    it and its ancestors, as far as mounted.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        if controllers:
            base /= controllers.removeprefix("name=")
        elif not (base / "cgroup.controllers").exists():
            base /= "unified"
        # In a container, the mount may be the group itself, without its path.
        folder = base / path.strip("/")
        folders = [folder, *folder.parents] if folder.is_dir() else [base]
        yield (
            controllers,
            [folder for folder in folders if folder.is_relative_to(base) and folder.is_dir()],
        )


def _quota(folder: Path) -> float | None:
    """Return the CPU quota in cores; None if there is none."""
    names = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")  # versions 2, 1 and 1
    words = [word for name in names for word in _text(folder / name).split()]
    if len(words) < 2 or not all(map(str.isdigit, words[:2])):  # not there, "max" or "-1"
        return None
    return int(words[0]) / int(words[1]) or None


def _number(folder: Path, *names: str) -> int | None:
    for name in names:
        if (text := _text(folder / name).strip()).isdigit():
            return int(text) if int(text) < UNLIMITED else None
    return None


def _counted(path: Path, name: str) -> int:
    """Return the number beside a name in a file of such lines; 0 if it is not there."""
    pairs = [line.split() for line in _text(path).splitlines()]
    return next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == name), 0)


def _text(path: Path) -> str:
    """Return the text of a file of the kernel; empty if it is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""
