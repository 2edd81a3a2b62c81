"""Ranks as threads of this process: real collectives, without Horovod."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hvdtrain.errors import UsageError
from hvdtrain.exchange import AVERAGE, SUM, Pending, Reduction
from hvdtrain.ring.orders import KnownOrder
from hvdtrain.ring.transports import Transport

Result = TypeVar("Result")
TIMEOUT_S = 30.0


class Board:
    """Where ranks leave what they give to a collective, and find what the others gave."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._given: dict[tuple[str, int], dict[int, Any]] = defaultdict(dict)
        self._broken = False

    def give(self, key: tuple[str, int], rank: int, value: Any) -> None:
        with self._changed:
            self._given[key][rank] = value
            self._changed.notify_all()

    def take(self, key: tuple[str, int]) -> list[Any]:
        """Every rank's value, in rank order, once all have given theirs."""
        given = self._given[key]
        with self._changed:
            whole = self._changed.wait_for(
                lambda: self._broken or len(given) == self.size, TIMEOUT_S
            )
            if not whole or len(given) < self.size:
                raise RuntimeError(f"{key} broke off: only ranks {sorted(given)} came")
            return [given[rank] for rank in range(self.size)]

    def is_complete(self, key: tuple[str, int]) -> bool:
        with self._changed:
            return len(self._given[key]) == self.size

    def fail(self) -> None:
        """A rank is gone: nobody shall wait for it."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()


@dataclass(frozen=True)
class _Pending:
    board: Board
    key: tuple[str, int]
    values: torch.Tensor
    op: str

    def done(self) -> bool:
        return self.board.is_complete(self.key)

    def wait(self) -> torch.Tensor:
        stacked = torch.stack(self.board.take(self.key))
        reduced = stacked.amax(0) if self.op == "max" else stacked.sum(0).to(stacked.dtype)
        return self.values.copy_(reduced)


class ThreadExchange:
    """An Exchange of one rank. Gradients are summed, in rank order: a run repeats bit for bit."""

    controller = "threads"
    repeatable = True

    def __init__(self, rank: int, board: Board) -> None:
        self.rank = rank
        self.size = self.ring_size = board.size
        self._board = board
        self._uses: Counter[str] = Counter()

    def __deepcopy__(self, memo: dict[int, Any]) -> ThreadExchange:
        return self

    def distribute(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        grad_accum_steps: int = 1,
        reduction: Reduction = AVERAGE,
    ) -> torch.optim.Optimizer:
        assert reduction == SUM
        return optimizer

    def begin_pass(self, optimizer: torch.optim.Optimizer) -> None: ...

    def reduce_gradients(self, optimizer: torch.optim.Optimizer, look: bool = False) -> bool:
        parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        ]
        own = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        for parameter, *given in zip(parameters, *self._gather(own, "gradients"), strict=True):
            parameter.grad = torch.stack(given).sum(0)
        return False

    def broadcast_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None: ...

    def begin_reduction(self, values: torch.Tensor, op: str, name: str) -> Pending:
        return _Pending(self._board, self._begin(values.clone(), name), values, op)

    def sum_later(self, values: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        key = self._begin(values.detach().clone(), name)
        return lambda: torch.stack(self._board.take(key)).sum(0)

    def broadcast_object(self, value: Any, name: str) -> Any:
        return self._gather(value, name)[0]

    def all_gather_object(self, value: Any, name: str) -> list[Any]:
        return self._gather(value, name)

    def peer_failures(self) -> AbstractContextManager[None]:
        return nullcontext()

    def summation_order(self) -> KnownOrder:
        raise UsageError("--audit=exact: the order of threads is not known")

    def ring(self) -> Transport:
        raise NotImplementedError

    def close(self) -> None: ...

    def abandon(self) -> None:
        self._board.fail()

    def _begin(self, value: Any, name: str) -> tuple[str, int]:
        self._uses[name] += 1
        key = (name, self._uses[name])
        self._board.give(key, self.rank, value)
        return key

    def _gather(self, value: Any, name: str) -> list[Any]:
        return self._board.take(self._begin(value, name))


def connect(size: int) -> list[ThreadExchange]:
    """The exchanges of `size` ranks."""
    board = Board(size)
    return [ThreadExchange(rank, board) for rank in range(size)]


def run_ranks(
    exchanges: list[ThreadExchange], work: Callable[[ThreadExchange], Result]
) -> list[Result]:
    """Run `work` as each rank at once; their results in rank order.

    Raises what the first rank to fail raised. torch's random numbers are common to all ranks:
    draw none in `work` whose order matters.
    """
    failures: list[BaseException] = []

    def run(exchange: ThreadExchange) -> Any:
        try:
            return work(exchange)
        except BaseException as error:
            failures.append(error)
            exchange.abandon()
            return None

    with ThreadPoolExecutor(len(exchanges)) as pool:
        results = list(pool.map(run, exchanges))
    if failures:
        raise failures[0]
    return results
