"""The outcome of a measurement: tables, JSON and plots, printed and written in one way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import EXIT_FAILED, EXIT_OK, Stopped
from hvdtrain.files import write_json
from hvdtrain.log import say
from hvdtrain.report.charts import Plot, write_plots


@dataclass(frozen=True)
class Outcome:
    """The results of a measurement, as they are shown."""

    tables: Sequence[str]
    content: Mapping[str, Any]  # of --json
    plots: Sequence[Plot] = ()
    problems: Sequence[str] = ()  # what could not be measured
    stopped: Stopped | None = None  # the signal that ended the measurement


def publish(outcome: Outcome, arguments: Mapping[str, Any]) -> int:
    """Print the tables, write JSON and plots; return the exit code, 1 if there are problems.

    Raises Stopped, at the end, if a signal has ended the measurement.
    """
    say("\n".join(outcome.tables))
    write_json(arguments["json"], outcome.content)
    if "output" in arguments:
        for path in write_plots(outcome.plots, arguments["output"]):
            say(f"written to {path}")
    if outcome.stopped:
        raise outcome.stopped
    return EXIT_FAILED if outcome.problems else EXIT_OK
