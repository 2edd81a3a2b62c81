"""The comparison: its plan, the processes of each system, and the resulting rows."""

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
from hvdtrain.launcher.command import EngineOptions, horovodrun_argv

JUDGED_DTYPE = "float64"
START_TIMEOUT_S = 60


@dataclass(frozen=True)
class ComparisonPlan:
    """The checked options of `hvdtrain compare`."""

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
    """The plan, and the properties of the work that all rows share."""

    plan: ComparisonPlan
    shape: tuple[int, ...]
    parameters: int
    gradient_bytes: int
    may_judge: bool
    why_not: str  # the reason for may_judge = False


def examine(plan: ComparisonPlan) -> Comparison:
    """Build the work once and import every system; raise UsageError before any process starts."""
    problems: list[str] = []
    for name in plan.systems:
        try:
            find_strategy(name)
        except UsageError as error:
            problems += error.problems
    work = Work(plan.work)
    shape = work.dataset.shape
    if plan.towers_dim > len(shape):
        problems.append(f"--towers-dim={plan.towers_dim}: inputs have dimensions 0 to {len(shape)}")
    if problems:
        raise UsageError(*problems)
    why_not = ""
    if work.depends_on_shares:
        why_not = "the model has batch norm or dropout, which depend on how samples are distributed"
    elif plan.work.dtype != JUDGED_DTYPE:
        why_not = f"rounding differences grow in {plan.work.dtype}; use --dtype {JUDGED_DTYPE}"
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
    """Run every system in each round, `single` first; return one row per system, failed ones too.

    `show` receives each complete row, and the row of `single`.
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
    """Return the specification that all processes of one system read."""
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
            raise ChildFailure(f"not run: its reference, {ORACLE}, failed")
        results = run_system(spec, strategy, setting.plan.controller, context)
    except ChildFailure as failure:
        processes = strategy.processes(spec)
        return Row(spec.system, strategy.what, FAILED, processes, problem=str(failure))
    return make_row(spec, strategy, results, setting.gradient_bytes, against, setting.may_judge)


def run_system(
    spec: Spec, strategy: type[Strategy], controller: str, context: ForkServerContext
) -> list[Result]:
    """Run the system and return the measurements of each process. Raises ChildFailure."""
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
    """Make the system's folder and start its processes. Raises ChildFailure.

    Each process is added to `children` as it starts, so that the caller can end those that run
    when a later one fails to start.
    """
    folder = Path(spec.folder)
    folder.mkdir(mode=0o700)
    path = folder / "spec.json"
    path.write_text(spec.as_text(), "utf-8")
    if strategy.under_horovodrun:
        command = [sys.executable, "-m", "hvdtrain.lab.systems.process", str(path)]
        hosts = (("localhost", spec.workers),)
        engine = EngineOptions(spec.workers, controller, hosts, None, START_TIMEOUT_S)
        children.append(Commanded(horovodrun_argv(engine, command), folder / "process-0.log"))
        return
    for number in range(len(strategy.processes(spec))):
        log = folder / f"process-{number}.log"
        process = context.Process(target=run_forked, args=(str(path), number, str(log)))
        process.start()
        children.append(Forked(process))
