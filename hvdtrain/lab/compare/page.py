"""Plots as PNG files, and one self-contained HTML page with the plots and the tables."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from hvdtrain.lab.compare.rows import (
    AGREES,
    DISAGREES,
    MB,
    ORACLE,
    REPORTED,
    TOLERANCE,
    Comparison,
    Row,
    cells_of,
    describe,
    explain,
    in_megabytes,
    speedup,
    summary_line,
)
from hvdtrain.report import charts
from hvdtrain.report.charts import GREY, Plot, label_rows
from hvdtrain.report.page import NOTHING, Table, write_page
from hvdtrain.report.plots import PHASE_COLOURS
from hvdtrain.train.clock import PHASES

BLUE, RED, GREEN = charts.PALETTE[:3]
SENT, RECEIVED = BLUE, charts.PALETTE[5]
COLOURS = {ORACLE: GREY, AGREES: GREEN, REPORTED: BLUE, DISAGREES: RED}
ROW_HEIGHT, MARGIN = 0.32, 1.1  # inches
BAR = 0.66  # of a row
LABEL_SIZE = 8
ALPHAS = (0.9, 0.6)  # of bars side by side, in turn
FAINTEST = 1e-17  # stands for a difference of zero on the logarithmic axis


def write_comparison(rows: Sequence[Row], setting: Comparison, folder: Path) -> Path:
    """Write plots and page into `folder`, the page last; return the path of the page.

    Text from files or flags is escaped.
    """
    return write_page(
        Path(__file__).parent / "compare.html.jinja",
        draw_plots(rows),
        folder,
        title=f"{len(rows)} ways compared, N = {setting.plan.workers}",
        description=describe(setting),
        verdict=summary_line(rows),
        why_not=setting.why_not,
        systems=table_of_systems(rows),
        ranks=table_of_ranks(rows),
        notes=[(row.system, explain(row)) for row in rows],
    )


def table_of_systems(rows: Sequence[Row]) -> Table:
    """Return a table with one row per system."""
    columns = [
        *("result", "samples/s", "× single", *(f"{phase}, ms" for phase in PHASES)),
        *("sent, MB", "received, MB", "rank", "source", "memory, MB"),
    ]
    cells = [(row.system, cells_of(row, _single(rows))) for row in rows]
    return Table(columns, [(name, [cell or NOTHING for cell in texts]) for name, texts in cells])


def _single(rows: Sequence[Row]) -> Row | None:
    return next((row for row in rows if row.status == ORACLE), None)


def table_of_ranks(rows: Sequence[Row]) -> Table:
    """Return a table with one row per rank that sends or receives: measured and by formula."""
    columns = [
        *("rank", "sent, MB", "received, MB", "messages", "source"),
        *("sent by formula, MB", "received by formula, MB"),
    ]
    return Table(columns, [(row.system, _cells(row, rank)) for row in rows for rank in row.traffic])


def _cells(row: Row, rank: str) -> list[str]:
    traffic, theory = row.traffic[rank], (row.formula or {}).get(rank)
    messages = f"{traffic.messages:g}" if row.traffic_source != "sockets" else NOTHING
    by_formula = in_megabytes(theory) if theory else [NOTHING] * 2
    return [rank, *in_megabytes(traffic), messages, row.traffic_source, *by_formula]


def draw_plots(rows: Sequence[Row]) -> list[Plot]:
    """Return every plot, over the systems that did not fail."""
    done = [row for row in rows if row.samples_per_s]
    return [_plot(chart, done) for chart in CHARTS] if done else []


def _throughput(axes: Axes, rows: Sequence[Row]) -> None:
    rates = [row.samples_per_s or 0.0 for row in rows]
    axes.barh(range(len(rows)), rates, BAR, color=[COLOURS[row.status] for row in rows])
    axes.set_xlim(0, max(rates) * 1.28)
    factors = [speedup(row, _single(rows)) for row in rows]
    texts = [
        f"{rate:,.0f}  (x {factor})" if factor else f"{rate:,.0f}"
        for rate, factor in zip(rates, factors, strict=True)
    ]
    label_rows(axes, rates, texts, LABEL_SIZE)


def _phases(axes: Axes, rows: Sequence[Row]) -> None:
    left = np.zeros(len(rows))
    for phase, colour in PHASE_COLOURS.items():
        values = np.array([1000 * row.phases_s[phase] for row in rows])
        axes.barh(range(len(rows)), values, BAR, left=left, color=colour)
        left += values


def _traffic(axes: Axes, rows: Sequence[Row]) -> None:
    for index, row in enumerate(rows):
        traffic = row.busiest[1]
        for offset, value, colour in (
            (-BAR / 4, traffic.sent, SENT),
            (BAR / 4, traffic.received, RECEIVED),
        ):
            hatched = {"facecolor": "none", "edgecolor": colour, "hatch": "////"}
            style = hatched if row.traffic_source == "formula" else {"color": colour}
            axes.barh(index + offset, value / MB, BAR / 2, **style)  # type: ignore[arg-type]
    ends = [max(row.busiest[1].sent, row.busiest[1].received) / MB for row in rows]
    axes.set_xlim(0, max(ends) * 1.42 or 1)
    label_rows(axes, ends, [row.where for row in rows], LABEL_SIZE)


def _differences(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set_xscale("log")
    differences = [math.nan if row.difference is None else row.difference for row in rows]
    drawn = [max(value, FAINTEST) if math.isfinite(value) else 1.0 for value in differences]
    colours = [GREY if row.status == REPORTED else COLOURS[row.status] for row in rows]
    axes.hlines(range(len(rows)), FAINTEST, drawn, colors=colours, linewidth=1.2)
    axes.scatter(drawn, range(len(rows)), c=colours, s=36, zorder=3, clip_on=False)
    texts = [f"{value:.0e}" if value else "none" for value in differences]
    label_rows(axes, [value * 1.8 for value in drawn], texts, LABEL_SIZE)
    axes.axvline(TOLERANCE, color=RED, linestyle=(0, (4, 3)), linewidth=1)
    axes.set_xlim(FAINTEST, max([TOLERANCE, *drawn]) * 1e4)


def _memory(axes: Axes, rows: Sequence[Row]) -> None:
    totals = [row.total_memory_bytes / MB for row in rows]
    for index, row in enumerate(rows):
        left = 0.0
        for number, size in enumerate(row.memory_bytes.values()):
            axes.barh(index, size / MB, BAR, left=left, color=BLUE, alpha=ALPHAS[number % 2])
            left += size / MB
    axes.set_xlim(0, max(totals) * 1.14)
    label_rows(axes, totals, [f"{total:,.0f}" for total in totals], LABEL_SIZE)


class Chart(NamedTuple):
    """A plot with a row for each system, the first on top."""

    draw: Callable[[Axes, Sequence[Row]], None]
    name: str
    title: str
    heading: str  # above the axes
    x_label: str
    caption: str
    colours: Mapping[str, str] = {}  # of the legend
    applies: Callable[[Row], bool] = lambda row: True  # to a system


CHARTS = (
    Chart(
        _throughput,
        name="throughput",
        title="Throughput",
        heading="Throughput",
        x_label="samples per second, over all workers",
        caption="Samples per second over all workers, and as a multiple of a single device. Green: "
        "judged, same result; blue: reported only; red: different result.",
    ),
    Chart(
        _phases,
        name="phases",
        title="Time per step",
        heading="Time per step by phase",
        x_label="ms, mean over the ranks that compute",
        caption="Time per step by phase. An exchange that overlaps backward within a library "
        "counts as compute; stages that wait for each other, and workers for servers, count it as "
        "exchange.",
        colours=PHASE_COLOURS,
    ),
    Chart(
        _traffic,
        name="traffic",
        title="Bytes per step",
        heading="Bytes per step at the busiest rank",
        x_label="MB",
        caption="Bytes sent and received per step by the rank with the most traffic: counted where "
        "hvdtrain sends, read from the kernel's sockets where a library does (with its headers), "
        "else computed by formula (hatched).",
        colours={"sent": SENT, "received": RECEIVED},
    ),
    Chart(
        _differences,
        name="difference",
        title="Difference to single",
        heading="Difference to single",
        x_label="largest difference / largest value of its tensor",
        caption="Difference of the final parameters to those of single; dashed: the tolerance for "
        f"synchronous systems in float64, {TOLERANCE:g}.",
        colours={"judged": GREEN, "reported only": GREY},
        applies=lambda row: row.difference is not None,
    ),
    Chart(
        _memory,
        name="memory",
        title="Peak memory",
        heading="Peak memory by process",
        x_label="MB",
        caption="Peak memory of each process, side by side; shared libraries count for each of "
        "them.",
    ),
)


def _plot(chart: Chart, done: Sequence[Row]) -> Plot:
    """Return a plot over those of these systems to which it applies."""
    rows = [row for row in done if chart.applies(row)]
    figure = charts.new_figure(charts.WIDTH, MARGIN + ROW_HEIGHT * max(len(rows), 2))
    axes = figure.add_subplot()
    names = [charts.shorten(row.system) for row in rows]
    charts.dress_rows(axes, chart.heading, names, chart.x_label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    chart.draw(axes, rows)
    if chart.colours:
        charts.name_colours(figure, chart.colours)
    return Plot(chart.name, chart.title, chart.caption, figure)
