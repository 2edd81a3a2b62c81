"""The plots of `hvdtrain report`: what is drawn is what the files hold."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.report.charts import PALETTE
from tests.unit.reported import (
    CONFUSION,
    audit_record,
    epoch_record,
    lines_of,
    make_run,
    plots_of,
    step_record,
    write_lines,
)


def test_curves_show_the_files_figures(tmp_path: Path) -> None:
    """Fails when a plotted value or step is not that of the records, or a run's colour changes."""
    plots = plots_of(make_run(tmp_path / "one"), make_run(tmp_path / "two"))
    steps, epochs = list(range(2, 21, 2)), [10, 20]
    by_name = {
        "loss": [(steps, lambda s: 2 / s), (epochs, lambda s: 3 / s), (epochs, lambda s: 4 / s)],
        "throughput": [(steps, lambda s: 100.0 + s)],
        "learning-rate": [(steps, lambda s: 0.1 / s)],
    }
    for name, kinds in by_name.items():
        expected = [
            (colour, at, [value(step) for step in at])
            for at, value in kinds
            for colour in PALETTE[:2]
        ]
        assert lines_of(plots[name]) == expected, name
    assert plots["throughput"].figure.axes[0].get_ylabel() == "samples per second"
    (legend,) = plots["loss"].figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]


def test_audits_show_failures_that_have_no_finite_ratio(tmp_path: Path) -> None:
    """Fails when an infinite ratio (null) is drawn as a number or vanishes, or the bound does."""
    axes = plots_of(make_run(tmp_path / "one"))["audit"].figure.axes[0]
    ratios, bound, failures = axes.lines
    assert list(ratios.get_xdata()) == [5, 10, 15]
    assert list(ratios.get_ydata())[:2] == [0.3, 7.5] and math.isnan(ratios.get_ydata()[2])
    assert list(failures.get_xdata()) == [10, 15] and failures.get_marker() == "x"
    assert list(bound.get_ydata()) == [1, 1]


@pytest.mark.parametrize(("ratios", "scale"), [((0.2, 0.4), "linear"), ((1e-4, 0.3), "log")])
def test_audits_far_apart_are_drawn_on_a_log_axis(tmp_path: Path, ratios, scale: str) -> None:
    """Fails when small ratios are squashed at 0, or near ones stand on a log axis."""
    run = make_run(tmp_path / "one")
    write_lines(run / "audit.jsonl", [audit_record(i, r) for i, r in enumerate(ratios, 1)])
    assert plots_of(run)["audit"].figure.axes[0].get_yscale() == scale


@pytest.mark.parametrize(
    ("losses", "scale"), [((2.3, 1.9), "linear"), ((2.3, 0.001), "log"), ((2.3, 0.0), "linear")]
)
def test_losses_far_apart_are_drawn_on_a_log_axis(tmp_path: Path, losses, scale: str) -> None:
    """Fails when a small loss lies on the axis, near ones are drawn by their logarithms, or a loss
    of 0 vanishes."""
    run = make_run(tmp_path / "one")
    records = [step_record(step, train_loss=loss) for step, loss in enumerate(losses, 1)]
    write_lines(run / "metrics.jsonl", records)
    assert plots_of(run)["loss"].figure.axes[0].get_yscale() == scale


def test_phases_are_stacked_over_the_steps_that_they_are_means_of(tmp_path: Path) -> None:
    """Fails when a phase's height, place in the stack, or interval of steps is wrong, when the
    runs' panels do not share axes, or a run without phases gets one."""
    runs = [make_run(tmp_path / name) for name in ("one", "two", "old")]
    slow = [step_record(step, data_s=0.5) for step in (2, 4)]
    write_lines(runs[1] / "metrics.jsonl", slow)
    write_lines(runs[2] / "metrics.jsonl", [epoch_record(10)])
    plot = plots_of(*runs)["phases"]
    panels = plot.figure.axes
    assert [axes.get_title(loc="left") for axes in panels] == [
        "Time per step: one",
        "Time per step: two",
    ]
    stairs = {patch.get_label(): patch.get_data() for patch in panels[0].patches}
    assert list(stairs) == ["data", "compute", "exchange", "update"]
    steps = np.arange(2, 21, 2)
    assert stairs["data"].edges == pytest.approx([0, *steps])
    assert stairs["compute"].baseline == pytest.approx(1.0)
    assert stairs["compute"].values == pytest.approx(1 + 4 + steps / 10)
    assert stairs["update"].values == pytest.approx(1 + 4 + steps / 10 + 2 + 1)
    assert panels[0].get_ylim() == panels[1].get_ylim() and panels[0].get_xlim() == (0, 20)
    assert panels[0].get_ylim()[1] > 507 and panels[0].get_ylabel() == "ms per step"
    assert "22% in one" in plot.caption  # 2 of 1 + 5.1 + 2 + 1, on average over the steps


