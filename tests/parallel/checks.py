"""Run by horovodrun on every rank: each check here is a test of its own (see test_checks.py).

A check raises on any rank when what it guards is broken; the ranks then inform one another, and go
on with the next check together. Rank 0 prints one JSON line a check.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from PIL import Image

import hvdtrain
from hvdtrain.audit import Auditor, AuditRecord, Audits
from hvdtrain.audit.checks import BoundCheck, ExactCheck
from hvdtrain.cli import make_parser
from hvdtrain.cli.evaluate import VALUES
from hvdtrain.data import GlobalBatchSampler, Shares, TensorSplit, feeding
from hvdtrain.data.feeding import Feed, StepData
from hvdtrain.data.splits import Dataset
from hvdtrain.errors import (
    AgreedFailure,
    AuditMismatch,
    TrainingError,
    TransportError,
    UsageError,
)
from hvdtrain.exchange import AVERAGE, SUM, Exchange, Reduction, SingleProcess, join
from hvdtrain.exchange import horovod as over_horovod
from hvdtrain.exchange.agreement import check_equal_on_all_ranks, run_on_all
from hvdtrain.exchange.connect import ENVIRONMENT_DEFAULTS
from hvdtrain.exchange.horovod import HorovodExchange, _Pending
from hvdtrain.exchange.objects import HEAD_BYTES, is_small, pickled
from hvdtrain.exchange.waiting import thread_ids
from hvdtrain.models import build_model
from hvdtrain.pulse import RING_TOKEN, Pulse
from hvdtrain.ring import all_reduce, gamma
from hvdtrain.run import prediction
from hvdtrain.run.joined import JoinedWorkers
from hvdtrain.run.trained import evaluate
from hvdtrain.tasks import Sums
from hvdtrain.tasks import classification as classifier
from hvdtrain.tensors import params_sha256
from hvdtrain.topology import Topology
from hvdtrain.train.batchnorm import averaged_statistics, convert_to_sync
from hvdtrain.train.evaluate import Interrupted
from hvdtrain.train.job import Intervals, Job
from hvdtrain.train.metering import Meter, StepSums
from hvdtrain.train.optimizers import BY_NAME, UNSUITABLE_ALONE
from hvdtrain.train.progress import State
from hvdtrain.train.state import capture
from hvdtrain.train.update import Update
from tests.data.make import CODE
from tests.data.small import Pictures
from tests.rings import lengths_for, rank_data
from tests.unit.jobs import classification, evaluate_on, one_step

CPU = torch.device("cpu")
RUN = Path(__file__).parents[1] / "data" / "0.2.0"
SHAPE = (1, 28, 28)
CLASSES = 10


def made_up_images(samples: int) -> Dataset:
    """Images and labels without pattern, so that losses differ and a wrong weight shows."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn((samples, *SHAPE), generator=generator, dtype=torch.float64)
    inputs *= torch.linspace(0.1, 4, samples, dtype=torch.float64)[:, None, None, None]
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    split = TensorSplit(inputs, labels)
    return Dataset("made up", SHAPE, CLASSES, split, split)


def make_job(
    dataset: Dataset, name: str = "lenet", accum_steps: int = 1, shares: Shares | None = None
) -> Job:
    torch.manual_seed(11)
    model = build_model(name, SHAPE, CLASSES, torch.float64)
    task = classification(dataset)
    shares = shares or Shares(1)
    sampler = GlobalBatchSampler(len(dataset.train), len(dataset.train), seed=0)
    return Job(
        model=model,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.0),),
        update=Update(model, CPU),
        task=task,
        data=task.build_data(),
        feed=Feed(dataset.train, sampler, shares, accum_steps, everyone=False),
        valid_shares=shares,
        schedule=lambda step: 0.0,
        total_steps=1,
        device=CPU,
        intervals=Intervals(log=1, evaluation=1),
    )


def distributed(job: Job, exchange: Exchange) -> Job:
    fits = len(job.feed.shares.weights) == exchange.size
    shares = job.feed.shares if fits else Shares(exchange.size)
    return replace(job, feed=replace(job.feed, shares=shares)).distributed(exchange)


def ring_sums_are_right(exchange: Exchange) -> None:
    """The ring that audits use (TCP under gloo, MPI under mpi), between real processes."""
    transport = exchange.ring()
    for length in lengths_for(exchange.size):
        for dtype in (np.int64, np.float32, np.float64):
            data = [rank_data(rank, length, dtype) for rank in range(exchange.size)]
            result = all_reduce(data[exchange.rank], transport)
            exact = np.sum(np.array(data, dtype=np.longdouble), axis=0)
            magnitudes = np.sum(np.abs(np.array(data, dtype=np.longdouble)), axis=0)
            allowed = 0 if dtype == np.int64 else gamma(exchange.size, dtype) * magnitudes
            assert (np.abs(result - exact) <= allowed).all(), (length, dtype)
    transport.close()


