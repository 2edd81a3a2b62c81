"""What was predicted, as a picture: efficiency and throughput over N."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator, StrMethodFormatter

from hvdtrain.errors import UsageError
from hvdtrain.lab.charts import (
    GREY,
    HEIGHT,
    WIDTH,
    Plot,
    dress,
    look_of,
    new_figure,
    set_text,
    shorten,
    to_png,
)
from hvdtrain.lab.plan.costs import METHODS
from hvdtrain.lab.plan.predicting import Prediction, Useful
from hvdtrain.lab.plan.profiles import Profile

MOST_TICKS = 12


def write_plot(
    predictions: Sequence[Prediction],
    useful: Mapping[str, Useful],
    least: float,
    profile: Profile,
    folder: Path,
) -> Path:
    """Raises UsageError where it cannot be written."""
    plot = draw_plot(predictions, useful, least, profile)
    path = folder / f"{plot.name}.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_png(plot.figure))
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"--output={folder}: cannot be written: {reason}; choose another --output"
        ) from error
    return path


def draw_plot(
    predictions: Sequence[Prediction],
    useful: Mapping[str, Useful],
    least: float,
    profile: Profile,
) -> Plot:
    """Efficiency above, throughput below; rings mark the largest useful N."""
    figure = new_figure(WIDTH, 1.75 * HEIGHT)
    upper, lower = figure.subplots(2, 1, sharex=True)
    dress(upper, f"Predicted: {shorten(profile.name)}", "efficiency", "")
    dress(lower, "", "samples/s", "workers")
    counts = list(dict.fromkeys(p.workers for p in predictions))
    for index, method in enumerate(METHODS):
        _draw_method(upper, lower, [p for p in predictions if p.method == method], index)
        _mark(upper, useful[method], index)
    alone = predictions[0].samples_per_s
    lower.plot(counts, [n * alone for n in counts], color=GREY, linestyle=(0, (1, 1.2)))
    upper.axhline(least, color=GREY, linestyle=(0, (4, 3)), linewidth=1)
    upper.set_ylim(0, 1.05)
    lower.set_yscale("log")
    lower.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    _number_workers(lower, counts)
    _name_methods(upper)
    caption = (
        "Efficiency (throughput on N over N times that on 1) and throughput, each worker with the "
        f"same batch. Rings: the largest N with an efficiency of at least {least:g}; dotted: N "
        "times the throughput of one."
    )
    return Plot("scaling", "Predicted scaling", caption, figure)


def _draw_method(upper: Axes, lower: Axes, rows: Sequence[Prediction], index: int) -> None:
    look = look_of(index)
    style = {"color": look.colour, "linewidth": 1.6, "marker": "o", "markersize": 3}
    counts = [row.workers for row in rows]
    upper.plot(counts, [row.efficiency for row in rows], **style)  # type: ignore[arg-type]
    lower.plot(counts, [row.samples_per_s for row in rows], **style)  # type: ignore[arg-type]


def _mark(axes: Axes, useful: Useful, index: int) -> None:
    at = ([useful.workers], [useful.efficiency])
    axes.scatter(*at, s=70, facecolors="none", edgecolors=look_of(index).colour, linewidths=1.4)


def _number_workers(axes: Axes, counts: Sequence[int]) -> None:
    """Powers of two, as evenly spaced as they are; every other one where they are many."""
    axes.set_xscale("log", base=2)
    shown = counts[:: 1 + len(counts) // (MOST_TICKS + 1)]
    axes.set_xticks(shown, [f"{n:,}" for n in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _name_methods(axes: Axes) -> None:
    handles = [
        Line2D([], [], color=look_of(index).colour, linewidth=2.5) for index in range(len(METHODS))
    ]
    figure = axes.get_figure()
    assert figure is not None
    legend = figure.legend(
        handles,
        [method.replace("_", " ") for method in METHODS],
        loc="outside lower center",
        ncols=len(METHODS),
        frameon=False,
        fontsize=9,
    )
    for text in legend.get_texts():
        set_text(text)
