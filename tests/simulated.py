"""Audits and canonical sums of many ranks in one process, with every message counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hvdtrain.audit import Auditor, AuditRecord
from hvdtrain.audit.checks import BoundCheck
from hvdtrain.exchange import SUM, Complete, Pending, SingleProcess
from hvdtrain.exchange.canonical import CanonicalSums
from hvdtrain.ring import Transport, all_reduce
from tests.rings import Counting, run_in_process


@dataclass(frozen=True)
class Counted:
    """What ranks have sent."""

    sent_bytes: float  # mean over ranks
    messages: int  # most of any rank
    is_right: bool


class RingExchange(SingleProcess):
    """An exchange whose reductions are those of the reference ring."""

    def __init__(self, transport: Transport) -> None:
        self.rank, self.size, self.ring_size = transport.rank, transport.size, transport.size
        self._transport = transport

    def begin_reduction(self, values: torch.Tensor, op: str, name: str) -> Pending:
        flat = values.view(-1).numpy()
        all_reduce(flat, self._transport, op, out=flat)
        return Complete(values)


def gradients_of(rank: int, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Values that differ by rank and by position."""
    return [torch.arange(n, dtype=torch.float32) % 97 + rank for n in lengths]


def totals_of(workers: int, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Their sums over all ranks, which float32 holds exactly."""
    ranks = workers * (workers - 1) // 2
    return [(workers * (torch.arange(n) % 97) + ranks).float() for n in lengths]


def audited(lengths: Sequence[int], workers: int) -> Counted:
    """Audit the sums of the gradients of as many parameters, in threads as ranks."""

    def work(transport: Counting) -> bool:
        model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(n)) for n in lengths)
        records: list[AuditRecord] = []
        audit = Auditor(model, transport, 1, records.append, BoundCheck(transport, SUM))
        audit.begin(1)
        for parameter, gradient in zip(model, gradients_of(transport.rank, lengths), strict=True):
            (parameter * gradient).sum().backward()
        for parameter, total in zip(model, totals_of(workers, lengths), strict=True):
            parameter.grad = total
        audit.reduced(1)
        return [record.ok for record in records] == [True]

    return _counted(workers, work)


def summed(lengths: Sequence[int], workers: int) -> Counted:
    """Add the gradients of as many parameters canonically, a share on each rank."""

    def work(transport: Counting) -> bool:
        model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(n)) for n in lengths)
        optimizer = torch.optim.SGD(model.parameters())
        sums = CanonicalSums(model, optimizer, workers, RingExchange(transport))
        sums.begin(transport.rank)
        sums.begin_pass(is_last=True)
        for parameter, gradient in zip(model, gradients_of(transport.rank, lengths), strict=True):
            (parameter * gradient).sum().backward()
        sums.finish()
        totals = totals_of(workers, lengths)
        return all(torch.equal(p.grad, total) for p, total in zip(model, totals, strict=True))

    return _counted(workers, work)


def _counted(workers: int, work: Callable[[Counting], bool]) -> Counted:
    def run(transport: Transport) -> tuple[list[int], bool]:
        counting = Counting(transport)
        right = work(counting)
        return [size for size in counting.sent if size], right

    sent, right = zip(*run_in_process(workers, run), strict=True)
    return Counted(
        sent_bytes=float(np.mean([sum(sizes) for sizes in sent])),
        messages=max(map(len, sent)),
        is_right=all(right),
    )
