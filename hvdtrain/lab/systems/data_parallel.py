"""torch.nn.DataParallel: one process that scatters the batch to its GPUs and gathers the scores.

Source: PyTorch, `torch/nn/parallel/data_parallel.py`: at every step inputs are scattered, the
module is replicated, the replicas run in threads, and outputs are gathered on the first device.
Without a visible GPU its list of devices is empty, and it calls the module directly.
"""

from __future__ import annotations

import torch

from hvdtrain.data.feeding import to_device
from hvdtrain.lab.systems.contract import Parameters, Place, Spec, Strategy
from hvdtrain.lab.systems.work import GlobalBatch, Work, parameters_of, trained

NO_GPU = (
    "no GPU is visible: torch.nn.DataParallel has no devices and calls the module directly, so "
    "this is one replica in one thread, and nothing is sent"
)


class TorchDataParallel(Strategy):
    """The system `data_parallel`."""

    what = "torch.nn.DataParallel"

    def __init__(self, work: Work, place: Place) -> None:
        super().__init__(work, place)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self._device = torch.device("cuda", 0) if gpus else torch.device("cpu")
        work.model.to(self._device)
        devices = list(range(min(place.workers, gpus))) or None
        self._model = torch.nn.DataParallel(work.model, devices)
        self._optimizer = work.optimizer(trained(work.model))

    @classmethod
    def processes(cls, spec: Spec) -> list[str]:
        return ["process"]

    def step(self, batch: GlobalBatch) -> None:
        self._optimizer.zero_grad()
        loaded = to_device(self.work.load(*batch), self._device)
        self.work.clock.enter("compute")
        self.work.add_gradient(self._model, loaded, len(batch.indices))
        self.work.update(self._optimizer)

    def parameters(self) -> Parameters:
        return parameters_of(self.work.model)

    def notes(self) -> list[str]:
        devices = self._model.device_ids
        return (
            [f"on {len(devices)} GPUs; copies between them are not counted"]
            if devices
            else [NO_GPU]
        )
