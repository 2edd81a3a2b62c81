"""Plots as PNG files, and one page that holds them and the table, and needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvdtrain import __version__
from hvdtrain.lab.compare.comparing import Comparison
from hvdtrain.lab.compare.plots import draw_plots
from hvdtrain.lab.compare.rows import FAILED, ORACLE, Row
from hvdtrain.lab.compare.table import MB, describe, explain, result_of, speedup, verdict
from hvdtrain.lab.report.page import Picture, save, take_pictures, templates
from hvdtrain.lab.report.tables import NOTHING, Table
from hvdtrain.train.metering import PHASES

TEMPLATE = "compare.html.jinja"


def write_page(rows: Sequence[Row], setting: Comparison, folder: Path) -> Path:
    """Write plots and page into the folder, the page last; returns the page's path."""
    pictures = take_pictures(draw_plots(rows))
    return save(render_page(rows, setting, pictures), pictures, folder)


def render_page(rows: Sequence[Row], setting: Comparison, pictures: Sequence[Picture]) -> str:
    """The page; whatever comes from files or flags is escaped."""
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
    """A row a system."""
    single = next((row for row in rows if row.status == ORACLE), None)
    columns = ["result", "samples/s", "× single", *(f"{phase}, ms" for phase in PHASES)]
    columns += ["sent, MB", "received, MB", "of", "known by", "memory, MB"]
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
    """A row for each rank that sends or receives: what was found, and what theory says."""
    columns = ["rank", "sent, MB", "received, MB", "messages", "known by"]
    columns += ["sent by formula, MB", "received by formula, MB"]
    cells = []
    for row in rows:
        for rank, traffic in row.traffic.items():
            theory = (row.formula or {}).get(rank)
            told = [f"{theory.sent / MB:.3f}", f"{theory.received / MB:.3f}"] if theory else []
            messages = f"{traffic.messages:g}" if row.traffic_source != "sockets" else NOTHING
            figures = [f"{traffic.sent / MB:.3f}", f"{traffic.received / MB:.3f}", messages]
            cells.append(
                (row.system, [rank, *figures, row.traffic_source, *(told or [NOTHING] * 2)])
            )
    return Table(columns, cells)
