"""Tables of evaluations: dense and sparse, summed over batches, shares and ranks."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.data import Shares, TensorSplit, VirtualShares, feeding
from hvdtrain.data.splits import Dataset
from hvdtrain.exchange import SingleProcess
from hvdtrain.records.directory import RunDirectory
from hvdtrain.records.event_log import EventLog
from hvdtrain.tasks import Settings, Sums, Task, classification
from hvdtrain.train import tables
from hvdtrain.train.evaluate import Evaluation, evaluate
from hvdtrain.train.metering import Totals
from hvdtrain.train.tables import Entries, plain_table
from tests.unit.jobs import CPU, evaluate_on
from tests.unit.threads import connect, run_ranks

SINGLE = SingleProcess()
SETTINGS = Settings("none", "none", Path(), 0, torch.float64)
SHAPE = (3, 4, 5)
MANY = 22_000  # ImageNet-21k
sparse = partial(torch.sparse_coo_tensor, check_invariants=True)


def whole_of(table: Any) -> torch.Tensor:
    return table.to_dense() if isinstance(table, torch.Tensor) else torch.tensor(table)


class Numbers:
    """Sample i is the number i."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: np.ndarray, epoch: int = 0) -> torch.Tensor:
        return torch.from_numpy(indices)


class Cells(Task):
    """Sample i adds `value(i)` to one cell of each table: `dense` as such, `sparse` by its entry,
    `either` by one or the other.
    """

    tables = {"dense": SHAPE, "sparse": SHAPE, "either": SHAPE, "none": (2, 2)}  # noqa: RUF012

    def __init__(self, value: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(SETTINGS)
        self.value = value

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Sums:
        cells = torch.stack([batch % 3, batch // 2 % 4, batch * batch % 5])
        table = sparse(cells, self.value(batch), SHAPE)
        is_even = int(batch[0]) % 2 == 0
        either = table if is_even else table.to_dense()
        none = sparse(torch.empty(2, 0), torch.empty(0), (2, 2))
        made = {"dense": table.to_dense(), "sparse": table, "either": either, "none": none}
        return Sums(torch.tensor(0.0), len(batch), made)


def cells_on(shares: Any, exchange: Any, samples: int, value: Any) -> dict[str, Any]:
    return evaluate(nn.Identity(), Cells(value), Numbers(samples), shares, exchange, CPU).tables


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [1, 2, 3, 11, 100])
def test_sparse_tables_have_the_sums_of_dense_ones(
    size: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when an entry is missed, counted twice or at another place, on ranks of which some have
    no samples, or have seen only one form of a table; or a form is not that of the task.
    """
    monkeypatch.setattr(feeding, "EVALUATION_BATCH", 7)
    monkeypatch.setattr(tables, "LEAST_MERGED", 4)

    def value(numbers: torch.Tensor) -> torch.Tensor:
        return 1000 * numbers + 1

    expected = torch.zeros(SHAPE, dtype=torch.int64)
    for i in range(samples):
        expected[i % 3, i // 2 % 4, i * i % 5] += 1000 * i + 1

    def work(exchange: Any) -> dict[str, Any]:
        return cells_on(Shares(size), exchange, samples, value)

    for found in run_ranks(connect(size), work) if size > 1 else [work(SINGLE)]:
        assert list(found) == ["dense", "sparse", "either", "none"]
        assert found["dense"] == expected.tolist()
        assert found["sparse"].layout is torch.sparse_coo and found["sparse"].is_coalesced()
        assert found["sparse"].dtype is torch.int64
        for name in ("sparse", "either"):
            assert torch.equal(whole_of(found[name]), expected), name
        assert found["none"].values().tolist() == [] and found["none"].shape == (2, 2)


@pytest.mark.parametrize("counts", [[2, 3], [1, 0, 4], [2, 1, 1, 1]])
def test_virtual_workers_add_entries_in_the_order_of_their_shares(counts: list[int]) -> None:
    """Fails when sums that round depend on the number of ranks (1e16 + 1 - 1e16 is 0 or 1)."""

    def value(numbers: torch.Tensor) -> torch.Tensor:
        return torch.tensor([1e16, 1.0, -1e16, 0.1, 3e8], dtype=torch.float64)[numbers * 7 // 3 % 5]

    def work(exchange: Any, counts: list[int]) -> torch.Tensor:
        shares = VirtualShares(Shares(5), counts)
        return cells_on(shares, exchange, 400, value)["sparse"].to_dense()

    alone = work(SINGLE, [5])
    assert alone.dtype is torch.float64
    for found in run_ranks(connect(len(counts)), lambda it: work(it, counts)):
        assert torch.equal(found, alone)


def test_no_sample_at_all() -> None:
    """Fails when tables of no batch are an error, or one of 22,000 classes is made in full."""
    found = cells_on(Shares(1), SINGLE, 0, lambda it: it)
    assert list(found) == ["dense", "sparse", "either", "none"]
    assert all(plain_table(it)["values"] == [] for it in found.values())


def test_entries_are_merged_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when memory grows with the samples instead of the cells, or merging changes a sum."""
    monkeypatch.setattr(tables, "LEAST_MERGED", 8)
    entries, expected = Entries(), np.zeros(5)
    for turn in range(100):
        places = np.array([turn % 5, 3, turn % 2])
        values = np.array([turn + 0.5, 7.0, -1.0])
        entries.add(places, values)
        np.add.at(expected, places, values)
        assert sum(map(len, entries._places)) <= 5 + 8 + 3
    places, sums = entries.merged()
    assert places.tolist() == [0, 1, 2, 3, 4] and sums.tolist() == expected.tolist()


class AsScores(nn.Module):
    """Takes the first row of each image for the scores of its classes."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images[:, 0, 0]


def predicting(classes: int, predicted: list[int], labels: list[int]) -> Dataset:
    inputs = torch.nn.functional.one_hot(torch.tensor(predicted), classes).float()[:, None, None]
    split = TensorSplit(inputs, torch.tensor(labels))
    return Dataset("scores", (1, 1, classes), classes, split, split)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_22_000_classes(size: int) -> None:
    """Fails when memory grows with the square of the classes (a matrix of int64 has 3.9 GB), or a
    pair is counted at another place: the samples of each rank have classes of their own.
    """
    labels = [1000 * (i % 3) + i for i in range(40)] + [MANY - 1]
    predicted = [label if i % 4 else MANY - 1 - i for i, label in enumerate(labels)]
    data = predicting(MANY, predicted, labels)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def work(exchange: Any) -> Evaluation:
        return evaluate_on(AsScores(), data, exchange)

    for found in run_ranks(connect(size), work) if size > 1 else [work(SINGLE)]:
        stored = plain_table(found.tables["confusion"])
        assert stored["shape"] == [MANY, MANY]
        assert stored["values"] == [1] * 41
        assert list(zip(*stored["indices"], strict=True)) == sorted(
            zip(labels, predicted, strict=True)
        )
        accuracy = found.class_accuracy()
        assert accuracy is not None and len(accuracy) == MANY
        assert [accuracy[label] for label in labels] == [float(i % 4 > 0) for i in range(41)]
        assert sum(it is None for it in accuracy) == MANY - 41
        assert found.metrics["accuracy"] == 30 / 41
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    assert grown_mib < 500


@pytest.mark.parametrize("classes", [1, 2, 6, 50])
def test_few_and_many_classes_are_counted_alike(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when pairs, accuracy or loss depend on the form of the table, or on how many scores are
    evaluated at a time; with one class, and with more classes than samples.
    """
    labels = [i * i % classes for i in range(20)]
    data = predicting(classes, [(i + i // 7) % classes for i in range(20)], labels)
    matrix = evaluate_on(AsScores(), data, SINGLE)
    monkeypatch.setattr(classification, "MOST_IN_MATRIX", 0)
    monkeypatch.setattr(classification, "MOST_SCORES", 3 * classes)
    pairs = evaluate_on(AsScores(), data, SINGLE)
    assert isinstance(matrix.tables["confusion"], list)
    assert whole_of(pairs.tables["confusion"]).tolist() == matrix.tables["confusion"]
    assert pairs.class_accuracy() == matrix.class_accuracy()
    assert pairs.metrics == matrix.metrics
    assert pairs.loss == pytest.approx(matrix.loss, rel=1e-12)


@pytest.mark.parametrize(("classes", "form"), [(200, list), (201, torch.Tensor)])
def test_matrices_that_can_be_read_stay_matrices(classes: int, form: type) -> None:
    """Fails when evaluation.json of a few classes changes, or that of many is a matrix."""
    found = evaluate_on(AsScores(), predicting(classes, [1, 2], [1, 3]), SINGLE)
    assert isinstance(found.tables["confusion"], form)


@pytest.mark.parametrize("table", [[4, 1], [[4, 1, 0], [0, 3, 0]], [[[1, 2], [3, 4]]], []])
def test_another_table_of_that_name_has_no_class_accuracy(table: list[Any]) -> None:
    """Fails when a task's own table `confusion`, of another shape, ends the run."""
    assert Evaluation(8, 0.5, {}, {"confusion": table}).class_accuracy() is None
    assert Evaluation(8, 0.5, {}, {}).class_accuracy() is None


def test_sparse_tables_are_kept_and_written(tmp_path: Path) -> None:
    """Fails when a sparse table cannot be read from a checkpoint or from evaluation.json, or the
    line of the evaluation lacks the accuracy of its classes.
    """
    pairs = torch.tensor([[0, 2, 2], [0, 1, 2]])
    table = sparse(pairs, torch.tensor([4, 3, 1]), (3, 3)).coalesce()
    torch.save(table, tmp_path / "state.pt")
    kept = torch.load(tmp_path / "state.pt", weights_only=True)
    evaluation = Evaluation(8, 0.75, {"accuracy": 0.625}, {"confusion": kept})
    directory = RunDirectory(tmp_path / "one")
    log = EventLog(directory, classes=["a", "b", "c"])
    log.epoch_end(Totals(3, 1, 8, 8, 0.5, {}, 1.0, {}, None), evaluation, lr=0.1)
    log.close({"status": "finished"})
    directory.close()
    written = json.loads((directory.path / "evaluation.json").read_text())
    assert written["confusion"] == {
        "shape": [3, 3],
        "indices": [[0, 2, 2], [0, 1, 2]],
        "values": [4, 3, 1],
    }
    stored = written["confusion"]
    again = sparse(stored["indices"], stored["values"], stored["shape"])
    assert torch.equal(again.to_dense(), table.to_dense())
    line = json.loads((directory.path / "metrics.jsonl").read_text())
    assert line["valid_class_accuracy"] == [1.0, None, 0.25] and "confusion" not in line
