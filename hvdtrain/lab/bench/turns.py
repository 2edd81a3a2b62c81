"""Turns of contestants, and what all benches share: commands, ratios, tables and files.

Concurrent jobs compute in turns, each while all others are stopped. A stopped process (SIGSTOP)
takes no CPU time, while in a waiting one Horovod's thread would wake up or Open MPI would spin. So
turns can be short and close together, without process starts between them. The measured interval
lies between two steps that a job has logged within its turn; the first of them ends the interval in
which it was stopped.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvdtrain.errors import Stopped, TrainingError
from hvdtrain.exchange import Exchange
from hvdtrain.lab.bench.cpu_time import NOTHING, CpuTime, cpu_time
from hvdtrain.lab.children import POLL_S, Child, ChildFailure, all_ended, guarded
from hvdtrain.launcher.command import (
    HorovodrunOptions,
    horovodrun_argv,
    horovodrun_environment,
    in_own_session,
    settings_for,
)
from hvdtrain.launcher.processes import StopRequests
from hvdtrain.log import duration
from hvdtrain.run.directory import METRICS

LEAST_LINES = 2  # logged in a turn: a whole interval lies between them
HVDTRAIN = [sys.executable, "-m", "hvdtrain.cli"]
EXPERIMENT = "run"
WARM_UP_STEPS = 5

Key = TypeVar("Key")
Found = TypeVar("Found")


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
    samples: float = 1  # of each process in a step


class Turns:
    """A job from start to end, stopped except during its turns."""

    def __init__(
        self, job: TurnJob, deadline_s: float, place: AbstractContextManager[object] | None = None
    ) -> None:
        """Start the job, wait for its first logged step, and stop it. Raises ChildFailure.

        `deadline_s`: of the monotonic clock. `place`: where it runs, closed after its end.
        """
        self._job, self._deadline_s = job, deadline_s
        self._place = place or nullcontext()
        self._children: list[Child] = []
        self._processes: list[int] = []
        self._windows: list[tuple[float, float]] = []
        self.cores: list[CpuTime] = []  # used on average, in each turn
        try:
            job.start(self._children)
            self._wait_for(1, [0] * len(job.progress))
            self._processes = [pid for child in self._children for pid in child.processes()]
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
        place, self._place = self._place, nullcontext()
        place.__exit__(None, None, None)

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
    starts: Mapping[str, Callable[[], Turns]],
    rounds: int,
    turn_s: float,
    note: Callable[[str, ChildFailure], None],
) -> tuple[dict[str, list[float]], dict[str, list[CpuTime]]]:
    """Start jobs that are alive at the same time and take turns; return samples/s and used cores,
    by job and round. A failure is noted with the job's name; it is left out from then on; its
    rounds are NaN.
    """
    running: dict[str, Turns] = {}
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


class Case(Protocol):
    """What contestants are compared on; its text is shown."""

    def __hash__(self) -> int: ...


class Turning(Protocol):
    """The settings of turns."""

    @property
    def rounds(self) -> int: ...

    @property
    def turn_s(self) -> float: ...


CaseKind = TypeVar("CaseKind", bound=Case)
Starts = Callable[[CaseKind, Path], Mapping[str, Callable[[], Turns]]]


@dataclass
class Results(Generic[CaseKind]):
    """What was measured, until a signal ended it."""

    rates: dict[CaseKind, dict[str, list[float]]] = field(default_factory=dict)
    cores: dict[CaseKind, dict[str, list[CpuTime]]] = field(default_factory=dict)  # used
    problems: list[str] = field(default_factory=list)
    stopped: Stopped | None = None

    def of(self, case: CaseKind) -> dict[str, Any]:
        """Return what was measured of a case, for `write_json`."""
        used = {
            name: [it._asdict() for it in each] for name, each in self.cores.get(case, {}).items()
        }
        return {"samples_per_s": self.rates[case], "cores": used}

    def raise_if_stopped(self) -> None:
        """Raise Stopped if a signal has ended the measurement."""
        if self.stopped:
            raise self.stopped


def measure_cases(
    cases: Sequence[CaseKind],
    starts: Starts[CaseKind],
    turning: Turning,
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
            own = folder / str(number)
            own.mkdir(mode=0o700)
            rates, cores = in_turns(
                starts(case, own), turning.rounds, turning.turn_s, partial(note, case)
            )
            results.rates[case], results.cores[case] = rates, cores
            speeds = (f"{name} {statistics.median(r):,.0f}" for name, r in rates.items())
            done = number + 1
            left_s = (time.monotonic() - began_s) / done * (len(cases) - done)
            left = f", about {duration(left_s)} left" if done < len(cases) else ""
            place = f"{done} of {len(cases)}{left}"
            report(f"{case}: {', '.join(speeds)} samples/s ({place})")
    except Stopped as stopped:
        results.stopped = stopped
        missing = len(cases) - len(results.rates)
        results.problems.append(f"{stopped}: {missing} of {len(cases)} cases are not measured")
        report(results.problems[-1])
    return results


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


def train_argv(folder: Path, flags: Sequence[str]) -> list[str]:
    """Return the command of `hvdtrain train` that writes its run to `folder`/run."""
    return [*HVDTRAIN, "train", *flags, "--output", str(folder), "--experiment", EXPERIMENT]


def launch_argv(workers: int, controller: str, train: Sequence[str]) -> list[str]:
    """Return the command of `hvdtrain launch` for what `train_argv` returns."""
    argv = [*HVDTRAIN, "launch", "-np", str(workers), "--controller", controller]
    return [*argv, "--", *train[len(HVDTRAIN) :]]


def on_workers(
    argv: Sequence[str], workers: int, controller: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs `argv` on local workers, and its environment.

    Horovodrun is called as by `hvdtrain launch`, with its settings; one worker runs without it.
    """
    if workers == 1:
        return [*argv], dict(os.environ)
    # The watchdog has no effect on `train`.
    settings = settings_for(controller, os.environ, watchdog_timeout_s=0, command="train")
    hosts = (("localhost", workers),)
    options = HorovodrunOptions(workers, controller, hosts, interface=None, start_timeout_s=60)
    command = horovodrun_argv(options, in_own_session(argv))
    return command, horovodrun_environment(os.environ, settings, None)


