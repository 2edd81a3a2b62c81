"""What containers and batch systems let a process use, on made-up machines and in this one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import cgroups
from tests.unit.folders import write

NO_LIMITS = dict.fromkeys(cgroups.KEYS)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({"proc/self/cgroup": "0::/\n"}, NO_LIMITS | {"version": 2}, id="none"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/cgroup.controllers": "",
                "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/job/memory.max": "3000\n",
                "sys/fs/cgroup/job/memory.current": "1000\n",
                "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
                "sys/fs/cgroup/job/step/memory.max": "5000\n",
                "sys/fs/cgroup/job/step/pids.max": "77\n",
                "sys/fs/cgroup/job/step/pids.current": "5\n",
            },
            {
                "version": 2,
                "cores": 1.5,
                "memory": 3000,
                "memory_used": 1000,
                "processes": 77,
                "processes_used": 5,
            },
            id="v2, the narrowest on the way up",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/../other\n",
                "sys/fs/cgroup/cgroup.controllers": "",
                "sys/fs/cgroup/memory.max": "4096\n",
                "sys/fs/cgroup/memory.current": "96\n",
            },
            NO_LIMITS | {"version": 2, "memory": 4096, "memory_used": 96},
            id="v2 in a container",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "9:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n8:pids:/\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "2048\n",
                "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": "48\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/pids/pids.max": "max\n",
            },
            {
                "version": 1,
                "cores": 0.5,
                "memory": 2048,
                "memory_used": 48,
                "processes": None,
                "processes_used": None,
            },
            id="v1",
        ),
    ],
)
def test_limits_of_containers(
    tmp_path: Path, files: dict[str, str], expected: dict[str, Any]
) -> None:
    """Fails when a limit is overlooked, or the number for "none" is taken for one."""
    assert cgroups.limits(write(tmp_path, files)) == expected


V2 = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cgroup.controllers": ""}


@pytest.mark.parametrize(
    ("quota", "environment", "expected"),
    [
        ("max 100000", {}, 6),
        ("400000 100000", {}, 4),
        ("150000 100000", {}, 1),
        ("20000 100000", {}, 1),
        ("900000 100000", {}, 6),
        ("400000 100000", {"SLURM_CPUS_ON_NODE": "3"}, 3),
        ("max 100000", {"SLURM_CPUS_ON_NODE": "128"}, 6),
        ("max 100000", {"SLURM_CPUS_ON_NODE": "many"}, 6),
    ],
)
def test_usable_cores(
    quota: str,
    environment: dict[str, str],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails when a quota, affinity or Slurm's allocation is overlooked, or leaves no core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 4, 6, 8, 10})
    root = write(tmp_path, V2 | {"sys/fs/cgroup/cpu.max": f"{quota}\n"})
    assert cgroups.usable_cores(environment, root) == expected


def test_without_the_kernels_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when another system than Linux, which has none of them, has no cores."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert cgroups.usable_cores({}, tmp_path) == 3
    assert cgroups.memory_kills(tmp_path) == 0


@pytest.mark.parametrize(
    "files",
    [
        V2 | {"sys/fs/cgroup/memory.events": "low 0\nmax 9\noom 4\noom_kill 3\n"},
        {
            "proc/self/cgroup": "4:memory:/job\n0::/\n",
            "sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 3\n",
            "sys/fs/cgroup/memory/memory.oom_control": "under_oom 0\noom_kill 7\n",
        },
    ],
)
def test_memory_kills(files: dict[str, str], tmp_path: Path) -> None:
    """Fails when the kernel's count is misread, or is that of other containers too."""
    assert cgroups.memory_kills(write(tmp_path, files)) == 3


@pytest.mark.parametrize(
    ("most", "used", "expected"),
    [("max", 9000, ""), ("20", 3, ""), ("20", 18, "has 18 of 20 processes and threads")],
)
def test_a_full_container(most: str, used: int, expected: str, tmp_path: Path) -> None:
    """Fails when a refused thread is blamed on a limit that is far away, or not on one at hand."""
    files = {"sys/fs/cgroup/pids.max": f"{most}\n", "sys/fs/cgroup/pids.current": f"{used}\n"}
    found = cgroups.explain_full(write(tmp_path, V2 | files))
    assert expected in found and bool(found) == bool(expected)
