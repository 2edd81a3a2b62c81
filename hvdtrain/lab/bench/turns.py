"""Turns of concurrent jobs, each of which computes while all others are stopped.

A stopped process (SIGSTOP) takes no CPU time, while in a waiting one Horovod's thread would wake up
or Open MPI would spin. So turns can be short and close together, without process starts between
them. The measured interval lies between two steps that a job has logged within its turn; the first
of them ends the interval in which it was stopped. CPU time is measured too: of the computing
threads, and of all others.
"""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

import psutil

from hvdtrain.errors import Stopped
from hvdtrain.evidence.children import POLL_S, Child, ChildFailure, all_ended
from hvdtrain.lab.bench.jobs import Logged, steps_per_s
from hvdtrain.lab.bench.rounds import columns, in_turn, median
from hvdtrain.lab.findings import Findings
from hvdtrain.launcher.processes import send_signal
from hvdtrain.log import duration
from hvdtrain.report.charts import Plot

LEAST_LINES = 2  # logged in a turn: a whole interval lies between them
CPU_HEADINGS = ["CPU time of a worker, ms a step", "step", "main thread", "others", "rest: waits"]


class CpuTime(NamedTuple):
    """The CPU time of some processes in seconds, or per step of a worker in milliseconds."""

    computing: float  # of their main threads
    others: float  # such as those of Horovod, Gloo and Open MPI

    def scaled(self, factor: float) -> CpuTime:
        """Return the multiple."""
        return CpuTime(self.computing * factor, self.others * factor)


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


@dataclass(frozen=True)
class TurnJob:
    """A job that takes turns."""

    folder: Path
    start: Callable[[list[Child]], None]  # adds the started processes to the list
    progress: Sequence[Path]  # files that grow by a line with each logged step
    finish: Callable[[Sequence[Child]], None]  # end the job in an orderly way, where that matters
    logged: Callable[[], list[list[Logged]]]  # the steps of each process, after its end
    samples: float = 1  # of each process in a step


class PausableJob:
    """A job from start to end, stopped except during its turns."""

    def __init__(self, job: TurnJob, deadline_s: float, context: ExitStack | None = None) -> None:
        """Start the job, wait for its first logged step, and stop it. Raises ChildFailure.

        `deadline_s`: of the monotonic clock. `context`: where it runs, closed after its end.
        """
        self._job, self._deadline_s = job, deadline_s
        self._context = context or ExitStack()
        self._children: list[Child] = []
        self._processes: list[int] = []
        self._windows: list[tuple[float, float]] = []
        self.cores: list[CpuTime] = []  # used on average, in each turn
        try:
            job.start(self._children)
            self._wait_for(1, [0] * len(job.progress))
            # Children on one host each know all processes there.
            self._processes = sorted({pid for child in self._children for pid in child.processes()})
        except BaseException:
            self.close()
            raise
        send_signal(signal.SIGSTOP, self._processes)

    def take(self, turn_s: float) -> None:
        """Run one turn, of `turn_s` or until enough steps are logged. Raises ChildFailure."""
        before, cpu_before = self._lines(), cpu_time(self._processes)
        began_s = time.time()
        send_signal(signal.SIGCONT, self._processes)
        try:
            time.sleep(turn_s)
            self._wait_for(LEAST_LINES + 1, before)  # the last line may be incomplete
        finally:
            send_signal(signal.SIGSTOP, self._processes)
        ended_s = time.time()
        self._windows.append((began_s, ended_s))
        used = (now - then for now, then in zip(cpu_time(self._processes), cpu_before, strict=True))
        self.cores.append(CpuTime(*used).scaled(1 / (ended_s - began_s)))

    def rates(self) -> list[float]:
        """End the job; return the samples/s of each turn. Raises ChildFailure."""
        return [
            sum(steps_per_s(steps) for steps in processes) * self._job.samples
            for processes in self.end()
        ]

    def end(self) -> list[list[list[Logged]]]:
        """End the job; return the steps logged within its turns, by turn and process."""
        send_signal(signal.SIGCONT, self._processes)
        self._wait_for(1, self._lines())
        self._job.finish(self._children)
        self.close()
        logged = self._job.logged()
        return [
            [[step for step in steps if began_s < step.at_s <= ended_s] for steps in logged]
            for began_s, ended_s in self._windows
        ]

    def close(self) -> None:
        """End all processes of the job; further calls have no effect."""
        while self._children:
            self._children.pop().end()
        self._context.close()

    def _lines(self) -> list[int]:
        return [
            path.read_bytes().count(b"\n") if path.exists() else 0 for path in self._job.progress
        ]

    def _wait_for(self, lines: int, before: Sequence[int]) -> None:
        """Wait until each process has logged `lines` more steps. Raises ChildFailure."""
        while any(new < old + lines for new, old in zip(self._lines(), before, strict=True)):
            if all_ended(self._children, self._job.folder):
                raise ChildFailure("it ended before its turns were over")
            if time.monotonic() > self._deadline_s:
                raise ChildFailure("its turns were not over in time (--time-limit-s)")
            time.sleep(POLL_S)


