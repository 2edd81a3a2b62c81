"""The findings of a measurement: tables, JSON and plots, printed and written in one way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import EXIT_FAILED, EXIT_OK, Stopped
from hvdtrain.files import write_json
from hvdtrain.log import say
from hvdtrain.report.charts import Plot, write_plots


@dataclass(frozen=True)
class Findings:
    """The results of a measurement, as they are shown."""

    tables: Sequence[str]
    content: Mapping[str, Any]  # of --json
    plots: Sequence[Plot] = ()
    problems: Sequence[str] = ()  # what could not be measured
    stopped: Stopped | None = None  # the signal that ended the measurement


def publish(findings: Findings, arguments: Mapping[str, Any]) -> int:
    """Print the tables, write JSON and plots; return the exit code, 1 if there are problems.

    `arguments`: `json`, and where they apply `output`, and the `disturbance` since the start.

    Raises Stopped, at the end, if a signal has ended the measurement.
    """
    disturbance = arguments.get("disturbance")
    machine = {"machine": disturbance.content()} if disturbance else {}
    say("\n".join([*findings.tables, *([disturbance.line()] if disturbance else [])]))
    write_json(arguments["json"], {**findings.content, **machine})
    if "output" in arguments:
        for path in write_plots(findings.plots, arguments["output"]):
            say(f"written to {path}")
    if findings.stopped:
        raise findings.stopped
    return EXIT_FAILED if findings.problems else EXIT_OK
