"""Tasks: what a loss gives is checked, and a mean over what it counts is exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from hvdtrain.audit import Audits
from hvdtrain.data import GlobalBatchSampler, Shares, Splits
from hvdtrain.data.feeding import Feed
from hvdtrain.data.sampler import Indices
from hvdtrain.errors import TrainingError
from hvdtrain.exchange import SingleProcess
from hvdtrain.tasks import Settings, Sums, Task, check_sums
from hvdtrain.train.evaluate import evaluate
from hvdtrain.train.job import Job
from tests.unit.jobs import CPU, made_up_data, make_job, one_step
from tests.unit.threads import ThreadExchange, connect, run_ranks

SINGLE = SingleProcess()
SETTINGS = Settings("none", "none", Path(), 0, torch.float64)
WORDS = 5


class Sentences:
    """Sample i: i % 4 words (so some have none), padded with -1."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Indices, epoch: int = 0) -> torch.Tensor:
        rows = torch.full((len(indices), 4), -1)
        for row, index in zip(rows, indices.tolist(), strict=True):
            row[: index % 4] = torch.tensor([(index * (place + 1)) % WORDS for place in range(4)])[
                : index % 4
            ]
        return rows


class Words(Task):
    """The mean is over words, of which each sample has another number."""

    metrics = ("right",)
    valid_metrics = ("right", "first")
    tables: Mapping[str, tuple[int, ...]] = {"seen": (WORDS,)}
    counts_samples = False

    def build_data(self) -> Splits:
        return Splits("words", Sentences(30), Sentences(11))

    def build_model(self) -> nn.Module:
        return nn.Embedding(WORDS, WORDS).double()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Sums:
        words = batch[batch >= 0]
        scores = model(words)
        loss = functional.cross_entropy(scores, (words + 1) % WORDS, reduction="sum")
        return Sums(loss, len(words), {"right": (scores.argmax(1) == (words + 1) % WORDS).sum()})

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Sums:
        sums = self.loss(model, batch)
        words = batch[batch >= 0]
        more = {"first": (words == 0).sum(), "seen": torch.bincount(words, minlength=WORDS)}
        return replace(sums, metrics={**sums.metrics, **more})


def words_job(exchange: Any, accum: int = 1) -> Job:
    task = Words(SETTINGS)
    data = task.build_data()
    torch.manual_seed(0)
    job = make_job(made_up_data(30), 30, exchange, build=task.build_model, accum=accum)
    sampler = GlobalBatchSampler(30, 30, seed=5)
    feed = Feed(data.train, sampler, Shares(exchange.size), accum, everyone=False)
    return replace(job, task=task, data=data, feed=feed)


def gradient_of(job: Job) -> torch.Tensor:
    (parameter,) = job.model.parameters()
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [1, 2, 7, 30])
def test_the_mean_over_words_is_that_of_one_process(size: int, samples: int) -> None:
    """Fails when a rank's mean is taken for the whole's, or samples are counted for words."""
    indices = np.arange(samples)
    task = Words(SETTINGS)
    model = words_job(SINGLE).model
    sums = task.loss(model, task.build_data().train.batch(indices))
    (sums.loss / max(sums.samples, 1)).backward()
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    expected = parameter.grad

    exchanges = connect(size) if size > 1 else [SINGLE]
    jobs = [words_job(ex, accum=2) for ex in exchanges]

    def work(exchange: ThreadExchange) -> torch.Tensor:
        one_step(jobs[exchange.rank], exchange, Audits(), 1, indices)
        return gradient_of(jobs[exchange.rank])

    found = run_ranks(exchanges, work) if size > 1 else [work(SINGLE)]
    for gradient in found:
        torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("size", [2, 3])
def test_tables_and_metrics_are_sums_over_ranks(size: int) -> None:
    """Fails when a table or metric misses a rank, or is divided by samples where words count."""
    task = Words(SETTINGS)
    data = task.build_data()
    model = words_job(SINGLE).model

    def work(exchange: Any) -> Any:
        return evaluate(model, task, data.valid, Shares(exchange.size), exchange, CPU)

    alone = work(SINGLE)
    words = torch.cat([row[row >= 0] for row in data.valid.batch(np.arange(11))])
    assert alone.tables == {"seen": torch.bincount(words, minlength=WORDS).tolist()}
    assert alone.metrics["first"] == int((words == 0).sum()) / len(words)
    assert alone.samples == 11
    for found in run_ranks(connect(size), work):
        assert (found.samples, found.metrics, found.tables) == (11, alone.metrics, alone.tables)
        assert found.loss == pytest.approx(alone.loss, rel=1e-13)


class Counting(Task):
    metrics = ("right",)


LOSS = torch.ones((), requires_grad=True)
WRONG = {
    "returned Tensor, expected hvdtrain.Sums": LOSS,
    "the loss must be a scalar, the sum over samples, and is [3]": Sums(
        torch.ones(3, requires_grad=True), 3, {"right": LOSS}
    ),
    "the loss does not depend on any parameter": Sums(torch.ones(()), 3, {"right": LOSS}),
    "a batch of 3 samples was counted as 2": Sums(LOSS, 2, {"right": LOSS}),
    "metrics [], expected ['right']": Sums(LOSS, 3),
    "metrics ['left', 'right'], expected ['right']": Sums(LOSS, 3, {"right": LOSS, "left": LOSS}),
}


@pytest.mark.parametrize("expected", WRONG)
def test_broken_promises_of_a_task_are_reported(expected: str) -> None:
    """Fails when a loss that would train something else is taken."""
    with pytest.raises(TrainingError) as caught:
        check_sums(WRONG[expected], Counting(SETTINGS), 3, training=True)
    assert expected in str(caught.value) and "Counting.loss" in str(caught.value)


def test_what_is_missing_is_named() -> None:
    """Fails when a task without a method ends in something else than its name."""
    task = Counting(SETTINGS)
    for method in ("build_data", "build_model"):
        with pytest.raises(NotImplementedError, match=f"Counting.{method} is missing"):
            getattr(task, method)()
    with pytest.raises(NotImplementedError, match=r"Counting\.loss is missing"):
        task.evaluate(nn.Identity(), None)
