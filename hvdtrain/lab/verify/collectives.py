"""The collectives under test, the runners that submit cases to them, and faults to inject."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hvdtrain.lab.verify.cases import Case
from hvdtrain.ring import Transport, broadcast, split_evenly

Tensors = list[torch.Tensor]
# Collective: return, on every rank, the tensor that the given rank passes.
Teller = Callable[[torch.Tensor, int], torch.Tensor]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Collectives(Protocol):
    """The collectives of an installation. Each takes tensors of one dtype and does not change them.

    `submission`: alone or together, each by itself and all begun before the first is awaited; or
    grouped, as one explicit group.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def controller(self) -> str: ...

    @property
    def repeatable(self) -> bool:
        """Whether the order of summation is the same in every run, for every submission."""

    def all_reduce(self, tensors: Tensors, op: str, name: str, submission: str) -> Tensors:
        """Collective: return each tensor's sum, average, min or max over ranks."""

    def reduce_scatter(self, tensors: Tensors, op: str, name: str, submission: str) -> Tensors:
        """Collective: return this rank's share of each sum or average, as `split_evenly` cuts."""

    def all_gather(self, tensors: Tensors, name: str, submission: str) -> Tensors:
        """Collective: return the tensors joined in rank order; lengths may differ by rank."""

    def broadcast(self, tensors: Tensors, root: int, name: str, submission: str) -> Tensors:
        """Collective: return the tensors of rank `root`."""


class Runner(Protocol):
    """A way of submitting cases to an installation."""

    def run(self, case: Case, inputs: Tensors, name: str, step: int) -> Tensors:
        """Collective: return the results. `step` counts the submissions of a case, from 0."""

    def spoiled(self) -> bool:
        """Return whether a fault changed the last results on this rank."""


class HonestRunner:
    """A runner that returns the installation's results unchanged."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def run(self, case: Case, inputs: Tensors, name: str, step: int) -> Tensors:
        kind, op, submission = case.operation.kind, case.operation.reduction, case.submission
        if kind == "allreduce":
            return self._collectives.all_reduce(inputs, op, name, submission)
        if kind == "reducescatter":
            return self._collectives.reduce_scatter(inputs, op, name, submission)
        if kind == "allgather":
            return self._collectives.all_gather(inputs, name, submission)
        root = self._collectives.size - 1  # rank 0 would be mistaken for a default
        return self._collectives.broadcast(inputs, root, name, submission)

    def spoiled(self) -> bool:
        return False


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
    tell: Teller


class Fault(Protocol):
    """Collective: spoil `delivered` in place, or leave it where the fault does not apply.

    `dice`: equally seeded on every rank, so that all choose the same victim. Each call must draw
    the same numbers on every rank.
    """

    def __call__(self, delivered: Delivered, place: CaseContext, dice: random.Random) -> None: ...


class FaultyRunner:
    """A runner that injects a fault of FAULTS into one tensor of every submission."""

    def __init__(self, honest: Runner, fault: str, transport: Transport, seed: int) -> None:
        """`seed`: the same on every rank; `transport`: broadcasts the terms that faults drop."""
        self._honest = honest
        self._fault = fault
        self._transport = transport
        self._dice = random.Random(seed)
        self._previous: Tensors = []
        self._spoiled = False

    def run(self, case: Case, inputs: Tensors, name: str, step: int) -> Tensors:
        results = [result.contiguous() for result in self._honest.run(case, inputs, name, step)]
        delivered = [result.clone() for result in results]
        victims = [number for number, length in enumerate(case.lengths) if length]
        self._spoiled = False
        if victims:
            victim = victims[self._dice.randrange(len(victims))]
            target = self._target(case, inputs, results, victim, step)
            place = self._place(case, inputs[victim])
            self._spoiled = inject(self._fault, target, place, self._dice)
        self._previous = delivered
        return results

    def spoiled(self) -> bool:
        return self._spoiled

    def _target(
        self, case: Case, inputs: Tensors, results: Tensors, victim: int, step: int
    ) -> Delivered:
        twins = [
            number
            for number, length in enumerate(case.lengths)
            if number != victim and length == case.lengths[victim]
        ]
        return Delivered(
            value=results[victim],
            op=case.operation.reduction,
            local=self._own_share(case, inputs[victim]),
            previous=self._previous[victim] if step else None,
            other=results[twins[0]] if twins else None,
        )

    def _place(self, case: Case, term: torch.Tensor) -> CaseContext:
        def term_of(local: torch.Tensor, rank: int) -> torch.Tensor:
            whole = np.array(term.numpy())
            broadcast(whole, self._transport, rank)
            return self._own_share(case, torch.from_numpy(whole))

        return CaseContext(self._transport.rank, self._transport.size, term_of)

    def _own_share(self, case: Case, term: torch.Tensor) -> torch.Tensor:
        """Return the part of a term that contributes to this rank's result."""
        if case.operation.kind != "reducescatter":
            return term
        return term[split_evenly(len(term), self._transport.size)[self._transport.rank]]


def inject(fault: str, delivered: Delivered, place: CaseContext, dice: random.Random) -> bool:
    """Collective: spoil one result with the fault of this name.

    Called on every rank with the same `fault`, shapes and state of `dice`. Return whether any bit
    of this rank's value was changed. Raises KeyError for an unknown fault.
    """
    before = delivered.value.clone()
    FAULTS[fault](delivered, place, dice)
    return not torch.equal(_bits(before), _bits(delivered.value))


def _bitflip(delivered: Delivered, place: CaseContext, dice: random.Random) -> None:
    bits = _bits(delivered.value)
    culprit = dice.randrange(place.size)
    # Drawn as fractions: with a reduce-scatter the ranks hold results of different lengths.
    where, which = dice.random(), dice.random()
    if place.rank == culprit and bits.numel():
        mask = 1 << int(which * (8 * bits.element_size() - 1))
        bits[int(where * bits.numel())] ^= mask


def _drop_rank(delivered: Delivered, place: CaseContext, dice: random.Random) -> None:
    dropped = dice.randrange(place.size)
    if delivered.op not in ("sum", "average") or delivered.local is None:
        return
    term = place.tell(delivered.local, dropped)
    if delivered.op == "average":
        term = term / place.size
    delivered.value.sub_(term.to(delivered.value.dtype))


def _sum_for_mean(delivered: Delivered, place: CaseContext, dice: random.Random) -> None:
    if delivered.op == "average":
        delivered.value.mul_(place.size)


def _mean_for_sum(delivered: Delivered, place: CaseContext, dice: random.Random) -> None:
    if delivered.op == "sum":
        delivered.value.copy_(delivered.value / place.size)


def _swap_results(delivered: Delivered, place: CaseContext, dice: random.Random) -> None:
    value, other = delivered.value, delivered.other
    if other is not None and other.shape == value.shape and other.dtype == value.dtype:
        kept = value.clone()
        value.copy_(other)
        other.copy_(kept)


def _stale(delivered: Delivered, place: CaseContext, dice: random.Random) -> None:
    if delivered.previous is not None:
        delivered.value.copy_(delivered.previous)


def _nan(delivered: Delivered, place: CaseContext, dice: random.Random) -> None:
    where = dice.random()
    flat = delivered.value.view(-1)
    if flat.is_floating_point() and flat.numel():
        flat[int(where * flat.numel())] = float("nan")


def _half_precision(delivered: Delivered, place: CaseContext, dice: random.Random) -> None:
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
