"""CPU time of the processes of a job: of their computing threads, and of all their others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import psutil

from hvdtrain.lab.bench.ratios import median


class CpuTime(NamedTuple):
    """The CPU time of some processes in seconds, or per step of a worker in milliseconds."""

    computing: float  # of their main threads
    others: float  # such as those of Horovod, Gloo and Open MPI

    def __sub__(self, before: CpuTime) -> CpuTime:
        return CpuTime(self.computing - before.computing, self.others - before.others)

    def scaled(self, factor: float) -> CpuTime:
        """Return the multiple."""
        return CpuTime(self.computing * factor, self.others * factor)


HEADINGS = ["CPU time of a worker, ms a step", "step", "main thread", "others", "rest: waits"]
NOTHING = CpuTime(math.nan, math.nan)


def cpu_time(pids: Iterable[int]) -> CpuTime:
    """Return the CPU time of processes since they started; nothing of those that have ended."""
    computing_s = total_s = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(pid)
            main = [thread for thread in process.threads() if thread.id == pid]
            total, system = process.cpu_times()[:2]
            computing_s += sum(thread.user_time + thread.system_time for thread in main)
            total_s += total + system
    return CpuTime(computing_s, total_s - computing_s)


def per_step_ms(
    cores: Sequence[CpuTime], samples_per_s: Sequence[float], samples: float, workers: int
) -> CpuTime | None:
    """Return the CPU time of a worker in a step: medians over rounds; None if all failed.

    `cores`: CPU time per second of each turn. `samples`: of all workers in a step.
    """
    per_round = [
        used.scaled(1000 * samples / speed / workers)
        for used, speed in zip(cores, samples_per_s, strict=True)
        if not math.isnan(speed)
    ]
    return CpuTime(*map(statistics.median, zip(*per_round, strict=True))) if per_round else None


def rows_of(
    case: str,
    rates: Mapping[str, Sequence[float]],
    cores: Mapping[str, Sequence[CpuTime]],
    samples: float,
    workers: int,
) -> list[list[str]]:
    """Return the rows of a case: a contestant's step in milliseconds, and where it went."""
    rows = []
    for name, speeds in rates.items():
        speed = median(speeds)
        cpu_ms = per_step_ms(cores[name], speeds, samples, workers)
        if speed and cpu_ms:
            step_ms = 1000 * samples / speed
            parts_ms = (step_ms, *cpu_ms, step_ms - sum(cpu_ms))
            # The kernel rounds the times of threads and of the process, each by itself.
            rows.append([f"{case}: {name}", *(f"{max(ms, 0.0):.1f}" for ms in parts_ms)])
    return rows
