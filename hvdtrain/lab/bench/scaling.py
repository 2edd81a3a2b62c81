"""`hvdtrain bench scaling`: samples/s on N workers, compared with DDP and the machine's limit.

For each model and N the three run concurrently and compute in short turns (see
hvdtrain/lab/bench/turns.py); the ratios within a round of turns are compared.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Protocol

import torch

from hvdtrain.errors import UsageError
from hvdtrain.lab.bench import peers
from hvdtrain.lab.bench.turns import (
    TurnJob,
    Turns,
    log_of,
    logged_steps,
    on_workers,
    read_steps,
    steps_per_s,
    train_argv,
)
from hvdtrain.lab.children import POLL_S, Child, ChildFailure, Commanded
from hvdtrain.lab.compare.comparing import start_system
from hvdtrain.lab.systems.contract import Spec
from hvdtrain.lab.systems.work import WorkSpec
from hvdtrain.models import build_model

OURS, DDP, LIMIT = "hvdtrain", "DDP", "limit"
CONTESTANTS = (OURS, DDP, LIMIT)
WEAK, STRONG = "weak", "strong"
LEAST_SHARE = 2  # samples per worker, the fewest for batch norm statistics
LEAST_STEPS = 1000  # in the epoch that contains all turns
LR, MOMENTUM = 0.01, 0.9
FINISH_S = 60.0


@dataclass(frozen=True)
class ScalingCase:
    """A model, number of workers and batch size, the same for all contestants."""

    model: str
    workers: int
    global_batch_size: int

    @property
    def steps(self) -> int:
        """The limit of steps, never reached: one epoch without its last batch."""
        return peers.SAMPLES // self.global_batch_size - 1

    def __str__(self) -> str:
        return f"{self.model}, N = {self.workers}, {self.global_batch_size} samples a step"


@dataclass(frozen=True)
class ScalingPlan:
    """Configuration of `hvdtrain bench scaling`."""

    models: Mapping[str, int]  # samples per worker, by model
    workers: tuple[int, ...]
    modes: tuple[str, ...]
    rounds: int
    turn_s: float
    controller: str  # gloo or mpi
    time_limit_s: float  # of each case

    def case(self, mode: str, model: str, workers: int) -> ScalingCase:
        """Return the case of a mode: weak scaling keeps the samples per worker, strong scaling the
        global batch, which is that of the most workers, so that both modes coincide there.
        """
        shares = workers if mode == WEAK else max(self.workers)
        return ScalingCase(model, workers, self.models[model] * shares)

    def cases(self) -> list[ScalingCase]:
        """Return all cases without duplicates, in the order of running."""
        found = (
            self.case(mode, model, workers)
            for model in self.models
            for mode in self.modes
            for workers in self.workers
        )
        return list(dict.fromkeys(found))


def examine(plan: ScalingPlan) -> None:
    """Raise UsageError for models that cannot be built, and batches too large or too small."""
    problems: list[str] = []
    for model in plan.models:
        try:
            build_model(model, peers.SHAPE, peers.CLASSES, torch.float32)
        except UsageError as error:
            problems += [problem.replace("--model=", "--models=") for problem in error.problems]
    for case in plan.cases():
        if case.steps < LEAST_STEPS:
            problems.append(f"{case}: too many. Lower --batch-size")
        if case.global_batch_size < case.workers * LEAST_SHARE:
            problems.append(f"{case}: less than {LEAST_SHARE} a worker. Raise --batch-size")
    if problems:
        raise UsageError(*problems)


class Contestant(Protocol):
    """A participant that takes turns."""

    def take(self, turn_s: float) -> None:
        """Run one turn. Raises ChildFailure."""

    def rates(self) -> list[float]:
        """End, and return the samples/s of each turn. Raises ChildFailure."""

    def close(self) -> None:
        """End all processes; further calls have no effect."""


Rates = dict[ScalingCase, dict[str, list[float]]]  # samples/s by contestant and round; NaN: failed
Start = Callable[[ScalingCase, str, Path], Contestant]


def measure(
    plan: ScalingPlan, start: Start, folder: Path, report: Callable[[str], None]
) -> tuple[Rates, list[str]]:
    """Measure one case after the other; problems are reported at once, and also returned."""
    rates: Rates = {}
    problems: list[str] = []
    for number, case in enumerate(plan.cases()):
        own = folder / str(number)
        own.mkdir(mode=0o700)

        def note(name: str, failure: ChildFailure, case: ScalingCase = case) -> None:
            problems.append(f"{name}, {case}: {failure}")
            report(problems[-1])

        rates[case] = measure_case(plan, case, start, own, note)
        speeds = (f"{name} {statistics.median(r):,.0f}" for name, r in rates[case].items())
        report(f"{case}: {', '.join(speeds)} samples/s")
    return rates, problems


def measure_case(
    plan: ScalingPlan,
    case: ScalingCase,
    start: Start,
    folder: Path,
    note: Callable[[str, ChildFailure], None],
) -> dict[str, list[float]]:
    """Measure all rounds of a case; a contestant that fails is left out from then on."""
    running: dict[str, Contestant] = {}
    rates = {name: [math.nan] * plan.rounds for name in CONTESTANTS}
    try:
        for name in CONTESTANTS:
            try:
                running[name] = start(case, name, folder / name)
            except ChildFailure as failure:
                note(name, failure)
        for number in range(plan.rounds):
            for name in in_turn(number):
                if name in running:
                    try:
                        running[name].take(plan.turn_s)
                    except ChildFailure as failure:
                        note(name, failure)
                        running.pop(name).close()
        for name, contestant in running.items():
            try:
                rates[name] = contestant.rates()
            except ChildFailure as failure:
                note(name, failure)
    finally:
        for contestant in running.values():
            contestant.close()
    return rates


def in_turn(number: int) -> tuple[str, ...]:
    """Return the order of a round; every other one is reversed, to balance who follows whom."""
    return CONTESTANTS if number % 2 == 0 else CONTESTANTS[::-1]


class InTurns:
    """A contestant that is a job in turns."""

    def __init__(self, turns: Turns, samples: float) -> None:
        """`samples`: per step, of each process that logs steps."""
        self._turns, self._samples = turns, samples
        self.take, self.close = turns.take, turns.close

    def rates(self) -> list[float]:
        return [
            sum(steps_per_s(steps) for steps in processes) * self._samples
            for processes in self._turns.end()
        ]


@dataclass(frozen=True)
class Starter:
    """A starter of contestants."""

    controller: str
    time_limit_s: float
    context: ForkServerContext

    def __call__(self, case: ScalingCase, name: str, folder: Path) -> InTurns:
        """Start a contestant. Raises ChildFailure."""
        deadline_s = time.monotonic() + self.time_limit_s
        if name == OURS:
            return InTurns(Turns(self._ours(case, folder), deadline_s), case.global_batch_size)
        job = self._peer(case, peers.PlainDdp if name == DDP else peers.Independent, folder)
        return InTurns(Turns(job, deadline_s), case.global_batch_size / case.workers)

    def _ours(self, case: ScalingCase, folder: Path) -> TurnJob:
        """Return the job of `hvdtrain train`, with all that it does by default."""
        flags = ["--model", case.model, "--data", peers.NAME, "--device", "cpu"]
        flags += ["--global-batch-size", str(case.global_batch_size), "--lr", str(LR)]
        flags += ["--momentum", str(MOMENTUM), "--max-steps", str(case.steps)]
        argv, environment = on_workers(train_argv(folder, flags), case.workers, self.controller)
        # A worker that waits for its turn has not failed.
        waiting = {"HOROVOD_GLOO_TIMEOUT_SECONDS": f"{math.ceil(self.time_limit_s)}"}

        def start(children: list[Child]) -> None:
            folder.mkdir(mode=0o700)
            children.append(Commanded(argv, folder / "process-0.log", waiting | environment))

        return TurnJob(folder, start, [log_of(folder)], stop_train, lambda: [logged_steps(folder)])

    def _peer(self, case: ScalingCase, strategy: type[peers.BareLoop], folder: Path) -> TurnJob:
        spec = self.spec(case, strategy, folder)
        logs = [peers.step_log(folder, number) for number in range(case.workers)]

        def start(children: list[Child]) -> None:
            start_system(spec, strategy, self.controller, self.context, children)

        return TurnJob(folder, start, logs, lambda children: None, lambda: [*map(read_steps, logs)])

    def spec(self, case: ScalingCase, strategy: type[peers.BareLoop], folder: Path) -> Spec:
        """Return the specification for the processes of a peer."""
        work = WorkSpec(
            model=case.model,
            data=peers.NAME,
            data_dir="",
            global_batch_size=case.global_batch_size,
            steps=case.steps,
            dtype="float32",
            seed=0,
            lr=LR,
            momentum=MOMENTUM,
        )
        return Spec(
            system=f"{strategy.__module__}:{strategy.__name__}",
            workers=case.workers,
            servers=0,
            work=work,
            towers_reduction="",
            towers_dim=0,
            folder=str(folder),
            token=secrets.token_hex(32),
            time_limit_s=self.time_limit_s,
            controller_pid=os.getpid(),
        )


def stop_train(children: Sequence[Child]) -> None:
    """Stop a run with SIGTERM to one worker, which notifies the others: all save and exit.

    Killed, Open MPI would leave files of its shared memory.
    """
    (child,) = children
    workers = [pid for pid in child.processes() if _is_train(pid)]
    for pid in workers[:1]:
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + FINISH_S
    while child.exit_code() is None and time.monotonic() < until:
        time.sleep(POLL_S)


def _is_train(pid: int) -> bool:
    """Return whether this is a worker; horovodrun and mpirun only name one in their arguments."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[1:4] == [b"-m", b"hvdtrain.cli", b"train"]
