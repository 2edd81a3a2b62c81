"""verify-n: comparison of tensors, bounds of the first step, refusals, and each experiment."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from hvdtrain.config import BatchConfig, TrainConfig
from hvdtrain.evidence.trials import Trial
from hvdtrain.evidence.verify_n.causes import causes_of_processes
from hvdtrain.evidence.verify_n.certificate import unfit_for_every_n
from hvdtrain.evidence.verify_n.experiments import find_causes
from hvdtrain.evidence.verify_n.parting import (
    AGREEMENT,
    Gap,
    Parting,
    gap_above,
    largest_gap,
)
from hvdtrain.evidence.verify_n.passes import OUTSIDE, Subject
from hvdtrain.exchange import SingleProcess
from hvdtrain.tasks import Sums
from tests.unit.commands import run
from tests.unit.jobs import made_up_data, make_job, plain, with_batch_norm

WIDTH = 16
TRAIN = ("--", "train")


class Randomly(nn.Module):
    """Dropout without a module of it, which may stay on in evaluation."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return functional.dropout(values, 0.5, self.training or self.always)


class Noisy(nn.Module):
    """Adds numbers of a generator: numpy's global one, or one of its own without a seed."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + torch.from_numpy(self.draw(size=tuple(values.shape)))


class Centred(nn.Module):
    """Subtracts the mean over the batch."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values - values.mean(0)


class CentredWithin(nn.Module):
    """The same between two modules, in the code that calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        return self.second(values - values.mean(0))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.lstm(values.reshape(-1, 4, 4))[0].flatten(1)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        rows = values.reshape(-1, 4, 4)
        return self.attention(rows, rows, rows, need_weights=False)[0].flatten(1)


def around(*middle: nn.Module) -> Any:
    """Return the builder of a network with these modules, named 2 and so on, in the middle."""
    return lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(WIDTH, WIDTH), *middle, nn.Tanh(), nn.Linear(WIDTH, 7)
    )


def subject(build: Any = plain, change: Any = None, shares: int = 2, **options: Any) -> Subject:
    job = make_job(made_up_data(30), 13, SingleProcess(), build=build, **options)
    if change is not None:
        honest = job.task.loss
        job.task.loss = lambda model, batch: change(honest(model, batch))  # type: ignore[method-assign]
    return Subject(job, np.arange(13), epoch=0, shares=shares)


CAUSES: dict[str, tuple[Any, list[tuple[str, tuple[str, ...]]]]] = {
    "none": (plain, []),
    "a module of dropout": (around(nn.Dropout(0.5)), [("dropout", ("2",))]),
    "dropout that is off": (around(nn.Dropout(0.0)), []),
    "dropout of layers of an LSTM": (around(Recurrent()), [("dropout", ("2.lstm",))]),
    "dropout of attention": (around(Attending()), [("dropout", ("2.attention",))]),
    "a function": (around(Randomly(always=False)), [("random forward", ("2",))]),
    "a function that stays on": (around(Randomly(always=True)), [("random forward", ("2",))]),
    "numpy": (around(Noisy(np.random.normal)), [("random forward", ("2",))]),
    "no seed": (around(Noisy(np.random.default_rng().normal)), [("not repeatable", ("2",))]),
    "batch norm": (with_batch_norm, [("batch norm", ("1", "5"))]),
    "both": (
        around(nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)),
        [("dropout", ("2",)), ("batch norm", ("3",))],
    ),
    "batch norm without running statistics": (
        around(nn.BatchNorm1d(WIDTH, track_running_stats=False)),
        [("mixes samples", ("2",))],
    ),
    "a normalisation of one's own": (around(Centred()), [("mixes samples", ("2",))]),
    "the same in the code between": (around(CentredWithin()), [("mixes samples", ("2",))]),
}


@pytest.mark.parametrize("shares", [2, 3])
@pytest.mark.parametrize(("build", "expected"), CAUSES.values(), ids=CAUSES)
def test_each_cause_of_the_model(build, expected, shares) -> None:
    """Fails when a cause is missed, is given another name or other modules, or one is invented."""
    found = find_causes(subject(build, shares=shares))
    assert [(cause.kind, cause.modules) for cause in found] == expected
    assert all(name in cause.text for cause in found for name in cause.modules)


LOSSES = {
    "mean loss": lambda sums: replace(sums, loss=sums.loss / sums.samples),
    "loss over the batch": lambda sums: replace(sums, loss=sums.loss.square()),
    "count of samples": lambda sums: Sums(sums.loss.square(), 5, sums.metrics),
}


@pytest.mark.parametrize(("kind", "change"), LOSSES.items(), ids=LOSSES)
def test_each_cause_of_the_loss(kind, change) -> None:
    """Fails when a loss that is not a sum is not named, or hides behind the model's dropout."""
    for build in (plain, around(nn.Dropout(0.5), nn.BatchNorm1d(WIDTH))):
        (cause,) = find_causes(subject(build, change))
        assert cause.kind == kind