def the_rings_secret_is_the_launchers(exchange: Exchange) -> None:
    """Where a launcher has given one, what travels through Horovod counts for nothing."""
    if exchange.controller == "mpi":
        return  # no sockets, no secret
    try:
        os.environ[RING_TOKEN] = "of one launch"
        exchange.ring().close()
        os.environ[RING_TOKEN] = f"of rank {exchange.rank}"
        expect(TransportError, f"(seen by rank {exchange.rank})", exchange.ring)
        if exchange.rank:
            del os.environ[RING_TOKEN]
        expect(UsageError, f"ranks {[*range(1, exchange.size)]} do not have it", exchange.ring)
    finally:
        os.environ.pop(RING_TOKEN, None)


def averaged_gradient_is_that_of_the_global_batch(exchange: Exchange) -> None:
    """Against one process's gradient of the mean loss, for even, uneven and empty shares, where
    gradients travel together, some alone (above 10 kB), and all alone.
    """
    size = exchange.size
    reductions = (SUM, AVERAGE, *(replace(SUM, bucket_bytes=limit) for limit in (0, 10_000)))
    uneven = Shares(size, [0.0, *range(1, size)])  # rank 0 gets nothing
    cases = [
        ("lenet", samples, 1, None) for samples in (1, size - 1, size, size + 1, 32 * size + 5)
    ]
    cases += [("mlp", size - 1, 1, None), ("lenet", 9 * size + 1, 1, uneven)]
    cases += [("lenet", samples, 3, None) for samples in (1, 2 * size, 9 * size + 1)]
    for (name, samples, accum_steps, shares), reduction in product(cases, reductions):
        dataset = made_up_images(samples)
        indices = np.arange(samples)
        alone = make_job(dataset, name).distributed(SingleProcess())
        one_step(alone, SingleProcess(), Audits(), 1, indices)
        together = make_job(dataset, name, accum_steps, shares)
        together = distributed(replace(together, reduction=reduction), exchange)
        one_step(together, exchange, Audits(), 1, indices).total()
        for (key, expected), actual in zip(
            alone.model.named_parameters(), together.model.parameters(), strict=True
        ):
            largest = expected.grad.abs().max()
            error = (actual.grad - expected.grad).abs().max()
            case = (name, samples, accum_steps, reduction, key)
            assert error <= 1e-12 * largest, (case, error / largest)


def sparse_gradients_train_as_on_one_process(exchange: Exchange) -> None:
    """For every size of share, also empty ones: with momentum, norm, state and the exact audit."""
    size = exchange.size
    ring = exchange.ring()
    try:
        check = ExactCheck(ring, exchange.summation_order(), SUM)
    except UsageError:  # of Open MPI's default at this N
        check = BoundCheck(ring, SUM)
    for samples, accum_steps in ((1, 1), (size - 1, 2), (size, 1), (4 * size + 1, 3)):
        dataset = made_up_images(samples)
        learned, records = [], []
        for where, sparse in ((SingleProcess(), False), (exchange, True)):
            job = make_job(dataset, accum_steps=accum_steps if where is exchange else 1)
            model = Words(sparse).double()
            update = Update(model, CPU, clip_grad=0.5)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            job = replace(job, model=model, optimizers=(optimizer,), update=update)
            job = distributed(replace(job, schedule=lambda step: 0.1, reduction=SUM), where)
            audit = Audits()
            if where is exchange:
                messages = partial(job.messages, SUM.bucket_bytes)
                audit = Auditor(model, ring, 1, records.append, check, messages=messages)
            for step in (1, 2, 3):
                sums = one_step(job, where, audit, step, np.arange(samples))
                sums.total()
                assert sums.gradient_norm > 0
            kept = capture(job, State(Meter(where, samples), 3, samples), where, {})
            assert (kept is None) == (where.rank > 0)
            learned.append([parameter.detach() for parameter in model.parameters()])
        assert [record.ok for record in records] == [True] * 3
        for alone, together in zip(*learned, strict=True):
            close(together, alone)


