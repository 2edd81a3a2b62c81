"""Figures without global state: size, colours, axes, legends and files."""

import base64
import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from hvdtrain.errors import UsageError
from hvdtrain.files import write_new
from hvdtrain.log import shown

# The palette by Okabe and Ito, for all kinds of colour vision, without yellow (faint on white).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
GREY = "#555555"
WIDTH, HEIGHT = 6.4, 4.0  # inches: text stays legible on a phone
ROW_HEIGHT = 0.42  # inches, of the plots with a row for each name
DPI = 160
LEGEND_ROW = 0.2  # inches
LONGEST_LABEL = 44
LOG_FROM = 50.0  # ratio of largest to smallest value from which a linear axis hides the small ones


@dataclass(frozen=True)
class Plot:
    """A figure with its name, title and caption."""

    name: str  # its file is NAME.png
    title: str
    caption: str
    figure: Figure

    @cached_property
    def png(self) -> bytes:
        """The image, encoded as PNG."""
        stream = io.BytesIO()
        with warnings.catch_warnings():
            # Letters that the font lacks are drawn as boxes; the page shows the name in full.
            warnings.filterwarnings("ignore", r"Glyph .* missing from", UserWarning)
            self.figure.savefig(stream, format="png")
        return stream.getvalue()

    @property
    def address(self) -> str:
        """The image as a data: URL."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


def look_of(index: int) -> dict[str, Any]:
    """Return the line style of the run at `index`, the same in every plot; the first 28 are
    distinct.
    """
    colour, dash = index % len(PALETTE), index // len(PALETTE) % len(DASHES)
    return {"color": PALETTE[colour], "linestyle": DASHES[dash]}


def new_figure(width: float = WIDTH, height: float = HEIGHT) -> Figure:
    """Return a figure outside pyplot, drawn by Agg when it is saved; sizes in inches."""
    return Figure(
        figsize=(width, height),
        dpi=DPI,
        layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08),  # inches
    )


def dress(axes: Axes, title: str, y_label: str, x_label: str = "step") -> None:
    """Set title, labels, a faint grid and integer ticks on the x axis."""
    set_title(axes, title)
    axes.set_xlabel(x_label)
    set_text(axes.set_ylabel(y_label))
    _open_frame(axes, grid="both")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def dress_rows(axes: Axes, title: str, names: Sequence[str], x_label: str) -> None:
    """Set title and label of a plot with one row for each name, the first on top."""
    set_title(axes, title)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel=x_label, ylim=(len(names) - 0.5, -0.5))
    axes.tick_params(axis="y", length=0)
    _open_frame(axes, grid="x")


def label_rows(axes: Axes, ends: Iterable[float], texts: Iterable[str], size: float) -> None:
    """Write a text behind the end of each row of `dress_rows`; `size`: of the font."""
    for row, (end, text) in enumerate(zip(ends, texts, strict=True)):
        set_text(
            axes.annotate(
                text,
                (end, row),
                (4, 0),
                textcoords="offset points",
                va="center",
                color=GREY,
                fontsize=size,
            )
        )


def _open_frame(axes: Axes, grid: Literal["both", "x"]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def set_title(axes: Axes, title: str) -> None:
    """Set a bold title, aligned left, without mathematical notation."""
    set_text(axes.set_title(title, loc="left", fontsize=11, fontweight="bold"))


def set_text(*texts: Text) -> None:
    """Turn off mathematical notation: names from files may contain dollar signs."""
    for text in texts:
        text.set_parse_math(False)


def shorten(name: str) -> str:
    """Return a label of one line; a long name loses its middle, as runs differ at their ends."""
    name = " ".join(shown(name).split())
    half = (LONGEST_LABEL - 1) // 2
    return name if len(name) <= LONGEST_LABEL else f"{name[:half]}…{name[-half:]}"


def name_runs(figure: Figure, names: Sequence[str], indexes: Sequence[int]) -> None:
    """Add a legend of runs under the plot, increasing its height; none for a single run."""
    if len(names) < 2:
        return
    labels = [shorten(names[i]) for i in indexes]
    handles = [Line2D([], [], linewidth=2.5, **look_of(i)) for i in indexes]
    longest = max(map(len, labels))
    columns = 1 if longest > 36 else 2 if longest > 20 else 3
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * math.ceil(len(labels) / columns))
    legend = legend_below(
        figure,
        handles,
        ["-"] * len(labels),  # placeholders: matplotlib would omit a label that begins with _
        ncols=min(columns, len(labels)),
        handlelength=2.8,  # long enough to distinguish the dashes
    )
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(label)
    set_text(*legend.get_texts())


def legend_below(
    figure: Figure, handles: Sequence[Any], labels: Sequence[str], **style: Any
) -> Legend:
    """Return a new legend in one row under the plot; `style` overrides options of the legend."""
    style = {"ncols": len(labels), "frameon": False, "fontsize": 9} | style
    return figure.legend(handles, labels, loc="outside lower center", **style)


def name_colours(figure: Figure, colours: Mapping[str, str], **style: Any) -> None:
    """Add a legend of what each colour is, under the plot; `style` as in `legend_below`."""
    handles = [Patch(color=colour) for colour in colours.values()]
    legend_below(figure, handles, list(colours), **style)


def name_kinds(axes: Axes, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Add a legend of the kinds of line, beside the title."""
    axes.legend(
        handles,
        labels,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderaxespad=0.1,
        frameon=False,
        ncols=len(labels),
        handlelength=1.6,
        columnspacing=1.0,
        fontsize=8,
    )


def is_wide(values: Iterable[float]) -> bool:
    """Return whether the finite values are all positive and spread enough for a log axis."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) >= LOG_FROM


def write_plots(
    plots: Iterable[Plot], folder: Path, pages: Mapping[str, str] | None = None
) -> list[Path]:
    """Write each plot to `folder`, which is created, as a PNG file, then `pages` by their names;
    return the paths. Raises UsageError where the folder or a file cannot be written.
    """
    files = {f"{plot.name}.png": plot.png for plot in plots} | dict(pages or {})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_new(folder / name, content)
    except OSError as error:
        raise UsageError(
            f"--output={folder}: cannot be written: {error.strerror or error}; "
            "choose another --output"
        ) from error
    return [folder / name for name in files]
