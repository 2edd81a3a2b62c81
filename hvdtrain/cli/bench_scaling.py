"""`hvdtrain bench scaling`: a table, JSON and plots."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hvdtrain.cli.json_file import write_json
from hvdtrain.errors import EXIT_FAILED, EXIT_OK
from hvdtrain.lab.bench.scaling import Plan, Starter, examine, measure
from hvdtrain.lab.bench.scaling_plots import draw_plots
from hvdtrain.lab.bench.scaling_results import as_json, points_of, table
from hvdtrain.lab.charts import write_plots
from hvdtrain.lab.children import fork_server, guarded
from hvdtrain.launcher.stopping import StopRequests
from hvdtrain.log import say


def run(arguments: dict[str, Any]) -> int:
    """All runs, one after the other. Returns the exit code: 1 where some have failed."""
    StopRequests()  # a signal raises Stopped, and what runs is ended on the way out
    plan = Plan(**{name: arguments[name] for name in Plan.__dataclass_fields__})
    examine(plan)
    with guarded(), tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        starter = Starter(plan.controller, plan.time_limit_s, fork_server())
        rates, problems = measure(plan, starter, Path(folder), say)
    points = points_of(plan, rates)
    say(table(plan, points))
    write_json(arguments["json"], as_json(plan, rates, points, problems))
    for path in write_plots(draw_plots(plan, rates, points), arguments["output"]):
        say(f"written to {path}")
    return EXIT_FAILED if problems else EXIT_OK
