"""`hvdtrain bench start`: a table, JSON and a plot."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.cli.json_file import write_json
from hvdtrain.errors import EXIT_OK, TrainingError
from hvdtrain.lab.bench.plots import draw_start
from hvdtrain.lab.bench.start import Plan, Runner, measure, ratios_of, table
from hvdtrain.lab.charts import write_plots
from hvdtrain.lab.children import ChildFailure, guarded
from hvdtrain.launcher.stopping import StopRequests
from hvdtrain.log import say


def run(arguments: dict[str, Any]) -> int:
    """All starts, one after the other. Returns the exit code. Raises TrainingError."""
    StopRequests()  # a signal raises Stopped, and what runs is ended on the way out
    plan = Plan(**{name: arguments[name] for name in Plan.__dataclass_fields__})
    with guarded(), tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        try:
            starts = measure(plan, Runner(plan), Path(folder), say)
        except ChildFailure as failure:
            raise TrainingError(f"bench start: {failure}") from failure
    say(table(plan, starts))
    found = {name: [asdict(start) for start in starts[name]] for name in starts}
    ratios = {name: asdict(ratio) for name, ratio in ratios_of(starts).items()}
    write_json(arguments["json"], {**asdict(plan), "starts": found, "ratios": ratios})
    for path in write_plots([draw_start(starts)], arguments["output"]):
        say(f"written to {path}")
    return EXIT_OK