def in_turns(
    starts: Mapping[str, Callable[[], PausableJob]],
    rounds: int,
    turn_s: float,
    note: Callable[[str, ChildFailure], None],
) -> tuple[dict[str, list[float]], dict[str, list[CpuTime]]]:
    """Start jobs that are alive at the same time and take turns; return samples/s and used cores,
    by job and round. A failure is noted with the job's name; it is left out from then on; its
    rounds are NaN.
    """
    running: dict[str, PausableJob] = {}
    rates = {name: [math.nan] * rounds for name in starts}
    cores = {name: [CpuTime(math.nan, math.nan)] * rounds for name in starts}

    @contextmanager
    def failure_noted(name: str) -> Iterator[None]:
        try:
            yield
        except ChildFailure as failure:
            note(name, failure)
            if name in running:
                running.pop(name).close()

    try:
        for name, start in starts.items():
            with failure_noted(name):
                running[name] = start()
        for number in range(rounds):
            for name in in_turn([*starts], number):
                if name in running:
                    with failure_noted(name):
                        running[name].take(turn_s)
        for name in [*running]:
            with failure_noted(name):
                rates[name] = running[name].rates()
                cores[name] = running[name].cores
    finally:
        for job in running.values():
            job.close()
    return rates, cores


CaseKind = TypeVar("CaseKind", bound=Hashable)  # what contestants are compared on; shown as text


@dataclass
class Results(Generic[CaseKind]):
    """What was measured, until a signal ended it."""

    rates: dict[CaseKind, dict[str, list[float]]] = field(default_factory=dict)
    cores: dict[CaseKind, dict[str, list[CpuTime]]] = field(default_factory=dict)  # used
    problems: list[str] = field(default_factory=list)
    stopped: Stopped | None = None

    def findings(
        self, tables: Sequence[str], plan: Any, points: Sequence[Any], plots: Sequence[Plot] = ()
    ) -> Findings:
        """Return what to publish; `plan`, `points`: dataclasses, all written to the JSON.

        A failed round is NaN there.
        """
        runs = [
            asdict(cast(Any, case))
            | {
                "samples_per_s": rates,
                "cores": {
                    name: [cpu._asdict() for cpu in used] for name, used in self.cores[case].items()
                },
            }
            for case, rates in self.rates.items()
        ]
        content = {
            **asdict(plan),
            "runs": runs,
            "points": [asdict(point) for point in points],
            "problems": self.problems,
        }
        return Findings(tables, content, plots, self.problems, self.stopped)


def measure_cases(
    cases: Sequence[CaseKind],
    contestants: Sequence[str],
    start: Callable[[CaseKind, str, Path], PausableJob],
    *,
    rounds: int,
    turn_s: float,
    folder: Path,
    report: Callable[[str], None],
) -> Results[CaseKind]:
    """Measure one case after the other, with progress and problems reported at once.

    `start`: starts a contestant of a case, in a folder that it makes, and raises ChildFailure. A
    signal (Stopped) keeps the cases that are complete. Rates are samples/s by contestant and round;
    NaN: failed.
    """
    results: Results[CaseKind] = Results()

    def note(case: CaseKind, name: str, failure: ChildFailure) -> None:
        results.problems.append(f"{name}, {case}: {failure}")
        report(results.problems[-1])

    began_s = time.monotonic()
    try:
        for done, case in enumerate(cases, start=1):
            case_folder = folder / str(done)
            case_folder.mkdir(mode=0o700)
            starts = {name: partial(start, case, name, case_folder / name) for name in contestants}
            rates, cores = in_turns(starts, rounds, turn_s, partial(note, case))
            results.rates[case], results.cores[case] = rates, cores
            speeds = (f"{name} {statistics.median(r):,.0f}" for name, r in rates.items())
            left_s = (time.monotonic() - began_s) / done * (len(cases) - done)
            left = f", about {duration(left_s)} left" if done < len(cases) else ""
            report(f"{case}: {', '.join(speeds)} samples/s ({done} of {len(cases)}{left})")
    except Stopped as stopped:
        results.stopped = stopped
        missing = len(cases) - len(results.rates)
        results.problems.append(f"{stopped}: {missing} of {len(cases)} cases are not measured")
        report(results.problems[-1])
    return results


def cpu_table(results: Results[CaseKind], work_of: Callable[[CaseKind], tuple[int, int]]) -> str:
    """Return the table of CPU time, which shows where a contestant's step goes, in milliseconds.

    `work_of`: returns the samples of a step over all workers, and the number of workers.
    """
    rows = [CPU_HEADINGS]
    for case, rates in results.rates.items():
        samples, workers = work_of(case)
        for name, speeds in rates.items():
            speed = median(speeds)
            cpu_ms = per_step_ms(results.cores[case][name], speeds, samples, workers)
            if speed and cpu_ms:
                step_ms = 1000 * samples / speed
                parts_ms = (step_ms, *cpu_ms, step_ms - sum(cpu_ms))
                # The kernel rounds the times of threads and of the process, each by itself.
                rows.append([f"{case}: {name}", *(f"{max(ms, 0.0):.1f}" for ms in parts_ms)])
    return "\n".join(columns(rows))


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
