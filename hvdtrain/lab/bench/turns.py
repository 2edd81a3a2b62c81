"""Jobs that live at the same time and compute in turns, each while all others are stopped.

A stopped process (SIGSTOP) takes no time at all, while Horovod's thread or Open MPI would go on
waking up or spinning in one that waits. So turns can be short and follow closely on one another,
and no start of a process lies between them. What is measured lies between two steps of which a job
has told within its turn; the first of them ends the interval in which it was stopped.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvdtrain.lab.children import (
    ONE_THREAD,
    POLL_S,
    Child,
    ChildFailure,
    Commanded,
    all_ended,
    watch,
)
from hvdtrain.launcher.command import Engine, engine_environment, horovodrun_argv, settings_for
from hvdtrain.run.records import METRICS

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


HVDTRAIN = [sys.executable, "-m", "hvdtrain.cli"]
START_TIMEOUT_S = 60
WATCHDOG_S = 600.0  # as `launch` has it; it sets nothing for `train`
EXPERIMENT = "run"


class Logged(NamedTuple):
    """A step that a process has told of: its number, and when it had ended (seconds since 1970)."""

    step: int
    at_s: float


def train_argv(folder: Path, flags: Sequence[str]) -> list[str]:
    """`hvdtrain train`, which leaves its run in `folder`/run."""
    return [*HVDTRAIN, "train", *flags, "--output", str(folder), "--experiment", EXPERIMENT]


def on_workers(
    argv: Sequence[str], workers: int, controller: str
) -> tuple[list[str], dict[str, str]]:
    """The command that runs `argv` on so many workers of this machine, and its environment: with
    horovodrun as `hvdtrain launch` calls it, and with its settings; for one worker, alone.
    """
    if workers == 1:
        return [*argv], dict(os.environ)
    settings = settings_for(controller, os.environ, WATCHDOG_S, ours=True)
    hosts = (("localhost", workers),)
    engine = Engine(workers, controller, hosts, None, START_TIMEOUT_S)
    values = {setting.name: setting.value for setting in settings}
    return horovodrun_argv(engine, argv), engine_environment(os.environ, values, None)


def run_command(
    argv: Sequence[str], environment: Mapping[str, str], folder: Path, time_limit_s: float
) -> None:
    """To its end, with one compute thread a process; its output goes into `folder`. Raises
    ChildFailure.
    """
    deadline = time.monotonic() + time_limit_s
    child = Commanded(argv, folder / "process-0.log", {**environment, **ONE_THREAD})
    try:
        watch([child], folder, deadline, time_limit_s)
    finally:
        child.end()


def logged_steps(folder: Path) -> list[Logged]:
    """When the logged steps of the run in `folder` ended, by the times of its scalars."""
    found = EventAccumulator(str(folder / EXPERIMENT / "tensorboard"))
    found.Reload()
    return [Logged(event.step, event.wall_time) for event in found.Scalars("train/loss")]


def log_of(folder: Path) -> Path:
    """The file that grows by a line with each logged step of the run in `folder`."""
    return folder / EXPERIMENT / METRICS


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of the run's metrics.jsonl of one kind: step or epoch."""
    text = log_of(folder).read_text("utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if line["kind"] == kind]
