"""The naive all-reduce: every rank sends its gradients to rank 0, which sums and sends them back.

Rank 0 receives (N - 1) S bytes and sends as many, so it becomes the bottleneck as N grows; a ring
has none. Source: A. Gibiansky, "Bringing HPC Techniques to Deep Learning" (2017), which introduces
the ring from this scheme.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hvdtrain.lab.systems.contract import Parameters, Place, Spec, Strategy, Traffic
from hvdtrain.lab.systems.messages import Messages
from hvdtrain.lab.systems.work import (
    GlobalBatch,
    Work,
    flatten_gradients,
    parameters_of,
    trained,
)

ROOT = 0


class GatherBroadcast(Strategy):
    """The system `gather_broadcast`: one process per worker, of which rank 0 also sums."""

    what = "gradients gathered and summed on rank 0, then broadcast; point to point"

    def __init__(self, work: Work, place: Place) -> None:
        super().__init__(work, place)
        self._messages = Messages(place)
        self._gradients = flatten_gradients(work.model)
        self._arriving = torch.empty_like(self._gradients)
        self._optimizer = work.optimizer(trained(work.model))

    @classmethod
    def formula(cls, spec: Spec, size: int) -> Mapping[str, Traffic]:
        others = spec.workers - 1
        at_root = Traffic(others * size, others * size, others)
        return {
            name: at_root if rank == ROOT else Traffic(size, size, 1)
            for rank, name in enumerate(cls.processes(spec))
        }

    def step(self, batch: GlobalBatch) -> None:
        self._gradients.zero_()
        self.work.add_gradient_of_share(batch, self.place.number, self.place.workers)
        self.work.clock.enter("exchange")
        self._sum_over_ranks()
        self.work.update(self._optimizer)

    def _sum_over_ranks(self) -> None:
        """Collective: replace `_gradients` by their sum, on every rank."""
        if self.place.number != ROOT:
            self._messages.send(self._gradients, ROOT)
            self._messages.receive(self._gradients, ROOT)
            return
        others = range(1, self.place.workers)
        for rank in others:
            self._messages.receive(self._arriving, rank)
            self._gradients.add_(self._arriving)
        for rank in others:
            self._messages.send(self._gradients, rank)

    def parameters(self) -> Parameters:
        return parameters_of(self.work.model)

    def traffic(self) -> Mapping[str, Traffic]:
        return {self.name: self._messages.traffic}

    def close(self) -> None:
        self._messages.close()
