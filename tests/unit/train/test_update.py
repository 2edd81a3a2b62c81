"""One step: whose gradient it is, and what becomes of it on the way into the parameters."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from hvdtrain.audit import Audits
from hvdtrain.errors import UsageError
from hvdtrain.exchange import SingleProcess
from hvdtrain.train.job import Job
from hvdtrain.train.metering import COUNT, LOSS, NOT_FINITE, STOP
from tests.unit.jobs import (
    CLASSES,
    evaluate_on,
    made_up_data,
    make_job,
    one_step,
    run_job,
    with_batch_norm,
)
from tests.unit.threads import ThreadExchange, connect, run_ranks

SINGLE = SingleProcess()
RELATIVE = 1e-12  # float64: some thousand roundings of 1.1e-16, of each tensor's largest value


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (actual[name] - tensor).abs().max() / tensor.abs().max()
        assert error <= RELATIVE, (name, float(error))


def gradient_of_the_mean(job: Job, indices: np.ndarray) -> dict[str, torch.Tensor]:
    """By hand, on a copy: the mean of the losses of all samples, in one piece."""
    model = copy.deepcopy(job.model)
    inputs, labels = job.data.train.batch(indices)
    functional.cross_entropy(model(inputs), labels).backward()
    return gradients(model)


def step_gradient(job: Job, indices: np.ndarray, exchange: Any = SINGLE) -> dict[str, torch.Tensor]:
    one_step(job, exchange, Audits(), 1, indices).total()
    return gradients(job.model)


@pytest.mark.parametrize("samples", [1, 5, 12])
@pytest.mark.parametrize("accum", [1, 2, 3, 7])
def test_accumulation_gives_the_gradient_of_the_mean(samples: int, accum: int) -> None:
    """Fails when passes are summed with wrong weights, or one without samples counts."""
    job = make_job(made_up_data(20), 12, SINGLE, accum=accum)
    indices = np.arange(20 - samples, 20)
    expected = gradient_of_the_mean(job, indices)
    assert_same(step_gradient(job, indices), expected)


class Words(nn.Module):
    """Looks up rows of a table for each image, some of them twice."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, sparse=sparse)
        self.output = nn.Linear(6, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = (images.flatten(1)[:, :4].abs() * 10).long() % 11
        return self.output(self.table(torch.cat([rows, rows[:, :2]], dim=1)).sum(1))


def test_sparse_gradients_train_as_dense_ones() -> None:
    """Fails if a layer with sparse gradients learns something else, or breaks off at the norm, in
    momentum, or when its state is kept.
    """
    states = []
    for sparse in (False, True):
        job = make_job(made_up_data(20), 8, SINGLE, build=lambda s=sparse: Words(s), accum=2)
        ran = run_job(job.distributed(SINGLE), SINGLE)
        assert ran.snapshot is not None and ran.outcome is not None
        assert not job.model.table.weight.grad.is_sparse
        states.append(ran.snapshot.state)
    dense, made_dense = ({**s["model"], **flat(s["optimizer"]["state"])} for s in states)
    assert_same(made_dense, dense)


def flat(state: dict[int, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{name} {number}": t for number, own in state.items() for name, t in own.items()}


def test_an_optimizer_for_sparse_gradients_alone_is_refused() -> None:
    """Fails if SparseAdam begins, and breaks off in its first step."""
    model = Words(sparse=True)
    optimizer = torch.optim.SparseAdam([model.table.weight])
    with pytest.raises(UsageError, match=r"SparseAdam: .* Use torch.optim.Adam"):
        SINGLE.distribute(optimizer, model)


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (0, 2, 1), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("samples", [1, 3, 13])
def test_shares_give_the_gradient_of_the_mean(accum: int, weights, samples: int) -> None:
    """Fails when uneven, empty or weighted shares change the averaged gradient."""
    data = made_up_data(20)
    indices = np.arange(20 - samples, 20)
    expected = gradient_of_the_mean(make_job(data, 13, SINGLE), indices)
    exchanges = connect(len(weights))
    jobs = [make_job(data, 13, ex, accum=accum, weights=weights) for ex in exchanges]
    for result in run_ranks(exchanges, lambda ex: step_gradient(jobs[ex.rank], indices, ex)):
        assert_same(result, expected)


@pytest.mark.parametrize("accum", [1, 3])
def test_clipping_acts_once_on_the_whole_gradient(accum: int) -> None:
    """Fails when passes are clipped one by one, the gradient twice, or a small one at all."""
    indices = np.arange(12)
    data = made_up_data(12)
    expected = gradient_of_the_mean(make_job(data, 12, SINGLE), indices)
    norm = torch.cat([tensor.flatten() for tensor in expected.values()]).norm()
    for limit in (float(norm) / 5, float(norm) * 1.01):
        job = make_job(data, 12, SINGLE, accum=accum, clip_grad=limit)
        factor = min(1.0, limit / (float(norm) + 1e-6))  # as torch documents it
        clipped = {name: tensor * factor for name, tensor in expected.items()}
        assert_same(step_gradient(job, indices), clipped)


def test_the_moving_average_is_the_one_by_hand() -> None:
    """Fails when the average starts elsewhere, decays otherwise, or lags a step behind."""
    decay = 0.7
    job = make_job(made_up_data(12), 12, SINGLE, ema_decay=decay, build=with_batch_norm)
    average: dict[str, torch.Tensor] = {}
    for step in range(1, 6):
        one_step(job, SINGLE, Audits(), step, np.arange(12))
        now = {name: p.detach().clone() for name, p in job.model.named_parameters()}
        average = {
            name: decay * average[name] + (1 - decay) * value if average else value
            for name, value in now.items()
        }
    assert job.update.average is not None
    averaged = job.update.average.module
    for name, parameter in averaged.named_parameters():
        torch.testing.assert_close(parameter.detach(), average[name], rtol=1e-14, atol=1e-14)
        assert not torch.equal(parameter, now[name])
    for name, buffer in job.model.named_buffers():
        assert torch.equal(averaged.get_buffer(name), buffer), name
    with job.evaluated_model() as model:
        assert model is averaged


def test_synchronised_layers_go_together_with_the_average() -> None:
    """Fails when the copy that the average is made of loses what its layers exchange over."""
    settings = {"build": with_batch_norm, "sync_bn": True, "ema_decay": 0.5}
    exchanges = connect(2)
    data = made_up_data(12)
    jobs = [make_job(data, 12, ex, **settings) for ex in exchanges]

    def work(exchange: ThreadExchange) -> None:
        job = jobs[exchange.rank]
        one_step(job, exchange, Audits(), 1, np.arange(12))
        with job.evaluated_model() as model:
            evaluate_on(model, data, exchange)

    run_ranks(exchanges, work)
    averages = [job.update.average.module for job in jobs if job.update.average]
    torch.testing.assert_close(averages[0].state_dict(), averages[1].state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_reduced_precision_trains(amp: str) -> None:
    """Fails when the loss does not fall, parameters lose their type, or nothing is cast."""
    data = made_up_data(24, torch.float32)
    job = make_job(data, 24, SINGLE, dtype=torch.float32, lr=0.1, total_steps=30, amp=amp, accum=2)
    seen = set()
    job.model[1].register_forward_hook(lambda module, given, output: seen.add(output.dtype))
    losses = [
        float(one_step(job, SINGLE, Audits(), step, np.arange(24)).total()[LOSS]) / 24
        for step in range(1, 31)
    ]
    assert losses[-1] < 0.8 * losses[0]
    assert {parameter.dtype for parameter in job.model.parameters()} == {torch.float32}
    assert seen == {torch.bfloat16 if amp == "bf16" else torch.float16}


def test_infinite_fp16_gradients_skip_the_step() -> None:
    """Fails when an overflow reaches parameters or momentum, or the loss scale stays as it is."""
    data = made_up_data(12, torch.float32)
    job = make_job(data, 12, SINGLE, dtype=torch.float32, amp="fp16", clip_grad=1.0)
    one_step(job, SINGLE, Audits(), 1, np.arange(12))
    state = job.update.state_dict()
    state["scaler"]["scale"] = 2.0**40
    job.update.load_state_dict(state)
    before = copy.deepcopy((job.model.state_dict(), job.optimizers[0].state_dict()["state"]))
    sums = one_step(job, SINGLE, Audits(), 2, np.arange(12)).total()
    after = (job.model.state_dict(), job.optimizers[0].state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert math.isfinite(sums[LOSS]) and sums[NOT_FINITE] == sums[STOP] == 0
    assert job.update.state_dict()["scaler"]["scale"] == 2.0**39
    for step in range(3, 45):
        one_step(job, SINGLE, Audits(), step, np.arange(12))
    assert not torch.equal(job.model[1].weight, before[0]["1.weight"])


def test_the_learning_rate_of_every_step_is_the_schedules() -> None:
    """Fails when a step uses the rate of its neighbour, or the one that is reported differs."""
    job = make_job(made_up_data(10), 4, SINGLE, total_steps=7)
    used: list[float] = []
    step = job.optimizers[0].step

    def stepping(*args: Any, **kwargs: Any) -> Any:
        used.extend(group["lr"] for group in job.optimizers[0].param_groups)
        return step(*args, **kwargs)

    job.optimizers[0].step = stepping  # type: ignore[method-assign]
    ran = run_job(job, SINGLE)
    assert used == [job.schedule(number) for number in range(7)]
    reported = [(record[1].step, record[-1]) for record in ran.recording.records]
    assert reported and all(lr == job.schedule(number - 1) for number, lr in reported)


@pytest.mark.parametrize("weights", [(1, 1), (0, 3, 1), (1, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("accum", [1, 3])
def test_sync_bn_gives_the_same_step_for_every_number_of_ranks(weights, accum: int) -> None:
    """Fails when a network with batch norm learns something else on 2, 3 or 4 ranks."""
    data, indices = made_up_data(11), np.arange(11)
    settings = {"build": with_batch_norm, "sync_bn": True, "accum": accum}
    alone = make_job(data, 11, SINGLE, **settings)
    step_gradient(alone, indices)
    exchanges = connect(len(weights))
    jobs = [make_job(data, 11, ex, weights=weights, **settings) for ex in exchanges]
    run_ranks(exchanges, lambda ex: step_gradient(jobs[ex.rank], indices, ex))
    for job in jobs:
        torch.testing.assert_close(
            job.model.state_dict(), alone.model.state_dict(), rtol=1e-11, atol=1e-13
        )


def images_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, CLASSES)
    )


def test_a_pass_without_samples_is_left_out_with_sync_bn() -> None:
    """Fails when a last batch smaller than --grad-accum-steps ends in an error of batch norm."""
    job = make_job(made_up_data(12), 12, SINGLE, build=images_norm, sync_bn=True, accum=3)
    indices = np.arange(2)
    sums = one_step(job, SINGLE, Audits(), 1, indices).total()
    assert sums[COUNT] == 2 and job.model[1].num_batches_tracked == 2
