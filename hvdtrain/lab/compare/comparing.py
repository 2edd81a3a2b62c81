"""What is compared, and the rows that come of it."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.lab.children import Child, ChildFailure, Commanded, Forked, Result, read_json, watch
from hvdtrain.lab.compare.rows import FAILED, Row, Weights, make_row, over_rounds, read_weights
from hvdtrain.lab.systems import ORACLE, find_strategy
from hvdtrain.lab.systems.contract import Spec, Strategy
from hvdtrain.lab.systems.process import run_forked
from hvdtrain.lab.systems.work import Work, WorkSpec
from hvdtrain.launcher.command import Engine, horovodrun_argv

JUDGED_DTYPE = "float64"


@dataclass(frozen=True)
class ComparisonPlan:
    """What `hvdtrain compare` was told."""

    systems: tuple[str, ...]
    workers: int
    servers: int
    work: WorkSpec
    towers_reduction: str
    towers_dim: int
    controller: str
    time_limit_s: float
    rounds: int


@dataclass(frozen=True)
class Comparison:
    """What all rows have in common, as the reader is told."""

    plan: ComparisonPlan
    shape: tuple[int, ...]
    parameters: int
    gradient_bytes: int
    may_judge: bool
    why_not: str  # it may not be judged


def examine(plan: ComparisonPlan) -> Comparison:
    """Build the work once, and find every system. Raises UsageError, before anything starts."""
    problems: list[str] = []
    for name in plan.systems:
        try:
            find_strategy(name)
        except UsageError as error:
            problems += error.problems
    work = Work(plan.work)
    shape = work.dataset.shape
    if plan.towers_dim > len(shape):
        problems.append(
            f"--towers-dim={plan.towers_dim}: inputs have {1 + len(shape)} dimensions, from 0"
        )
    if problems:
        raise UsageError(*problems)
    why_not = ""
    if work.depends_on_shares:
        why_not = "the model has batch norm or dropout, which depend on how samples are shared out"
    elif plan.work.dtype != JUDGED_DTYPE:
        why_not = f"in {plan.work.dtype} differences of rounding grow; judged is --dtype float64"
    return Comparison(
        plan=plan,
        shape=shape,
        parameters=sum(p.numel() for p in work.model.parameters()),
        gradient_bytes=work.bytes_of_gradients,
        may_judge=not why_not,
        why_not=why_not,
    )


def compare(
    setting: Comparison, folder: Path, context: ForkServerContext, show: Callable[[Row, Row], None]
) -> list[Row]:
    """Run every system, `single` first, and all of them again in each round; a failure is a row
    too. `show` is told of each row once it is whole, and of that of `single`.
    """
    plan = setting.plan
    found: dict[str, list[Row]] = {name: [] for name in (ORACLE, *plan.systems)}
    rows: list[Row] = []
    oracle: Weights | None = None
    for round_number in range(plan.rounds):
        for number, (name, earlier) in enumerate(found.items()):
            spec = make_spec(plan, name, folder / f"round-{round_number}-system-{number}")
            row = _run(spec, setting, context, oracle)
            if name == ORACLE and row.status != FAILED:
                oracle = read_weights(Path(spec.folder))
            earlier.append(row)
            if round_number == plan.rounds - 1:
                rows.append(over_rounds(earlier))
                show(rows[-1], rows[0])
    return rows


def make_spec(plan: ComparisonPlan, system: str, folder: Path) -> Spec:
    """What the processes of one system are told."""
    return Spec(
        system=system,
        workers=plan.workers,
        servers=plan.servers,
        work=plan.work,
        towers_reduction=plan.towers_reduction,
        towers_dim=plan.towers_dim,
        folder=str(folder),
        token=secrets.token_hex(32),
        time_limit_s=plan.time_limit_s,
        controller_pid=os.getpid(),
    )


def _run(
    spec: Spec, setting: Comparison, context: ForkServerContext, oracle: Weights | None
) -> Row:
    strategy = find_strategy(spec.system)
    against = None if spec.system == ORACLE else oracle
    try:
        if oracle is None and spec.system != ORACLE:
            raise ChildFailure(f"not run: {ORACLE}, which it is held against, has failed")
        results = run_system(spec, strategy, setting.plan.controller, context)
    except ChildFailure as failure:
        processes = strategy.processes(spec)
        return Row(spec.system, strategy.what, FAILED, processes, problem=str(failure))
    return make_row(spec, strategy, results, setting.gradient_bytes, against, setting.may_judge)


START_TIMEOUT_S = 60


def run_system(
    spec: Spec, strategy: type[Strategy], controller: str, context: ForkServerContext
) -> list[Result]:
    """What each process of the system has measured. Raises ChildFailure."""
    folder = Path(spec.folder)
    deadline = time.monotonic() + spec.time_limit_s
    children: list[Child] = []
    try:
        start_system(spec, strategy, controller, context, children)
        watch(children, folder, deadline, spec.time_limit_s)
    finally:
        for child in children:
            child.end()
    numbers = range(len(strategy.processes(spec)))
    return [read_json(folder / f"process-{number}.json") for number in numbers]


def start_system(
    spec: Spec,
    strategy: type[Strategy],
    controller: str,
    context: ForkServerContext,
    children: list[Child],
) -> None:
    """Make the system's folder, and add each process to `children` as it is started: they are to
    be ended also where a later one could not be. Raises ChildFailure.
    """
    folder = Path(spec.folder)
    folder.mkdir(mode=0o700)
    path = folder / "spec.json"
    path.write_text(spec.as_text(), "utf-8")
    if strategy.under_horovodrun:
        command = [sys.executable, "-m", "hvdtrain.lab.systems.process", str(path)]
        argv = horovodrun_argv(_engine(spec, controller), command)
        children.append(Commanded(argv, folder / "process-0.log"))
        return
    for number in range(len(strategy.processes(spec))):
        children.append(_fork(context, path, number))


def _engine(spec: Spec, controller: str) -> Engine:
    hosts = (("localhost", spec.workers),)
    return Engine(spec.workers, controller, hosts, None, START_TIMEOUT_S)


def _fork(context: ForkServerContext, spec_path: Path, number: int) -> Forked:
    log = spec_path.parent / f"process-{number}.log"
    process = context.Process(target=run_forked, args=(str(spec_path), number, str(log)))
    process.start()
    return Forked(process)
