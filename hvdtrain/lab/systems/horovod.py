"""The training step of `hvdtrain train` over Horovod's DistributedOptimizer, under horovodrun.

Source: A. Sergeev and M. Del Balso, "Horovod: fast and easy distributed deep learning in
TensorFlow" (2018, arXiv:1802.05799). The step itself is in `hvdtrain.train.loop`.
"""

import itertools
from collections.abc import Mapping

import torch

from hvdtrain.audit import Audits
from hvdtrain.data import Shares, SharesLike
from hvdtrain.data.feeding import Feed
from hvdtrain.lab.systems.contract import Member, Parameters, RingTraffic, Traffic
from hvdtrain.lab.systems.work import GlobalBatch, Work, trained
from hvdtrain.tensors import CPU
from hvdtrain.train.job import Intervals, Job
from hvdtrain.train.metering import Meter
from hvdtrain.train.step import train_step
from hvdtrain.train.update import Update

LOG_INTERVAL = 10
NO_AUDITS = Audits()


def job_of(
    work: Work,
    optimizer: torch.optim.Optimizer,
    shares: SharesLike,
    micro_batches: int = 1,
    device: torch.device = CPU,
) -> Job:
    """Return the work as a job of `train`; its optimizer is not distributed yet."""
    return Job(
        model=work.model,
        optimizers=(optimizer,),
        update=Update(work.model, device),
        task=work.task,
        data=work.task.build_data(),
        feed=Feed(work.dataset.train, work.sampler, shares, micro_batches, everyone=False),
        valid_shares=shares,
        schedule=lambda step: work.spec.lr,
        total_steps=work.spec.steps,
        device=device,
        intervals=Intervals(log=LOG_INTERVAL, evaluation=1),
    )


class Horovod(RingTraffic):
    """The system `horovod`: complete steps, with sample weights, sums over ranks, metrics."""

    what = "the training step of hvdtrain train, on Horovod, under horovodrun"
    under_horovodrun = True
    measured = "sockets"

    def __init__(self, work: Work, member: Member) -> None:
        super().__init__(work, member)
        # Imported here, so that only this row fails where Horovod is not installed.
        from hvdtrain.exchange.horovod import HorovodExchange

        self._exchange = exchange = HorovodExchange()
        job = job_of(work, work.optimizer(trained(work.model)), Shares(exchange.size))
        self._job = job.distributed(exchange)
        self._meter = Meter(exchange, work.sampler.samples, work.task.metrics)
        self._meter.clock = work.clock
        self._numbers = itertools.count(1)

    def step(self, batch: GlobalBatch) -> None:
        number, meter = next(self._numbers), self._meter
        meter.begin_step(number)
        data = self._job.feed.step(batch.indices, self._exchange.rank, batch.epoch)
        sums = train_step(self._job, self._exchange, NO_AUDITS, number, data, meter.clock)
        meter.end_step(sums, number, data.samples)
        if number % LOG_INTERVAL == 0:
            meter.read_interval()

    def parameters(self) -> Parameters:
        self._meter.collect()
        return super().parameters()

    def traffic(self) -> Mapping[str, Traffic] | None:
        """Return the socket traffic; None under MPI, whose local workers use shared memory."""
        return super().traffic() if self._exchange.controller == "gloo" else None

    def notes(self) -> list[str]:
        memory = "bytes by formula: MPI workers on one machine exchange through shared memory"
        return [
            f"controller {self._exchange.controller}",
            "the part of the exchange that overlaps backward is timed as compute",
            *([memory] if self._exchange.controller == "mpi" else []),
        ]

    def close(self) -> None:
        self._exchange.close()
