"""torch's DistributedDataParallel over Gloo: one process per worker, all-reduce during backward.

Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(2020, arXiv:2006.15704). Gradients are exchanged in buckets while the backward pass runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.nn.parallel import DistributedDataParallel

from hvdtrain.data import Shares
from hvdtrain.lab.systems.contract import Parameters, Place, Spec, Strategy, Traffic, socket_traffic
from hvdtrain.lab.systems.messages import join_group, leave_group
from hvdtrain.lab.systems.ring import ring_formula
from hvdtrain.lab.systems.work import GlobalBatch, Work, parameters_of, trained


class TorchDistributedDataParallel(Strategy):
    """The system `ddp`. torch averages over ranks, so each sum of losses is divided by B / N."""

    what = "torch DistributedDataParallel, over Gloo"
    measured = "sockets"

    def __init__(self, work: Work, place: Place) -> None:
        super().__init__(work, place)
        join_group(place)
        self._model = DistributedDataParallel(work.model)
        self._optimizer = work.optimizer(trained(work.model))

    @classmethod
    def formula(cls, spec: Spec, size: int) -> Mapping[str, Traffic]:
        return ring_formula(spec.workers, size)

    def step(self, batch: GlobalBatch) -> None:
        self._optimizer.zero_grad()
        own = Shares(self.place.workers).of(batch.indices, self.place.number)
        loaded = self.work.load(own, batch.epoch)
        self.work.clock.enter("compute")
        # Also for an empty share: every rank must take part in the all-reduce of each bucket.
        divisor = len(batch.indices) / self.place.workers
        self.work.add_gradient(self._model, loaded, divisor)
        self.work.update(self._optimizer)

    def parameters(self) -> Parameters:
        return parameters_of(self.work.model)

    def traffic(self) -> Mapping[str, Traffic] | None:
        measured = socket_traffic()
        return {self.name: measured} if measured else None

    def notes(self) -> list[str]:
        return ["the exchange overlaps backward and is timed as compute"]

    def close(self) -> None:
        leave_group()
