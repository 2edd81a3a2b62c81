"""The runners that submit cases to the collectives under test, and faults to inject."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from hvdtrain.evidence.verify.cases import Case
from hvdtrain.exchange.gpus import synchronize
from hvdtrain.ring import Transport, broadcast, split_evenly
from hvdtrain.tensors import CPU

if TYPE_CHECKING:
    from hvdtrain.exchange.horovod import HorovodExchange

Tensors = list[torch.Tensor]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Runner:
    """A runner of cases that returns the installation's results unchanged."""

    spoiled = False  # whether a fault changed the last results on this rank
    seconds = 0.0  # of the last submission on this rank, without copies to and from a GPU

    def __init__(self, exchange: HorovodExchange, device: torch.device = CPU) -> None:
        self._exchange, self.device = exchange, device
        self.ran_on = device.type  # the type of the device of the last results

    def run(self, case: Case, inputs: Tensors, name: str, step: int) -> Tensors:
        """Collective: return the results, on the CPU, of tensors on the device.

        `step` counts the submissions of a case, from 0.
        """
        there = [tensor.to(self.device) for tensor in inputs]
        synchronize(self.device)
        started = time.perf_counter()
        results = self._exchange.collective(
            case.operation.kind,
            there,
            name,
            case.submission,
            op=case.operation.reduction,
            root=self._exchange.size - 1,  # rank 0 would be mistaken for a default
        )
        synchronize(self.device)
        self.seconds = time.perf_counter() - started
        self.ran_on = results[0].device.type
        return [result.cpu() for result in results]


@dataclass(frozen=True)
class Delivered:
    """The result of a collective on one rank, and the data that faults use to spoil it."""

    value: torch.Tensor  # contiguous; changed in place
    op: str  # sum, average, or another operation
    local: torch.Tensor | None = None  # this rank's own term, of the shape of `value`
    previous: torch.Tensor | None = None  # the result of the step before
    other: torch.Tensor | None = None  # another result of this step, also changed by a swap


@dataclass(frozen=True)
class CaseContext:
    """The rank and size of this process, and the exchange of terms that faults use."""

    rank: int
    size: int
    # Collective: return, on every rank, the `local` of the given rank.
    term_of: Callable[[torch.Tensor, int], torch.Tensor]


# Collective: spoil the result in place, or leave it where the fault does not apply. The random
# numbers are equally seeded on every rank, so that all choose the same victim: each call must draw
# the same numbers on every rank.
Fault = Callable[[Delivered, CaseContext, random.Random], None]


class FaultyRunner(Runner):
    """A runner that injects a fault of FAULTS into one tensor of every submission."""

    def __init__(
        self,
        exchange: HorovodExchange,
        fault: str,
        transport: Transport,
        seed: int,
        device: torch.device = CPU,
    ) -> None:
        """`seed`: the same on every rank; `transport`: broadcasts the terms that faults drop."""
        super().__init__(exchange, device)
        self._fault, self._transport, self._dice = fault, transport, random.Random(seed)
        self._previous: Tensors = []

    def run(self, case: Case, inputs: Tensors, name: str, step: int) -> Tensors:
        results = [result.contiguous() for result in super().run(case, inputs, name, step)]
        honest = [result.clone() for result in results]
        victims = [number for number, length in enumerate(case.lengths) if length]
        self.spoiled = False
        if victims:
            victim = self._dice.choice(victims)
            twins = [
                results[number]
                for number, length in enumerate(case.lengths)
                if number != victim and length == case.lengths[victim]
            ]
            delivered = Delivered(
                value=results[victim],
                op=case.operation.reduction,
                local=self._own_share(case, inputs[victim]),
                previous=self._previous[victim] if step else None,
                other=twins[0] if twins else None,
            )
            context = CaseContext(
                self._transport.rank,
                self._transport.size,
                partial(self._term_of, case, inputs[victim]),
            )
            self.spoiled = inject(self._fault, delivered, context, self._dice)
        self._previous = honest
        return results

    def _term_of(
        self, case: Case, term: torch.Tensor, local: torch.Tensor, rank: int
    ) -> torch.Tensor:
        """Collective: return the part of the term of `rank`, of which this rank has `term`."""
        whole = np.array(term.numpy())
        broadcast(whole, self._transport, rank)
        return self._own_share(case, torch.from_numpy(whole))

    def _own_share(self, case: Case, term: torch.Tensor) -> torch.Tensor:
        """Return the part of a term that contributes to this rank's result."""
        if case.operation.kind != "reducescatter":
            return term
        return term[split_evenly(len(term), self._transport.size)[self._transport.rank]]


def inject(fault: str, delivered: Delivered, context: CaseContext, dice: random.Random) -> bool:
    """Collective: spoil one result with the fault of this name.

    Called on every rank with the same `fault`, shapes and state of `dice`. Return whether any bit
    of this rank's value was changed. Raises KeyError for an unknown fault.
    """
    before = delivered.value.clone()
    FAULTS[fault](delivered, context, dice)
    return not torch.equal(_bits(before), _bits(delivered.value))


def _bitflip(delivered: Delivered, context: CaseContext, dice: random.Random) -> None:
    bits = _bits(delivered.value)
    culprit = dice.randrange(context.size)
    # Drawn as fractions: with a reduce-scatter the ranks hold results of different lengths.
    where, which = dice.random(), dice.random()
    if context.rank == culprit and bits.numel():
        bits[int(where * bits.numel())] ^= 1 << int(which * (8 * bits.element_size() - 1))


def _drop_rank(delivered: Delivered, context: CaseContext, dice: random.Random) -> None:
    dropped = dice.randrange(context.size)
    if delivered.op not in ("sum", "average") or delivered.local is None:
        return
    term = context.term_of(delivered.local, dropped)
    if delivered.op == "average":
        term = term / context.size
    delivered.value.sub_(term.to(delivered.value.dtype))


def _sum_for_mean(delivered: Delivered, context: CaseContext, dice: random.Random) -> None:
    if delivered.op == "average":
        delivered.value.mul_(context.size)


def _mean_for_sum(delivered: Delivered, context: CaseContext, dice: random.Random) -> None:
    if delivered.op == "sum":
        delivered.value.copy_(delivered.value / context.size)


def _swap_results(delivered: Delivered, context: CaseContext, dice: random.Random) -> None:
    value, other = delivered.value, delivered.other
    if other is not None and other.shape == value.shape and other.dtype == value.dtype:
        kept = value.clone()
        value.copy_(other)
        other.copy_(kept)


def _stale(delivered: Delivered, context: CaseContext, dice: random.Random) -> None:
    if delivered.previous is not None:
        delivered.value.copy_(delivered.previous)


def _nan(delivered: Delivered, context: CaseContext, dice: random.Random) -> None:
    where = dice.random()
    flat = delivered.value.view(-1)
    if flat.is_floating_point() and flat.numel():
        flat[int(where * flat.numel())] = float("nan")


def _half_precision(delivered: Delivered, context: CaseContext, dice: random.Random) -> None:
    if delivered.value.is_floating_point():
        delivered.value.copy_(delivered.value.half())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of the same memory as integers."""
    return tensor.detach().view(-1).view(BITS[tensor.element_size()])


FAULTS: dict[str, Fault] = {
    "bitflip": _bitflip,
    "drop-rank": _drop_rank,
    "sum-for-mean": _sum_for_mean,
    "mean-for-sum": _mean_for_sum,
    "swap-results": _swap_results,
    "stale": _stale,
    "nan": _nan,
    "half-precision": _half_precision,
}
