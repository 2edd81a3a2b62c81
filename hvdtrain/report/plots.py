"""Plots of runs: curves over steps, time per phase, and confusions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from hvdtrain.report.charts import (
    GREY,
    HEIGHT,
    LEGEND_ROW,
    PALETTE,
    WIDTH,
    Plot,
    dress,
    is_wide,
    look_of,
    name_colours,
    name_kinds,
    name_runs,
    new_figure,
    shorten,
)
from hvdtrain.report.confusions import draw_confusions
from hvdtrain.report.runs import Run, number

UNITS = {  # what the caption and the axis call a metric
    "loss": ("Mean loss per sample", "loss (mean per sample)"),
    "accuracy": ("Accuracy", "accuracy (part of samples, 0 to 1)"),
}
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


Style = dict[str, Any]  # of a line of matplotlib
# Of a metric: the records, the prefix of its name there, and label and style of the lines.
CURVES: tuple[tuple[str, str, str, Style], ...] = (
    ("steps", "train_", "train, by step", {"linewidth": 0.9, "alpha": 0.5}),
    (
        "epochs",
        "train_",
        "train, by epoch",
        {"linewidth": 1.0, "marker": "o", "markersize": 4, "markerfacecolor": "white"},
    ),
    ("evaluations", "valid_", "valid", {"marker": "D", "markersize": 4}),
)
# Of figures of logged steps: what `_draw` is called with.
THROUGHPUT: dict[str, Any] = {
    "name": "throughput",
    "title": "Throughput",
    "label": "samples per second",
    "caption": "Samples per second over all workers, since the logged step before.",
    "from_zero": True,
}
LEARNING_RATE: dict[str, Any] = {
    "name": "learning-rate",
    "title": "Learning rate",
    "label": "learning rate",
    "caption": "The learning rate that the optimizer used at each logged step.",
    "from_zero": True,
    "may_be_log": False,
}


@dataclass(frozen=True)
class Line:
    """Values of one run over steps; NaN, drawn as a gap, where not finite."""

    run: int
    label: str  # of all lines of this kind, if any
    style: Style
    steps: list[float]
    values: list[float]


def draw_plots(runs: Sequence[Run]) -> tuple[list[Plot], list[str]]:
    """Return the plots for which a run has data, and the descriptions of the missing ones."""
    metrics = dict.fromkeys(name for run in runs for name in _metrics_of(run))
    drawn: dict[str, Sequence[Plot | None]] = {
        "loss": [draw_metric(runs, "loss")],
        "accuracy or another metric": [draw_metric(runs, metric) for metric in metrics],
        "throughput": [_draw(runs, _lines(runs, "steps", "samples_per_s"), **THROUGHPUT)],
        "time per phase of a step": [draw_phases(runs)],
        "learning rate": [_draw(runs, _lines(runs, "steps", "lr"), **LEARNING_RATE)],
        "audits": [draw_audits(runs)],
        "confusion matrix": draw_confusions(runs),
    }
    return (
        [plot for group in drawn.values() for plot in group if plot],
        [what for what, group in drawn.items() if not any(group)],
    )


def _metrics_of(run: Run) -> list[str]:
    """Return accuracy where the run has it, else all metrics of its records."""
    names = {
        name.partition("_")[2]: None
        for record in run.steps + run.epochs + run.evaluations
        for name in record
        if name.startswith(("train_", "valid_")) and math.isfinite(number(record, name))
    }
    metrics = [name for name in names if name not in NOT_METRICS]
    return ["accuracy"] if "accuracy" in metrics else metrics


def draw_metric(runs: Sequence[Run], metric: str) -> Plot | None:
    """Plot a metric, or the loss, in training and validation."""
    lines = [
        line
        for records, prefix, label, style in CURVES
        for line in _lines(runs, records, prefix + metric, label, style)
    ]
    title = metric.replace("_", " ").capitalize()
    what, label = UNITS.get(metric, (title, metric))
    return _draw(
        runs,
        lines,
        name=metric,
        title=title,
        label=label,
        caption=f"{what}: thin by logged step, round by epoch, diamonds in validation.",
    )


def draw_audits(runs: Sequence[Run]) -> Plot | None:
    """Plot the worst error over bound of each audit; rounding does not explain values above 1."""
    lines = _lines(runs, "audits", "worst_error_over_bound", style={"marker": "o", "markersize": 3})
    plot = _draw(
        runs,
        lines,
        name="audit",
        title="Audit",
        label="worst error ÷ rounding bound",
        caption="Above 1, rounding cannot explain a difference between gradients and reference.",
    )
    if not plot:
        return None
    axes = plot.figure.axes[0]
    axes.axhline(1, color=GREY, linestyle=(0, (4, 3)), linewidth=1)
    axes.annotate(
        "bound",
        (1, 1),
        xytext=(-2, 2),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=GREY,
    )
    if is_wide([1.0, *(value for line in lines for value in line.values)]):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, max(axes.get_ylim()[1], BOUND_AT_MOST))
    failed = [one["step"] for run in runs for one in run.audits if one.get("ok") is False]
    if failed:  # marked above all ratios, as their own may be infinite
        axes.set_ylim(top=axes.get_ylim()[1] * (10 if axes.get_yscale() == "log" else 1.15))
        cross: Style = {"marker": "x", "linestyle": "none", "color": FAILURE}
        axes.plot(failed, [0.96] * len(failed), transform=axes.get_xaxis_transform(), **cross)
        name_kinds(axes, [Line2D([], [], **cross)], ["audit failed"])
    return plot


def _lines(
    runs: Sequence[Run], source: str, name: str, label: str = "", style: Style | None = None
) -> list[Line]:
    """Return a line for each run with a finite value of `name` in the records of `source`."""
    lines = []
    for index, run in enumerate(runs):
        records = [record for record in getattr(run, source) if name in record]
        values = [number(record, name) for record in records]
        # Audits are kept without one: a failed audit is marked even if its ratio is infinite.
        if any(map(math.isfinite, values)) or (values and source == "audits"):
            steps = [number(record, "step") for record in records]
            lines.append(Line(index, label, style or {}, steps, values))
    return lines


def _draw(
    runs: Sequence[Run],
    lines: Sequence[Line],
    *,
    name: str,
    title: str,
    label: str,
    caption: str,
    from_zero: bool = False,
    may_be_log: bool = True,
) -> Plot | None:
    """Plot the lines; return None where there are none.

    `label`: of the y axis, which is logarithmic for values that are far apart, if it `may_be_log`;
    else it begins at 0 if `from_zero`.
    """
    if not lines:
        return None
    figure = new_figure()
    axes = figure.add_subplot()
    for line in lines:
        _plot(axes, line, len(runs))
    dress(axes, title, label)
    if may_be_log and is_wide([value for line in lines for value in line.values]):
        axes.set_yscale("log")
    elif from_zero:
        axes.set_ylim(bottom=0)
    if styles := {line.label: line.style for line in lines if line.label}:
        colour = look_of(0)["color"] if len(runs) == 1 else GREY
        handles = [Line2D([], [], color=colour, **style) for style in styles.values()]
        name_kinds(axes, handles, list(styles))
    name_runs(figure, [run.name for run in runs], sorted({line.run for line in lines}))
    return Plot(name, title, caption, figure)


def _plot(axes: Axes, line: Line, runs: int) -> None:
    style: Style = {"linewidth": LINE_WIDTH, **line.style}
    if len(line.steps) <= FEW:
        style = {"marker": ".", "markersize": 4, **style}
    # Equal runs all stay visible: each is drawn thinner than those below it.
    wider = 1 + min(runs - 1, MOST_WIDER) * (1 - line.run / max(runs - 1, 1))
    style |= {name: style[name] * wider for name in ("linewidth", "markersize") if name in style}
    axes.plot(line.steps, line.values, **look_of(line.run), **style)


class Times(NamedTuple):
    """Mean time of a step by phase: column i of `seconds` from `edges[i]` to `edges[i + 1]`."""

    name: str
    edges: np.ndarray
    seconds: np.ndarray  # phase, logged step
    exchange_share: float


def draw_phases(runs: Sequence[Run]) -> Plot | None:
    """Plot one panel per run, with shared axes; None where no run has measured its phases."""
    measured = [times for run in runs if (times := _times_of(run))]
    if not measured:
        return None
    row_height = ROW_HEIGHT if len(measured) <= MANY else LOW_ROW_HEIGHT
    height = HEIGHT if len(measured) == 1 else row_height * len(measured) + 0.6
    figure = new_figure(WIDTH, height + LEGEND_ROW)
    panels = figure.subplots(len(measured), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    longest = max(times.seconds.sum(axis=0).max() for times in measured)
    unit, factor = ("ms", 1e3) if longest < 1 else ("s", 1.0)
    for axes, times in zip(panels, measured, strict=True):
        _stack(axes, times, factor)
        title = "Time per step" if len(runs) == 1 else f"Time per step: {shorten(times.name)}"
        dress(axes, title, f"{unit} per step", "step" if axes is panels[-1] else "")
    first, last = min(t.edges[0] for t in measured), max(t.edges[-1] for t in measured)
    panels[0].set(xlim=(first, last), ylim=(0, longest * factor * 1.05))
    name_colours(figure, PHASE_COLOURS)
    shares = [
        f"{times.exchange_share:.0%}" + ("" if len(runs) == 1 else f" in {times.name}")
        for times in measured
    ]
    return Plot(
        name="phases",
        title="Time per step",
        caption=f"Mean time of a step by phase. The exchange takes {'; '.join(shares)}.",
        figure=figure,
    )


def _times_of(run: Run) -> Times | None:
    """Return the times of a run; None where it has measured none, or only zeros."""
    by_step: dict[float, list[float]] = {}  # the newest of each step
    for record in run.steps:
        measured = [number(record, f"{phase}_s") for phase in PHASE_COLOURS]
        if any(map(math.isfinite, measured)):
            by_step[number(record, "step")] = measured
    steps = sorted(by_step)
    seconds = np.nan_to_num(np.array([by_step[step] for step in steps]).T).clip(min=0)
    if not seconds.sum() > 0:
        return None
    interval = steps[1] - steps[0] if len(steps) > 1 else steps[0]
    edges = np.array([min(steps[0] - 1, max(0.0, steps[0] - interval)), *steps])
    totals = dict(zip(PHASE_COLOURS, seconds @ np.diff(edges), strict=True))
    return Times(run.name, edges, seconds, totals["exchange"] / sum(totals.values()))


def _stack(axes: Axes, times: Times, factor: float) -> None:
    """Stack the phases as stairs, as a mean over an interval holds for all its steps."""
    base = np.zeros(times.seconds.shape[1])
    for (phase, colour), seconds in zip(PHASE_COLOURS.items(), times.seconds, strict=True):
        top = base + seconds * factor
        axes.stairs(top, times.edges, baseline=base, fill=True, color=colour, label=phase)
        base = top
