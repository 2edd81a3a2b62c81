"""Confusion matrices of the newest evaluation of each run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hvdtrain.lab.charts import Plot, new_figure, set_text, set_title, shorten
from hvdtrain.lab.report.runs import Run

MOST_COUNTED = 20  # most classes for which every count is written
MOST_NAMED = 40  # most classes for which every class is named
DARK = 0.55  # share from which the count is white


def draw_confusions(runs: Sequence[Run]) -> list[Plot]:
    """Return a plot for each run with a confusion matrix."""
    plots = []
    for i, run in enumerate(runs, start=1):
        counts = read_counts(run)
        if counts is None:
            continue
        alone = len(runs) == 1
        title = "Confusion matrix" if alone else f"Confusion matrix: {run.name}"
        classes = _class_names(run, len(counts))
        figure = _draw(counts, classes, shorten(title))
        name = "confusion" if alone else f"confusion-{i}"
        plots.append(Plot(name, title, _describe(run, counts, classes), figure))
    return plots


def read_counts(run: Run) -> np.ndarray | None:
    """Return the square matrix (true, predicted class); None if absent, empty or invalid."""
    try:
        counts = np.array(run.evaluation.get("confusion"), dtype=np.float64)
    except (TypeError, ValueError):  # rows of different lengths, or text in them
        return None
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1]:
        return None
    return counts if np.isfinite(counts).all() and counts.sum() > 0 else None


def _class_names(run: Run, classes: int) -> list[str]:
    names = run.evaluation.get("classes")
    if isinstance(names, list) and len(names) == classes:
        return [str(name) for name in names]
    return [str(i) for i in range(classes)]


def _draw(counts: np.ndarray, classes: list[str], title: str) -> Figure:
    size = 5.6 if len(classes) <= MOST_COUNTED else 6.8
    figure = new_figure(size + 0.4, size)
    axes = figure.add_subplot()
    of_true_class = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, of_true_class, out=np.zeros_like(counts), where=of_true_class > 0)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    bar = figure.colorbar(image, ax=axes, shrink=0.75, label="share of the true class")
    bar.outline.set_visible(False)
    set_title(axes, title)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    _name_classes(axes, classes)
    if len(classes) <= MOST_COUNTED:
        _write_counts(axes, counts, shares)
    return figure


def _name_classes(axes: Any, classes: list[str]) -> None:
    """Label every class by name; where they exceed MOST_NAMED, some by number."""
    if len(classes) > MOST_NAMED:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        return
    labels = [shorten(name) for name in classes]
    places, size = range(len(classes)), 9 if len(classes) <= MOST_COUNTED else 7
    slanted = max(map(len, labels)) > 2
    axes.set_xticks(places, labels, fontsize=size, rotation=90 if slanted else 0)
    axes.set_yticks(places, labels, fontsize=size)
    for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        set_text(text)


def _write_counts(axes: Any, counts: np.ndarray, shares: np.ndarray) -> None:
    """Write the counts except zeros, so that errors stand out."""
    size = 9 if len(counts) <= 12 else 6.5
    for row, column in np.argwhere(counts > 0):
        colour = "white" if shares[row, column] > DARK else "black"
        text = f"{counts[row, column]:.0f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)


def _describe(run: Run, counts: np.ndarray, classes: list[str]) -> str:
    right, total = np.trace(counts), counts.sum()
    step = run.evaluation.get("step")
    when = f"At step {step:,}: " if isinstance(step, int) else ""
    text = f"{when}{right:,.0f} of {total:,.0f} samples right"
    wrong = counts - np.diag(np.diag(counts))
    if wrong.any():
        true, predicted = divmod(int(wrong.argmax()), len(counts))
        times = f"{wrong.max():,.0f}"
        text += f"; most often {classes[true]} was taken for {classes[predicted]}, {times} times"
    return text + "."
