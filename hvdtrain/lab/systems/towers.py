"""One process, a replica of the model a device; on a CPU a device is a thread.

The global batch is split along a dimension, each replica (tower) computes on its part, and the
gradients of all towers become one update. How is what the reductions differ in: see
`hvdtrain.lab.systems.towers`.

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


@dataclass(frozen=True)
class Tower:
    """One replica; `gradients` holds all of its `.grad`."""

    model: torch.nn.Module
    gradients: torch.Tensor
    tally: Tally = field(default_factory=Tally)

    def sends(self, size: int) -> None:
        """To another device."""
        self.tally.add(sent=size)

    def receives(self, size: int) -> None:
        """From another device."""
        self.tally.add(received=size)


class Reduction(Protocol):
    """One of the three; `begin`, then the towers compute, then `reduce`, then `update` of each."""

    @property
    def what(self) -> str: ...

    @staticmethod
    def formula(towers: int, size: int) -> list[Traffic]:
        """What each tower sends and receives in a step, for gradients of `size` bytes."""

    def begin(self) -> None:
        """Before the towers compute."""

    def divisor(self, total: int) -> float:
        """Of the sum of a tower's losses, for a global batch of `total` samples."""

    def reduce(self, total: int) -> None:
        """Once all towers have computed."""

    def update(self, number: int) -> None:
        """One tower's part of the update, in its thread."""

    def parameters(self) -> Parameters:
        """As they stand."""


class _OwnCopies:
    """Every tower updates its own copy, by an optimizer of its own."""

    def __init__(self, work: Work, towers: Sequence[Tower]) -> None:
        self._towers = towers
        self._optimizers = [work.optimizer(trained(tower.model)) for tower in towers]
        self._total = 0

    def begin(self) -> None:
        """Each has its copy already."""

    def divisor(self, total: int) -> float:
        return 1.0

    def update(self, number: int) -> None:
        self._towers[number].gradients.div_(self._total)
        self._optimizers[number].step()

    def parameters(self) -> Parameters:
        return parameters_of(self._towers[0].model)


class Gluon(_OwnCopies):
    """Sum in a buffer apart (a key-value store), from which every tower pulls."""

    what = "as Gluon's Trainer: summed in a key-value store, pulled by every tower"

    def __init__(self, work: Work, towers: Sequence[Tower]) -> None:
        super().__init__(work, towers)
        self._store = torch.empty_like(towers[0].gradients)

    @staticmethod
    def formula(towers: int, size: int) -> list[Traffic]:
        return [Traffic(size, size, 1)] * towers

    def reduce(self, total: int) -> None:
        self._total = total
        self._store.zero_()
        for tower in self._towers:
            self._store.add_(tower.gradients)
            tower.sends(self._store.nbytes)
        for tower in self._towers:
            tower.gradients.copy_(self._store)
            tower.receives(self._store.nbytes)


class D2l(_OwnCopies):
    """Gather in tower 0's gradient, broadcast from there."""

    what = "as in Dive into Deep Learning: gathered on tower 0, broadcast from there"

    @staticmethod
    def formula(towers: int, size: int) -> list[Traffic]:
        others = towers - 1
        return [Traffic(others * size, others * size, others)] + [Traffic(size, size, 1)] * others

    def reduce(self, total: int) -> None:
        self._total = total
        first, *others = self._towers
        size = first.gradients.nbytes
        for tower in others:
            first.gradients.add_(tower.gradients)
            tower.sends(size)
            first.receives(size)
        for tower in others:
            tower.gradients.copy_(first.gradients)
            first.sends(size)
            tower.receives(size)


class TensorFlow:
    """One set of variables, read by every tower; the mean of the towers' gradients."""

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
            tower.receives(values.nbytes)

    def divisor(self, total: int) -> float:
        return total / len(self._towers)

    def reduce(self, total: int) -> None:
        gradients = [tower.gradients for tower in self._towers]
        torch.mean(torch.stack(gradients), dim=0, out=self._variables.grad)
        for tower in self._towers:
            tower.sends(tower.gradients.nbytes)

    def update(self, number: int) -> None:
        if number == 0:
            self._optimizer.step()

    def parameters(self) -> Parameters:
        return parameters_of(self._model)


REDUCTIONS: dict[str, type[Gluon | TensorFlow | D2l]] = {
    "gluon": Gluon,
    "tensorflow": TensorFlow,
    "d2l": D2l,
}
