"""What training needs of the other ranks, as a contract, and its form for a single process.

The training loop is handed an Exchange and never learns which one it has.
`hvdtrain.exchange.horovod` holds the one over Horovod.
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
    """What becomes of the ranks' gradients on their way.

    `op`: sum or average. `compression`: none or fp16, the type in which they travel.
    """

    op: str = "average"
    compression: str = "none"

    def weight(self, ranks: int) -> int:
        """By what each rank multiplies its gradient for the sum over `ranks` to come out."""
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
        """gloo or mpi; none for a single process."""

    @property
    def repeatable(self) -> bool:
        """Whether sums are added in the same order in every run."""

    def distribute(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        grad_accum_steps: int = 1,
        reduction: Reduction = AVERAGE,
    ) -> torch.optim.Optimizer:
        """Collective: make `optimizer.step()` reduce gradients over ranks first. Returns it.

        Afterwards rank 0's parameters, buffers and optimizer state are on every rank, and gradients
        are dense (`make_gradients_dense`).
        `grad_accum_steps`: backward passes whose gradients add up before they are reduced.
        """

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective: on return every `.grad` is its reduction over ranks.

        The next `optimizer.step()` uses the gradients as they then stand.
        """

    def sum_later(self, values: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        """Collective: begin summing `values` over ranks; the call of the result waits for it."""

    def broadcast_object(self, value: Any, name: str) -> Any:
        """Collective: rank 0's `value`, on every rank."""

    def all_gather_object(self, value: Any, name: str) -> list[Any]:
        """Collective: every rank's `value`, in rank order."""

    def peer_failures(self) -> AbstractContextManager[None]:
        """Within it, the library's own "a collective broke off" is raised as PeerFailure."""

    def summation_order(self) -> KnownOrder:
        """In which order ranks are summed. Raises UsageError where nobody has said."""

    def ring(self) -> Transport:
        """Collective: a ring over all ranks that does not use this exchange's own reductions."""

    def start_timeline(self, path: Path) -> None:
        """Begin to note down, on rank 0, what the library does with each tensor."""

    def stop_timeline(self) -> None:
        """End that."""

    def watch_stalls(self, give_up: Callable[[PeerFailure], None]) -> None:
        """From here on call `give_up`, in a thread, when a collective waits for longer than the
        stall limit of Horovod's environment variables, if that is set.
        """

    def close(self) -> None:
        """Collective: leave the group of ranks in good order."""

    def abandon(self) -> None:
        """Let the others know that this rank is about to end: their collectives break off."""


class SingleProcess:
    """N = 1: nothing to exchange. Needs no Horovod, and can be stepped through in a debugger."""

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
        """There are no other ranks: the gradients are reduced already.

        A parameter that was not used gets a zero gradient, as it does from Horovod: else weight
        decay would move it on several ranks and not on one.
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
        return OPEN_MPI_RING  # of one rank, any ring's

    def ring(self) -> Transport:
        (transport,) = in_process_ring(1)
        return transport

    def start_timeline(self, path: Path) -> None:
        """There is no library."""

    def stop_timeline(self) -> None:
        """There is no library."""

    def watch_stalls(self, give_up: Callable[[PeerFailure], None]) -> None:
        """There is nobody to wait for."""

    def close(self) -> None:
        """Nothing is held."""

    def abandon(self) -> None:
        """There is nobody to tell."""


def make_gradients_dense(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Turn sparse gradients of `model` into dense ones as soon as a backward pass has made them.

    A rank whose share is empty has no gradient, and could not know that the others send rows; rows
    that are looked up twice have no fixed order of summation; norms and most optimizers take no
    sparse gradients. Dense ones are summed, checked and used as all others are, on any N. Raises
    UsageError for an optimizer that takes sparse gradients only.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            "SparseAdam: takes sparse gradients only, but those of several workers are added up as "
            "dense ones (on one worker too: N changes nothing). Use torch.optim.Adam or Adagrad"
        )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_make_dense)


def _make_dense(parameter: torch.Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()


def join(connect: Callable[[], Exchange]) -> Exchange:
    """Collective: what `connect` gives, once in a process; from then on it is `joined`."""
    global _joined
    if _joined is None:
        _joined = connect()
    return _joined


def joined() -> Exchange | None:
    """The job that a script of somebody's own has joined by `hvdtrain.init`."""
    return _joined


def agree(exchange: Exchange, what: str, action: Callable[[], Result]) -> Result:
    """Collective: run `action` on every rank, and go on only if it succeeded on all of them.

    Otherwise every rank raises the same AgreedFailure, which names each failing rank: nobody is
    left waiting in a later collective. `what` names the collective ("prepare").
    """
    told: tuple[int, str] | None = None
    try:
        result = action()
    except HvdtrainError as error:
        told = (error.exit_code, str(error))
    except (Exception, SystemExit) as error:  # a surprise, in a user's model perhaps
        trace = traceback.format_exc().rstrip()
        told = (EXIT_FAILED, f"{type(error).__name__}: {error}\n{trace}")
    told_by_rank = exchange.all_gather_object(told, f"hvdtrain.agree.{what}")
    failures = {rank: told for rank, told in enumerate(told_by_rank) if told is not None}
    if failures:
        raise AgreedFailure(failures, exchange.size)
    return result
