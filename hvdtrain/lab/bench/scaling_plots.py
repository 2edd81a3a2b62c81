"""What `hvdtrain bench scaling` has found, as pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, StrMethodFormatter

from hvdtrain.lab.bench.scaling import CONTESTANTS, DDP, LIMIT, OURS, Rates, ScalingPlan
from hvdtrain.lab.bench.scaling_results import Point
from hvdtrain.lab.charts import GREY, PALETTE, WIDTH, Plot, dress, new_figure, set_text

COLOURS = dict(zip(CONTESTANTS, (*PALETTE[:2], GREY), strict=True))
MARKERS = dict(zip(CONTESTANTS, ("o", "s", "^"), strict=True))
PANEL_HEIGHT, MARGIN = 2.7, 0.7  # inches
PANEL_WIDTH = WIDTH / 2
ROW_HEIGHT = 0.42  # inches


def draw_plots(plan: ScalingPlan, rates: Rates, points: Sequence[Point]) -> list[Plot]:
    """Every plot for which there are results."""
    done = [point for point in points if point.samples_per_s[OURS]]
    return [_draw_speed(plan, done), _draw_ratios(plan, rates, done)] if done else []


def _draw_speed(plan: ScalingPlan, points: Sequence[Point]) -> Plot:
    """A row a mode, a column a model: samples/s over N."""
    models = list(dict.fromkeys(point.case.model for point in points))
    width = max(WIDTH, PANEL_WIDTH * len(models))
    figure = new_figure(width, MARGIN + PANEL_HEIGHT * len(plan.modes))
    panels = figure.subplots(len(plan.modes), len(models), squeeze=False)
    for row, mode in zip(panels, plan.modes, strict=True):
        for axes, model in zip(row, models, strict=True):
            own = [point for point in points if (point.mode, point.case.model) == (mode, model)]
            _draw_panel(axes, f"{model}, {mode}", own)
    handles = [
        Line2D([], [], color=COLOURS[name], marker=MARKERS[name], linewidth=1.8)
        for name in CONTESTANTS
    ]
    handles.append(Line2D([], [], color=GREY, linestyle=(0, (1, 1.5)), linewidth=1.2))
    labels = [OURS, DDP, f"{LIMIT} of this machine", "N times one process alone"]
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8
    )
    caption = (
        "Samples per second over all workers, medians. Weak: the same samples a worker; strong: "
        "the same global batch. The limit: as many processes at the same time, without exchange."
    )
    return Plot("scaling", "Scaling", caption, figure)


def _draw_panel(axes: Axes, title: str, points: Sequence[Point]) -> None:
    counts = [point.case.workers for point in points]
    dress(axes, title, "samples/s", "workers")
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    alone = next((p.samples_per_s[LIMIT] for p in points if p.case.workers == 1), None)
    if alone:
        ideal = [alone * count for count in counts]
        axes.plot(counts, ideal, color=GREY, linestyle=(0, (1, 1.5)), linewidth=1.2)
    for name in CONTESTANTS:
        values = [point.samples_per_s[name] or math.nan for point in points]
        axes.plot(counts, values, color=COLOURS[name], marker=MARKERS[name], linewidth=1.8)
    axes.margins(x=0.12, y=0.1)
    axes.set_ylim(bottom=0)


def _draw_ratios(plan: ScalingPlan, rates: Rates, points: Sequence[Point]) -> Plot:
    """A row a point: the ratios of all rounds as dots, their medians as lines."""
    figure = new_figure(WIDTH, 1.3 + ROW_HEIGHT * len(points))
    axes = figure.add_subplot()
    set_text(axes.set_title("hvdtrain's speed", loc="left", fontsize=11, fontweight="bold"))
    for place, point in enumerate(points):
        found = rates[point.case]
        for other, ratio, offset in (
            (DDP, point.over_ddp, -0.16),
            (LIMIT, point.over_limit, 0.16),
        ):
            values = [a / b for a, b in zip(found[OURS], found[other], strict=True)]
            at = [place + offset] * len(values)
            axes.scatter(values, at, s=16, color=COLOURS[other], alpha=0.55, linewidth=0)
            if ratio:
                ends = (place + offset - 0.14, place + offset + 0.14)
                axes.vlines(ratio.median, *ends, color=COLOURS[other], linewidth=2.4)
    labels = [f"{p.case.model}, {p.mode}, N = {p.case.workers}" for p in points]
    axes.set_yticks(range(len(points)), labels)
    axes.set_ylim(len(points) - 0.5, -0.5)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("as a multiple of the other's, within rounds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    handles = [Line2D([], [], color=COLOURS[name], linewidth=2.4) for name in (DDP, LIMIT)]
    names = [f"of {DDP}'s", f"of the {LIMIT}"]
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    caption = f"Ratios of {plan.rounds} rounds, and their medians."
    return Plot("ratios", "Ratios", caption, figure)
