"""Concurrent jobs that compute in turns, each while all others are stopped.

A stopped process (SIGSTOP) takes no CPU time, while in a waiting one Horovod's thread would wake up
or Open MPI would spin. So turns can be short and close together, without process starts between
them. The measured interval lies between two steps that a job has logged within its turn; the first
of them ends the interval in which it was stopped.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvdtrain.exchange import Exchange
from hvdtrain.lab.children import (
    ONE_THREAD,
    POLL_S,
    Child,
    ChildFailure,
    Commanded,
    all_ended,
    watch,
)
from hvdtrain.launcher.command import (
    EngineOptions,
    engine_environment,
    horovodrun_argv,
    settings_for,
)
from hvdtrain.run.records import METRICS

LEAST_LINES = 2  # logged in a turn: a whole interval lies between them
HVDTRAIN = [sys.executable, "-m", "hvdtrain.cli"]
START_TIMEOUT_S = 60
WATCHDOG_S = 600.0  # the default of `launch`; without effect on `train`
EXPERIMENT = "run"


class Logged(NamedTuple):
    """A logged step: its number, and the time of its end in seconds since 1970."""

    step: int
    at_s: float


@dataclass(frozen=True)
class TurnJob:
    """A job that takes turns."""

    folder: Path
    start: Callable[[list[Child]], None]  # adds the started processes to the list
    progress: Sequence[Path]  # files that grow by a line with each logged step
    finish: Callable[[Sequence[Child]], None]  # end the job in an orderly way, where that matters
    logged: Callable[[], list[list[Logged]]]  # the steps of each process, after its end


class Turns:
    """A job from start to end, stopped except during its turns."""

    def __init__(self, job: TurnJob, deadline_s: float) -> None:
        """Start the job, wait for its first logged step, and stop it. Raises ChildFailure.

        `deadline_s`: of the monotonic clock.
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
        """Run one turn, of `turn_s` or until enough steps are logged. Raises ChildFailure."""
        before = self._lines()
        began_s = time.time()
        self._signal(signal.SIGCONT)
        try:
            time.sleep(turn_s)
            self._wait_for(LEAST_LINES + 1, before)  # the last line may be incomplete
        finally:
            self._signal(signal.SIGSTOP)
        self._windows.append((began_s, time.time()))

    def end(self) -> list[list[list[Logged]]]:
        """End the job; return the steps logged within its turns, by turn and process."""
        self._signal(signal.SIGCONT)
        self._wait_for(1, self._lines())
        self._job.finish(self._children)
        self.close()
        logged = self._job.logged()
        return [[_within(steps, *window) for steps in logged] for window in self._windows]

    def close(self) -> None:
        """End all processes of the job; further calls have no effect."""
        while self._children:
            self._children.pop().end()

    def _lines(self) -> list[int]:
        return [_count_lines(path) for path in self._job.progress]

    def _wait_for(self, lines: int, before: Sequence[int] | None = None) -> None:
        """Wait until each process has logged `lines` more steps. Raises ChildFailure."""
        before = before or [0] * len(self._job.progress)
        while any(new < old + lines for new, old in zip(self._lines(), before, strict=True)):
            if all_ended(self._children, self._job.folder):
                raise ChildFailure("it ended before its turns were over")
            if time.monotonic() > self._deadline_s:
                raise ChildFailure("its turns were not over in time (--time-limit-s)")
            time.sleep(POLL_S)

    def _signal(self, number: int) -> None:
        for pid in self._processes:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # the next check of the children reports it


def _within(steps: Sequence[Logged], began_s: float, ended_s: float) -> list[Logged]:
    return [logged for logged in steps if began_s < logged.at_s <= ended_s]


def steps_per_s(steps: Sequence[Logged]) -> float:
    """Return the rate between the first and the last; NaN for fewer than two."""
    if len(steps) < 2:
        return math.nan
    first, *_, last = steps
    return (last.step - first.step) / (last.at_s - first.at_s)


def read_steps(path: Path) -> list[Logged]:
    """Read lines of a step's number and time; text after the last line break is ignored."""
    *lines, _ = path.read_text("utf-8").split("\n")
    return [Logged(int(step), float(at_s)) for step, at_s in map(str.split, lines)]


