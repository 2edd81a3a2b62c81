"""The report of runs: PNG files, and one page that holds them all and needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from hvdtrain import __version__
from hvdtrain.errors import UsageError
from hvdtrain.files import write_new
from hvdtrain.lab.charts import Plot, look_of, to_png
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
    """A plot as the page shows it."""

    plot: Plot
    png: bytes

    @property
    def address(self) -> str:
        """The image itself, as a data: address."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


def write_report(runs: Sequence[Run], folder: Path) -> Path:
    """Write plots and page into the folder, the page last; returns the page's path."""
    plots, absent = draw_plots(runs)
    pictures = take_pictures(plots)
    return save(render_page(runs, pictures, absent), pictures, folder)


def take_pictures(plots: Sequence[Plot]) -> list[Picture]:
    """The plots as images."""
    return [Picture(plot, to_png(plot.figure)) for plot in plots]


def save(page: str, pictures: Sequence[Picture], folder: Path) -> Path:
    """Write images and page into the folder, the page last; returns the page's path."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            write_new(folder / f"{picture.plot.name}.png", picture.png)
        write_new(folder / PAGE, page)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"--output={folder}: cannot be written: {reason}; choose another --output"
        ) from error
    return folder / PAGE


def draw_plots(runs: Sequence[Run]) -> tuple[list[Plot], list[str]]:
    """Every plot for which a run has data, and what the others would have shown."""
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
    """The page; whatever comes from files is escaped."""
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
    """Those of these folders and of the report itself; what they are given is escaped."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
