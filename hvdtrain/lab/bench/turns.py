"""Jobs that live at the same time and compute in turns, each while all others are stopped.

A stopped process (SIGSTOP) takes no time at all, while Horovod's thread or Open MPI would go on
waking up or spinning in one that waits. So turns can be short and follow closely on one another,
and no start of a process lies between them. What is measured lies between two steps of which a job
has told within its turn; the first of them ends the interval in which it was stopped.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.lab.bench.train_runs import Logged
from hvdtrain.lab.children import POLL_S, Child, ChildFailure, all_ended

LEAST_LINES = 2  # told in a turn: a whole interval lies between them


@dataclass(frozen=True)
class Job:
    """What is to take turns."""

    folder: Path
    start: Callable[[list[Child]], None]  # adds to the list what it has started
    progress: Sequence[Path]  # files that grow by a line with each step that is told of
    finish: Callable[[Sequence[Child]], None]  # end it in good order, where that matters
    logged: Callable[[], list[list[Logged]]]  # once it has ended: each process's steps


class Turns:
    """One job, from its start to its end; it is stopped but for its turns."""

    def __init__(self, job: Job, deadline_s: float) -> None:
        """Starts it, lets it warm up, and stops it. `deadline_s`: of the monotonic clock. Raises
        ChildFailure.
        """
        self._job, self._deadline_s = job, deadline_s
        self._children: list[Child] = []
        self._processes: list[int] = []
        self._windows: list[tuple[float, float]] = []
        try:
            job.start(self._children)
            self._wait_for(1)
            self._processes = [pid for child in self._children for pid in child.processes()]
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def take(self, turn_s: float) -> None:
        """One turn, of this time or until enough was told. Raises ChildFailure."""
        before = self._lines()
        began_s = time.time()
        self._signal(signal.SIGCONT)
        try:
            time.sleep(turn_s)
            self._wait_for(LEAST_LINES + 1, before)  # the last may be told of in part only
        finally:
            self._signal(signal.SIGSTOP)
        self._windows.append((began_s, time.time()))

    def end(self) -> list[list[list[Logged]]]:
        """End it. Returns, by turn and process, the steps that it has told of in its turn."""
        self._signal(signal.SIGCONT)
        self._wait_for(1, self._lines())
        self._job.finish(self._children)
        self.close()
        logged = self._job.logged()
        return [[_within(steps, *window) for steps in logged] for window in self._windows]

    def close(self) -> None:
        """Nothing is left of it. More than one call does no harm."""
        while self._children:
            self._children.pop().end()

    def _lines(self) -> list[int]:
        return [_count_lines(path) for path in self._job.progress]

    def _wait_for(self, lines: int, before: Sequence[int] | None = None) -> None:
        """Until each process has told of so many steps more. Raises ChildFailure."""
        before = before or [0] * len(self._job.progress)
        while any(new < old + lines for new, old in zip(self._lines(), before, strict=True)):
            if all_ended(self._children, self._job.folder):
                raise ChildFailure("it came to its end before its turns were over")
            if time.monotonic() > self._deadline_s:
                raise ChildFailure("its turns were not over in time (--time-limit-s)")
            time.sleep(POLL_S)

    def _signal(self, number: int) -> None:
        for pid in self._processes:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # the next look at the children tells


def _within(steps: Sequence[Logged], began_s: float, ended_s: float) -> list[Logged]:
    return [logged for logged in steps if began_s < logged.at_s <= ended_s]


def steps_per_s(steps: Sequence[Logged]) -> float:
    """Between the first and the last; NaN where there are fewer than two."""
    if len(steps) < 2:
        return math.nan
    first, *_, last = steps
    return (last.step - first.step) / (last.at_s - first.at_s)


def read_steps(path: Path) -> list[Logged]:
    """From lines of a step's number and its time; the last one may have been cut short."""
    *lines, _ = path.read_text("utf-8").split("\n")
    return [Logged(int(step), float(at_s)) for step, at_s in map(str.split, lines)]


def _count_lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0  # not yet
