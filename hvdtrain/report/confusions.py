"""Plots of confusions: a matrix, or of many classes the worst pairs and the worst classes."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hvdtrain.report.charts import (
    PALETTE,
    ROW_HEIGHT,
    WIDTH,
    Plot,
    dress_rows,
    label_rows,
    new_figure,
    set_text,
    set_title,
    shorten,
)
from hvdtrain.report.runs import Run

MOST_DRAWN = 200  # most classes in a matrix; the dots of more would be too small to see
MOST_LISTED = 12  # pairs, and classes, of those that have no matrix
MOST_COUNTED = 20  # most classes for which every count is written
MOST_NAMED = 40  # most classes for which every class is named
DARK = 0.55  # share from which the count is white
ROOM = 1.35  # of the longest bar, for the text behind it


@dataclass(frozen=True)
class Confusions:
    """Pairs of a true and a predicted class that occur, each once, with their counts."""

    names: list[str]  # of all classes
    true: np.ndarray
    predicted: np.ndarray
    counts: np.ndarray

    @property
    def samples(self) -> np.ndarray:
        """The number of samples of each class."""
        return np.bincount(self.true, self.counts, len(self.names))

    @property
    def right(self) -> np.ndarray:
        """The number of samples of each class that were classified correctly."""
        return np.bincount(
            self.true, np.where(self.true == self.predicted, self.counts, 0), len(self.names)
        )

    def worst_pairs(self) -> np.ndarray:
        """Return the numbers of the wrong pairs, the most frequent first; of equals, that with the
        larger share of its true class.
        """
        wrong = np.flatnonzero((self.true != self.predicted) & (self.counts > 0))
        shares = self.counts[wrong] / self.samples[self.true[wrong]]
        return wrong[np.lexsort((-shares, -self.counts[wrong]))]

    def worst_classes(self) -> np.ndarray:
        """Return the classes with samples, the least accurate first; of equals, the larger."""
        samples = self.samples
        held = np.flatnonzero(samples > 0)
        accuracy = self.right[held] / samples[held]
        return held[np.lexsort((-samples[held], accuracy))]


def draw_confusions(runs: Sequence[Run]) -> list[Plot]:
    """Return a plot for each run that has counted confusions."""
    plots = []
    for i, run in enumerate(runs, start=1):
        if held := read_confusions(run):
            number, of_run = ("", "") if len(runs) == 1 else (f"-{i}", f": {run.name}")
            is_matrix = len(held.names) <= MOST_DRAWN
            title = ("Confusion matrix" if is_matrix else "Worst confusions") + of_run
            figure = (_draw_matrix if is_matrix else _draw_worst)(held, shorten(title))
            plots.append(Plot(f"confusion{number}", title, _describe(run, held), figure))
    return plots


def read_confusions(run: Run) -> Confusions | None:
    """Return the counts of an evaluation, a matrix (true, predicted class) or its entries; None if
    absent, empty or invalid.
    """
    stored = run.evaluation.get("confusion")
    try:
        if isinstance(stored, dict):
            shape, pairs = stored["shape"], np.array(stored["indices"], np.float64)
            counts = np.array(stored["values"], np.float64)
        else:
            matrix = np.array(stored, np.float64)
            shape, pairs = matrix.shape, np.array(np.nonzero(matrix), np.float64)
            counts = matrix[matrix != 0]
        classes, width = map(operator.index, shape)
    except (TypeError, ValueError, KeyError, OverflowError):  # other shapes, or text in them
        return None
    if classes != width or pairs.shape != (2, *counts.shape) or not np.isfinite(counts).all():
        return None
    is_class = (pairs == np.floor(pairs)) & (pairs >= 0) & (pairs < classes)
    if not is_class.all() or not counts.sum() > 0:
        return None
    names, (true, predicted) = run.evaluation.get("classes", []), pairs.astype(np.int64)
    numbered = names if len(names) == classes else range(classes)
    return Confusions([str(name) for name in numbered], true, predicted, counts)


def _draw_matrix(held: Confusions, title: str) -> Figure:
    classes = held.names
    counts = np.zeros((len(classes), len(classes)))
    counts[held.true, held.predicted] = held.counts
    size = 5.6 if len(classes) <= MOST_COUNTED else 6.8
    figure = new_figure(size + 0.4, size)
    axes = figure.add_subplot()
    of_true_class = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, of_true_class, out=np.zeros_like(counts), where=of_true_class > 0)
    bar = figure.colorbar(
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1),
        ax=axes,
        shrink=0.75,
        label="share of the true class",
    )
    bar.outline.set_visible(False)
    set_title(axes, title)
    axes.set(xlabel="predicted class", ylabel="true class")
    _name_classes(axes, classes)
    if len(classes) <= MOST_COUNTED:
        for row, column in np.argwhere(counts > 0):  # without zeros, errors stand out
            axes.text(
                column,
                row,
                f"{counts[row, column]:.0f}",
                ha="center",
                va="center",
                fontsize=9 if len(counts) <= 12 else 6.5,
                color="white" if shares[row, column] > DARK else "black",
            )
    return figure


def _name_classes(axes: Axes, classes: list[str]) -> None:
    """Label every class by name; where they exceed MOST_NAMED, some by number."""
    if len(classes) > MOST_NAMED:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        return
    labels = [shorten(name) for name in classes]
    places, size = range(len(classes)), 9 if len(classes) <= MOST_COUNTED else 7
    axes.set_xticks(places, labels, fontsize=size, rotation=90 if max(map(len, labels)) > 2 else 0)
    axes.set_yticks(places, labels, fontsize=size)
    set_text(*axes.get_xticklabels(), *axes.get_yticklabels())


def _draw_worst(held: Confusions, title: str) -> Figure:
    """Draw the most frequent errors, if any, above the least accurate classes."""
    names, samples, right = held.names, held.samples, held.right
    pairs, classes = held.worst_pairs()[:MOST_LISTED], held.worst_classes()[:MOST_LISTED]
    heights = [len(rows) for rows in (pairs, classes) if len(rows)]
    figure = new_figure(WIDTH, sum(heights) * ROW_HEIGHT + len(heights))
    panels = iter(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    if len(pairs):
        true, counts = held.true[pairs], held.counts[pairs]
        both = zip(true, held.predicted[pairs], strict=True)
        labels = [f"{shorten(names[a])}\ntaken for {shorten(names[b])}" for a, b in both]
        axes = next(panels)
        dress_rows(axes, "Most frequent errors", labels, "samples")
        _draw_bars(axes, counts, counts, samples[true])
    axes, labels = next(panels), [shorten(names[index]) for index in classes]
    dress_rows(axes, "Least accurate classes", labels, "accuracy (part of the class's samples)")
    _draw_bars(axes, right[classes] / samples[classes], right[classes], samples[classes])
    set_text(figure.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold"))
    return figure


def _draw_bars(axes: Axes, values: np.ndarray, parts: np.ndarray, wholes: np.ndarray) -> None:
    """Draw a bar of a value in each row, and "part of whole" behind it."""
    axes.tick_params(axis="y", labelsize=7)
    set_text(*axes.get_yticklabels())
    axes.barh(range(len(values)), values, 0.7, color=PALETTE[0])
    axes.set_xlim(0, max(values) * ROOM or 1)
    pairs = zip(parts, wholes, strict=True)
    label_rows(axes, values, (f"{part:,.0f} of {whole:,.0f}" for part, whole in pairs), 7)


def _describe(run: Run, held: Confusions) -> str:
    right, total = held.right.sum(), held.counts.sum()
    step = run.evaluation.get("step")
    when = f"At step {step:,}: " if isinstance(step, int) else ""
    text = f"{when}{right:,.0f} of {total:,.0f} classified correctly"
    if len(worst := held.worst_pairs()):
        true, predicted = held.true[worst[0]], held.predicted[worst[0]]
        text += (
            f"; the most frequent error ({held.counts[worst[0]]:,.0f}): "
            f"{held.names[true]} was taken for {held.names[predicted]}"
        )
    return text + "."
