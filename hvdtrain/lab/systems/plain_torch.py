"""Loops of plain PyTorch: on a single device, and with the two data parallel modules of torch.

Sources: PyTorch, `torch/nn/parallel/data_parallel.py`; S. Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training" (2020, arXiv:2006.15704).
"""

from collections.abc import Mapping

import torch

from hvdtrain.data import Shares
from hvdtrain.data.feeding import to_device
from hvdtrain.lab.systems.contract import Member, Messages, RingTraffic, Spec, Strategy, Traffic
from hvdtrain.lab.systems.work import GlobalBatch, Work, trained

NO_GPU = (
    "no GPU is visible: torch.nn.DataParallel has no devices and calls the module directly, so "
    "this is one replica in one thread, and nothing is sent"
)


class PlainLoop(Strategy):
    """A training loop in which each process computes on its share of the global batch."""

    def __init__(self, work: Work, member: Member) -> None:
        super().__init__(work, member)
        self._model: torch.nn.Module = work.model
        self._device = torch.device("cpu")
        self._optimizer = work.optimizer(trained(work.model))

    def step(self, batch: GlobalBatch) -> None:
        processes = self.member.processes
        local_indices = Shares(processes).of(batch.indices, self.member.number)
        self._optimizer.zero_grad()
        loaded = to_device(self.work.load(local_indices, batch.epoch), self._device)
        self.work.clock.enter("compute")
        # Also for an empty share, as every rank must take part in DistributedDataParallel's
        # exchange. That averages over ranks, so each sum of losses is divided by B / processes.
        self.work.add_gradient(self._model, loaded, len(batch.indices) / processes)
        self.work.update(self._optimizer)


class Single(PlainLoop):
    """The system `single`: one device, one model, the whole batch: the reference for all others."""

    what = "one process, one model, the whole batch: the oracle"

    @classmethod
    def processes(cls, spec: Spec) -> list[str]:
        return ["process"]

    @classmethod
    def formula(cls, spec: Spec, size: int) -> Mapping[str, Traffic]:
        return {"process": Traffic()}


class TorchDataParallel(PlainLoop):
    """The system `data_parallel`: one process that scatters the batch to its GPUs.

    At every step torch scatters the inputs, replicates the module, runs the replicas in threads,
    and gathers their outputs on the first GPU. Without a visible GPU it calls the module directly.
    """

    what = "torch.nn.DataParallel"

    def __init__(self, work: Work, member: Member) -> None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = torch.device("cuda", 0) if gpus else torch.device("cpu")
        work.model.to(device)
        super().__init__(work, member)
        self._device = device
        self._gpus = list(range(min(member.workers, gpus)))
        self._model = torch.nn.DataParallel(work.model, self._gpus or None)

    @classmethod
    def processes(cls, spec: Spec) -> list[str]:
        return ["process"]

    def notes(self) -> list[str]:
        count = len(self._gpus)
        on_gpus = f"GPUs: {count}, while the others compute on the CPU; copies are not counted"
        return [on_gpus if count else NO_GPU]


class TorchDistributedDataParallel(RingTraffic, PlainLoop):
    """The system `ddp`: one process per worker; buckets are all-reduced during backward."""

    what = "torch DistributedDataParallel, over Gloo"
    measured = "sockets"

    def __init__(self, work: Work, member: Member) -> None:
        super().__init__(work, member)
        self.link = Messages(member)
        self._model = torch.nn.parallel.DistributedDataParallel(work.model)

    def notes(self) -> list[str]:
        return ["the exchange overlaps backward and is timed as compute"]
