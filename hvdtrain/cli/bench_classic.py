"""`hvdtrain bench classic`: a table, JSON and a plot."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hvdtrain.cli.json_file import write_json
from hvdtrain.errors import EXIT_OK, TrainingError
from hvdtrain.lab.bench.classic import Plan, as_json, data_that_is_there, measure, table, train
from hvdtrain.lab.bench.plots import draw_classic
from hvdtrain.lab.charts import write_plots
from hvdtrain.lab.children import ChildFailure, guarded
from hvdtrain.launcher.stopping import StopRequests
from hvdtrain.log import say


def run(arguments: dict[str, Any]) -> int:
    """All runs, one after the other. Returns the exit code. Raises TrainingError."""
    StopRequests()  # a signal raises Stopped, and what runs is ended on the way out
    data = arguments["data"] or data_that_is_there(Path(arguments["data_dir"]))
    values = arguments | {"data": data}
    plan = Plan(**{name: values[name] for name in Plan.__dataclass_fields__})
    with guarded(), tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        try:
            results = measure(plan, train, Path(folder), say)
        except ChildFailure as failure:
            raise TrainingError(f"bench classic: {failure}") from failure
    say(table(plan, results))
    write_json(arguments["json"], as_json(plan, results))
    for path in write_plots([draw_classic(plan, results)], arguments["output"]):
        say(f"written to {path}")
    return EXIT_OK