def test_the_confusion_matrix_counts_and_names(tmp_path: Path) -> None:
    """Fails when rows and columns are swapped, a count is missing, or class names are not used."""
    plot = plots_of(make_run(tmp_path / "one"))["confusion"]
    axes = plot.figure.axes[0]
    written = {(*text.get_position()[::-1],): text.get_text() for text in axes.texts}
    expected = {
        (row, column): str(count)
        for row, counts in enumerate(CONFUSION)
        for column, count in enumerate(counts)
        if count
    }
    assert written == expected
    assert axes.get_ylabel() == "true class" and axes.get_xlabel() == "predicted class"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b", "$c"]
    assert axes.images[0].get_array()[0].tolist() == pytest.approx([5 / 6, 1 / 6, 0])
    assert plot.caption == (
        "At step 20: 21 of 24 classified correctly; "
        "the most frequent error (2): b was taken for $c."
    )


@pytest.mark.parametrize("classes", [21, 100])
def test_large_confusion_matrices_are_not_written_full(tmp_path: Path, classes: int) -> None:
    """Fails when hundreds of counts cover the plot, or absent class names are an error."""
    run = make_run(tmp_path / "one")
    evaluation = {"step": 20, "confusion": np.eye(classes, dtype=int).tolist()}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    axes = plots_of(run)["confusion"].figure.axes[0]
    assert list(axes.texts) == [] and len(axes.get_xticks()) <= 25


ENTRIES = {"shape": [3, 3], "indices": [[0, 0, 1], [0, 1, 1]], "values": [5, 1, 7]}
NO_CONFUSIONS: list[Any] = [
    *(None, [], [[1, 2]], [[1], [2, 3]], "x", [[0, 0], [0, 0]], {}, [1, 2]),
    ENTRIES | {"shape": [3, 4]},
    ENTRIES | {"shape": [3]},
    ENTRIES | {"shape": ["3", "3"]},
    ENTRIES | {"indices": [[0, 0, 1], [0, 1, 3]]},
    ENTRIES | {"indices": [[0, 0, 1], [0, -1, 1]]},
    ENTRIES | {"indices": [[0, 0, 1], [0, 0.5, 1]]},
    ENTRIES | {"indices": [[0, 0], [0, 1]]},
    ENTRIES | {"values": [5, None, 7]},
    ENTRIES | {"values": [[5, 1, 7]]},
    ENTRIES | {"indices": [[], []], "values": []},
]


@pytest.mark.parametrize("confusion", NO_CONFUSIONS)
def test_confusions_that_are_none_are_left_out(tmp_path: Path, confusion: Any) -> None:
    """Fails when something else under that name is drawn, or is an error."""
    run = make_run(tmp_path / "one")
    write_confusion(run, confusion)
    assert "confusion" not in plots_of(run)


def write_confusion(run: Path, confusion: Any, **others: Any) -> None:
    content = {"step": 1, "confusion": confusion} | others
    (run / "evaluation.json").write_text(json.dumps(content))


def in_entries(matrix: np.ndarray) -> dict[str, Any]:
    """A matrix as evaluation.json holds that of many classes."""
    pairs = np.nonzero(matrix)
    indices, values = [it.tolist() for it in pairs], matrix[pairs].tolist()
    return {"shape": list(matrix.shape), "indices": indices, "values": values}