def _count_lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0  # not yet


def train_argv(folder: Path, flags: Sequence[str]) -> list[str]:
    """Return the command of `hvdtrain train` that writes its run to `folder`/run."""
    return [*HVDTRAIN, "train", *flags, "--output", str(folder), "--experiment", EXPERIMENT]


def on_workers(
    argv: Sequence[str], workers: int, controller: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs `argv` on local workers, and its environment.

    Horovodrun is called as by `hvdtrain launch`, with its settings; one worker runs without it.
    """
    if workers == 1:
        return [*argv], dict(os.environ)
    settings = settings_for(controller, os.environ, WATCHDOG_S, ours=True)
    hosts = (("localhost", workers),)
    engine = EngineOptions(workers, controller, hosts, None, START_TIMEOUT_S)
    values = {setting.name: setting.value for setting in settings}
    return horovodrun_argv(engine, argv), engine_environment(os.environ, values, None)


def run_command(
    argv: Sequence[str], environment: Mapping[str, str], folder: Path, time_limit_s: float
) -> None:
    """Run a command to its end, with one compute thread per process and its log in `folder`.

    Raises ChildFailure.
    """
    deadline = time.monotonic() + time_limit_s
    child = Commanded(argv, folder / "process-0.log", {**environment, **ONE_THREAD})
    try:
        watch([child], folder, deadline, time_limit_s)
    finally:
        child.end()


def logged_steps(folder: Path) -> list[Logged]:
    """Return the logged steps of the run in `folder`, with the times of its scalars."""
    found = EventAccumulator(str(folder / EXPERIMENT / "tensorboard"))
    found.Reload()
    return [Logged(event.step, event.wall_time) for event in found.Scalars("train/loss")]


def log_of(folder: Path) -> Path:
    """Return the file that grows by a line with each logged step of the run in `folder`."""
    return folder / EXPERIMENT / METRICS


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind (step or epoch) in the run's metrics.jsonl."""
    text = log_of(folder).read_text("utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if line["kind"] == kind]


WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Ratio:
    """The spread of a ratio between two contestants over all rounds."""

    median: float
    lowest: float
    lower_quartile: float
    upper_quartile: float
    highest: float


@dataclass(frozen=True)
class Options:
    """Options of the benchmarks within one job; each uses those that apply to it."""

    rounds: int
    steps: int  # per round
    model: str
    batch_size: int  # per worker
    megabytes: float


@dataclass(frozen=True)
class Measured:
    """The results of a benchmark within one job."""

    what: str  # description of one step
    seconds: dict[str, list[float]]  # per step, by contestant and round
    ratios: dict[str, Ratio]
    megabytes: float | None = None  # per step, where the speed is given in MB/s


def run_rounds(
    contestants: Mapping[str, Callable[[], None]], rounds: int, steps: int, exchange: Exchange
) -> dict[str, list[float]]:
    """Collective: return the seconds per step on the slowest rank, by contestant and round.

    In a round each contestant makes `steps` steps; every other round is in reverse order, so that
    none always follows the same other.
    """
    for step in contestants.values():
        for _ in range(WARM_UP_STEPS):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        order = list(contestants.items())
        for name, step in order if number % 2 == 0 else reversed(order):
            exchange.all_gather_object(None, "hvdtrain.bench.start")
            started = time.perf_counter()
            for _ in range(steps):
                step()
            own = (time.perf_counter() - started) / steps
            seconds[name].append(max(exchange.all_gather_object(own, "hvdtrain.bench.end")))
    return seconds


def ratio(seconds: Mapping[str, list[float]], name: str, to: str) -> Ratio:
    """Return the time of `name` over that of `to` within rounds."""
    return spread([a / b for a, b in zip(seconds[name], seconds[to], strict=True)])


def spread(ratios: Sequence[float]) -> Ratio:
    """Return the spread of the ratios of one or more rounds."""
    lower, _, upper = (
        statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else [*ratios] * 3
    )
    return Ratio(statistics.median(ratios), min(ratios), lower, upper, max(ratios))