def test_random_numbers_in_the_loss() -> None:
    """Fails when noise that the task draws, outside of every module, is taken for a mean loss."""
    (cause,) = find_causes(
        subject(change=lambda sums: replace(sums, loss=sums.loss * torch.rand(())))
    )
    assert (cause.kind, cause.modules) == ("random forward", ())
    assert OUTSIDE in cause.text


def test_what_is_right_on_every_n() -> None:
    """Fails when synchronised batch norm, or with virtual workers dropout, is made a cause."""
    assert find_causes(subject(with_batch_norm, sync_bn=True)) == []
    both = around(nn.Dropout(0.5), nn.BatchNorm1d(WIDTH))
    assert find_causes(subject(both), exact=True) == []


def test_data_without_a_seed() -> None:
    """Fails when data that change between two readings, or processes, are not the cause."""
    data = made_up_data(30)
    honest, noise = data.train.batch, np.random.default_rng()

    def batch(indices: Any, epoch: int = 0) -> Any:
        inputs, labels = honest(indices, epoch)
        return inputs + torch.from_numpy(noise.normal(size=tuple(inputs.shape))), labels

    data.train.batch = batch
    (cause,) = find_causes(Subject(make_job(data, 13, SingleProcess()), np.arange(13), 0, 2))
    assert cause.kind == "data"
    one = {"data": "a", "parameters": "b"}
    assert causes_of_processes(one, dict(one)) == []
    kinds = [cause.kind for cause in causes_of_processes(one, {"data": "c", "parameters": "d"})]
    assert kinds == ["data", "initial parameters"]


def test_largest_gap() -> None:
    """Fails when another tensor or element is named, or the measure is not of its own tensor."""
    one = {"large": torch.tensor([1000.0, 0.0]), "small": torch.tensor([[1.0, -4.0], [2.0, 3.0]])}
    other = {name: values.clone() for name, values in one.items()}
    assert largest_gap(one, other) == Gap()
    other["large"][1] = 1.0  # 1e-3 of its tensor
    other["small"][1, 0] = 2.5  # an eighth of its tensor
    found = largest_gap(one, other)
    assert found == Gap(0.125, "small", (1, 0), 2.0, 2.5)
    assert found.described() == "parameter small, index [1, 0]: 2 and 2.5"


def test_gap_of_special_values() -> None:
    """Fails when rounding of a tensor of zeros is a difference, or an infinity is none."""
    zeros, noise = torch.zeros(3, dtype=torch.float64), torch.full((3,), 1e-17, dtype=torch.float64)
    weights = torch.ones(3, dtype=torch.float64)
    one, other = {"bias": zeros, "weight": weights}, {"bias": noise, "weight": weights}
    assert largest_gap(one, other).relative < AGREEMENT
    assert largest_gap({"bias": zeros}, {"bias": noise}).relative == math.inf
    mask = torch.tensor([-math.inf, 0.0, math.nan])
    assert largest_gap({"mask": mask[:2]}, {"mask": mask[:2].clone()}) == Gap()
    assert largest_gap({"mask": mask[1:2]}, {"mask": mask[2:]}).relative == math.inf
    assert largest_gap(one, {"weight": weights}).relative == math.inf
    assert largest_gap(one, {**one, "bias": zeros[:2]}).relative == math.inf
    flags = torch.tensor([True, False])
    assert largest_gap({"flags": flags}, {"flags": ~flags}).relative == 1.0


def test_parameters_come_before_buffers_and_bits_count() -> None:
    """Fails when a buffer is named for a parameter, or 0 and -0 are the same bits."""
    one = {"parameter": {"weight": torch.ones(2)}, "tensor": {"running_mean": torch.ones(2)}}
    other = {
        "parameter": {"weight": torch.tensor([1.0, 1.5])},
        "tensor": {"running_mean": torch.zeros(2)},
    }
    assert gap_above(AGREEMENT, one, other).tensor == "weight"
    found = gap_above(0.7, one, other)
    assert (found.kind, found.tensor) == ("tensor", "running_mean")
    assert gap_above(1.0, one, other) is None
    zero, negative = (
        {"parameter": {"weight": torch.tensor([value])}, "tensor": {}} for value in (0.0, -0.0)
    )
    assert gap_above(0.0, zero, zero) is None
    assert gap_above(0.0, zero, negative) == Gap(0.0, "weight")


