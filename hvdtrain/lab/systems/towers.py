"""One process with one replica of the model per device; on a CPU a device is a thread.

The global batch is split along a dimension, each replica (tower) computes on its part, and a
`Reduction` turns the gradients of all towers into one update.

Sources: Apache MXNet, `python/mxnet/gluon/utils.py` (`split_and_load`, with `batch_axis`), and
TensorFlow's tutorial `cifar10_multi_gpu_train.py` (towers).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from hvdtrain.data import Shares
from hvdtrain.lab.systems.contract import Parameters, Place, Spec, Strategy, Tally, Traffic
from hvdtrain.lab.systems.work import (
    GlobalBatch,
    Work,
    flatten_gradients,
    flatten_parameters,
    parameters_of,
    trained,
)

Result = TypeVar("Result")


def split_along(tensor: torch.Tensor, dimension: int, towers: int) -> list[torch.Tensor]:
    """Split `tensor` along `dimension` into `towers` parts, whose lengths differ by at most one."""
    return list(tensor.split(Shares(towers).sizes(tensor.shape[dimension]), dimension))


class Towers(Strategy):
    """The system `towers`: one replica per thread."""

    what = "one process, one replica per thread; the batch split along a dimension"

    def __init__(self, work: Work, place: Place) -> None:
        super().__init__(work, place)
        self._dimension = place.spec.towers_dim
        replicas = [copy.deepcopy(work.model) for _ in range(place.workers)]
        towers = [Tower(model, flatten_gradients(model)) for model in replicas]
        self._reduction: TowerReduction = REDUCTIONS[place.spec.towers_reduction](work, towers)
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
        # The layout of a loader whose samples lie along that dimension.
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
        """Call `task` once per tower, in parallel; raise what any call raises."""
        return list(self._threads.map(task, range(len(self._towers))))

    def parameters(self) -> Parameters:
        return self._reduction.parameters()

    def traffic(self) -> Mapping[str, Traffic]:
        return {f"tower {n}": tower.tally.total for n, tower in enumerate(self._towers)}

    def notes(self) -> list[str]:
        return [f"reduction: {self._reduction.what}; bytes are memory copies between towers"]

    def close(self) -> None:
        self._threads.shutdown()


@dataclass(frozen=True)
class Tower:
    """One replica; every `.grad` is a view of `gradients`, `tally` counts its copies."""

    model: torch.nn.Module
    gradients: torch.Tensor
    tally: Tally = field(default_factory=Tally)


class TowerReduction(Protocol):
    """The path from gradients to an update.

    Call order in a step: `begin`, computation in the towers, `reduce`, `update` of each tower.
    """

    @property
    def what(self) -> str: ...

    @staticmethod
    def formula(towers: int, size: int) -> list[Traffic]:
        """Return the traffic of each tower per step, for gradients of `size` bytes."""

    def begin(self) -> None:
        """Prepare the replicas, before the towers compute."""

    def divisor(self, total: int) -> float:
        """Return the divisor of a tower's sum of losses, for a global batch of `total` samples."""

    def reduce(self, total: int) -> None:
        """Combine the gradients, once all towers have computed."""

    def update(self, number: int) -> None:
        """Make the part of the update of one tower, in its thread."""

    def parameters(self) -> Parameters:
        """Return the current parameters."""


class Gluon:
    """Gradients are summed in a separate buffer (key-value store), which every tower copies.

    Every tower updates its own copy of the parameters, with its own optimizer.
    """

    what = "as Gluon's Trainer: summed in a key-value store, pulled by every tower"

    def __init__(self, work: Work, towers: Sequence[Tower]) -> None:
        self._towers = towers
        self._optimizers = [work.optimizer(trained(tower.model)) for tower in towers]
        self._total = 0
        self._store = torch.empty_like(towers[0].gradients)

    @staticmethod
    def formula(towers: int, size: int) -> list[Traffic]:
        return [Traffic(size, size, 1)] * towers

    def begin(self) -> None:
        """Do nothing: every tower has its own copy."""

    def divisor(self, total: int) -> float:
        return 1.0

    def reduce(self, total: int) -> None:
        self._total = total
        self._store.zero_()
        for tower in self._towers:
            self._store.add_(tower.gradients)
            tower.tally.add(sent=self._store.nbytes)
        for tower in self._towers:
            tower.gradients.copy_(self._store)
            tower.tally.add(received=self._store.nbytes)

    def update(self, number: int) -> None:
        self._towers[number].gradients.div_(self._total)
        self._optimizers[number].step()

    def parameters(self) -> Parameters:
        return parameters_of(self._towers[0].model)


class TensorFlow:
    """The mean of the towers' gradients updates shared variables, which every tower copies."""

    what = "as TensorFlow's towers: the mean of the towers' gradients updates shared variables"

    def __init__(self, work: Work, towers: Sequence[Tower]) -> None:
        self._towers = towers
        self._model = work.model
        self._variables = flatten_parameters(work.model)
        self._variables.grad = torch.empty_like(self._variables)
        self._copies = [flatten_parameters(tower.model) for tower in towers]
        self._optimizer = work.optimizer([self._variables])

    @staticmethod
    def formula(towers: int, size: int) -> list[Traffic]:
        return [Traffic(size, size, 1)] * towers

    def begin(self) -> None:
        for tower, values in zip(self._towers, self._copies, strict=True):
            values.copy_(self._variables)
            tower.tally.add(received=values.nbytes)

    def divisor(self, total: int) -> float:
        return total / len(self._towers)

    def reduce(self, total: int) -> None:
        gradients = [tower.gradients for tower in self._towers]
        torch.mean(torch.stack(gradients), dim=0, out=self._variables.grad)
        for tower in self._towers:
            tower.tally.add(sent=tower.gradients.nbytes)

    def update(self, number: int) -> None:
        if number == 0:
            self._optimizer.step()

    def parameters(self) -> Parameters:
        return parameters_of(self._model)


REDUCTIONS: dict[str, type[Gluon | TensorFlow]] = {"gluon": Gluon, "tensorflow": TensorFlow}
