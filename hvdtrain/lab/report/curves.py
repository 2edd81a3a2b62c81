"""Plots over steps: loss, metrics, throughput, learning rate, audits and time per phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hvdtrain.lab.charts import (
    GREY,
    HEIGHT,
    LEGEND_ROW,
    PALETTE,
    WIDTH,
    Plot,
    dress,
    is_wide,
    legend_below,
    look_of,
    name_kinds,
    name_runs,
    new_figure,
    shorten,
)
from hvdtrain.lab.report.runs import Record, Run, number

NOT_METRICS = ("loss", "samples", "class_accuracy")
LINE_WIDTH = 1.6
MOST_WIDER = 2.5  # the first of many runs is so much wider than the last
BOUND_AT_MOST = 1.2  # where the axis ends, so that the bound at 1 stands clear of the frame
FAILURE = "#B00020"
FEW = 40  # most points that are marked: a line of a single point would be invisible
PHASE_COLOURS = {  # bottom to top
    "data": PALETTE[5],
    "compute": PALETTE[0],
    "exchange": PALETTE[1],
    "update": PALETTE[4],
}
ROW_HEIGHT, LOW_ROW_HEIGHT = 2.0, 1.5  # inches per run, for up to MANY runs, and for more
MANY = 4
_ABOVE_RIGHT: dict[str, Any] = {
    "xytext": (-2, 2),
    "textcoords": "offset points",
    "ha": "right",
    "fontsize": 8,
    "color": GREY,
}


@dataclass(frozen=True)
class Kind:
    """A kind of line that every run may have."""

    label: str
    source: str  # the field of Run that holds its records
    name: str  # the figure's name in a record
    style: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """The values of one run and kind over steps; NaN, drawn as a gap, where not finite."""

    run: int
    kind: Kind
    steps: list[float]
    values: list[float]


def draw_loss(runs: Sequence[Run]) -> Plot | None:
    """Plot training and validation loss."""
    caption = "Mean loss per sample: thin by logged step, round by epoch, diamonds in validation."
    return _draw(runs, "loss", "Loss", "loss (mean per sample)", _kinds("loss"), caption)


def draw_metrics(runs: Sequence[Run]) -> list[Plot]:
    """Plot the accuracy; for runs without it, each of their metrics."""
    plots = []
    for metric in dict.fromkeys(name for run in runs for name in _metrics_of(run)):
        title = metric.replace("_", " ").capitalize()
        label = "accuracy (part of samples, 0 to 1)" if metric == "accuracy" else metric
        caption = f"{title}: thin by logged step, round by epoch, diamonds in validation."
        if plot := _draw(runs, metric, title, label, _kinds(metric), caption):
            plots.append(plot)
    return plots


def draw_throughput(runs: Sequence[Run]) -> Plot | None:
    """Plot samples per second over all workers."""
    kinds = [Kind("", "steps", "samples_per_s")]
    caption = "Samples per second over all workers, since the logged step before."
    plot = _draw(runs, "throughput", "Throughput", "samples per second", kinds, caption)
    if plot:
        plot.figure.axes[0].set_ylim(bottom=0)
    return plot


def draw_learning_rate(runs: Sequence[Run]) -> Plot | None:
    """Plot the learning rate."""
    kinds = [Kind("", "steps", "lr")]
    caption = "The learning rate that the optimizer used at each logged step."
    plot = _draw(runs, "learning-rate", "Learning rate", "learning rate", kinds, caption)
    if plot:
        plot.figure.axes[0].set(yscale="linear", ylim=(0, None))
    return plot


def draw_audits(runs: Sequence[Run]) -> Plot | None:
    """Plot the worst error over bound of each audit; rounding does not explain values above 1."""
    label = "worst error ÷ rounding bound"
    kind = Kind("", "audits", "worst_error_over_bound", {"marker": "o", "markersize": 3})
    caption = "Above 1, rounding cannot explain a difference between gradients and reference."
    audited = [i for i, run in enumerate(runs) if run.audits]
    if not audited:
        return None
    figure = new_figure()
    axes = figure.add_subplot()
    lines = [_line(i, runs[i], kind) for i in audited]
    for line in lines:
        _plot(axes, line, len(runs))
    axes.axhline(1, color=GREY, linestyle=(0, (4, 3)), linewidth=1)
    axes.annotate("bound", (1, 1), xycoords=("axes fraction", "data"), **_ABOVE_RIGHT)
    dress(axes, "Audit", label)
    _scale(axes, [value for line in lines for value in line.values] + [1.0])
    if axes.get_yscale() == "linear":
        axes.set_ylim(0, max(axes.get_ylim()[1], BOUND_AT_MOST))
    _mark_failures(axes, [record for run in runs for record in run.audits])
    name_runs(figure, [run.name for run in runs], audited)
    return Plot("audit", "Audit", caption, figure)


def _mark_failures(axes: Any, audits: Sequence[Record]) -> None:
    """Mark each failed audit above all ratios, as its own may be infinite."""
    failed = [record["step"] for record in audits if record.get("ok") is False]
    if not failed:
        return
    axes.set_ylim(top=axes.get_ylim()[1] * (10 if axes.get_yscale() == "log" else 1.15))
    cross: dict[str, Any] = {"marker": "x", "linestyle": "none", "color": FAILURE}
    axes.plot(failed, [0.96] * len(failed), transform=axes.get_xaxis_transform(), **cross)
    name_kinds(axes, [Line2D([], [], **cross)], ["audit failed"])


def _kinds(metric: str) -> list[Kind]:
    thin = {"linewidth": 0.9, "alpha": 0.5}
    round_marks = {"linewidth": 1.0, "marker": "o", "markersize": 4, "markerfacecolor": "white"}
    return [
        Kind("train, by step", "steps", f"train_{metric}", thin),
        Kind("train, by epoch", "epochs", f"train_{metric}", round_marks),
        Kind("valid", "epochs", f"valid_{metric}", {"marker": "D", "markersize": 4}),
    ]


def _metrics_of(run: Run) -> list[str]:
    """Return accuracy where the run has it, else all metrics of its records."""
    names = {
        name.partition("_")[2]: None
        for record in run.steps + run.epochs
        for name in record
        if name.startswith(("train_", "valid_")) and math.isfinite(number(record, name))
    }
    metrics = [name for name in names if name not in NOT_METRICS]
    return ["accuracy"] if "accuracy" in metrics else metrics


def _draw(
    runs: Sequence[Run], name: str, title: str, label: str, kinds: Sequence[Kind], caption: str
) -> Plot | None:
    """Plot all kinds of lines of all runs; return None where no run has a finite value."""
    lines = [_line(i, run, kind) for kind in kinds for i, run in enumerate(runs)]
    lines = [line for line in lines if any(map(math.isfinite, line.values))]
    if not lines:
        return None
    figure = new_figure()
    axes = figure.add_subplot()
    for line in lines:
        _plot(axes, line, len(runs))
    dress(axes, title, label)
    _scale(axes, [value for line in lines for value in line.values])
    shown = [kind for kind in kinds if kind.label and any(line.kind == kind for line in lines)]
    if shown:
        colour = look_of(0).colour if len(runs) == 1 else GREY
        handles = [Line2D([], [], color=colour, **kind.style) for kind in shown]
        name_kinds(axes, handles, [kind.label for kind in shown])
    name_runs(figure, [run.name for run in runs], sorted({line.run for line in lines}))
    return Plot(name, title, caption, figure)


def _line(index: int, run: Run, kind: Kind) -> Line:
    records: list[Record] = getattr(run, kind.source)
    held = [record for record in records if kind.name in record]
    steps = [number(record, "step") for record in held]
    return Line(index, kind, steps, [number(record, kind.name) for record in held])


def _plot(axes: Any, line: Line, runs: int) -> None:
    look = look_of(line.run)
    style = {"linewidth": LINE_WIDTH} | line.kind.style
    if len(line.steps) <= FEW:
        style = {"marker": ".", "markersize": 4} | style
    # Equal runs all stay visible: each is drawn thinner than those below it.
    wider = 1 + min(runs - 1, MOST_WIDER) * (1 - line.run / max(runs - 1, 1))
    style |= {name: style[name] * wider for name in ("linewidth", "markersize") if name in style}
    axes.plot(line.steps, line.values, color=look.colour, linestyle=look.dash, **style)


def _scale(axes: Any, values: Sequence[float]) -> None:
    if is_wide(values):
        axes.set_yscale("log")


@dataclass(frozen=True)
class Times:
    """Mean time of a step by phase: column i of `seconds` from `edges[i]` to `edges[i + 1]`."""

    name: str
    edges: np.ndarray
    seconds: np.ndarray  # phase, logged step

    def share(self, phase: str) -> float:
        """Return the share of the total time spent in a phase."""
        totals = self.seconds @ np.diff(self.edges)
        return float(totals[list(PHASE_COLOURS).index(phase)] / totals.sum())


def draw_phases(runs: Sequence[Run]) -> Plot | None:
    """Plot one panel per run, with shared axes; None where no run has measured its phases."""
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
    handles = [Patch(color=colour) for colour in PHASE_COLOURS.values()]
    legend_below(figure, handles, list(PHASE_COLOURS))
    shares = "; ".join(
        f"{times.share('exchange'):.0%}" + ("" if len(runs) == 1 else f" in {times.name}")
        for times in measured
    )
    caption = f"Mean time of a step by phase. The exchange takes {shares}."
    return Plot("phases", "Time per step", caption, figure)


def _times_of(run: Run) -> Times | None:
    """Return the times of a run; None where it has measured none, or only zeros."""
    records = _in_order([record for record in run.steps if _is_measured(record)])
    if not records:
        return None
    seconds = np.array(
        [[number(record, f"{phase}_s") for record in records] for phase in PHASE_COLOURS]
    )
    seconds = np.nan_to_num(seconds).clip(min=0)
    steps = [number(record, "step") for record in records]
    interval = steps[1] - steps[0] if len(steps) > 1 else steps[0]
    edges = np.array([min(steps[0] - 1, max(0.0, steps[0] - interval)), *steps])
    return Times(run.name, edges, seconds) if seconds.sum() > 0 else None


def _is_measured(record: Record) -> bool:
    return any(math.isfinite(number(record, f"{phase}_s")) for phase in PHASE_COLOURS)


def _in_order(records: list[Record]) -> list[Record]:
    """Return the newest record of each step, by step."""
    by_step = {number(record, "step"): record for record in records}
    return [by_step[step] for step in sorted(by_step)]


def _stack(axes: Any, times: Times, factor: float) -> None:
    """Stack the phases as stairs, as a mean over an interval holds for all its steps."""
    base = np.zeros(times.seconds.shape[1])
    for (phase, colour), seconds in zip(PHASE_COLOURS.items(), times.seconds, strict=True):
        top = base + seconds * factor
        axes.stairs(top, times.edges, baseline=base, fill=True, color=colour, label=phase)
        base = top
