"""One device, one model, the whole global batch: the reference for all other systems."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.lab.systems.contract import Parameters, Place, Spec, Strategy, Traffic
from hvdtrain.lab.systems.work import GlobalBatch, Work, parameters_of, trained


class Single(Strategy):
    """The system `single`: a plain training loop."""

    what = "one process, one model, the whole batch: the oracle"

    def __init__(self, work: Work, place: Place) -> None:
        super().__init__(work, place)
        self._optimizer = work.optimizer(trained(work.model))

    @classmethod
    def processes(cls, spec: Spec) -> list[str]:
        return ["process"]

    @classmethod
    def formula(cls, spec: Spec, size: int) -> Mapping[str, Traffic]:
        return {"process": Traffic()}

    def step(self, batch: GlobalBatch) -> None:
        self._optimizer.zero_grad()
        loaded = self.work.load(*batch)
        self.work.clock.enter("compute")
        self.work.add_gradient(self.work.model, loaded, len(batch.indices))
        self.work.update(self._optimizer)

    def parameters(self) -> Parameters:
        return parameters_of(self.work.model)
