"""One process with one replica of the model per device; on a CPU a device is a thread.

The global batch is split along a dimension, each replica (tower) computes on its part, and a
reduction (`Gluon`, `TensorFlow`) turns the gradients of all towers into one update. In a step it is
called in this order: `begin`, `reduce` after the towers have computed, `update` for each tower.

Sources: Apache MXNet, `python/mxnet/gluon/utils.py` (`split_and_load`, with `batch_axis`), and
TensorFlow's tutorial `cifar10_multi_gpu_train.py` (towers).
"""

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from hvdtrain.data import Shares
from hvdtrain.lab.systems.contract import Member, Parameters, Spec, Strategy, Traffic
from hvdtrain.lab.systems.work import (
    GlobalBatch,
    Work,
    flatten_gradients,
    flatten_parameters,
    parameters_of,
    trained,
)


def split_along(tensor: torch.Tensor, dimension: int, towers: int) -> list[torch.Tensor]:
    """Split `tensor` along `dimension` into `towers` parts, whose lengths differ by at most one."""
    return list(tensor.split(Shares(towers).sizes(tensor.shape[dimension]), dimension))


@dataclass
class Tower:
    """One replica; every `.grad` is a view of `gradients`, `traffic` counts its copies."""

    model: torch.nn.Module
    gradients: torch.Tensor
    traffic: Traffic = field(default_factory=Traffic)


class Towers(Strategy):
    """The system `towers`: one replica per thread."""

    what = "one process, one replica per thread; the batch split along a dimension"

    def __init__(self, work: Work, member: Member) -> None:
        super().__init__(work, member)
        replicas = [copy.deepcopy(work.model) for _ in range(member.workers)]
        self._towers = [Tower(model, flatten_gradients(model)) for model in replicas]
        self._reduction = REDUCTIONS[member.spec.towers_reduction](work, self._towers)
        self._threads = ThreadPoolExecutor(len(replicas), "tower")

    @classmethod
    def processes(cls, spec: Spec) -> list[str]:
        return [f"process of {spec.workers} threads"]

    @classmethod
    def formula(cls, spec: Spec, size: int) -> Mapping[str, Traffic]:
        return {f"tower {number}": Traffic(size, size, 1) for number in range(spec.workers)}

    def step(self, batch: GlobalBatch) -> None:
        clock, dimension = self.work.clock, self.member.spec.towers_dim
        inputs, labels = self.work.load(*batch)
        # The layout of a loader whose samples lie along that dimension.
        laid_out = inputs.movedim(0, dimension).contiguous()
        parts = split_along(laid_out, dimension, len(self._towers))
        answers = split_along(labels, 0, len(self._towers))
        clock.enter("compute")
        divisor = self._reduction.begin(len(batch.indices))

        def compute(tower: Tower, part: torch.Tensor, targets: torch.Tensor) -> None:
            tower.gradients.zero_()
            if len(targets):
                self.work.add_gradient(tower.model, (part.movedim(dimension, 0), targets), divisor)

        # `list` waits for all threads, and raises what any of them raises.
        list(self._threads.map(compute, self._towers, parts, answers))
        clock.enter("exchange")
        self._reduction.reduce()
        clock.enter("update")
        list(self._threads.map(self._reduction.update, range(len(self._towers))))
        clock.leave()

    def parameters(self) -> Parameters:
        return parameters_of(self._reduction.model)

    def traffic(self) -> Mapping[str, Traffic]:
        return {f"tower {number}": tower.traffic for number, tower in enumerate(self._towers)}

    def notes(self) -> list[str]:
        return [f"reduction: {self._reduction.what}; bytes are memory copies between towers"]

    def close(self) -> None:
        self._threads.shutdown()


class Gluon:
    """Gradients are summed in a separate buffer (key-value store), which every tower copies.

    Every tower updates its own copy of the parameters, with its own optimizer.
    """

    what = "as Gluon's Trainer: summed in a key-value store, pulled by every tower"

    def __init__(self, work: Work, towers: Sequence[Tower]) -> None:
        self.model = towers[0].model
        self._towers = towers
        self._optimizers = [work.optimizer(trained(tower.model)) for tower in towers]
        self._total = 0
        self._store = torch.empty_like(towers[0].gradients)

    def begin(self, total: int) -> float:
        """Return the divisor of each tower's sum of losses in a step of `total` samples."""
        self._total = total
        return 1.0

    def reduce(self) -> None:
        self._store.zero_()
        for tower in self._towers:
            self._store.add_(tower.gradients)
        for tower in self._towers:
            tower.gradients.copy_(self._store)
            tower.traffic = tower.traffic.plus(self._store.nbytes, self._store.nbytes)

    def update(self, number: int) -> None:
        """Make the part of the update of one tower, in its thread."""
        self._towers[number].gradients.div_(self._total)
        self._optimizers[number].step()


class TensorFlow:
    """The mean of the towers' gradients updates shared variables, which every tower copies."""

    what = "as TensorFlow's towers: the mean of the towers' gradients updates shared variables"

    def __init__(self, work: Work, towers: Sequence[Tower]) -> None:
        self.model = work.model
        self._towers = towers
        self._variables = flatten_parameters(work.model)
        self._variables.grad = torch.empty_like(self._variables)
        self._copies = [flatten_parameters(tower.model) for tower in towers]
        self._optimizer = work.optimizer([self._variables])

    def begin(self, total: int) -> float:
        """Copy the variables; return as `Gluon.begin`."""
        for values in self._copies:
            values.copy_(self._variables)
        return total / len(self._towers)

    def reduce(self) -> None:
        gradients = [tower.gradients for tower in self._towers]
        torch.mean(torch.stack(gradients), dim=0, out=self._variables.grad)
        for tower, values in zip(self._towers, self._copies, strict=True):
            tower.traffic = tower.traffic.plus(tower.gradients.nbytes, values.nbytes)

    def update(self, number: int) -> None:
        if number == 0:
            self._optimizer.step()


REDUCTIONS: dict[str, type[Gluon | TensorFlow]] = {"gluon": Gluon, "tensorflow": TensorFlow}
