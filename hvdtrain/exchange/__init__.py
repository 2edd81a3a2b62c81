"""The interface to the other ranks (Exchange), and its implementation for a single process.

The training loop receives an Exchange and does not depend on its implementation.
`hvdtrain.exchange.horovod` holds the implementation over Horovod.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from hvdtrain.errors import EXIT_FAILED, AgreedFailure, HvdtrainError, PeerFailure, UsageError
from hvdtrain.ring.orders import OPEN_MPI_RING, KnownOrder
from hvdtrain.ring.transports import Transport
from hvdtrain.ring.transports.in_process import in_process_ring

Result = TypeVar("Result")
_joined: Exchange | None = None


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced over ranks.

    `op`: sum or average. `compression`: none or fp16, the type in which they are sent.
    """

    op: str = "average"
    compression: str = "none"

    def weight(self, ranks: int) -> int:
        """Return the factor for each rank's gradient so that the reduction is the sum."""
        return ranks if self.op == "average" else 1


AVERAGE = Reduction()
SUM = Reduction("sum")


class Exchange(Protocol):
    """Collectives over all ranks, and the optimizer that reduces gradients."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def controller(self) -> str:
        """Return 'gloo' or 'mpi'; 'none' for a single process."""

    @property
    def repeatable(self) -> bool:
        """Return whether sums are added in the same order in every run."""

    def distribute(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        grad_accum_steps: int = 1,
        reduction: Reduction = AVERAGE,
    ) -> torch.optim.Optimizer:
        """Collective: make `optimizer.step()` reduce gradients over ranks first; return it.

        Afterwards rank 0's parameters, buffers and optimizer state are on every rank, and gradients
        are dense (`make_gradients_dense`). `grad_accum_steps`: number of backward passes whose
        gradients are accumulated before they are reduced.
        """

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective: wait until every `.grad` is reduced over ranks.

        The next `optimizer.step()` uses the gradients without reducing them again.
        """

    def sum_later(self, values: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        """Collective: begin to sum `values` over ranks; return a function that waits for the sum.

        The sum has the shape and dtype of `values`.
        """

    def broadcast_object(self, value: Any, name: str) -> Any:
        """Collective: return rank 0's `value` on every rank."""

    def all_gather_object(self, value: Any, name: str) -> list[Any]:
        """Collective: return every rank's `value`, in rank order."""

    def peer_failures(self) -> AbstractContextManager[None]:
        """Return a context manager that converts the library's error to PeerFailure.

        This is the error that a collective raises when another rank fails.
        """

    def summation_order(self) -> KnownOrder:
        """Return the order in which ranks are summed. Raises UsageError if it is unknown."""

    def ring(self) -> Transport:
        """Collective: return a ring over all ranks, independent of this exchange's reductions."""

    def start_timeline(self, path: Path) -> None:
        """Start to record, on rank 0, the library's operations on each tensor."""

    def stop_timeline(self) -> None:
        """Stop the recording of `start_timeline`."""

    def watch_stalls(self, give_up: Callable[[PeerFailure], None]) -> None:
        """Call `give_up`, in a thread, if a collective exceeds the stall limit.

        The limit is that of Horovod's environment variables; without one, nothing is watched.
        """

    def close(self) -> None:
        """Collective: leave the group of ranks together."""

    def abandon(self) -> None:
        """Make the other ranks' collectives fail, because this rank is about to end."""


class SingleProcess:
    """The exchange of a single process, without Horovod; it can be run in a debugger."""

    rank = 0
    size = 1
    controller = "none"
    repeatable = True

    def distribute(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        grad_accum_steps: int = 1,
        reduction: Reduction = AVERAGE,
    ) -> torch.optim.Optimizer:
        make_gradients_dense(model, optimizer)
        return optimizer

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the missing gradients of trainable parameters to zero, as Horovod does.

        Otherwise weight decay would change unused parameters on several ranks but not on one.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def sum_later(self, values: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        return lambda: values

    def broadcast_object(self, value: Any, name: str) -> Any:
        return value

    def all_gather_object(self, value: Any, name: str) -> list[Any]:
        return [value]

    def peer_failures(self) -> AbstractContextManager[None]:
        return nullcontext()

    def summation_order(self) -> KnownOrder:
        return OPEN_MPI_RING  # of one rank, all orders are equal

    def ring(self) -> Transport:
        (transport,) = in_process_ring(1)
        return transport

    def start_timeline(self, path: Path) -> None:
        """Do nothing: there is no library to record."""

    def stop_timeline(self) -> None:
        """Do nothing."""

    def watch_stalls(self, give_up: Callable[[PeerFailure], None]) -> None:
        """Do nothing: no collective waits."""

    def close(self) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""


def make_gradients_dense(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Convert sparse gradients of `model` to dense ones as soon as a backward pass makes them.

    A rank whose share is empty has no gradient and could not determine that the others send sparse
    ones; rows that are looked up twice have no fixed order of summation; norms and most optimizers
    do not support sparse gradients. Dense ones are summed, checked and used like all others, for
    any N. Raises UsageError for an optimizer that takes sparse gradients only.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            "SparseAdam: takes sparse gradients only, but hvdtrain makes all gradients dense (on "
            "one worker too, so that N changes nothing). Use torch.optim.Adam or Adagrad"
        )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_make_dense)


def _make_dense(parameter: torch.Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()


def join(connect: Callable[[], Exchange]) -> Exchange:
    """Collective: return the exchange of this process; the first call creates it by `connect`."""
    global _joined
    if _joined is None:
        _joined = connect()
    return _joined


def joined() -> Exchange | None:
    """Return the exchange that a script has joined by `hvdtrain.init`, or None."""
    return _joined


def agree(exchange: Exchange, what: str, action: Callable[[], Result]) -> Result:
    """Collective: run `action` on every rank; return its result if it succeeded on all of them.

    Otherwise every rank raises the same AgreedFailure, which names each failing rank, so no rank is
    left waiting in a later collective. `what` names the collective ("prepare").
    """
    failure: tuple[int, str] | None = None
    try:
        result = action()
    except HvdtrainError as error:
        failure = (error.exit_code, str(error))
    except (Exception, SystemExit) as error:  # unexpected, perhaps in a user's model
        trace = traceback.format_exc().rstrip()
        failure = (EXIT_FAILED, f"{type(error).__name__}: {error}\n{trace}")
    gathered = exchange.all_gather_object(failure, f"hvdtrain.agree.{what}")
    failures = {rank: failure for rank, failure in enumerate(gathered) if failure is not None}
    if failures:
        raise AgreedFailure(failures, exchange.size)
    return result
