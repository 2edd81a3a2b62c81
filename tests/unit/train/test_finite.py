"""Gradients, parameters and state that are not finite: found at once, named, and never saved."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.audit import Audits
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.exchange import SingleProcess
from hvdtrain.train.job import Job
from hvdtrain.train.metering import Meter
from hvdtrain.train.progress import State
from hvdtrain.train.state import capture, find_not_finite, load_optimizers
from hvdtrain.train.update import Update, not_finite
from tests.unit.jobs import made_up_data, make_job, one_step, plain, run_job, with_batch_norm
from tests.unit.threads import ThreadExchange, connect, run_ranks

SINGLE = SingleProcess()
MARK = 77.0  # the first pixel of a sample at which a root has no derivative
BIG = 1e38  # of float32's 3.4e38


class Root(nn.Module):
    """Adds sqrt(root^2) to all scores of a sample, and sqrt(0) to those of a marked one."""

    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Parameter(torch.ones(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        marked = images.flatten(1)[:, 0] == MARK
        return torch.sqrt(self.root.square() * (~marked).to(images.dtype))[:, None]


class Rooted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = plain(), Root()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images) + self.head(images)


class Overflowing(nn.Module):
    """The gradient of `root` is finite on each of two ranks, and their sum is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.root = plain(), nn.Parameter(torch.zeros(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros_like(self.body(images))
        scores[:, 0] = 35 * (BIG * self.root)  # all scores are 0: each class has probability 1/7
        return scores + 0 * self.body(images)


def state_of(job: Job) -> Any:
    return copy.deepcopy((job.model.state_dict(), job.optimizers[0].state_dict()["state"]))


def refused_step(job: Job, exchange: Any, samples: int) -> str:
    """The error of the second step, once it is sure that it was not made."""
    job = job.distributed(exchange)
    one_step(job, exchange, Audits(), 1, np.arange(samples, 2 * samples))
    before = state_of(job)
    with pytest.raises(TrainingError) as caught:
        one_step(job, exchange, Audits(), 2, np.arange(samples))
    torch.testing.assert_close(state_of(job), before, rtol=0, atol=0)
    return str(caught.value)


def test_a_gradient_that_is_not_finite_ends_the_run_at_its_step() -> None:
    """Fails if it reaches the parameters or momentum, or parameter, step or rank are not named."""
    data = made_up_data(24)
    data.train.inputs[5, 0, 0, 0] = MARK
    reported = refused_step(make_job(data, 12, SINGLE, build=Rooted), SINGLE, 12)
    assert reported.startswith("the gradient of head.root is not finite at step 2 on rank 0, while")
    assert "(1 of 5 parameters; the last is head.root)" in reported


@pytest.mark.parametrize("rank", [0, 2])
def test_the_rank_is_named_on_all_ranks(rank: int) -> None:
    """Fails if ranks end differently, or another rank is named than the one it came from."""
    data = made_up_data(24)
    data.train.inputs[2 * rank + 1, 0, 0, 0] = MARK  # in the first of two micro-batches
    exchanges = connect(3)
    jobs = [make_job(data, 12, ex, build=Rooted, accum=2) for ex in exchanges]
    reported = set(run_ranks(exchanges, lambda ex: refused_step(jobs[ex.rank], ex, 12)))
    assert len(reported) == 1 and f"is not finite at step 2 on rank {rank}, while" in reported.pop()


def test_a_loss_that_is_not_finite_is_the_cause() -> None:
    """Fails if the gradient is blamed for what the loss has begun."""
    data = made_up_data(24)
    data.train.inputs[7] = torch.inf
    exchanges = connect(2)
    jobs = [make_job(data, 12, ex) for ex in exchanges]
    for text in run_ranks(exchanges, lambda ex: refused_step(jobs[ex.rank], ex, 12)):
        assert text.startswith("the loss is not finite at step 2 on rank 1 (loss nan)")


def test_a_sum_that_overflows_is_no_ranks_fault() -> None:
    """Fails if a rank is named whose own gradient was finite."""
    data = made_up_data(24, torch.float32)
    data.train.labels[:] = 1 + data.train.labels % 6  # none is of class 0
    exchanges = connect(2)
    settings = {"build": Overflowing, "dtype": torch.float32, "lr": 0.0}
    jobs = [make_job(data, 12, ex, **settings) for ex in exchanges]

    def step(exchange: ThreadExchange) -> str:
        with pytest.raises(TrainingError) as caught:
            job = jobs[exchange.rank].distributed(exchange)
            one_step(job, exchange, Audits(), 1, np.arange(12))
        return str(caught.value)

    for text in run_ranks(exchanges, step):
        assert "gradient of root is not finite at step 1 after summation, although finite" in text


def test_finite_values_whose_sum_overflows_are_finite() -> None:
    """Fails if the sum alone is believed, or an infinity or NaN is missed, or sparse ones are."""
    large = torch.full((9,), 3e38)
    sparse = torch.sparse_coo_tensor(
        [[1, 3]], torch.tensor([1.0, torch.nan]), (5,), check_invariants=True
    )
    wide = torch.zeros(2, 3, dtype=torch.float64)
    tensors = {"large": large, "wide": wide}
    assert not_finite(tensors) == [] == not_finite({})
    spoiled = {"inf": -torch.inf * torch.ones(1), "both": torch.tensor([torch.inf, -torch.inf])}
    spoiled |= {"sparse": sparse, "imaginary": torch.tensor([complex(1, torch.nan), 2j])}
    assert not_finite(tensors | spoiled) == list(spoiled)


class Counting(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("place", [0, 1234, 2999, 3000, 3001, 3002])
def test_a_bad_value_among_many_small_tensors_is_named(place: int) -> None:
    """Fails if a tensor that is checked together with others of its shape hides a bad value, or
    takes operations of its own; or if scalars, large and empty tensors are left out.
    """
    shapes = [(3,) if number % 2 else (2, 2) for number in range(3000)]
    tensors = {str(n): torch.ones(it) for n, it in enumerate([*shapes, (), (1 << 13,), (1,), (0,)])}
    with Counting() as counting:
        assert not_finite(tensors) == []
    assert counting.count < 40
    tensors[str(place)].view(-1)[-1] = math.nan
    assert not_finite(tensors) == [str(place)]


def test_the_norm_to_clip_by_keeps_its_bits() -> None:
    """Fails if the norm that updates depend on is added in another order than torch's, or the one
    that is only recorded differs by more than rounding.
    """
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(n % 7 + 1) for n in range(500)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms = []
    for limit in (1e-3, None):
        for number, parameter in enumerate(model):
            parameter.grad = parameter.detach() * (number + 1)
        expected = torch.nn.utils.get_total_norm([it.grad for it in model])
        update = Update(model, torch.device("cpu"), clip_grad=limit)
        norms.append((update.apply([optimizer], measure=True), expected))
    (clipped, exactly), (measured, nearly) = norms
    assert torch.equal(clipped, exactly)
    torch.testing.assert_close(measured, nearly)


def masked() -> nn.Module:
    """With batch norm, a mask of infinities that two layers share, and a frozen parameter."""
    model = with_batch_norm()
    mask = torch.full((3, 3), -torch.inf)
    model[0].register_buffer("mask", mask)
    model[4].register_buffer("mask", mask)
    model.fence = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)
    return model


def trained(exchange: Any) -> Job:
    return make_job(made_up_data(20), 8, exchange, build=masked, total_steps=3, ema_decay=0.5)


def spoil_average(job: Job) -> None:
    assert job.update.average is not None
    job.update.average.module[4].bias.data[2] = torch.inf


SPOILED = {
    "the parameter 6.bias is not finite": lambda job: job.model[6].bias.data[3:4].fill_(torch.nan),
    "the optimizer's momentum_buffer of 4.weight is not finite": lambda job: (
        job.optimizers[0].state[job.model[4].weight]["momentum_buffer"].fill_(torch.inf)
    ),
    "the moving average of 4.bias is not finite": spoil_average,
    "1.running_var of rank 0 is not finite": lambda job: job.model[1].running_var.fill_(torch.nan),
}


@pytest.mark.parametrize("expected", SPOILED)
def test_a_state_that_is_not_finite_is_never_saved(expected: str) -> None:
    """Fails if it is captured, a rank goes on, or it is not said what it is."""
    exchanges = connect(2)
    jobs = [trained(ex) for ex in exchanges]

    def work(exchange: ThreadExchange) -> str:
        job = jobs[exchange.rank]
        run_job(job, exchange)
        SPOILED[expected](job)
        with pytest.raises(TrainingError) as caught:
            capture(job, State(Meter(exchange, 20), 3, 20), exchange, {})
        return str(caught.value)

    for text in run_ranks(exchanges, work):
        assert text.startswith(f"after step 3 {expected}") and "it is not saved" in text


def test_the_parameter_of_an_optimizer_with_groups_is_named() -> None:
    """Fails if the optimizer's own order of parameters, by which its state is numbered, is taken
    for that of the model; or if a resume gives the state to other parameters.
    """
    job = trained(SINGLE)
    late, early = (list(job.model[layer].parameters()) for layer in (6, 4))
    groups = [{"params": late}, {"params": early, "lr": 0.01}]
    job = replace(job, optimizers=(torch.optim.SGD(groups, lr=0.1, momentum=0.9),)).distributed(
        SINGLE
    )
    snapshot = run_job(job, SINGLE).snapshot
    assert snapshot is not None
    order = ["6.weight", "6.bias", "4.weight", "4.bias"]
    assert snapshot.state["optimizer_order"] == order
    for number, name in enumerate(order):
        state = copy.deepcopy(snapshot.state)
        state["optimizer"]["state"][number]["momentum_buffer"].fill_(torch.nan)
        expected = f"the optimizer's momentum_buffer of {name} is not finite"
        assert find_not_finite(state) == expected
    other = torch.optim.SGD(reversed(groups), lr=0.1, momentum=0.9)
    match = "parameter 1 of the optimizer is 4.weight, and was 6.weight when the checkpoint was"
    with pytest.raises(UsageError, match=match):
        load_optimizers(snapshot.state, job.model, [other], [])
    assert not other.state
    same = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    load_optimizers(snapshot.state, job.model, [same], [])
    assert len(same.state) == len(order)


def test_masks_of_infinities_are_saved() -> None:
    """Fails if a constant buffer is taken for a parameter, or a frozen one must be finite."""
    snapshot = run_job(trained(SINGLE), SINGLE).snapshot
    assert snapshot is not None and snapshot.state["model"]["4.mask"].isinf().all()
    assert find_not_finite(snapshot.state) is None


def test_a_skipped_fp16_step_is_saved() -> None:
    """Fails if infinite gradients that the loss scale takes care of end a run or a checkpoint."""
    data = made_up_data(12, torch.float32)
    job = make_job(data, 12, SINGLE, dtype=torch.float32, amp="fp16")
    state = job.update.state_dict()
    state["scaler"]["scale"] = 2.0**40
    job.update.load_state_dict(state)
    one_step(job, SINGLE, Audits(), 1, np.arange(12))
    assert job.update.state_dict()["scaler"]["scale"] == 2.0**39  # it was skipped
    assert capture(job, State(Meter(SINGLE, 12), 1, 12), SINGLE, {}) is not None
