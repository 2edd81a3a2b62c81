"""Faults that a wrong exchange could have, done on purpose to results that it has delivered.

`hvdtrain verify --inject` and the audit's campaign use the same ones. A fault changes a result in
place, after the exchange and before whoever checks it: no check knows that it is being tested.

    name             where      what becomes of the result
    bitflip          one rank   one bit of one element is turned over
    drop-rank        all ranks  one rank's term is missing from a sum or an average
    sum-for-mean     all ranks  an average is not divided by the number of ranks
    mean-for-sum     all ranks  a sum is divided by the number of ranks
    swap-results     all ranks  two results of the same shape are exchanged
    stale            all ranks  it is that of the step before
    nan              all ranks  one element is not a number
    half-precision   all ranks  it has been rounded to float16 on its way
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

# Collective: the tensor that the given rank passes, on every rank.
Teller = Callable[[torch.Tensor, int], torch.Tensor]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Delivered:
    """One rank's result of one collective, and what a fault may need to spoil it."""

    value: torch.Tensor  # contiguous; changed in place
    op: str  # sum, average, or another operation
    local: torch.Tensor | None = None  # this rank's own term, of the shape of `value`
    previous: torch.Tensor | None = None  # the result of the step before
    other: torch.Tensor | None = None  # another result of this step, also changed by a swap


@dataclass(frozen=True)
class Place:
    """Where this process stands, and how a fault on all ranks learns one rank's term."""

    rank: int
    size: int
    tell: Teller


class Fault(Protocol):
    """Collective: spoil `delivered` in place, or leave it as it is where the fault means nothing.

    `dice`: seeded alike on every rank, so that all pick the same victim. Each call must draw the
    same numbers on every rank.
    """

    def __call__(self, delivered: Delivered, place: Place, dice: random.Random) -> None: ...


def inject(fault: str, delivered: Delivered, place: Place, dice: random.Random) -> bool:
    """Collective: spoil one result with the fault of this name.

    Called on every rank with the same `fault`, shapes and state of `dice`. Returns whether any bit
    of this rank's value was changed. Raises KeyError for an unknown fault.
    """
    before = delivered.value.clone()
    FAULTS[fault](delivered, place, dice)
    return not torch.equal(_bits(before), _bits(delivered.value))


def _bitflip(delivered: Delivered, place: Place, dice: random.Random) -> None:
    bits = _bits(delivered.value)
    culprit = dice.randrange(place.size)
    # Drawn as fractions: with a reduce-scatter the ranks hold results of different lengths.
    where, which = dice.random(), dice.random()
    if place.rank == culprit and bits.numel():
        mask = 1 << int(which * (8 * bits.element_size() - 1))
        bits[int(where * bits.numel())] ^= mask


def _drop_rank(delivered: Delivered, place: Place, dice: random.Random) -> None:
    dropped = dice.randrange(place.size)
    if delivered.op not in ("sum", "average") or delivered.local is None:
        return
    term = place.tell(delivered.local, dropped)
    if delivered.op == "average":
        term = term / place.size
    delivered.value.sub_(term.to(delivered.value.dtype))


def _sum_for_mean(delivered: Delivered, place: Place, dice: random.Random) -> None:
    if delivered.op == "average":
        delivered.value.mul_(place.size)


def _mean_for_sum(delivered: Delivered, place: Place, dice: random.Random) -> None:
    if delivered.op == "sum":
        delivered.value.copy_(delivered.value / place.size)


def _swap_results(delivered: Delivered, place: Place, dice: random.Random) -> None:
    value, other = delivered.value, delivered.other
    if other is not None and other.shape == value.shape and other.dtype == value.dtype:
        kept = value.clone()
        value.copy_(other)
        other.copy_(kept)


def _stale(delivered: Delivered, place: Place, dice: random.Random) -> None:
    if delivered.previous is not None:
        delivered.value.copy_(delivered.previous)


def _nan(delivered: Delivered, place: Place, dice: random.Random) -> None:
    where = dice.random()
    flat = delivered.value.view(-1)
    if flat.is_floating_point() and flat.numel():
        flat[int(where * flat.numel())] = float("nan")


def _half_precision(delivered: Delivered, place: Place, dice: random.Random) -> None:
    if delivered.value.is_floating_point():
        delivered.value.copy_(delivered.value.half())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, flat, as integers."""
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
