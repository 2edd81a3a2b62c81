"""How the gradients of towers become one update, after three systems.

    reduction    a tower's loss           exchange                             who updates
    gluon        sum over its samples     summed in a buffer apart, which      every tower its own
                                          every tower reads                    copy, rescaled by 1/B
    tensorflow   mean over its samples    mean over towers                     the one set of
                 (weighted, see below)                                         variables, which
                                                                               towers read anew
    d2l          sum over its samples     added up in tower 0's own gradient,  every tower its own
                                          broadcast from there                 copy, divided by B

Sources: Apache MXNet, `python/mxnet/gluon/trainer.py` (`_allreduce_grads`, `_update`,
`rescale_grad`) with `kvstore='local'`; TensorFlow's `cifar10_multi_gpu_train.py`
(`average_gradients`); A. Zhang et al., https://d2l.ai, chapter 13.5 (`allreduce`).

The mean of towers' means is the mean over the batch only where all have equally many samples. So a
tower's mean is weighted by its share, n_t / (B / T): its loss is the sum over its n_t samples,
divided by B / T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hvdtrain.lab.systems.contract import Parameters
from hvdtrain.lab.systems.traffic import Tally, Traffic
from hvdtrain.lab.systems.work import Work, flatten_parameters, parameters_of, trained


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
