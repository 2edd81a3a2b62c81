"""Figures without global state: their size, colours, legends and files."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from hvdtrain.errors import UsageError
from hvdtrain.files import write_new

# By Okabe and Ito, for all kinds of colour vision; without the yellow, which white swallows.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
GREY = "#555555"
WIDTH, HEIGHT = 6.4, 4.0  # inches: letters can still be read on a phone
DPI = 160
LEGEND_ROW = 0.2  # inches
LONGEST_LABEL = 44
LOG_FROM = 50.0  # largest over smallest value: from here on a linear axis hides the small ones


@dataclass(frozen=True)
class Plot:
    """A figure and what is told of it."""

    name: str  # its file is NAME.png
    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Look:
    """How a run's lines look in every plot."""

    colour: str
    dash: Any


def look_of(index: int) -> Look:
    """The look of the run at `index`; 28 differ."""
    turn = index // len(PALETTE)
    return Look(PALETTE[index % len(PALETTE)], DASHES[turn % len(DASHES)])


def new_figure(width: float = WIDTH, height: float = HEIGHT) -> Figure:
    """One that is drawn by Agg when it is saved, and that pyplot knows nothing of."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)  # inches
    return Figure(figsize=(width, height), dpi=DPI, layout=layout)


def dress(axes: Axes, title: str, y_label: str, x_label: str = "step") -> None:
    """Title, labels and a faint grid; steps are whole."""
    set_text(axes.set_title(title, loc="left", fontsize=11, fontweight="bold"))
    axes.set_xlabel(x_label)
    set_text(axes.set_ylabel(y_label))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def set_text(text: Any) -> None:
    """Names come from files: a dollar sign in one starts no formula."""
    text.set_parse_math(False)


def shorten(name: str) -> str:
    """A label of one line; what is long loses its middle, as runs differ at their ends."""
    name = " ".join(name.split())
    if len(name) <= LONGEST_LABEL:
        return name
    half = (LONGEST_LABEL - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def name_runs(figure: Figure, names: Sequence[str], indexes: Sequence[int]) -> None:
    """A legend of runs under the plot, which grows by it; none for a run alone."""
    if len(names) < 2:
        return
    labels = [shorten(names[i]) for i in indexes]
    looks = [look_of(i) for i in indexes]
    handles = [Line2D([], [], color=x.colour, linestyle=x.dash, linewidth=2.5) for x in looks]
    longest = max(map(len, labels))
    columns = 1 if longest > 36 else 2 if longest > 20 else 3
    rows = math.ceil(len(labels) / columns)
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * rows)
    legend = figure.legend(
        handles,
        ["-"] * len(labels),  # a label that begins with _ would be left out: they come below
        loc="outside lower center",
        ncols=min(columns, len(labels)),
        frameon=False,
        handlelength=2.8,  # long enough to tell dashes apart
        fontsize=9,
    )
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(label)
        set_text(text)


def name_kinds(axes: Axes, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend of what kinds of line there are, beside the title."""
    axes.legend(
        handles,
        labels,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(labels),
        frameon=False,
        fontsize=8,
        handlelength=1.6,
        columnspacing=1.0,
        borderaxespad=0.1,
    )


def is_wide(values: Iterable[float]) -> bool:
    """Whether the finite values are all above 0 and differ so much that a log axis helps."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) >= LOG_FROM


def write_plots(plots: Iterable[Plot], folder: Path) -> list[Path]:
    """Each as a PNG file in `folder`, which is made. Raises UsageError where that cannot be."""
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for plot in plots:
            paths.append(folder / f"{plot.name}.png")
            write_new(paths[-1], to_png(plot.figure))
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"--output={folder}: cannot be written: {reason}; choose another --output"
        ) from error
    return paths


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG file's bytes."""
    stream = io.BytesIO()
    with warnings.catch_warnings():
        # A name in letters that the font lacks shows as boxes; the page has it in full.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from", category=UserWarning)
        figure.savefig(stream, format="png")
    return stream.getvalue()