def test_bounds_only_narrow() -> None:
    """Fails when a search whose difference does not repeat would never end."""
    known = Parting(9, 6, Gap(), None)
    assert known.contains(Parting(8, 7, Gap(), None))
    assert known.contains(Parting(9, 8, Gap(), None))
    assert not known.contains(known)
    assert not known.contains(Parting(10, 9, Gap(), None))


def test_refused_configurations(tmp_path: Path) -> None:
    """Fails when another experiment for each N starts, or one of the problems is not reported."""
    config = tmp_path / "run.yaml"
    config.write_text("batch_size: 8\n")
    flags = ["--output=x", "--resume", "auto", "--rank-weights=1,2", "--optt=sgd"]
    finished = run(tmp_path, "verify-n", "-np=1,0,x", f"--json={tmp_path}/no/file", *TRAIN, *flags)
    assert finished.returncode == 2
    for text in ("'0' is not", "'x' is not", "two or more", "no such folder", "--output is chosen"):
        assert text in finished.stderr, text
    assert "--resume is chosen" in finished.stderr and "--optt: no such flag" in finished.stderr
    finished = run(tmp_path, "verify-n", "-np=2,2", *TRAIN, f"--config={config}", *flags[3:4])
    assert finished.returncode == 2
    for text in ("two or more", "--batch-size=8: is per worker", "--global-batch-size", "--rank-w"):
        assert text in finished.stderr, text
    finished = run(tmp_path, "verify-n", "-np=1,2")
    assert finished.returncode == 2 and "usage: hvdtrain verify-n" in finished.stderr


def test_more_workers_than_virtual_ones_are_refused() -> None:
    """Fails when N above V starts."""
    batch = BatchConfig(virtual_workers=4, micro_batch="auto")
    config = SimpleNamespace(batch=batch)
    assert unfit_for_every_n(config, (1, 4)) == []  # type: ignore[arg-type]
    (problem,) = unfit_for_every_n(config, (1, 4, 5))  # type: ignore[arg-type]
    assert "5 workers for --virtual-workers=4" in problem
    assert unfit_for_every_n(TrainConfig(), (1, 99)) == []
    fitted = TrainConfig(batch=BatchConfig(micro_batch="auto"))
    assert "--micro-batch=auto: may choose other passes" in unfit_for_every_n(fitted, (1, 2))[0]


LOGS = {
    "one process": (2, "header\nhvdtrain: error: --lr=x: bad\n--opt=y: bad\n", True),
    "gloo": (
        1,
        "[0]<stderr>:hvdtrain: error on rank 0 on vm: --lr=x: bad\n[0]<stderr>:--opt=y: bad\n"
        "[1]<stderr>:Terminated\nTraceback (most recent call last):\nExit code: 2\n",
        True,
    ),
    "mpi": (
        2,
        "[1,0]<stderr>:hvdtrain: error on rank 0 on vm: --lr=x: bad\n"
        "[1,0]<stderr>:--opt=y: bad\n-----\n  Exit code:    2\n",
        True,
    ),
    "a failure": (1, "[0]<stderr>:hvdtrain: error on rank 0 on vm: NaN\nExit code: 1\n", False),
}


@pytest.mark.parametrize(("code", "log", "refused"), LOGS.values(), ids=LOGS)
def test_a_refusal_is_read_from_the_log(code, log, refused) -> None:
    """Fails when a refused configuration passes for a failure of training, or its text is cut."""
    trial = Trial.__new__(Trial)
    trial._job = SimpleNamespace(exit_code=lambda: code)  # type: ignore[assignment]
    trial.log = lambda: log  # type: ignore[method-assign]
    assert trial.refusal() == ("--lr=x: bad\n--opt=y: bad" if refused else None)


def test_the_end_of_a_log_is_that_of_the_workers() -> None:
    """Fails when horovodrun's traceback hides why a worker has failed."""
    trial = Trial.__new__(Trial)
    trial.log = lambda: LOGS["a failure"][1] + "Traceback\n" * 30  # type: ignore[method-assign]
    assert trial.last_lines().endswith("NaN")
