"""The network's layers split over processes: for contrast, as it does not share out the batch.

Each process holds one stage. The whole batch goes through all of them forward, and its gradient
backward; one computes while the others wait. It raises the limit on a network's size, not speed.

Source: Y. Huang et al., "GPipe" (2019, arXiv:1811.06965), section 2, before micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hvdtrain.lab.systems.contract import Parameters, Place, Spec, Strategy
from hvdtrain.lab.systems.messages import Messages
from hvdtrain.lab.systems.stages import cut_into_stages, shapes_between
from hvdtrain.lab.systems.traffic import Traffic
from hvdtrain.lab.systems.work import DTYPES, GlobalBatch, Work, parameters_of, trained


class ModelParallel(Strategy):
    """A process a stage."""

    what = "the layers split over processes, the batch whole"

    def __init__(self, work: Work, place: Place) -> None:
        super().__init__(work, place)
        self._messages = Messages(place)
        stages = cut_into_stages(work.model, place.workers)
        dtype = DTYPES[work.spec.dtype]
        self._shapes = shapes_between(stages, torch.zeros((1, *work.dataset.shape), dtype=dtype))
        self._last = len(stages) - 1
        self._stage = stages[place.number] if place.number <= self._last else None
        if self._stage:
            self._optimizer = work.optimizer(trained(self._stage))

    @classmethod
    def processes(cls, spec: Spec) -> list[str]:
        return [f"stage {number}" for number in range(spec.workers)]

    def step(self, batch: GlobalBatch) -> None:
        """Collective: forward through this stage, backward, and the update of its parameters."""
        stage, number, clock = self._stage, self.place.number, self.work.clock
        if stage is None:
            clock.leave()
            return
        self._optimizer.zero_grad()
        total = len(batch.indices)
        inputs, labels = self.work.load(*batch) if number in (0, self._last) else (None, None)
        passed = inputs if number == 0 else self._receive(number - 1, total, number - 1)
        assert passed is not None
        clock.enter("compute")
        if number < self._last:
            result = stage(passed.requires_grad_(number > 0))
            clock.enter("exchange")
            self._messages.send(result.detach().contiguous(), number + 1)
            gradient = self._receive(number, total, number + 1)
            clock.enter("compute")
            result.backward(gradient)
        else:
            assert labels is not None
            self.work.add_gradient(stage, (passed.requires_grad_(number > 0), labels), total)
        if number > 0:
            clock.enter("exchange")
            assert passed.grad is not None
            self._messages.send(passed.grad.contiguous(), number - 1)
        self.work.update(self._optimizer)

    def _receive(self, passage: int, samples: int, source: int) -> torch.Tensor:
        """What passes between stages `passage` and `passage + 1`, forward or backward."""
        self.work.clock.enter("exchange")
        dtype = DTYPES[self.work.spec.dtype]
        values = torch.empty((samples, *self._shapes[passage]), dtype=dtype)
        self._messages.receive(values, source)
        return values

    def parameters(self) -> Parameters:
        """Of this stage."""
        return parameters_of(self._stage) if self._stage else {}

    def traffic(self) -> Mapping[str, Traffic]:
        return {self.name: self._messages.traffic}

    def notes(self) -> list[str]:
        if self._stage is None:
            return [f"{self.name} has no layers: the network has {self._last + 1} stages"]
        layers = dict.fromkeys(
            name.rpartition(".")[0] for name, _ in self._stage.named_parameters()
        )
        return [f"{self.name}: {', '.join(layers)}"]

    def close(self) -> None:
        self._messages.close()