def logged_steps(folder: Path) -> list[Logged]:
    """Return the logged steps of the run in `folder`, with the times of its scalars."""
    found = EventAccumulator(str(folder / EXPERIMENT / "tensorboard"))
    found.Reload()
    return [Logged(event.step, event.wall_time) for event in found.Scalars("train/loss")]


def log_of(folder: Path) -> Path:
    """Return the file that grows by a line with each logged step of the run in `folder`."""
    return folder / EXPERIMENT / METRICS


@contextmanager
def scratch_folder(bench: str) -> Iterator[Path]:
    """Yield a folder for jobs, and end whatever is started within this context.

    A signal raises Stopped. Raises TrainingError for a ChildFailure.
    """
    StopRequests()
    with guarded(), tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        try:
            yield Path(folder)
        except ChildFailure as failure:
            raise TrainingError(f"bench {bench}: {failure}") from failure


def in_turn(contestants: Sequence[Key], number: int) -> Sequence[Key]:
    """Return the order of a round; every other one is reversed, to balance who follows whom."""
    return contestants if number % 2 == 0 else contestants[::-1]


def measure(
    contestants: Sequence[Key],
    rounds: int,
    run: Callable[[Key, Path], Found],
    folder: Path,
    report: Callable[[str], None],
) -> dict[Key, list[Found]]:
    """Run one contestant after the other; return results by contestant and round.

    Raises ChildFailure as `run`, which receives a new folder.
    """
    results: dict[Key, list[Found]] = {contestant: [] for contestant in contestants}
    for number in range(rounds):
        for contestant in in_turn(contestants, number):
            own = folder / f"{number}-{contestants.index(contestant)}"
            own.mkdir(mode=0o700)
            results[contestant].append(run(contestant, own))
            report(f"round {number + 1}: {contestant}: {results[contestant][-1]}")
    return results


def run_rounds(
    contestants: Mapping[str, Callable[[], object]], rounds: int, steps: int, exchange: Exchange
) -> dict[str, list[float]]:
    """Collective: return the seconds per step on the slowest rank, by contestant and round."""
    for step in contestants.values():
        # All ranks begin together: sums of the contestant before, in progress still, have the same
        # names.
        exchange.all_gather_object(None, "hvdtrain.bench.warm_up")
        for _ in range(WARM_UP_STEPS):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in in_turn([*contestants], number):
            step = contestants[name]
            exchange.all_gather_object(None, "hvdtrain.bench.start")
            started = time.perf_counter()
            for _ in range(steps):
                step()
            own = (time.perf_counter() - started) / steps
            seconds[name].append(max(exchange.all_gather_object(own, "hvdtrain.bench.end")))
    return seconds


@dataclass(frozen=True)
class Ratio:
    """The spread of a ratio between two contestants over all rounds."""

    median: float
    lowest: float
    lower_quartile: float
    upper_quartile: float
    highest: float

    @property
    def middle_half(self) -> str:
        """Return the quartiles as text."""
        return f"{self.lower_quartile:.3f} to {self.upper_quartile:.3f}"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the spread of ours over theirs within one or more rounds."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    lower, _, upper = (
        statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    )
    return Ratio(statistics.median(ratios), min(ratios), lower, upper, max(ratios))


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column is aligned to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in rows
    ]


def ratio_lines(ratios: Mapping[str, Ratio]) -> list[str]:
    """Return the lines of a table of ratios: median, middle half and range."""
    rows = [["", "median", "middle half", "all"]]
    for name, found in ratios.items():
        spread = f"{found.lowest:.3f} to {found.highest:.3f}"
        rows.append([f"ratio, {name}", f"{found.median:.3f}", found.middle_half, spread])
    return columns(rows)


def plan_of(kind: type[Found], arguments: Mapping[str, Any]) -> Found:
    """Return the dataclass `kind`, whose fields are all among the arguments."""
    return kind(**{name: arguments[name] for name in kind.__annotations__})


@dataclass(frozen=True)
class Options:
    """Options of the benches within one job; each uses those that apply to it."""

    rounds: int
    steps: int  # per round
    model: str
    batch_size: int  # per worker
    megabytes: float
    virtual_workers: int | None = None


@dataclass(frozen=True)
class Measured:
    """The results of a bench within one job."""

    seconds_per_step: dict[str, list[float]]  # by contestant and round
    ratios: dict[str, Ratio]
    megabytes: float | None = None  # summed in a step