class Words(torch.nn.Module):
    """Looks up rows of a table for each image, some of them twice."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = torch.nn.Embedding(11, 6, sparse=sparse)
        self.output = torch.nn.Linear(6, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = (images.flatten(1)[:, :4].abs() * 10).long() % 11
        return self.output(self.table(torch.cat([rows, rows[:, :2]], dim=1)).sum(1))


def horovods_threads_do_not_push_aside_who_computes(exchange: Exchange) -> None:
    """Its threads are scheduled in batches, and the one that computes is not."""
    policies = {os.sched_getscheduler(thread) for thread in thread_ids()}
    assert os.SCHED_BATCH in policies
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def initial_state_is_that_of_rank_0(exchange: Exchange) -> None:
    """Weight decay and a state of its own must not move the parameters of other ranks."""
    torch.manual_seed(100 + exchange.rank)
    model = torch.nn.Linear(5, 3)
    model.register_buffer("mask", torch.arange(5) > exchange.rank)  # Horovod has no bool
    before = params_sha256(model)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1 * (1 + exchange.rank), momentum=0.9, weight_decay=0.5
    )
    wrapped = exchange.distribute(optimizer, model)
    of_rank_0 = exchange.all_gather_object(before, "test.before")[0]
    assert params_sha256(model) == of_rank_0
    assert wrapped.param_groups[0]["lr"] == 0.1
    if exchange.size > 1 and exchange.rank > 0:
        assert before != of_rank_0  # else the check could not fail


OPTIMIZERS = [
    *((BY_NAME[name], {}) for name in sorted(BY_NAME.keys() - UNSUITABLE_ALONE.keys())),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.AdamW, {"foreach": True, "betas": (0.7, 0.8)}),
    (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
]


class Trained:
    """Two parameters in groups of their own, whose gradients are whole numbers: sums of them are
    exact in any order. Its schedule is built before it is distributed.
    """

    def __init__(self, kind: type[torch.optim.Optimizer], options: dict[str, object]) -> None:
        generator = torch.Generator().manual_seed(5)
        self.model = torch.nn.ParameterDict(
            {
                name: torch.nn.Parameter(torch.randn(shape, generator=generator).double())
                for name, shape in (("weight", (3, 2)), ("bias", (3,)))
            }
        )
        groups = [{"params": [self.model["weight"]], "lr": 0.02}, {"params": [self.model["bias"]]}]
        if "weight_decay" in kind(list(self.model.values()), lr=0.1, **options).defaults:
            groups[0]["weight_decay"] = 0.1
        self.optimizer = kind(groups, lr=0.1, **options)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.calls = 0
        self.optimizer.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self.calls += 1

    def step(self, step: int, ranks: list[int]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.model.values():
            place = torch.arange(parameter.numel(), dtype=torch.float64).view_as(parameter)
            terms = [(7 * rank + 3 * step + 2 * place) % 11 - 4 for rank in ranks]
            (parameter * sum(terms)).sum().backward()
        self.optimizer.step()
        self.schedule.step()


def optimizers_go_on_from_the_state_of_rank_0(exchange: Exchange) -> None:
    """To the bit as one process does: what any rank had made of its own optimizer before, groups,
    defaults, hooks and a schedule that was built before.
    """
    everyone = list(range(exchange.size))
    for kind, options in OPTIMIZERS:
        alone, together = Trained(kind, options), Trained(kind, options)
        for step in range(2):
            alone.step(step, [0])
        for step in range([2, 0, 1, 3][exchange.rank]):  # rank 1 has no state at all
            together.step(step, [exchange.rank])
        if exchange.rank > 0:  # of a schedule each rank keeps its own count
            together.schedule.load_state_dict(alone.schedule.state_dict())
        given = exchange.distribute(together.optimizer, together.model, 1, SUM)
        for step in range(2, 5):
            alone.step(step, everyone)
            together.step(step, [exchange.rank])
        case = (kind.__name__, options)
        assert given is together.optimizer, case
        assert together.calls == [5, 3, 4, 6][exchange.rank], case
        defaults = alone.optimizer.defaults  # torch adds to them on loading
        assert {name: given.defaults[name] for name in defaults} == defaults, case
        found, expected = given.state_dict(), alone.optimizer.state_dict()
        assert found["param_groups"] == expected["param_groups"], case
        for pair in (found["state"], expected["state"]), (together.model, alone.model):
            torch.testing.assert_close(*map(dict, pair), rtol=0, atol=0, msg=str(case))


def clipping_is_that_of_one_process(exchange: Exchange) -> None:
    """The norm is that of the reduced gradient; each step is reduced, and audited, once."""
    join(lambda: exchange)
    size, samples = exchange.size, 5 * exchange.size
    inputs = torch.randn((2, samples, 4), generator=torch.Generator().manual_seed(4)).double()
    for accum_steps in (1, 2):
        torch.manual_seed(8)
        alone, together = (torch.nn.Linear(4, 3).double() for _ in range(2))
        alone.load_state_dict(together.state_dict())
        own = torch.from_numpy(Shares(size).of(np.arange(samples), exchange.rank))
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        optimizer = torch.optim.SGD(together.parameters(), lr=0.1)
        for wrong in (-1, 1.5, True, None):
            call = partial(hvdtrain.distribute, together, optimizer, accum_steps, wrong)
            expect(UsageError, f"bucket_bytes={wrong!r}: must be 'auto', or an int >= 0", call)
        optimizer = hvdtrain.distribute(together, optimizer, accum_steps)
        audit = hvdtrain.GradientAudit(together, optimizer, every=1, evidence=None)
        for step in range(3):
            plain.zero_grad()
            optimizer.zero_grad()
            for batch in inputs[:accum_steps] * (step + 1):
                alone(batch).square().sum().backward()
                (together(batch[own]).square().sum() * size).backward()
            expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            close(hvdtrain.clip_grad_norm_(optimizer, 0.5), expected)
            if step == 1:  # reduced already, and not once more
                again = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
                close(hvdtrain.clip_grad_norm_(optimizer, 0.5), again)
            plain.step()
            optimizer.step()
            for one, other in zip(together.parameters(), alone.parameters(), strict=True):
                close(one, other)
        assert audit.checked == 3
        audit.close()
    expect(UsageError, "does not reduce", lambda: hvdtrain.clip_grad_norm_(plain, 1.0))


def gradients_on_their_way_must_not_be_touched(exchange: Exchange) -> None:
    """Code that clips, scales, replaces or drops them too early, and what `step` cannot do; also
    where they still wait for a layer of their bucket that is unused.
    """
    for has_unused_layer in (False, True):
        model = torch.nn.Linear(5, 3)
        if has_unused_layer:
            model.add_module("unused", torch.nn.Linear(2, 2))
        _refuses_early_changes(exchange, model)


def _refuses_early_changes(exchange: Exchange, model: torch.nn.Linear) -> None:
    optimizer = exchange.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def replace_one() -> None:
        model.bias.grad = model.bias.grad * 0.5

    for touch, name in (
        (lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6), "parameter weight's"),
        (lambda: model.weight.grad.mul_(0.5), "parameter weight's"),
        (lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 0.1), "changed in all: 2"),
        (replace_one, "parameter bias's"),
    ):
        model(torch.ones(2, 5)).sum().backward()
        expect(TrainingError, "between backward() and optimizer.step()", optimizer.zero_grad)
        touch()
        expect(TrainingError, name, optimizer.step)
        exchange.reduce_gradients(optimizer)  # what Horovod was given must be finished
        optimizer.zero_grad()  # dropped
    expect(UsageError, "step(closure)", lambda: optimizer.step(lambda: 0.0))


def sums_are_known_to_be_finite(exchange: Exchange) -> None:
    """One is not, in the first, a middle or the last element, on one rank or only once it is added:
    then they are not known to be. Those that are converted once they are added never are. Over MPI
    it is known without looking at them again.
    """
    with pytest.MonkeyPatch.context() as patch:
        if exchange.controller == "mpi":
            patch.setattr(over_horovod, "looks_finite", lambda message, compressed_from: False)
        for dtype, size in product((torch.float32, torch.float64), (3, 40_001, 300_001)):
            for reduction in (SUM, AVERAGE):
                _knows_finite_sums(exchange, dtype, size, reduction, True)
        for dtype, reduction in (
            (torch.bfloat16, SUM),
            (torch.complex64, AVERAGE),
            (torch.float32, replace(SUM, compression="fp16")),
        ):
            _knows_finite_sums(exchange, dtype, 40_001, reduction, False)
    for factor, ends_finite in ((0.5, True), (16.0, False)):
        values = torch.full((5000,), torch.finfo(torch.float32).max / 8)
        handle = hvd.allreduce_async(
            values, name=f"test.scaled.{factor}", op=hvd.Sum, postscale_factor=factor
        )
        over_horovod.wait(handle)
        known = over_horovod.is_finite(handle)
        assert bool(hvd.synchronize(handle).isfinite().all()) == ends_finite
        assert known == (ends_finite and exchange.controller == "mpi")


def _knows_finite_sums(
    exchange: Exchange, dtype: torch.dtype, size: int, reduction: Reduction, can_know: bool
) -> None:
    last, largest = exchange.size - 1, torch.finfo(dtype).max
    model = torch.nn.Linear(size, 1).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = exchange.distribute(optimizer, model, reduction=reduction)
    for place, value, ranks in (
        (0, 1.0, set()),
        (0, torch.inf, {0}),
        (size // 2, torch.nan, {last}),
        (size - 1, -torch.inf, {last // 2}),
        (size // 3, largest, {0, last}),
        (size - 2, -largest, {0}),
    ):
        gradient = torch.ones(1, size, dtype=dtype)
        if exchange.rank in ranks:
            gradient[0, place] = value
        optimizer.zero_grad()
        model(gradient).sum().real.backward()
        known = exchange.reduce_gradients(optimizer, look=True)
        is_finite = bool(model.weight.grad.isfinite().all())
        assert known == (can_know and is_finite), (dtype, size, reduction, value)


@contextmanager
def _alarm_before_the_last_rank(exchange: Exchange, handle: Callable[..., None]) -> Iterator[None]:
    """Let the last rank come 1 s late to what follows; the others receive SIGALRM meanwhile."""
    before = signal.signal(signal.SIGALRM, handle)
    hvd.allreduce(torch.ones(1), name="test.together")
    if exchange.rank == exchange.size - 1:
        time.sleep(1)
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def a_rank_that_waits_sleeps(exchange: Exchange) -> None:
    """For the last rank, without looking again and again; a signal is handled meanwhile."""
    for finish in (hvd.synchronize, lambda handle: _Pending(exchange, handle).wait()):
        handled_s: list[float] = []
        note = partial(lambda into, *_: into.append(time.monotonic()), handled_s)
        with _alarm_before_the_last_rank(exchange, note):
            began_s, began = time.monotonic(), resource.getrusage(resource.RUSAGE_THREAD)
            finish(hvd.allreduce_async(torch.ones(3), name="test.late"))
            ended = resource.getrusage(resource.RUSAGE_THREAD)
        if exchange.rank < exchange.size - 1:
            assert ended.ru_nvcsw - began.ru_nvcsw < 100, ended.ru_nvcsw - began.ru_nvcsw
            assert ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime < 0.3
            assert handled_s[0] - began_s < 0.7, handled_s[0] - began_s


def an_error_of_a_handler_is_not_one_of_horovod(exchange: Exchange) -> None:
    """As torch's for a worker of a DataLoader that has ended; the operation goes on."""

    def fail(*_: object) -> None:
        raise RuntimeError("of the handler")

    with _alarm_before_the_last_rank(exchange, fail):
        handle = hvd.allreduce_async(torch.ones(3), name="test.late", op=hvd.Sum)
        if exchange.rank < exchange.size - 1:
            error = expect(RuntimeError, "of the handler", lambda: hvd.synchronize(handle))
            assert type(error) is RuntimeError, type(error)
        assert hvd.synchronize(handle).tolist() == [exchange.size] * 3


