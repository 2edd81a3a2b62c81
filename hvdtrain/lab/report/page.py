"""The report of runs: PNG files, and one self-contained page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from hvdtrain import __version__
from hvdtrain.lab.charts import Plot, look_of, to_png, write_files
from hvdtrain.lab.report.confusion import draw_confusions
from hvdtrain.lab.report.curves import (
    draw_audits,
    draw_learning_rate,
    draw_loss,
    draw_metrics,
    draw_phases,
    draw_throughput,
)
from hvdtrain.lab.report.runs import Run
from hvdtrain.lab.report.tables import compare_options, compare_runs, notes_of

PAGE = "index.html"
TEMPLATE = "page.html.jinja"


@dataclass(frozen=True)
class Picture:
    """A plot and its image."""

    plot: Plot
    png: bytes

    @property
    def address(self) -> str:
        """Return the image as a data: URL."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


def write_report(runs: Sequence[Run], folder: Path) -> Path:
    """Write plots and page to the folder, the page last; return the path of the page."""
    plots, absent = draw_plots(runs)
    pictures = take_pictures(plots)
    return save(render_page(runs, pictures, absent), pictures, folder)


def take_pictures(plots: Sequence[Plot]) -> list[Picture]:
    """Render the plots as images."""
    return [Picture(plot, to_png(plot.figure)) for plot in plots]


def save(page: str, pictures: Sequence[Picture], folder: Path) -> Path:
    """Write images and page to the folder, the page last; return the path of the page.

    Raises UsageError where they cannot be written.
    """
    images = [(f"{picture.plot.name}.png", picture.png) for picture in pictures]
    return write_files([*images, (PAGE, page)], folder)[-1]


def draw_plots(runs: Sequence[Run]) -> tuple[list[Plot], list[str]]:
    """Return the plots for which a run has data, and the descriptions of the missing ones."""
    drawn: list[tuple[str, list[Plot | None]]] = [
        ("loss", [draw_loss(runs)]),
        ("accuracy or another metric", [*draw_metrics(runs)]),
        ("throughput", [draw_throughput(runs)]),
        ("time per phase of a step", [draw_phases(runs)]),
        ("learning rate", [draw_learning_rate(runs)]),
        ("audits", [draw_audits(runs)]),
        ("confusion matrix", [*draw_confusions(runs)]),
    ]
    plots = [plot for _, group in drawn for plot in group if plot]
    return plots, [what for what, group in drawn if not any(group)]


def render_page(runs: Sequence[Run], pictures: Sequence[Picture], absent: Sequence[str]) -> str:
    """Return the page as HTML; all text from files is escaped."""
    return (
        templates()
        .get_template(TEMPLATE)
        .render(
            title=f"{len(runs)} runs compared" if len(runs) > 1 else f"Run {runs[0].name}",
            summary=compare_runs(runs),
            colours=[look_of(i).colour for i in range(len(runs))],
            notes=[(run.name, notes) for run in runs if (notes := notes_of(run))],
            options=compare_options(runs),
            alone=len(runs) == 1,
            pictures=pictures,
            absent=absent,
            version=__version__,
        )
    )


def templates(*folders: Path) -> jinja2.Environment:
    """Return an environment of the templates in `folders` and here, which escapes all values."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
