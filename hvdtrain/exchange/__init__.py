"""The interface to the other ranks (Exchange), and its form for a single process.

`hvdtrain.exchange.horovod` holds the implementation over Horovod; the loop depends on neither.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from hvdtrain.errors import PeerFailure, UsageError
from hvdtrain.exchange.buckets import LEAST_BUCKET_BYTES
from hvdtrain.exchange.gradients import make_gradients_dense, parameters_of
from hvdtrain.ring.orders import OPEN_MPI_RING, KnownOrder
from hvdtrain.ring.transports import Transport, in_process_ring

_joined: Exchange | None = None


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced over ranks."""

    op: str = "average"  # or sum
    compression: str = "none"  # or fp16: the type in which they are sent
    bucket_bytes: int = LEAST_BUCKET_BYTES  # smaller gradients are reduced together

    def weight(self, ranks: int) -> int:
        """Return the factor for each rank's gradient so that the reduction is the sum."""
        return ranks if self.op == "average" else 1


AVERAGE = Reduction()
SUM = Reduction("sum")


class Pending(Protocol):
    """A reduction in progress."""

    def done(self) -> bool:
        """Return whether `wait` would return at once."""

    def wait(self) -> torch.Tensor:
        """Collective: wait for the reduction; return the reduced values."""


@dataclass(frozen=True)
class Complete:
    """A reduction that has ended."""

    values: torch.Tensor

    def done(self) -> bool:
        return True

    def wait(self) -> torch.Tensor:
        return self.values


class Exchange(Protocol):
    """Collectives over all ranks, and the optimizer that reduces gradients.

    The bodies are those of a single process, and only SingleProcess inherits them.
    """

    rank: int
    size: int
    ring_size: int  # ranks of the ring that adds gradients, or hosts if ranks of a host add first
    controller: str  # gloo or mpi; none for a single process
    repeatable: bool  # whether sums are added in the same order in every run

    def distribute(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        grad_accum_steps: int = 1,
        reduction: Reduction = AVERAGE,
        adopt: bool = True,
    ) -> torch.optim.Optimizer:
        """Collective: make `optimizer.step()` reduce gradients over ranks first; return it.

        Afterwards rank 0's parameters, buffers and optimizer state are on every rank, unless these
        are not to `adopt` them, and gradients are dense (`make_gradients_dense`).
        `grad_accum_steps`: number of backward passes whose gradients are accumulated before they
        are reduced.
        """
        make_gradients_dense(model, optimizer)
        return optimizer

    def retire(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo `distribute`: `optimizer.step()` uses the gradients of this rank again."""
        return

    def begin_pass(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare for a backward pass; a loop calls this before each of them, or never."""
        return

    def reduce_gradients(self, optimizer: torch.optim.Optimizer, look: bool = False) -> bool:
        """Collective: wait until every `.grad` is reduced over ranks. True: all are surely finite.

        `look`: read those again of which that is not known, while others are on their way.
        The next `optimizer.step()` uses the gradients without reducing them again. Missing ones of
        trainable parameters are zero: otherwise weight decay would change unused parameters on
        several ranks but not on one.
        """
        for parameter in parameters_of(optimizer):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return False

    def broadcast_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Collective: replace parameters, buffers and optimizer state by those of rank 0."""
        return

    def begin_reduction(self, values: torch.Tensor, op: str, name: str) -> Pending:
        """Collective: begin to reduce `values` over ranks, in place, by `op`: sum or max."""
        return Complete(values)

    def sum_later(self, values: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        """Collective: begin to sum `values` over ranks; return a function that awaits the sum."""
        return lambda: values

    def broadcast_object(self, value: Any, name: str) -> Any:
        """Collective: return rank 0's `value` on every rank."""
        return value

    def all_gather_object(self, value: Any, name: str) -> list[Any]:
        """Collective: return every rank's `value`, in rank order."""
        return [value]

    def peer_failures(self) -> AbstractContextManager[None]:
        """Return a context that raises PeerFailure where a failure elsewhere ends a collective."""
        return nullcontext()

    def summation_order(self) -> KnownOrder:
        """Return the order in which ranks are summed. Raises UsageError if it is unknown."""
        return OPEN_MPI_RING  # of one rank, all orders are equal

    def ring(self) -> Transport:
        """Collective: return a ring over all ranks, independent of this exchange's reductions."""
        (transport,) = in_process_ring(1)
        return transport

    def start_timeline(self, path: Path) -> None:
        """Start to record, on rank 0, the library's operations on each tensor."""
        return

    def stop_timeline(self) -> None:
        """Stop the recording of `start_timeline`."""
        return

    def watch_stalls(self, give_up: Callable[[PeerFailure], None]) -> None:
        """Call `give_up`, in a thread, if a collective exceeds Horovod's stall limit, if set."""
        return

    def close(self) -> None:
        """Collective: leave the group of ranks together."""
        return

    def abandon(self) -> None:
        """Make the other ranks' collectives fail, because this rank is about to end."""
        return


class SingleProcess(Exchange):
    """The exchange of a single process, without Horovod; it can be run in a debugger."""

    rank = 0
    size = 1
    ring_size = 1
    controller = "none"
    repeatable = True


def known_order_of(exchange: Exchange, device: torch.device) -> KnownOrder | None:
    """Return the order in which ranks are summed; None if it is unknown."""
    if exchange.size <= 2:
        return OPEN_MPI_RING  # a + b = b + a
    if device.type != "cpu":
        return None
    try:
        return exchange.summation_order()
    except UsageError:
        return None


def join(connect: Callable[[], Exchange]) -> Exchange:
    """Collective: return the exchange of this process; the first call creates it by `connect`."""
    global _joined
    if _joined is None:
        _joined = connect()
    return _joined


def joined() -> Exchange | None:
    """Return the exchange that a script has joined by `hvdtrain.init`, or None."""
    return _joined


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks, collective in both passes: y = sum_r x_r, so dL/dx_r = sum_s dL_s/dy."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, exchange: Exchange, name: str) -> torch.Tensor:
        ctx.exchange, ctx.name = exchange, name
        return exchange.sum_later(values.clone(), name)()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return summed(gradient.contiguous(), ctx.exchange, f"{ctx.name}.backward"), None, None


def summed(
    values: torch.Tensor, exchange: Exchange, name: str, counts: bool = True
) -> torch.Tensor:
    """Collective: return the sum over ranks. Its derivatives, of any order, are collectives too:
    sums over ranks.

    `counts`: False: this rank computes with a sample that stands in for none, so its derivatives
    are zero for all ranks; it takes part in their sums, as the others wait for it.
    """
    total: torch.Tensor = _SumOverRanks.apply(values, exchange, name)  # type: ignore[no-untyped-call]
    return total if counts else total.detach() + total * 0.0