def ranks_may_use_different_parameters(exchange: Exchange) -> None:
    """Rank r uses layer r % 2 alone: nobody waits for what another submits later. What is reduced
    already is not reduced again because code has dropped one gradient since.
    """
    model = torch.nn.ModuleList([torch.nn.Linear(3, 2).double() for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = exchange.distribute(optimizer, model, reduction=SUM)
    for step in range(2):
        before = [layer.weight.detach().clone() for layer in model]
        optimizer.zero_grad()
        own = torch.full((1, 3), exchange.rank + 1.0 + step).double()
        model[exchange.rank % 2](own).sum().backward()
        exchange.reduce_gradients(optimizer)
        model[step].bias.grad = None
        optimizer.step()
        for number, layer in enumerate(model):
            of_ranks = range(number, exchange.size, 2)
            total = float(sum(rank + 1.0 + step for rank in of_ranks))
            close(before[number] - layer.weight, torch.full((2, 3), total).double())


def a_broadcast_that_fails_is_noticed(exchange: Exchange) -> None:
    """Ranks that start from different parameters must not train: here nothing is broadcast."""
    torch.manual_seed(exchange.rank)
    model = torch.nn.Linear(5, 3)
    honest, hvd.broadcast_parameters = hvd.broadcast_parameters, lambda state, root_rank: None
    try:
        expect(
            TrainingError,
            "after the initial broadcast",
            lambda: exchange.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model),
        )
    finally:
        hvd.broadcast_parameters = honest


def the_exchange_is_repeatable(exchange: Exchange) -> None:
    """Without fusion, as set by default; and Open MPI yields while it waits."""
    assert exchange.repeatable
    assert os.environ["HOROVOD_FUSION_THRESHOLD"] == "0"
    assert all(os.environ[name] == value for name, value in ENVIRONMENT_DEFAULTS.items())


def an_unused_layer_stays_the_same_for_every_n(exchange: Exchange) -> None:
    """Weight decay moves it by itself: on several ranks exactly as on one."""
    results = []
    for where in (SingleProcess(), exchange):
        job = make_job(made_up_images(8))
        unused = torch.nn.Linear(3, 3).double()
        job.model.conv1.add_module("unused", unused)  # a convolution does not run its children
        with torch.no_grad():
            unused.weight.fill_(2)
        optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1, weight_decay=0.5)
        job = replace(job, optimizers=(optimizer,), schedule=lambda step: 0.1)
        job = distributed(job, where)
        one_step(job, where, Audits(), 1, np.arange(8))
        results.append(unused.weight.detach())
    assert torch.equal(*results)


