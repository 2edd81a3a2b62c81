"""Where a step's time goes: stacked by phase, over steps; the runs one under the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.patches import Patch

from hvdtrain.lab.charts import (
    HEIGHT,
    LEGEND_ROW,
    WIDTH,
    Plot,
    dress,
    new_figure,
    shorten,
)
from hvdtrain.lab.report.runs import Record, Run, number

PHASES = {  # bottom to top; colours by Okabe and Ito
    "data": "#56B4E9",
    "compute": "#0072B2",
    "exchange": "#D55E00",
    "update": "#E69F00",
}
ROW_HEIGHT, LOW_ROW_HEIGHT = 2.0, 1.5  # inches, of each run where there are several, or many
MANY = 4


@dataclass(frozen=True)
class Times:
    """One run's: `edges[i]` to `edges[i + 1]` are the steps of column i of `seconds`."""

    name: str
    edges: np.ndarray
    seconds: np.ndarray  # phase, logged step

    def share(self, phase: str) -> float:
        """The part of all time that a phase took."""
        totals = self.seconds @ np.diff(self.edges)
        return float(totals[list(PHASES).index(phase)] / totals.sum())


def draw_phases(runs: Sequence[Run]) -> Plot | None:
    """A panel a run, with common axes; None where no run has measured its phases."""
    measured = [times for run in runs if (times := _times_of(run))]
    if not measured:
        return None
    alone = len(measured) == 1
    row_height = ROW_HEIGHT if len(measured) <= MANY else LOW_ROW_HEIGHT
    height = HEIGHT if alone else row_height * len(measured) + 0.6
    figure = new_figure(WIDTH, height + LEGEND_ROW)
    panels = figure.subplots(len(measured), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    longest = max(times.seconds.sum(axis=0).max() for times in measured)
    unit, factor = ("ms", 1e3) if longest < 1 else ("s", 1.0)
    for axes, times in zip(panels, measured, strict=True):
        _stack(axes, times, factor)
        title = "Time per step" if len(runs) == 1 else f"Time per step: {shorten(times.name)}"
        dress(axes, title, f"{unit} per step", "step" if axes is panels[-1] else "")
    panels[0].set_xlim(min(t.edges[0] for t in measured), max(t.edges[-1] for t in measured))
    panels[0].set_ylim(0, longest * factor * 1.05)
    handles = [Patch(color=colour) for colour in PHASES.values()]
    figure.legend(
        handles, list(PHASES), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    shares = "; ".join(
        f"{times.share('exchange'):.0%}" + ("" if len(runs) == 1 else f" in {times.name}")
        for times in measured
    )
    caption = f"Mean time of a step by phase. The exchange takes {shares}."
    return Plot("phases", "Time per step", caption, figure)


def _times_of(run: Run) -> Times | None:
    """None for a run that has measured none, or nothing but zeros."""
    records = _in_order([record for record in run.steps if _is_measured(record)])
    if not records:
        return None
    seconds = np.array([[number(record, f"{phase}_s") for record in records] for phase in PHASES])
    seconds = np.nan_to_num(seconds).clip(min=0)
    steps = [number(record, "step") for record in records]
    interval = steps[1] - steps[0] if len(steps) > 1 else steps[0]
    edges = np.array([min(steps[0] - 1, max(0.0, steps[0] - interval)), *steps])
    return Times(run.name, edges, seconds) if seconds.sum() > 0 else None


def _is_measured(record: Record) -> bool:
    return any(math.isfinite(number(record, f"{phase}_s")) for phase in PHASES)


def _in_order(records: list[Record]) -> list[Record]:
    """By step, one record each: the newest."""
    by_step = {number(record, "step"): record for record in records}
    return [by_step[step] for step in sorted(by_step)]


def _stack(axes: Any, times: Times, factor: float) -> None:
    """A mean over an interval holds for all its steps: stairs, not slopes."""
    base = np.zeros(times.seconds.shape[1])
    for (phase, colour), seconds in zip(PHASES.items(), times.seconds, strict=True):
        top = base + seconds * factor
        axes.stairs(top, times.edges, baseline=base, fill=True, color=colour, label=phase)
        base = top
