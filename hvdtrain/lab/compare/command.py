"""The `compare` subcommand: a table, JSON, plots and a page of ways to train on N devices."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.errors import EXIT_FAILED, EXIT_MISMATCH, EXIT_OK
from hvdtrain.files import write_json
from hvdtrain.lab.children import fork_server
from hvdtrain.lab.compare.comparing import Comparison, ComparisonPlan, compare, examine
from hvdtrain.lab.compare.page import write_page
from hvdtrain.lab.compare.rows import DISAGREES, FAILED, Row
from hvdtrain.lab.compare.table import describe, heading, line, notes_of, verdict
from hvdtrain.lab.systems import ORACLE
from hvdtrain.lab.systems.work import WorkSpec
from hvdtrain.launcher.command import find_controller
from hvdtrain.launcher.stopping import StopRequests
from hvdtrain.log import say


def run(arguments: dict[str, Any], systems: tuple[str, ...]) -> int:
    """Run all systems, one after the other; return the exit code."""
    StopRequests()  # a signal raises Stopped, and child processes are ended on the way out
    context = fork_server()
    setting = examine(make_plan(arguments, systems))
    names = [ORACLE, *systems]
    say(f"{describe(setting)}\n{heading(names)}")

    def show(row: Row, single: Row) -> None:
        say(line(row, names, single))

    with tempfile.TemporaryDirectory(prefix="hvdtrain-compare-") as folder:
        rows = compare(setting, Path(folder), context, show)
    say("\n".join([*notes_of(rows, setting), verdict(rows)]))
    write_json(arguments["json"], as_json(setting, rows))
    say(f"written to {write_page(rows, setting, arguments['output'])}")
    return exit_code(rows)


def make_plan(arguments: dict[str, Any], systems: tuple[str, ...]) -> ComparisonPlan:
    """Build the plan from checked flags."""
    names = WorkSpec.__dataclass_fields__
    return ComparisonPlan(
        systems=systems,
        workers=arguments["np"],
        servers=arguments["servers"],
        work=WorkSpec(**{name: arguments[name] for name in names}),
        towers_reduction=arguments["towers_reduction"],
        towers_dim=arguments["towers_dim"],
        controller=find_controller(arguments["controller"]),
        time_limit_s=arguments["time_limit_s"],
        rounds=arguments["rounds"],
    )


def exit_code(rows: Sequence[Row]) -> int:
    """Return the exit code of the rows; a wrong result takes precedence over a failure."""
    found = {row.status for row in rows}
    if DISAGREES in found:
        return EXIT_MISMATCH
    return EXIT_FAILED if FAILED in found else EXIT_OK


def as_json(setting: Comparison, rows: Sequence[Row]) -> dict[str, Any]:
    """Return setting and rows as JSON values; a difference that is not finite becomes null."""
    plan = asdict(setting.plan)
    return {
        **plan.pop("work"),
        **plan,
        "shape": list(setting.shape),
        "parameters": setting.parameters,
        "gradient_bytes": setting.gradient_bytes,
        "rows": [_row_as_json(row) for row in rows],
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    values = asdict(row)
    values["traffic"] = {name: t._asdict() for name, t in row.traffic.items()}
    values["formula"] = row.formula and {name: t._asdict() for name, t in row.formula.items()}
    if row.difference is not None and not math.isfinite(row.difference):
        values["difference"] = None
    return values
