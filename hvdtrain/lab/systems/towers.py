"""One process, a replica of the model a device; on a CPU a device is a thread.

The global batch is split along a dimension, each replica (tower) computes on its part, and the
gradients of all towers become one update. How is what the reductions differ in: see
`hvdtrain.lab.systems.towers_reductions`.

Sources: Apache MXNet, `python/mxnet/gluon/utils.py` (`split_and_load`, with `batch_axis`), and
TensorFlow's tutorial `cifar10_multi_gpu_train.py` (towers).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from hvdtrain.data import Shares
from hvdtrain.lab.systems.contract import Parameters, Place, Spec, Strategy
from hvdtrain.lab.systems.towers_reductions import REDUCTIONS, Reduction, Tower
from hvdtrain.lab.systems.traffic import Traffic
from hvdtrain.lab.systems.work import GlobalBatch, Work, flatten_gradients

Result = TypeVar("Result")


def split_along(tensor: torch.Tensor, dimension: int, towers: int) -> list[torch.Tensor]:
    """The tensor in `towers` parts along `dimension`, which differ in length by at most one."""
    return list(tensor.split(Shares(towers).sizes(tensor.shape[dimension]), dimension))


class Towers(Strategy):
    """A replica a thread."""

    what = "one process, a replica a thread; the batch split along a dimension"

    def __init__(self, work: Work, place: Place) -> None:
        super().__init__(work, place)
        self._dimension = place.spec.towers_dim
        replicas = [copy.deepcopy(work.model) for _ in range(place.workers)]
        towers = [Tower(model, flatten_gradients(model)) for model in replicas]
        self._reduction: Reduction = REDUCTIONS[place.spec.towers_reduction](work, towers)
        self._towers = towers
        self._threads = ThreadPoolExecutor(len(towers), "tower")

    @classmethod
    def processes(cls, spec: Spec) -> list[str]:
        return [f"process of {spec.workers} threads"]

    @classmethod
    def formula(cls, spec: Spec, size: int) -> Mapping[str, Traffic]:
        per_tower = REDUCTIONS[spec.towers_reduction].formula(spec.workers, size)
        return {f"tower {number}": traffic for number, traffic in enumerate(per_tower)}

    def step(self, batch: GlobalBatch) -> None:
        clock, total = self.work.clock, len(batch.indices)
        inputs, labels = self.work.load(*batch)
        # As a loader would hand it out whose samples lie along that dimension.
        laid_out = inputs.movedim(0, self._dimension).contiguous()
        parts = split_along(laid_out, self._dimension, len(self._towers))
        answers = split_along(labels, 0, len(self._towers))
        clock.enter("compute")

        def compute(number: int) -> None:
            tower, own = self._towers[number], answers[number]
            tower.gradients.zero_()
            if len(own):
                part = parts[number].movedim(self._dimension, 0)
                divisor = self._reduction.divisor(total)
                self.work.add_gradient(tower.model, (part, own), divisor)

        self._reduction.begin()
        self._in_threads(compute)
        clock.enter("exchange")
        self._reduction.reduce(total)
        clock.enter("update")
        self._in_threads(self._reduction.update)
        clock.leave()

    def _in_threads(self, task: Callable[[int], Result]) -> list[Result]:
        """One call for each tower, in its thread; raises what any of them raises."""
        return list(self._threads.map(task, range(len(self._towers))))

    def parameters(self) -> Parameters:
        return self._reduction.parameters()

    def traffic(self) -> Mapping[str, Traffic]:
        return {f"tower {n}": tower.tally.total for n, tower in enumerate(self._towers)}

    def notes(self) -> list[str]:
        return [f"reduction: {self._reduction.what}; bytes are copies between towers within memory"]

    def close(self) -> None:
        self._threads.shutdown()