def drifted_ranks_are_named(exchange: Exchange) -> None:
    """One rank's weight differs by one unit in the last place."""
    model = torch.nn.Linear(5, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
        if exchange.rank == exchange.size - 1:
            model.weight[1, 2] = torch.nextafter(model.weight[1, 2], torch.tensor(2.0))
    expect(
        TrainingError,
        f"rank {exchange.size - 1} held",
        lambda: check_equal_on_all_ranks(model, exchange, "in this test"),
    )


def unfrozen_parameters_are_noticed(exchange: Exchange) -> None:
    """Horovod would silently not average them."""
    for change in ("unfreeze", "add"):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        if change == "unfreeze":
            model[1].requires_grad_(False)
        given = model if change == "unfreeze" else model[0]
        optimizer = exchange.distribute(torch.optim.SGD(given.parameters(), lr=0.1), model)
        if change == "unfreeze":
            model[1].requires_grad_(True)
        else:
            optimizer.add_param_group({"params": list(model[1].parameters())})
        model(torch.ones(2, 3)).sum().backward()
        expect(
            TrainingError,
            "2 added or unfrozen (such as 1.",
            lambda optimizer=optimizer: exchange.reduce_gradients(optimizer),
        )
        optimizer.synchronize()  # what Horovod was given must be finished on all ranks


def ranks_must_build_the_same_model(exchange: Exchange) -> None:
    """The last rank does not: each rank learns it, before anything else is exchanged."""
    last = exchange.size - 1

    def layers(names: str) -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, False) for name in names})

    for names, ordered, found in (
        ("acb", "acb", "Trainable parameter 2: c.weight [2, 2] torch.float32 (rank 0: b.weight"),
        ("abc", "acb", "Optimizer's parameter 2: c.weight [2, 2] torch.float32 (rank 0: b.weight"),
        ("ab", "ab", "Trainable parameter 3: none (rank 0: c.weight"),
    ):
        for share in (exchange.distribute, exchange.broadcast_state):  # with virtual workers
            own = (names, ordered) if exchange.rank == last else ("abc", "abc")
            model = layers(own[0])
            optimizer = torch.optim.SGD([model[name].weight for name in own[1]], lr=0.1)
            both = partial(share, model=model, optimizer=optimizer)
            error = expect(AgreedFailure, found, both)
            assert str(error).startswith(f"rank {last}: "), error
            assert error.exit_code == 2
    reduction = replace(SUM, bucket_bytes=0 if exchange.rank == last else 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    both = partial(exchange.distribute, optimizer, model, reduction=reduction)
    error = expect(AgreedFailure, "distribute: bucket_bytes=0, on rank 0 64", both)
    assert str(error).startswith(f"rank {last}: "), error


def converted_models_are_refused(exchange: Exchange) -> None:
    """Their gradients would be rounded to the type of the bucket, silently."""
    alone = replace(SUM, bucket_bytes=0)
    for dtype, reduction in product((torch.float64, torch.bfloat16), (SUM, alone)):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = exchange.distribute(optimizer, model, reduction=reduction)
        model.to(dtype)
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
        expected = f"weight from torch.float32 on cpu to {dtype} on cpu (converted in all: 2)"
        expect(TrainingError, expected, optimizer.step)


def objects_of_any_size_arrive(exchange: Exchange) -> None:
    """Objects around the size of a head, of which some ranks have small and others large ones."""
    largest = next(n for n in range(HEAD_BYTES) if not is_small(len(pickled(bytes(n))))) - 1
    for case, length in enumerate((0, 1, largest, largest + 1, 100_000)):
        for sender in range(exchange.size):  # the others have short ones
            own = bytes([exchange.rank]) * (length if exchange.rank == sender else 3)
            gathered = exchange.all_gather_object(own, f"test.objects.{case}.{sender}")
            lengths = [length if rank == sender else 3 for rank in range(exchange.size)]
            assert gathered == [bytes([rank]) * n for rank, n in enumerate(lengths)]
        value = bytes([7]) * length if exchange.rank == 0 else None
        assert exchange.broadcast_object(value, f"test.object.{case}") == bytes([7]) * length


def failures_are_agreed_on(exchange: Exchange) -> None:
    """One rank's bad input ends all ranks, with its text and its exit code."""
    last = exchange.size - 1

    def prepare() -> None:
        if exchange.rank == last:
            raise UsageError("--data-dir=x: not on this host")

    error = expect(
        AgreedFailure,
        f"rank {last}: --data-dir=x: not on this host",
        lambda: run_on_all(exchange, "test", prepare),
    )
    assert error.exit_code == 2


def evaluation_counts_each_sample_once(exchange: Exchange) -> None:
    """For data sets of any size, also smaller than the number of ranks, and for many classes."""
    few = classifier.MOST_IN_MATRIX
    sizes = sorted({1, exchange.size - 1, exchange.size, exchange.size + 1, 101})
    for samples, classifier.MOST_IN_MATRIX in product(sizes, (0, few)):
        dataset = made_up_images(samples)
        model = make_job(dataset).model
        expected = evaluate_on(model, dataset, SingleProcess())
        actual = evaluate_on(model, dataset, exchange)
        assert actual.samples == expected.samples == samples
        assert actual.plain()["tables"] == expected.plain()["tables"]
        assert actual.metrics == expected.metrics
        assert abs(actual.loss - expected.loss) <= 1e-12 * expected.loss
    try:  # one rank was asked to stop, and all receive it
        evaluate_on(model, dataset, exchange, lambda: exchange.rank == exchange.size - 1)
    except Interrupted:
        return
    raise AssertionError("the evaluation went on")


def trained_models_are_used_by_all_ranks(exchange: Exchange) -> None:
    """evaluate and predict: rank 0 writes the file that one process does, to the bit; with more
    ranks than batches, too.
    """
    place = tempfile.mkdtemp() if exchange.rank == 0 else ""
    folder = Path(exchange.broadcast_object(place, "test.folder"))
    images = [folder / f"{number}.png" for number in range(5)]
    if exchange.rank == 0:
        for number, path in enumerate(images):
            pixels = (Pictures(8, 1000)[number][0][0].numpy() * 256).astype(np.uint8)
            Image.fromarray(pixels).save(path)
    exchange.all_gather_object(None, "test.images")
    alone = JoinedWorkers(SingleProcess(), Topology(), Pulse())
    together = JoinedWorkers(exchange, Topology.from_environment(), Pulse())
    for batch in (7, 20):
        feeding.EVALUATION_BATCH, prediction.PREDICTED_AT_A_TIME = batch, batch // 3
        files = {}
        for workers in (alone, together) if exchange.rank == 0 else (together,):
            lines = (["evaluate", RUN, *CODE], ["predict", RUN, *images, CODE[0]])
            for words in lines:
                file = folder / f"{words[0]}-{workers.exchange.size}-{batch}.json"
                parsed = make_parser().parse_args([*map(str, words), "--json", str(file)])
                if words[0] == "evaluate":
                    evaluate(vars(parsed), VALUES, workers)
                else:
                    prediction.predict(vars(parsed), workers)
                files.setdefault(words[0], []).append(file)
        for pair in files.values() if exchange.rank == 0 else ():
            assert pair[0].read_bytes() == pair[1].read_bytes()


def audit_finds_faults_of_the_exchange(exchange: Exchange) -> None:
    """Faults between Horovod and the optimizer, on one rank or on all, on the last element."""
    last = exchange.size - 1

    def flip_bit(gradient: torch.Tensor) -> None:
        if exchange.rank == last:
            gradient.numpy().reshape(-1).view(np.int64)[-1] ^= 1 << 30

    def drop_last_rank(gradient: torch.Tensor) -> None:
        gradient.reshape(-1)[-1] -= local[-1]

    def stale(gradient: torch.Tensor) -> None:
        gradient.reshape(-1)[-1] *= 1.001

    ring = exchange.ring()
    samples = 4 * exchange.size + 1
    dataset = made_up_images(samples)
    for fault in (None, flip_bit, drop_last_rank, stale):
        job = distributed(make_job(dataset), exchange)
        records: list[AuditRecord] = []
        honest = Auditor(job.model, ring, 1, records.append, BoundCheck(ring, job.reduction))
        audit = FaultyExchangeAudit(honest, job, fault)
        local = audit.local_weight_gradients(exchange)

        def step(job: Job = job, audit: FaultyExchangeAudit = audit) -> None:
            one_step(job, exchange, audit, 1, np.arange(samples))

        if fault is None:
            step()
            assert records[0].ok
            assert records[0].elements == sum(p.numel() for p in job.model.parameters())
        else:
            expect(AuditMismatch, "parameter output.weight, index [9, 127]", step)
            assert not records[0].ok
    ring.close()


class FaultyExchangeAudit:
    """An audit that does mischief to the reduced gradients before it hands over to the real one."""

    def __init__(
        self, audit: Auditor, job: Job, fault: Callable[[torch.Tensor], None] | None
    ) -> None:
        self._audit = audit
        self._job = job
        self._fault = fault

    def local_weight_gradients(self, exchange: Exchange) -> torch.Tensor:
        """The last rank's own gradient of output.weight, known to all ranks, flat."""
        own: list[torch.Tensor] = []
        weight = self._job.model.output.weight
        hook = weight.register_post_accumulate_grad_hook(lambda p: own.append(p.grad.clone()))
        samples = len(self._job.data.train)
        one_step(self._job, exchange, Audits(), 1, np.arange(samples)).total()
        hook.remove()
        return exchange.all_gather_object(own[0].reshape(-1), "test.local")[-1]

    def begin(self, step: int, data: StepData) -> None:
        self._audit.begin(step, data)

    def begin_pass(self, share: int, batch: Any) -> None:
        self._audit.begin_pass(share, batch)

    def updated(self, step: int, sums: StepSums) -> None: ...

    def reduced(self, step: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if self._fault:
            self._fault(self._job.model.output.weight.grad)
        self._audit.reduced(step, optimizers)


def a_loss_that_is_not_finite_ends_all_ranks(exchange: Exchange) -> None:
    """Only one rank meets it; all leave at the same step, and it is named."""
    last = exchange.size - 1
    loss = torch.tensor(float("nan") if exchange.rank == last else 1.0)
    meter = Meter(exchange, samples_per_epoch=10)
    meter.begin_step(1)
    sums = StepSums(CPU)
    sums.add(Sums(loss, 2))
    sums.start(exchange, 1, stop_requested=False, phases_s=meter.clock.take())
    meter.end_step(sums, 1, 2)
    expect(TrainingError, f"at step 1 on rank {last} (loss nan).", meter.read_interval)


def synchronised_batch_norm_is_that_of_the_whole_batch(exchange: Exchange) -> None:
    """Outputs, gradients and running statistics, for uneven and empty shares."""
    size = exchange.size
    for weights in (None, [0.0, *range(1, size)]):
        values = torch.randn((5 * size + 1, 3, 4), generator=torch.Generator().manual_seed(1))
        values = values.double() * 3 + 1
        torch.manual_seed(2)
        whole, shared = (
            torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Conv1d(3, 2, 3)).double()
            for _ in range(2)
        )
        shared.load_state_dict(whole.state_dict())
        convert_to_sync(shared, exchange)
        own = torch.from_numpy(Shares(size, weights).of(np.arange(len(values)), exchange.rank))
        expected = whole(values)
        expected.square().sum().backward()
        actual = shared(values[own])
        optimizer = exchange.distribute(torch.optim.SGD(shared.parameters(), lr=0.1), shared)
        (actual.square().sum() * size).backward()
        exchange.reduce_gradients(optimizer)
        close(actual, expected[own])
        for one, other in zip(shared.parameters(), whole.parameters(), strict=True):
            close(one.grad, other.grad)
        for one, other in zip(shared.buffers(), whole.buffers(), strict=True):
            close(one, other)


def statistics_are_averaged_and_put_back(exchange: Exchange) -> None:
    """Weighted by samples within the context; each rank's own again afterwards."""
    layer = torch.nn.BatchNorm1d(2).double()
    layer.running_mean.fill_(exchange.rank + 1)
    before = layer.running_mean.clone()
    weights = [float(2 * rank) for rank in range(exchange.size)]
    with averaged_statistics(layer, exchange, weights[exchange.rank]) as model:
        mean = sum(w * (rank + 1) for rank, w in enumerate(weights)) / sum(weights)
        close(model.running_mean, torch.full((2,), mean, dtype=torch.float64))
    assert torch.equal(layer.running_mean, before)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


CHECKS = (
    synchronised_batch_norm_is_that_of_the_whole_batch,
    statistics_are_averaged_and_put_back,
    ring_sums_are_right,
    the_rings_secret_is_the_launchers,
    averaged_gradient_is_that_of_the_global_batch,
    sparse_gradients_train_as_on_one_process,
    horovods_threads_do_not_push_aside_who_computes,
    initial_state_is_that_of_rank_0,
    optimizers_go_on_from_the_state_of_rank_0,
    clipping_is_that_of_one_process,
    gradients_on_their_way_must_not_be_touched,
    sums_are_known_to_be_finite,
    a_rank_that_waits_sleeps,
    an_error_of_a_handler_is_not_one_of_horovod,
    ranks_may_use_different_parameters,
    a_broadcast_that_fails_is_noticed,
    the_exchange_is_repeatable,
    an_unused_layer_stays_the_same_for_every_n,
    drifted_ranks_are_named,
    unfrozen_parameters_are_noticed,
    ranks_must_build_the_same_model,
    converted_models_are_refused,
    objects_of_any_size_arrive,
    failures_are_agreed_on,
    evaluation_counts_each_sample_once,
    trained_models_are_used_by_all_ranks,
    audit_finds_faults_of_the_exchange,
    a_loss_that_is_not_finite_ends_all_ranks,
)


def expect(kind: type[Exception], text: str, action: Callable[[], object]) -> Exception:
    """`action` must raise `kind` with `text` in its message."""
    try:
        action()
    except kind as error:
        assert text in str(error), f"{text!r} is not in {error}"
        return error
    raise AssertionError(f"no {kind.__name__}")


def main() -> int:
    torch.set_num_threads(1)
    exchange = HorovodExchange()
    for check in CHECKS:
        try:
            check(exchange)
            problem = None
        except Exception:
            problem = traceback.format_exc()
        problems = exchange.all_gather_object(problem, f"test.{check.__name__}")
        if exchange.rank == 0:
            sys.stdout.write(json.dumps({"check": check.__name__, "problems": problems}) + "\n")
            sys.stdout.flush()
    exchange.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
