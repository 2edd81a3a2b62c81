"""Turns of concurrent jobs, each of which computes while all others are stopped.

A stopped process (SIGSTOP) takes no CPU time, while in a waiting one Horovod's thread would wake up
or Open MPI would spin. So turns can be short and close together, without process starts between
them. The measured interval lies between two steps that a job has logged within its turn; the first
of them ends the interval in which it was stopped.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from hvdtrain.errors import Stopped
from hvdtrain.evidence.children import POLL_S, Child, ChildFailure, all_ended
from hvdtrain.lab.bench.cpu_time import NOTHING, CpuTime, cpu_time
from hvdtrain.lab.bench.jobs import Logged, steps_per_s
from hvdtrain.lab.bench.rounds import in_turn
from hvdtrain.log import duration

LEAST_LINES = 2  # logged in a turn: a whole interval lies between them


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

    def __init__(
        self, job: TurnJob, deadline_s: float, context: AbstractContextManager[object] | None = None
    ) -> None:
        """Start the job, wait for its first logged step, and stop it. Raises ChildFailure.

        `deadline_s`: of the monotonic clock. `context`: where it runs, closed after its end.
        """
        self._job, self._deadline_s = job, deadline_s
        self._context = context or nullcontext()
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
        self._signal(signal.SIGSTOP)

    def take(self, turn_s: float) -> None:
        """Run one turn, of `turn_s` or until enough steps are logged. Raises ChildFailure."""
        before, cpu_before = self._lines(), cpu_time(self._processes)
        began_s = time.time()
        self._signal(signal.SIGCONT)
        try:
            time.sleep(turn_s)
            self._wait_for(LEAST_LINES + 1, before)  # the last line may be incomplete
        finally:
            self._signal(signal.SIGSTOP)
        ended_s = time.time()
        self._windows.append((began_s, ended_s))
        used = cpu_time(self._processes) - cpu_before
        self.cores.append(used.scaled(1 / (ended_s - began_s)))

    def rates(self) -> list[float]:
        """End the job; return the samples/s of each turn. Raises ChildFailure."""
        return [
            sum(steps_per_s(steps) for steps in processes) * self._job.samples
            for processes in self.end()
        ]

    def end(self) -> list[list[list[Logged]]]:
        """End the job; return the steps logged within its turns, by turn and process."""
        self._signal(signal.SIGCONT)
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
        context, self._context = self._context, nullcontext()
        context.__exit__(None, None, None)

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

    def _signal(self, number: int) -> None:
        for pid in self._processes:
            with suppress(ProcessLookupError):  # the next check of the children reports it
                os.kill(pid, number)


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
    cores = {name: [NOTHING] * rounds for name in starts}

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


class Compared(Protocol):
    """What contestants are compared on; its text is shown."""

    def __hash__(self) -> int: ...


class TurnOptions(Protocol):
    """The settings of turns."""

    @property
    def rounds(self) -> int: ...

    @property
    def turn_s(self) -> float: ...


CaseKind = TypeVar("CaseKind", bound=Compared)
Starts = Callable[[CaseKind, Path], Mapping[str, Callable[[], PausableJob]]]


@dataclass
class Results(Generic[CaseKind]):
    """What was measured, until a signal ended it."""

    rates: dict[CaseKind, dict[str, list[float]]] = field(default_factory=dict)
    cores: dict[CaseKind, dict[str, list[CpuTime]]] = field(default_factory=dict)  # used
    problems: list[str] = field(default_factory=list)
    stopped: Stopped | None = None

    def of(self, case: CaseKind) -> dict[str, Any]:
        """Return what was measured of a case, for `write_json`."""
        used = {name: [cpu._asdict() for cpu in each] for name, each in self.cores[case].items()}
        return {"samples_per_s": self.rates[case], "cores": used}

    def raise_if_stopped(self) -> None:
        """Raise Stopped if a signal has ended the measurement."""
        if self.stopped:
            raise self.stopped


def measure_cases(
    cases: Sequence[CaseKind],
    starts: Starts[CaseKind],
    turning: TurnOptions,
    folder: Path,
    report: Callable[[str], None],
) -> Results[CaseKind]:
    """Measure one case after the other, with progress and problems reported at once.

    `starts`: returns, for a case and a new folder, what starts each contestant. A signal (Stopped)
    keeps the cases that are complete. Rates are samples/s by contestant and round; NaN: failed.
    """
    results: Results[CaseKind] = Results()

    def note(case: CaseKind, name: str, failure: ChildFailure) -> None:
        results.problems.append(f"{name}, {case}: {failure}")
        report(results.problems[-1])

    began_s = time.monotonic()
    try:
        for number, case in enumerate(cases):
            case_folder = folder / str(number)
            case_folder.mkdir(mode=0o700)
            rates, cores = in_turns(
                starts(case, case_folder), turning.rounds, turning.turn_s, partial(note, case)
            )
            results.rates[case], results.cores[case] = rates, cores
            speeds = (f"{name} {statistics.median(r):,.0f}" for name, r in rates.items())
            done = number + 1
            left_s = (time.monotonic() - began_s) / done * (len(cases) - done)
            left = f", about {duration(left_s)} left" if done < len(cases) else ""
            progress = f"{done} of {len(cases)}{left}"
            report(f"{case}: {', '.join(speeds)} samples/s ({progress})")
    except Stopped as stopped:
        results.stopped = stopped
        missing = len(cases) - len(results.rates)
        results.problems.append(f"{stopped}: {missing} of {len(cases)} cases are not measured")
        report(results.problems[-1])
    return results