def test_entries_of_few_classes_are_drawn_as_their_matrix(tmp_path: Path) -> None:
    """Fails when the same counts look otherwise in another form."""
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    write_confusion(runs[0], CONFUSION, classes=["a", "b", "$c"])
    write_confusion(runs[1], in_entries(np.array(CONFUSION)), classes=["a", "b", "$c"])
    first, second = (plots_of(run)["confusion"] for run in runs)
    assert first.caption == second.caption
    assert first.png == second.png


def confused(classes: int) -> np.ndarray:
    """Class i has i % 3 samples right; some of the last classes are taken for others."""
    matrix = np.diag(np.arange(classes) % 3)
    for number, (true, predicted, count) in enumerate(((-1, 2, 9), (-2, 0, 4), (-3, 1, 9))):
        matrix[true, predicted] = count
        matrix[true, true] = 10 * number + 1
    return matrix


@pytest.mark.parametrize("form", [np.ndarray.tolist, in_entries])
def test_of_many_classes_the_worst_pairs_and_classes_are_shown(tmp_path: Path, form: Any) -> None:
    """Fails when a matrix of which nobody can read a class is drawn, a pair, class or count is not
    that of the file, a class without samples is listed, or earlier files' matrices are refused.
    """
    run = make_run(tmp_path / "one")
    write_confusion(run, form(confused(300)), classes=[f"${number}" for number in range(300)])
    plot = plots_of(run)["confusion"]
    errors, classes = plot.figure.axes
    assert not errors.images and not classes.images
    assert labels_of(errors) == [
        "$299\ntaken for $2",  # as many as the next, but of fewer samples
        "$297\ntaken for $1",
        "$298\ntaken for $0",
    ]
    assert [bar.get_width() for bar in errors.patches] == [9, 9, 4]
    assert [text.get_text() for text in errors.texts] == ["9 of 10", "9 of 30", "4 of 15"]
    assert labels_of(classes)[:5] == ["$299", "$297", "$298", "$2", "$5"]
    accuracy = [bar.get_width() for bar in classes.patches]
    assert accuracy[:4] == pytest.approx([1 / 10, 21 / 30, 11 / 15, 1]) and len(accuracy) == 12
    assert [text.get_text() for text in classes.texts][:2] == ["1 of 10", "21 of 30"]
    assert plot.title == "Worst confusions" and plot.caption == (
        "At step 1: 330 of 352 classified correctly; "
        "the most frequent error (9): $299 was taken for $2."
    )
    assert plot.png.startswith(b"\x89PNG")


def labels_of(axes: Any) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


@pytest.mark.parametrize("right", [0, 1])
def test_many_classes_all_right_or_all_wrong(tmp_path: Path, right: int) -> None:
    """Fails when an axis has no length, as without errors or with an accuracy of 0."""
    run = make_run(tmp_path / "one")
    classes = 22_000
    numbers = np.arange(classes)
    pairs = [numbers.tolist(), ((numbers + 1 - right) % classes).tolist()]
    confusion = {"shape": [classes, classes], "indices": pairs, "values": [1] * classes}
    write_confusion(run, confusion)
    plot = plots_of(run)["confusion"]
    assert len(plot.figure.axes) == 2 - right
    assert labels_of(plot.figure.axes[-1]) == [str(number) for number in range(12)]
    assert plot.png.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("classes", "kind"), [(200, "Confusion matrix"), (201, "Worst confusions")]
)
def test_a_matrix_is_drawn_as_far_as_it_can_be_read(
    tmp_path: Path, classes: int, kind: str
) -> None:
    """Fails when the limit is another than the documented one."""
    run = make_run(tmp_path / "one")
    write_confusion(run, in_entries(confused(classes)))
    assert plots_of(run)["confusion"].title == kind


def test_names_that_matplotlib_would_leave_out_or_set_as_formulas(tmp_path: Path) -> None:
    """Fails when a run's name is missing from the legend, or stops the drawing."""
    names = ("_hidden", "$\\bad{$", "日本語", "long" * 40)
    plots = plots_of(*(make_run(tmp_path / name) for name in names))
    (legend,) = plots["loss"].figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown[:3] == list(names[:3]) and 20 < len(shown[3]) < 50
    for plot in plots.values():
        assert plot.png.startswith(b"\x89PNG")
