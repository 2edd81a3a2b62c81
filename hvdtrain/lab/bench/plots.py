"""Plots of `hvdtrain bench` start, classic and scaling."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, StrMethodFormatter

from hvdtrain.lab.bench.classic import PUBLISHED, SETTINGS, ClassicPlan, Results, epoch_time
from hvdtrain.lab.bench.scaling import CONTESTANTS, DDP, LIMIT, OURS, Rates, ScalingPlan
from hvdtrain.lab.bench.scaling_results import ScalingPoint
from hvdtrain.lab.bench.start import PARTS, Starts, medians_of_parts
from hvdtrain.lab.charts import (
    GREY,
    PALETTE,
    WIDTH,
    Plot,
    dress,
    dress_rows,
    legend_below,
    new_figure,
    set_title,
)

BAR = 0.62  # share of a row
ROW_HEIGHT, MARGIN = 0.42, 1.2  # inches
PART_COLOURS = dict(zip(PARTS, (PALETTE[4], *PALETTE[:4]), strict=True))
COLOURS = dict(zip(CONTESTANTS, (*PALETTE[:2], GREY), strict=True))
MARKERS = dict(zip(CONTESTANTS, ("o", "s", "^"), strict=True))
PANEL_HEIGHT, PANEL_MARGIN = 2.7, 0.7  # inches
PANEL_WIDTH = WIDTH / 2
IDEAL: dict[str, Any] = {"color": GREY, "linestyle": (0, (1, 1.5)), "linewidth": 1.2}


def draw_start(starts: Starts) -> Plot:
    """Plot one bar per command, divided into its parts where they are known."""
    figure = new_figure(WIDTH, MARGIN + ROW_HEIGHT * len(starts))
    axes = figure.add_subplot()
    longest = 0.0
    for place, found in enumerate(starts.values()):
        total_s = statistics.median(start.total_s for start in found)
        left = 0.0
        for part, seconds in medians_of_parts(found).items():
            axes.barh(place, seconds, BAR, left=left, color=PART_COLOURS[part])
            left += seconds
        if not left:
            axes.barh(place, total_s, BAR, color=GREY, alpha=0.6)
        end = max(total_s, left)
        longest = max(longest, end)
        at = {"textcoords": "offset points", "xytext": (4, 0), "va": "center", "fontsize": 8}
        axes.annotate(f"{total_s:.2f}", (end, place), **at)  # type: ignore[arg-type]
    axes.set_xlim(0, longest * 1.12)
    dress_rows(axes, "From the command to the first step", [*starts], "seconds, medians")
    handles = [*(Patch(color=colour) for colour in PART_COLOURS.values())]
    handles.append(Patch(color=GREY, alpha=0.6))
    legend_below(figure, handles, [*PARTS, "not taken apart"], fontsize=8)
    caption = "Medians, of each part by itself: they need not add up to that of the total."
    return Plot("start", "Start", caption, figure)


def draw_classic(plan: ClassicPlan, results: Results) -> Plot:
    """Plot our speed-ups over one worker and the published ones."""
    own = [epoch_time(results[setting]) for setting in SETTINGS]
    series = {f"hvdtrain, {plan.model} on {plan.data}": own}
    series |= {f"{found.name}, published": list(found.epoch_s) for found in PUBLISHED}
    figure = new_figure()
    axes = figure.add_subplot()
    width = 0.8 / len(series)
    for number, (seconds, colour) in enumerate(zip(series.values(), PALETTE, strict=False)):
        for place, value in enumerate(seconds):
            at = place + (number - (len(series) - 1) / 2) * width
            factor = seconds[0] / value
            axes.bar(at, factor, width * 0.9, color=colour)
            label = axes.annotate(f"{factor:.2f}", (at, factor), ha="center", va="bottom")
            label.set_fontsize(8)
    titles = [
        f"{s.workers} worker{'s' if s.workers > 1 else ''}\nbatch {s.global_batch_size}, lr {s.lr}"
        for s in SETTINGS
    ]
    axes.set_xticks(range(len(SETTINGS)), titles)
    set_title(axes, "Speed-up")
    axes.set_ylabel("epoch time of one worker / epoch time")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colour) for colour, _ in zip(PALETTE, series, strict=False)]
    legend_below(figure, handles, [*series], fontsize=8)
    caption = "Epoch time of one worker over that of each setting; the published ones on GPUs."
    return Plot("classic", "Classic table", caption, figure)


def draw_plots(plan: ScalingPlan, rates: Rates, points: Sequence[ScalingPoint]) -> list[Plot]:
    """Return the plots of all points that have results."""
    done = [point for point in points if point.samples_per_s[OURS]]
    return [_draw_speed(plan, done), _draw_ratios(plan, rates, done)] if done else []


def _draw_speed(plan: ScalingPlan, points: Sequence[ScalingPoint]) -> Plot:
    """Plot samples/s over N, one row per mode and one column per model."""
    models = list(dict.fromkeys(point.case.model for point in points))
    width = max(WIDTH, PANEL_WIDTH * len(models))
    figure = new_figure(width, PANEL_MARGIN + PANEL_HEIGHT * len(plan.modes))
    panels = figure.subplots(len(plan.modes), len(models), squeeze=False)
    for row, mode in zip(panels, plan.modes, strict=True):
        for axes, model in zip(row, models, strict=True):
            own = [point for point in points if (point.mode, point.case.model) == (mode, model)]
            _draw_panel(axes, f"{model}, {mode}", own)
    handles = [
        Line2D([], [], color=COLOURS[name], marker=MARKERS[name], linewidth=1.8)
        for name in CONTESTANTS
    ]
    handles.append(Line2D([], [], **IDEAL))
    labels = [OURS, DDP, f"{LIMIT} of this machine", "N times one process alone"]
    legend_below(figure, handles, labels, fontsize=8)
    caption = (
        "Samples per second over all workers, medians. Weak: the same samples a worker; strong: "
        "the same global batch. The limit: as many processes at the same time, without exchange."
    )
    return Plot("scaling", "Scaling", caption, figure)


def _draw_panel(axes: Axes, title: str, points: Sequence[ScalingPoint]) -> None:
    counts = [point.case.workers for point in points]
    dress(axes, title, "samples/s", "workers")
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    alone = next((p.samples_per_s[LIMIT] for p in points if p.case.workers == 1), None)
    if alone:
        axes.plot(counts, [alone * count for count in counts], **IDEAL)
    for name in CONTESTANTS:
        values = [point.samples_per_s[name] or math.nan for point in points]
        axes.plot(counts, values, color=COLOURS[name], marker=MARKERS[name], linewidth=1.8)
    axes.margins(x=0.12, y=0.1)
    axes.set_ylim(bottom=0)


def _draw_ratios(plan: ScalingPlan, rates: Rates, points: Sequence[ScalingPoint]) -> Plot:
    """Plot one row per point: the ratios of all rounds as dots, their medians as lines."""
    figure = new_figure(WIDTH, 1.3 + ROW_HEIGHT * len(points))
    axes = figure.add_subplot()
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
    axes.axvline(1, color="black", linewidth=0.8)
    dress_rows(axes, "hvdtrain's speed", labels, "as a multiple of the other's, within rounds")
    handles = [Line2D([], [], color=COLOURS[name], linewidth=2.4) for name in (DDP, LIMIT)]
    legend_below(figure, handles, [f"of {DDP}'s", f"of the {LIMIT}"])
    caption = f"Ratios of {plan.rounds} rounds, and their medians."
    return Plot("ratios", "Ratios", caption, figure)
