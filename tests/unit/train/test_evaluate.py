"""Evaluation counts every sample once, on any number of ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hvdtrain.data import TensorSplit, feeding
from hvdtrain.data.splits import Dataset
from hvdtrain.exchange import SingleProcess
from hvdtrain.train.evaluate import (
    Evaluation,
    Interrupted,
    in_evaluation_mode,
)
from tests.unit.jobs import evaluate_on, made_up_data, plain, with_batch_norm
from tests.unit.threads import connect, run_ranks


class AsScores(nn.Module):
    """Takes the first row of each image for the scores of its classes."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images[:, 0, 0]


def by_scores(scores: list[list[float]], labels: list[int]) -> Dataset:
    inputs = torch.tensor(scores, dtype=torch.float32)[:, None, None]
    split = TensorSplit(inputs, torch.tensor(labels))
    return Dataset("scores", (1, 1, len(scores[0])), len(scores[0]), split, split)


SIX = by_scores(
    [
        [9, 8, 7, 6, 5, 4],  # 0, taken for 0
        [9, 8, 7, 6, 5, 4],  # 4, taken for 0, among the best five
        [9, 8, 7, 6, 5, 4],  # 5, taken for 0, not among them
        [0, 1, 0, 0, 0, 0.5],  # 1, taken for 1
        [1, 2, 3, 4, 5, 6],  # 1, taken for 5, among them
        [1, 2, 3, 4, 5, 6],  # 0, taken for 5, not among them
        [1, 2, 3, 4, 5, 6],  # 5, taken for 5
    ],
    [0, 4, 5, 1, 1, 0, 5],
)


def test_a_hand_count() -> None:
    """Fails when top-1, top-5, a class's count or a cell of the matrix is not the one by hand."""
    found = evaluate_on(AsScores(), SIX, SingleProcess())
    assert found is not None
    assert found.samples == 7
    assert found.metrics == {"accuracy": 3 / 7, "accuracy_top5": 5 / 7}
    expected = [[0] * 6 for _ in range(6)]
    for true, taken in ((0, 0), (4, 0), (5, 0), (1, 1), (1, 5), (0, 5), (5, 5)):
        expected[true][taken] += 1
    assert found.tables == {"confusion": expected}
    assert found.class_accuracy() == [1 / 2, 1 / 2, None, None, 0, 1 / 2]
    inputs, labels = SIX.valid.batch(torch.arange(7).numpy())
    losses = [
        math.log(sum(math.exp(s) for s in row)) - row[label]
        for row, label in zip(inputs[:, 0, 0].tolist(), labels.tolist(), strict=True)
    ]
    assert found.loss == pytest.approx(sum(losses) / 7, rel=1e-12)


def test_fewer_than_six_classes() -> None:
    """Fails when top-5 of three classes is an error, or reported though it is always 1."""
    found = evaluate_on(AsScores(), by_scores([[1, 2, 3], [3, 2, 1]], [0, 0]), SingleProcess())
    assert found is not None
    assert found.metrics == {"accuracy": 0.5}
    assert found.tables["confusion"] == [[1, 0, 1], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("samples", [1, 3, 50])
def test_the_result_is_the_same_on_any_number_of_ranks(size: int, samples: int) -> None:
    """Fails when a sample is padded, missed or weighted, also where a rank has none at all."""
    data = made_up_data(1, valid=samples)
    torch.manual_seed(0)
    model = plain().double()
    alone = evaluate_on(model, data, SingleProcess())
    assert alone is not None and alone.samples == samples
    data.valid.log.clear()
    for found in run_ranks(connect(size), lambda ex: evaluate_on(model, data, ex)):
        assert found is not None
        assert found.loss == pytest.approx(alone.loss, rel=1e-12)
        assert found == Evaluation(samples, found.loss, alone.metrics, alone.tables)
    assert sorted(sample for batch in data.valid.log for sample in batch) == list(range(samples))


def test_batches_change_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a batch's mean is taken for its sum, or its size for that of the others."""
    data = made_up_data(1, valid=50)
    torch.manual_seed(0)
    model = plain().double()
    whole = evaluate_on(model, data, SingleProcess())
    monkeypatch.setattr(feeding, "EVALUATION_BATCH", 7)
    parts = evaluate_on(model, data, SingleProcess())
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    assert (parts.tables, parts.metrics) == (whole.tables, whole.metrics)


def test_the_model_is_left_as_it_was() -> None:
    """Fails when evaluation moves statistics, keeps gradients, or leaves another mode."""
    data = made_up_data(1, valid=10)
    model = with_batch_norm().double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for mode in (True, False):
        model.train(mode)
        evaluate_on(model, data, SingleProcess())
        assert all(layer.training is mode for layer in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_what_is_frozen_stays_in_evaluation_mode() -> None:
    """Fails when an evaluation puts a frozen batch norm, a teacher or an adapter into another mode,
    or does not tell it.
    """

    class Told(nn.Linear):
        def train(self, mode: bool = True) -> Told:
            told.append(mode)
            return super().train(mode)

    told: list[bool] = []
    frozen = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    model = nn.Sequential(frozen, Told(2, 2), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)))
    frozen.eval()
    model[2][1].eval()
    before = [it.training for it in model.modules()]
    with in_evaluation_mode(model):
        assert not any(it.training for it in model.modules())
    assert [it.training for it in model.modules()] == before
    assert told == [False, True]


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_a_request_to_stop_is_known_to_all_ranks(asked: int, monkeypatch) -> None:
    """Fails when a rank goes on for long, gets a result of some samples, or waits for ever."""
    monkeypatch.setattr(feeding, "EVALUATION_BATCH", 2)
    data = made_up_data(1, valid=30)
    model = plain().double()
    questions = [0, 0, 0]

    def work(exchange) -> None:
        def stop_requested() -> bool:
            questions[exchange.rank] += 1
            return exchange.rank == asked and questions[exchange.rank] == 3

        with pytest.raises(Interrupted):
            evaluate_on(model, data, exchange, stop_requested)

    run_ranks(connect(3), work)
    assert questions[asked] == 3
    with pytest.raises(Interrupted):
        evaluate_on(model, data, SingleProcess(), lambda: True)
