"""The `compare` subcommand: a table, JSON, plots and a page of ways to train on N devices."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.errors import EXIT_FAILED, EXIT_MISMATCH, EXIT_OK, attempt, refuse
from hvdtrain.evidence.children import ChildFailure
from hvdtrain.evidence.trials import scratch_folder
from hvdtrain.files import write_json
from hvdtrain.lab.compare.page import write_comparison
from hvdtrain.lab.compare.rows import (
    DISAGREES,
    FAILED,
    Comparison,
    ComparisonPlan,
    Row,
    Weights,
    describe,
    heading,
    line,
    make_row,
    notes_of,
    over_rounds,
    read_weights,
    summary_line,
)
from hvdtrain.lab.systems import ORACLE, find_strategy
from hvdtrain.lab.systems.contract import Spec, SystemOptions
from hvdtrain.lab.systems.process import run_system, start_fork_server
from hvdtrain.lab.systems.work import BY_SHARE, Work, WorkSpec
from hvdtrain.launcher.horovodrun import find_controller
from hvdtrain.launcher.processes import StopRequests
from hvdtrain.log import say

JUDGED_DTYPE = "float64"


def run(arguments: dict[str, Any], systems: tuple[str, ...]) -> int:
    """Run all systems, one after the other; return the exit code."""
    StopRequests()  # a signal raises Stopped, and child processes are ended on the way out
    names = [ORACLE, *systems]
    with scratch_folder("compare") as folder:
        start_fork_server()
        setting = examine(make_plan(arguments, systems))
        say(f"{describe(setting)}\n{heading(names)}")
        rows = compare(setting, folder, lambda row, single: say(line(row, names, single)))
    say("\n".join([*notes_of(rows, setting), summary_line(rows)]))
    write_json(arguments["json"], as_json(setting, rows))
    say(f"written to {write_comparison(rows, setting, arguments['output'])}")
    return exit_code(rows)


def make_plan(arguments: dict[str, Any], systems: tuple[str, ...]) -> ComparisonPlan:
    """Build the plan from checked flags."""
    same = ("servers", "towers_reduction", "towers_dim", "time_limit_s", "rounds")
    return ComparisonPlan(
        systems=systems,
        workers=arguments["np"],
        work=WorkSpec(**{option.name: arguments[option.name] for option in fields(WorkSpec)}),
        controller=find_controller(arguments["controller"]).name,
        **{name: arguments[name] for name in same},
    )


def examine(plan: ComparisonPlan) -> Comparison:
    """Build the work once and import every system; raise UsageError before any process starts."""
    problems: list[str] = []
    for name in plan.systems:
        attempt(problems, partial(find_strategy, name))
    work = Work(plan.work)
    shape = work.dataset.shape
    if plan.towers_dim > len(shape):
        problems.append(f"--towers-dim={plan.towers_dim}: inputs have dimensions 0 to {len(shape)}")
    refuse(problems)
    why_not = ""
    if any(isinstance(layer, BY_SHARE) for layer in work.model.modules()):
        why_not = "the model has batch norm or dropout, which depend on how samples are distributed"
    elif plan.work.dtype != JUDGED_DTYPE:
        why_not = f"rounding differences grow in {plan.work.dtype}; use --dtype {JUDGED_DTYPE}"
    parameters = sum(p.numel() for p in work.model.parameters())
    return Comparison(plan, shape, parameters, work.bytes_of_gradients, why_not)


def compare(setting: Comparison, folder: Path, show: Callable[[Row, Row], None]) -> list[Row]:
    """Run every system in each round, `single` first; return one row per system, failed ones too.

    `show` receives each complete row, and the row of `single`.
    """
    plan = setting.plan
    by_system: dict[str, list[Row]] = {name: [] for name in (ORACLE, *plan.systems)}
    rows: list[Row] = []
    oracle: Weights | None = None
    for round_number in range(plan.rounds):
        for number, (name, earlier) in enumerate(by_system.items()):
            spec = make_spec(plan, name, folder / f"round-{round_number}-system-{number}")
            row = _run(spec, setting, oracle)
            if name == ORACLE and row.status != FAILED:
                oracle = read_weights(Path(spec.folder))
            earlier.append(row)
            if round_number == plan.rounds - 1:
                rows.append(over_rounds(earlier))
                show(rows[-1], rows[0])
    return rows


def make_spec(plan: ComparisonPlan, system: str, folder: Path) -> Spec:
    """Return the specification that all processes of one system read."""
    same = {option.name: getattr(plan, option.name) for option in fields(SystemOptions)}
    return Spec(system=system, folder=str(folder), token=secrets.token_hex(32), **same)


def _run(spec: Spec, setting: Comparison, oracle: Weights | None) -> Row:
    strategy = find_strategy(spec.system)
    against = None if spec.system == ORACLE else oracle
    try:
        if oracle is None and spec.system != ORACLE:
            raise ChildFailure(f"not run: its reference, {ORACLE}, failed")
        results = run_system(spec, strategy, setting.plan.controller)
    except ChildFailure as failure:
        named = (spec.system, strategy.what, FAILED, strategy.processes(spec))
        return Row(*named, problem=str(failure))
    return make_row(spec, strategy, results, setting.gradient_bytes, against, not setting.why_not)


def exit_code(rows: Sequence[Row]) -> int:
    """Return the exit code of the rows; a wrong result takes precedence over a failure."""
    statuses = {row.status for row in rows}
    if DISAGREES in statuses:
        return EXIT_MISMATCH
    return EXIT_FAILED if FAILED in statuses else EXIT_OK


def as_json(setting: Comparison, rows: Sequence[Row]) -> dict[str, Any]:
    """Return setting and rows as values for `write_json`."""
    plan = asdict(setting.plan)
    return {
        **plan.pop("work"),
        **plan,
        "shape": setting.shape,
        "parameters": setting.parameters,
        "gradient_bytes": setting.gradient_bytes,
        "rows": [asdict(row) for row in rows],
    }
