"""Run by horovodrun on every rank: each check here is a test of its own (see test_checks.py).

A check raises on any rank when what it guards is broken; the ranks then tell one another, and go
on with the next check together. Rank 0 prints one JSON line a check.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch

from hvdtrain.audit import Auditor, AuditRecord, NoAudit
from hvdtrain.audit.bound import BoundCheck
from hvdtrain.batchnorm import averaged_statistics, convert_to_sync
from hvdtrain.comm import ENVIRONMENT_DEFAULTS, HorovodExchange
from hvdtrain.data import GlobalBatchSampler, Shares, TensorSplit
from hvdtrain.data.feeding import Feed
from hvdtrain.data.splits import Dataset
from hvdtrain.errors import (
    AgreedFailure,
    AuditMismatch,
    TrainingError,
    TransportError,
    UsageError,
)
from hvdtrain.exchange import AVERAGE, SUM, Exchange, SingleProcess, agree
from hvdtrain.metering import Meter, StepSums
from hvdtrain.models import build_model
from hvdtrain.parameters import check_equal_on_all_ranks, params_sha256
from hvdtrain.pulse import RING_TOKEN
from hvdtrain.ring import all_reduce, gamma
from hvdtrain.tasks import Sums
from hvdtrain.training import Job
from hvdtrain.update import Update
from tests.rings import lengths_for, rank_data
from tests.unit.jobs import classification, evaluate_on, one_step

CPU = torch.device("cpu")
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
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        update=Update(model, CPU),
        task=task,
        data=task.build_data(),
        feed=Feed(dataset.train, sampler, shares, accum_steps, everyone=False),
        valid_shares=shares,
        schedule=lambda step: 0.0,
        total_steps=1,
        device=CPU,
        log_interval=1,
        eval_interval=1,
        checkpoint_interval=0,
        hash_every=0,
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
    """Against one process's gradient of the mean loss, for even, uneven and empty shares."""
    size = exchange.size
    uneven = Shares(size, [0.0, *range(1, size)])  # rank 0 gets nothing
    cases = [
        ("lenet", samples, 1, None) for samples in (1, size - 1, size, size + 1, 32 * size + 5)
    ]
    cases += [("mlp", size - 1, 1, None), ("lenet", 9 * size + 1, 1, uneven)]
    cases += [("lenet", samples, 3, None) for samples in (1, 2 * size, 9 * size + 1)]
    for (name, samples, accum_steps, shares), reduction in product(cases, (SUM, AVERAGE)):
        dataset = made_up_images(samples)
        indices = np.arange(samples)
        alone = make_job(dataset, name)
        one_step(alone, SingleProcess(), NoAudit(), 1, indices)
        together = make_job(dataset, name, accum_steps, shares)
        together = distributed(replace(together, reduction=reduction), exchange)
        one_step(together, exchange, NoAudit(), 1, indices).total()
        for (key, expected), actual in zip(
            alone.model.named_parameters(), together.model.parameters(), strict=True
        ):
            largest = expected.grad.abs().max()
            error = (actual.grad - expected.grad).abs().max()
            case = (name, samples, accum_steps, reduction, key)
            assert error <= 1e-12 * largest, (case, error / largest)


def sparse_gradients_are_reduced(exchange: Exchange) -> None:
    """Each rank looks up a row of its own and twice a common one: the sum holds those of all ranks,
    and each rank has sent a row once; the average is that over N.
    """
    for reduction in (SUM, AVERAGE):
        layer = torch.nn.Embedding(exchange.size + 1, 2, sparse=True, dtype=torch.float64)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        optimizer = exchange.distribute(optimizer, layer, 1, reduction)
        layer(torch.tensor([exchange.rank, exchange.size, exchange.size])).sum().backward()
        assert layer.weight.grad.is_coalesced()
        exchange.reduce_gradients(optimizer)
        expected = torch.ones(exchange.size + 1, 2, dtype=torch.float64)
        expected[-1] = 2 * exchange.size  # the row that all have looked up
        expected /= reduction.weight(exchange.size)
        torch.testing.assert_close(layer.weight.grad.to_dense(), expected)


def horovods_threads_do_not_push_aside_who_computes(exchange: Exchange) -> None:
    """Its threads are scheduled in batches, and the one that computes is not."""
    threads = [folder.name for folder in Path("/proc/self/task").iterdir()]
    policies = {os.sched_getscheduler(int(thread)) for thread in threads}
    assert os.SCHED_BATCH in policies
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def initial_state_is_that_of_rank_0(exchange: Exchange) -> None:
    """Weight decay and a state of its own must not move the parameters of other ranks."""
    torch.manual_seed(100 + exchange.rank)
    model = torch.nn.Linear(5, 3)
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
        job.model.add_module("unused", torch.nn.Linear(3, 3).double())
        with torch.no_grad():
            job.model.unused.weight.fill_(2)
        optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1, weight_decay=0.5)
        job = replace(job, optimizer=optimizer, schedule=lambda step: 0.1)
        job = distributed(job, where)
        one_step(job, where, NoAudit(), 1, np.arange(8))
        results.append(job.model.unused.weight.detach())
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


def failures_are_agreed_on(exchange: Exchange) -> None:
    """One rank's bad input ends all ranks, with its text and its exit code."""
    last = exchange.size - 1

    def prepare() -> None:
        if exchange.rank == last:
            raise UsageError("--data-dir=x: not on this host")

    error = expect(
        AgreedFailure,
        f"rank {last}: --data-dir=x: not on this host",
        lambda: agree(exchange, "test", prepare),
    )
    assert error.exit_code == 2


def evaluation_counts_each_sample_once(exchange: Exchange) -> None:
    """For data sets of any size, also smaller than the number of ranks."""
    for samples in sorted({1, exchange.size - 1, exchange.size, exchange.size + 1, 101}):
        dataset = made_up_images(samples)
        model = make_job(dataset).model
        expected = evaluate_on(model, dataset, SingleProcess())
        actual = evaluate_on(model, dataset, exchange)
        assert actual.samples == expected.samples == samples
        assert actual.tables == expected.tables
        assert actual.metrics == expected.metrics
        assert abs(actual.loss - expected.loss) <= 1e-12 * expected.loss
    stopped = evaluate_on(model, dataset, exchange, lambda: exchange.rank == exchange.size - 1)
    assert stopped is None  # one rank was asked to stop, and all know


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
        one_step(self._job, exchange, NoAudit(), 1, np.arange(samples)).total()
        hook.remove()
        return exchange.all_gather_object(own[0].reshape(-1), "test.local")[-1]

    def begin(self, step: int) -> None:
        self._audit.begin(step)

    def end(self, step: int) -> None:
        if self._fault:
            self._fault(self._job.model.output.weight.grad)
        self._audit.end(step)


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
        shared = convert_to_sync(shared, exchange)
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
    sparse_gradients_are_reduced,
    horovods_threads_do_not_push_aside_who_computes,
    initial_state_is_that_of_rank_0,
    a_broadcast_that_fails_is_noticed,
    the_exchange_is_repeatable,
    an_unused_layer_stays_the_same_for_every_n,
    drifted_ranks_are_named,
    unfrozen_parameters_are_noticed,
    failures_are_agreed_on,
    evaluation_counts_each_sample_once,
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
