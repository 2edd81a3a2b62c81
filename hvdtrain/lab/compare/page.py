"""Plots as PNG files, and one self-contained HTML page with the plots and the tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from hvdtrain import __version__
from hvdtrain.lab.charts import GREY, PALETTE, WIDTH, Plot, new_figure, set_text, shorten
from hvdtrain.lab.compare.comparing import Comparison
from hvdtrain.lab.compare.rows import DISAGREES, FAILED, ORACLE, REPORTED, TOLERANCE, Row
from hvdtrain.lab.compare.table import MB, describe, explain, result_of, speedup, verdict
from hvdtrain.lab.report.curves import PHASE_COLOURS
from hvdtrain.lab.report.page import Picture, save, take_pictures, templates
from hvdtrain.lab.report.tables import NOTHING, Table
from hvdtrain.train.metering import PHASES

TEMPLATE = "compare.html.jinja"


def write_page(rows: Sequence[Row], setting: Comparison, folder: Path) -> Path:
    """Write plots and page into `folder`, the page last; return the path of the page."""
    pictures = take_pictures(draw_plots(rows))
    return save(render_page(rows, setting, pictures), pictures, folder)


def render_page(rows: Sequence[Row], setting: Comparison, pictures: Sequence[Picture]) -> str:
    """Return the page as HTML; text from files or flags is escaped."""
    return (
        templates(Path(__file__).parent)
        .get_template(TEMPLATE)
        .render(
            title=f"{len(rows)} ways compared, N = {setting.plan.workers}",
            description=describe(setting),
            verdict=verdict(rows),
            why_not=setting.why_not,
            systems=table_of_systems(rows),
            ranks=table_of_ranks(rows),
            notes=[(row.system, explain(row)) for row in rows],
            pictures=pictures,
            version=__version__,
        )
    )


def table_of_systems(rows: Sequence[Row]) -> Table:
    """Return a table with one row per system."""
    single = next((row for row in rows if row.status == ORACLE), None)
    columns = ["result", "samples/s", "× single", *(f"{phase}, ms" for phase in PHASES)]
    columns += ["sent, MB", "received, MB", "rank", "source", "memory, MB"]
    return Table(columns, [(row.system, _cells(row, single)) for row in rows])


def _cells(row: Row, single: Row | None) -> list[str]:
    if row.status == FAILED:
        return [FAILED] + [NOTHING] * (7 + len(PHASES))
    rank, traffic = row.busiest
    return [
        result_of(row),
        f"{row.samples_per_s:,.0f}",
        speedup(row, single) or NOTHING,
        *(f"{1000 * row.phases_s[phase]:.2f}" for phase in PHASES),
        f"{traffic.sent / MB:.3f}",
        f"{traffic.received / MB:.3f}",
        rank or NOTHING,
        row.traffic_source if rank else NOTHING,
        f"{row.total_memory_bytes / MB:,.0f}",
    ]


def table_of_ranks(rows: Sequence[Row]) -> Table:
    """Return a table with one row per rank that sends or receives: measured and by formula."""
    columns = ["rank", "sent, MB", "received, MB", "messages", "source"]
    columns += ["sent by formula, MB", "received by formula, MB"]
    cells = []
    for row in rows:
        for rank, traffic in row.traffic.items():
            theory = (row.formula or {}).get(rank)
            expected = [NOTHING] * 2
            if theory:
                expected = [f"{theory.sent / MB:.3f}", f"{theory.received / MB:.3f}"]
            messages = f"{traffic.messages:g}" if row.traffic_source != "sockets" else NOTHING
            figures = [f"{traffic.sent / MB:.3f}", f"{traffic.received / MB:.3f}", messages]
            cells.append((row.system, [rank, *figures, row.traffic_source, *expected]))
    return Table(columns, cells)


BLUE, RED, GREEN = PALETTE[:3]
ROW_HEIGHT, MARGIN = 0.32, 1.1  # inches
BAR = 0.66  # of a row
SENT, RECEIVED = PALETTE[0], PALETTE[5]
FAINTEST = 1e-17  # stands for a difference of zero on the logarithmic axis


def draw_plots(rows: Sequence[Row]) -> list[Plot]:
    """Return every plot, over the systems that did not fail."""
    done = [row for row in rows if row.samples_per_s]
    if not done:
        return []
    return [
        _throughput(done),
        _phases(done),
        _traffic(done),
        _differences([row for row in done if row.difference is not None]),
        _memory(done),
    ]


def _throughput(rows: Sequence[Row]) -> Plot:
    axes = _axes(rows, "Throughput", "samples per second, over all workers")
    single = next((row for row in rows if row.status == ORACLE), None)
    values = [row.samples_per_s or 0.0 for row in rows]
    axes.barh(range(len(rows)), values, BAR, color=[_colour(row) for row in rows])
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        factor = speedup(row, single)
        _label(axes, value, place, f"{value:,.0f}" + (f"  (x {factor})" if factor else ""))
    axes.set_xlim(0, max(values) * 1.28)
    caption = (
        "Samples per second over all workers, and as a multiple of a single device. Green: judged, "
        "same result; blue: reported only; red: different result."
    )
    return Plot("throughput", "Throughput", caption, axes.get_figure())  # type: ignore[arg-type]


def _phases(rows: Sequence[Row]) -> Plot:
    axes = _axes(rows, "Time per step by phase", "ms, mean over the ranks that compute")
    left = np.zeros(len(rows))
    for phase, colour in PHASE_COLOURS.items():
        values = np.array([1000 * row.phases_s[phase] for row in rows])
        axes.barh(range(len(rows)), values, BAR, left=left, color=colour)
        left += values
    _legend(axes, [Patch(color=colour) for colour in PHASE_COLOURS.values()], list(PHASE_COLOURS))
    caption = (
        "Time per step by phase. An exchange that overlaps backward within a library counts as "
        "compute; stages that wait for each other, and workers for servers, count it as exchange."
    )
    return Plot("phases", "Time per step", caption, axes.get_figure())  # type: ignore[arg-type]


def _traffic(rows: Sequence[Row]) -> Plot:
    axes = _axes(rows, "Bytes per step at the busiest rank", "MB")
    half = BAR / 2
    most = 0.0
    for place, row in enumerate(rows):
        rank, traffic = row.busiest
        hatch = "////" if row.traffic_source == "formula" else None
        for offset, value, colour in (
            (-half / 2, traffic.sent, SENT),
            (half / 2, traffic.received, RECEIVED),
        ):
            style = {"color": colour} if not hatch else {"facecolor": "none", "edgecolor": colour}
            axes.barh(place + offset, value / MB, half, hatch=hatch, **style)  # type: ignore[arg-type]
        most = max(most, traffic.sent / MB, traffic.received / MB)
        words = f"{rank}, {row.traffic_source}" if rank else "nothing"
        _label(axes, max(traffic[:2]) / MB, place, words)
    axes.set_xlim(0, most * 1.42 or 1)
    _legend(axes, [Patch(color=SENT), Patch(color=RECEIVED)], ["sent", "received"])
    caption = (
        "Bytes sent and received per step by the rank with the most traffic: counted where "
        "hvdtrain sends, read from the kernel's sockets where a library does (with its headers), "
        "else computed by formula (hatched)."
    )
    return Plot("traffic", "Bytes per step", caption, axes.get_figure())  # type: ignore[arg-type]


def _differences(rows: Sequence[Row]) -> Plot:
    axes = _axes(rows, "Difference to single", "largest difference / largest value of its tensor")
    axes.set_xscale("log")
    values = [_drawn(row.difference) for row in rows]
    colours = [GREY if row.status == REPORTED else _colour(row) for row in rows]
    axes.hlines(range(len(rows)), FAINTEST, values, colors=colours, linewidth=1.2)
    axes.scatter(values, range(len(rows)), c=colours, s=36, zorder=3, clip_on=False)
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        words = "none" if row.difference == 0 else f"{row.difference:.0e}"
        _label(axes, value * 1.8, place, words)
    axes.axvline(TOLERANCE, color=RED, linestyle=(0, (4, 3)), linewidth=1)
    axes.set_xlim(FAINTEST, max([TOLERANCE, *values]) * 1e4)
    _legend(axes, [Patch(color=GREEN), Patch(color=GREY)], ["judged", "reported only"])
    caption = (
        f"Difference of the final parameters to those of single; dashed: the tolerance for "
        f"synchronous systems in float64, {TOLERANCE:g}."
    )
    return Plot("difference", "Difference to single", caption, axes.get_figure())  # type: ignore[arg-type]


def _memory(rows: Sequence[Row]) -> Plot:
    axes = _axes(rows, "Peak memory by process", "MB")
    longest = max(row.total_memory_bytes for row in rows) / MB
    for place, row in enumerate(rows):
        left = 0.0
        for number, size in enumerate(row.memory_bytes.values()):
            alpha = 0.9 if number % 2 == 0 else 0.6
            axes.barh(place, size / MB, BAR, left=left, color=BLUE, alpha=alpha)
            left += size / MB
        _label(axes, left, place, f"{left:,.0f}")
    axes.set_xlim(0, longest * 1.14)
    caption = "Peak memory of each process, side by side; shared libraries count for each of them."
    return Plot("memory", "Peak memory", caption, axes.get_figure())  # type: ignore[arg-type]


def _axes(rows: Sequence[Row], title: str, x_label: str) -> Axes:
    """Return axes with one row per system, the first on top."""
    axes = new_figure(WIDTH, MARGIN + ROW_HEIGHT * max(len(rows), 2)).add_subplot()
    set_text(axes.set_title(title, loc="left", fontsize=11, fontweight="bold"))
    axes.set_xlabel(x_label)
    axes.set_yticks(range(len(rows)), [shorten(row.system) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return axes


def _label(axes: Axes, value: float, place: int, text: str) -> None:
    style: dict[str, Any] = {"va": "center", "fontsize": 8, "color": GREY}
    at = (value, place)
    set_text(axes.annotate(text, at, xytext=(4, 0), textcoords="offset points", **style))


def _legend(axes: Axes, handles: Sequence[Patch], labels: Sequence[str]) -> None:
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9
    )


def _colour(row: Row) -> str:
    if row.status == DISAGREES:
        return RED
    return {ORACLE: GREY, REPORTED: BLUE}.get(row.status, GREEN)


def _drawn(difference: float | None) -> float:
    """Return the value to draw on the logarithmic axis; None, NaN and infinity become 1."""
    if difference is None or not math.isfinite(difference):
        return 1.0
    return max(difference, FAINTEST)
