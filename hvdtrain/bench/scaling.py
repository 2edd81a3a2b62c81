"""`hvdtrain bench scaling`: samples/s on N = 1..P workers, ours beside DDP and the machine's limit.

Contestants are started one after the other, each for a short run, so that none disturbs another
(Horovod's thread wakes up also while its job waits). In each round all of a case follow closely on
one another, and what is compared are the ratios within rounds.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch

from hvdtrain.bench import images, peers
from hvdtrain.bench.train_runs import logged_steps, on_workers, run_command, train_argv
from hvdtrain.children import ChildFailure
from hvdtrain.compare.running import run_system
from hvdtrain.config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.models import build_model
from hvdtrain.strategies.contract import Spec
from hvdtrain.strategies.work import WorkSpec

OURS, DDP, LIMIT = "hvdtrain", "DDP", "limit"
CONTESTANTS = (OURS, DDP, LIMIT)
WEAK, STRONG = "weak", "strong"
WARM_UP_STEPS = RunConfig.log_interval  # `train` is measured by the times that it logs
STEPS = {"lenet": 200, "mlp": 100}  # some five seconds on two cores
OTHER_STEPS = 30
LEAST_SHARE = 2  # samples, of which batch norm can make statistics
LR, MOMENTUM = 0.01, 0.9


@dataclass(frozen=True)
class Case:
    """What the contestants do: the same for all of them."""

    model: str
    workers: int
    global_batch_size: int
    steps: int  # measured, after those of the warm-up


@dataclass(frozen=True)
class Plan:
    """What `hvdtrain bench scaling` was told."""

    models: Mapping[str, int]  # and the samples a worker
    workers: tuple[int, ...]
    modes: tuple[str, ...]
    rounds: int
    steps: int | None  # None: as the model needs
    controller: str  # gloo or mpi
    time_limit_s: float  # of each run

    def case(self, mode: str, model: str, workers: int) -> Case:
        """Weak scaling keeps the samples a worker; strong scaling the global batch, which is that
        of the most workers, so that both meet there.
        """
        shares = workers if mode == WEAK else max(self.workers)
        steps = self.steps or STEPS.get(model, OTHER_STEPS)
        return Case(model, workers, self.models[model] * shares, steps)

    def cases(self) -> list[Case]:
        """Each once, in the order of running."""
        found = (
            self.case(mode, model, workers)
            for model in self.models
            for mode in self.modes
            for workers in self.workers
        )
        return list(dict.fromkeys(found))


def examine(plan: Plan) -> None:
    """Raises UsageError for models that cannot be built, and for runs longer than an epoch."""
    problems: list[str] = []
    for model in plan.models:
        try:
            build_model(model, images.SHAPE, images.CLASSES, torch.float32)
        except UsageError as error:
            problems += [problem.replace("--model=", "--models=") for problem in error.problems]
    for case in plan.cases():
        samples = (WARM_UP_STEPS + case.steps) * case.global_batch_size
        if samples > images.SAMPLES:
            problems.append(
                f"{case.model}, N = {case.workers}: {samples:,} samples in a run; there are "
                f"{images.SAMPLES:,}. Lower --steps or --batch-size"
            )
        if case.global_batch_size < case.workers * LEAST_SHARE:
            problems.append(
                f"{case.model}, N = {case.workers}: {case.global_batch_size} samples a step are "
                f"less than {LEAST_SHARE} a worker. Raise --batch-size"
            )
    if problems:
        raise UsageError(*problems)


Rates = dict[Case, dict[str, list[float]]]  # samples/s by contestant and round; NaN: it failed
Run = Callable[[Case, str, Path], float]


def turns(plan: Plan) -> Iterator[tuple[int, Case, str]]:
    """Every run in order: round, case, contestant. Every other round goes in reverse, so that none
    is always the one after a certain other.
    """
    for number in range(plan.rounds):
        for case in plan.cases():
            for name in CONTESTANTS if number % 2 == 0 else reversed(CONTESTANTS):
                yield number, case, name


def measure(
    plan: Plan, run: Run, folder: Path, tell: Callable[[str], None]
) -> tuple[Rates, list[str]]:
    """All runs; what went wrong is told at once, and returned too."""
    rates: Rates = {case: {name: [] for name in CONTESTANTS} for case in plan.cases()}
    problems: list[str] = []
    for turn, (number, case, name) in enumerate(turns(plan)):
        try:
            rate = run(case, name, folder / str(turn))
        except ChildFailure as failure:
            rate = math.nan
            problems.append(
                f"{name}, {case.model}, N = {case.workers}, round {number + 1}: {failure}"
            )
            tell(problems[-1])
        rates[case][name].append(rate)
        if all(len(found) == number + 1 for found in rates[case].values()):
            tell(_progress(plan, number, case, rates[case]))
    return rates, problems


def _progress(plan: Plan, number: int, case: Case, rates: Mapping[str, list[float]]) -> str:
    told = ", ".join(f"{name} {found[-1]:,.0f}" for name, found in rates.items())
    return (
        f"round {number + 1} of {plan.rounds}: {case.model}, N = {case.workers}, "
        f"{case.global_batch_size} samples a step: {told} samples/s"
    )


@dataclass(frozen=True)
class Runner:
    """Runs one contestant once."""

    controller: str
    time_limit_s: float
    context: ForkServerContext

    def __call__(self, case: Case, name: str, folder: Path) -> float:
        """Samples a second. `folder` is made. Raises ChildFailure."""
        if name == OURS:
            return self._ours(case, folder)
        return self._peer(case, peers.PlainDdp if name == DDP else peers.Independent, folder)

    def _ours(self, case: Case, folder: Path) -> float:
        """`hvdtrain train` in full, between two of the steps that it logs."""
        folder.mkdir(mode=0o700)
        flags = ["--model", case.model, "--data", images.NAME, "--device", "cpu"]
        flags += ["--global-batch-size", str(case.global_batch_size), "--lr", str(LR)]
        flags += ["--momentum", str(MOMENTUM), "--max-steps", str(WARM_UP_STEPS + case.steps)]
        argv, environment = on_workers(train_argv(folder, flags), case.workers, self.controller)
        run_command(argv, environment, folder, self.time_limit_s)
        first, *_, last = logged_steps(folder)
        return (last.step - first.step) * case.global_batch_size / (last.at_s - first.at_s)

    def _peer(self, case: Case, strategy: type[peers.BareLoop], folder: Path) -> float:
        spec = self._spec(case, strategy, folder)
        results = run_system(spec, strategy, self.controller, self.context)
        own = [r["samples"] / case.workers / (r["ended_s"] - r["begun_s"]) for r in results]
        return float(sum(own))

    def _spec(self, case: Case, strategy: type[peers.BareLoop], folder: Path) -> Spec:
        work = WorkSpec(
            model=case.model,
            data=images.NAME,
            data_dir="",
            global_batch_size=case.global_batch_size,
            steps=WARM_UP_STEPS + case.steps,
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
