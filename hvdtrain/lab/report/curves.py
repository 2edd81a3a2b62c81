"""Curves over steps: loss, metrics, throughput, learning rate, audits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.lines import Line2D

from hvdtrain.lab.charts import (
    GREY,
    Plot,
    dress,
    is_wide,
    look_of,
    name_kinds,
    name_runs,
    new_figure,
)
from hvdtrain.lab.report.runs import Record, Run, number

NOT_METRICS = ("loss", "samples", "class_accuracy")
LINE_WIDTH = 1.6
WIDEST = 6.0
FAILURE = "#B00020"
FEW = 40  # points up to here are marked each: a line of one point would be invisible


@dataclass(frozen=True)
class Kind:
    """One sort of line that every run may have."""

    label: str
    source: str  # the field of Run that holds its records
    name: str  # the figure's name in a record
    style: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One run's figures of one kind; NaN, a gap, where a figure was not finite."""

    run: int
    kind: Kind
    steps: list[float]
    values: list[float]


def draw_loss(runs: Sequence[Run]) -> Plot | None:
    """Loss, in training and validation."""
    caption = "Mean loss per sample: thin by logged step, round by epoch, diamonds in validation."
    return _draw(runs, "loss", "Loss", "loss (mean per sample)", _kinds("loss"), caption)


def draw_metrics(runs: Sequence[Run]) -> list[Plot]:
    """Accuracy; of runs that have none, each metric that they have."""
    plots = []
    for metric in dict.fromkeys(name for run in runs for name in _metrics_of(run)):
        title = metric.replace("_", " ").capitalize()
        label = "accuracy (part of samples, 0 to 1)" if metric == "accuracy" else metric
        caption = f"{title}: thin by logged step, round by epoch, diamonds in validation."
        if plot := _draw(runs, metric, title, label, _kinds(metric), caption):
            plots.append(plot)
    return plots


def draw_throughput(runs: Sequence[Run]) -> Plot | None:
    """Samples per second, over all workers."""
    kinds = [Kind("", "steps", "samples_per_s")]
    caption = "Samples per second over all workers, since the logged step before."
    plot = _draw(runs, "throughput", "Throughput", "samples per second", kinds, caption)
    if plot:
        plot.figure.axes[0].set_ylim(bottom=0)
    return plot


def draw_learning_rate(runs: Sequence[Run]) -> Plot | None:
    """The learning rate."""
    kinds = [Kind("", "steps", "lr")]
    caption = "The learning rate that the optimizer used at each logged step."
    plot = _draw(runs, "learning-rate", "Learning rate", "learning rate", kinds, caption)
    if plot:
        axes = plot.figure.axes[0]
        axes.set(yscale="linear", ylim=(0, None))
        widest = min(LINE_WIDTH * len(axes.lines), WIDEST)
        widths = np.linspace(widest, LINE_WIDTH, len(axes.lines))
        for line, width in zip(axes.lines, widths, strict=True):
            line.set_linewidth(width)  # runs often have the same rate: none hides another
    return plot


def draw_audits(runs: Sequence[Run]) -> Plot | None:
    """Worst error over bound of each audit; above 1 rounding cannot explain it."""
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
        _plot(axes, line)
    axes.axhline(1, color=GREY, linestyle=(0, (4, 3)), linewidth=1)
    axes.annotate("bound", (1, 1), xycoords=("axes fraction", "data"), **_ABOVE_RIGHT)
    dress(axes, "Audit", label)
    _scale(axes, [value for line in lines for value in line.values] + [1.0])
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    _mark_failures(axes, [record for run in runs for record in run.audits])
    name_runs(figure, [run.name for run in runs], audited)
    return Plot("audit", "Audit", caption, figure)


_ABOVE_RIGHT: dict[str, Any] = {
    "xytext": (-2, 2),
    "textcoords": "offset points",
    "ha": "right",
    "fontsize": 8,
    "color": GREY,
}


def _mark_failures(axes: Any, audits: Sequence[Record]) -> None:
    """A cross above all ratios for each failed audit, as its own may be infinite."""
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
    """Accuracy where a run has it; else every metric of its records."""
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
    """All runs' lines of all kinds in one plot; None where no run has a finite value."""
    lines = [_line(i, run, kind) for kind in kinds for i, run in enumerate(runs)]
    lines = [line for line in lines if any(map(math.isfinite, line.values))]
    if not lines:
        return None
    figure = new_figure()
    axes = figure.add_subplot()
    for line in lines:
        _plot(axes, line)
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


def _plot(axes: Any, line: Line) -> None:
    look = look_of(line.run)
    style = {"linewidth": LINE_WIDTH} | line.kind.style
    if len(line.steps) <= FEW:
        style = {"marker": ".", "markersize": 4} | style
    axes.plot(line.steps, line.values, color=look.colour, linestyle=look.dash, **style)


def _scale(axes: Any, values: Sequence[float]) -> None:
    if is_wide(values):
        axes.set_yscale("log")
