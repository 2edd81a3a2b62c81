"""Faults in virtual workers, each of which must change what several workers learn.

    horovodrun -np N python -m tests.parallel.breakages FOLDER

trains each experiment of FOLDER/experiments.json with the fault of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from hvdtrain.data import Shares, VirtualShares
from hvdtrain.exchange import Complete
from hvdtrain.exchange.canonical import CanonicalSums
from hvdtrain.exchange.horovod import HorovodExchange
from hvdtrain.topology import Topology
from hvdtrain.train import workers
from hvdtrain.train.workers import VirtualWorkers
from tests.parallel.shared import main

RANK = Topology.from_environment().rank
SIZE = Topology.from_environment().size


def shares_cut_by_rank() -> AbstractContextManager[object]:
    """Each rank's part of a batch is cut among its own virtual workers."""

    def of(self: VirtualShares, indices: Any, share: int) -> Any:
        (rank,) = (it for it in range(SIZE) if share in self.of_rank(it))
        own = self.of_rank(rank)
        return Shares(len(own)).of(Shares(SIZE).of(indices, rank), share - own[0])

    return patch.object(VirtualShares, "of", of)


def random_numbers_by_rank() -> AbstractContextManager[object]:
    honest = workers.seed_all
    return patch.object(workers, "seed_all", lambda *them: honest(*them, RANK))


def statistics_by_rank() -> AbstractContextManager[object]:
    """All virtual workers of a rank share one set of buffers."""
    return patch.object(VirtualWorkers, "_load", lambda self, share: None)


def floats_in_place_of_integers() -> AbstractContextManager[object]:
    """Shares are added in float32, first on each rank."""
    sums: dict[int, torch.Tensor] = {}
    honest_add = CanonicalSums.next_share

    def keep(self: CanonicalSums) -> None:
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                if parameter.grad is not None:
                    before = sums.get(id(parameter), torch.zeros_like(parameter))
                    sums[id(parameter)] = before + parameter.grad

    def next_share(self: CanonicalSums) -> None:
        keep(self)
        honest_add(self)

    honest_finish = CanonicalSums.finish

    def finish(self: CanonicalSums) -> bool:
        keep(self)
        are_finite = honest_finish(self)
        parameters = [p for bucket in self._buckets for p in bucket.parameters]
        for number, parameter in enumerate(parameters):
            own = sums.pop(id(parameter), torch.zeros_like(parameter))
            name = f"breakage.{number}"
            parameter.grad = self._exchange.begin_reduction(own, "sum", name).wait()
        return are_finite

    return _all(
        patch.object(CanonicalSums, "next_share", next_share),
        patch.object(CanonicalSums, "finish", finish),
    )


def exponents_by_rank() -> AbstractContextManager[object]:
    """Ranks do not agree on exponents. (The audit, which would find it, is off.)"""
    honest = HorovodExchange.begin_reduction

    def begin(self: HorovodExchange, values: torch.Tensor, op: str, name: str) -> Any:
        return Complete(values) if op == "max" else honest(self, values, op, name)

    return patch.object(HorovodExchange, "begin_reduction", begin)


@contextmanager
def _all(*patches: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


BREAKAGES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "none": lambda: patch.object(workers, "seed_all", workers.seed_all),
    "shares cut by rank": shares_cut_by_rank,
    "random numbers by rank": random_numbers_by_rank,
    "statistics by rank": statistics_by_rank,
    "floats in place of integers": floats_in_place_of_integers,
    "exponents by rank": exponents_by_rank,
}

if __name__ == "__main__":
    main(lambda name: BREAKAGES[name]())
