"""The interface to the other ranks (Exchange), its form for a single process, and agreement.

`hvdtrain.exchange.horovod` holds the implementation over Horovod; the loop depends on neither.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvdtrain.errors import (
    EXIT_FAILED,
    AgreedFailure,
    HvdtrainError,
    PeerFailure,
    TrainingError,
    UsageError,
    name_ranks,
)
from hvdtrain.exchange.buckets import LEAST_BUCKET_BYTES
from hvdtrain.exchange.distributed_optimizer import (
    check_layout,
    layout_of,
    load_exactly,
    parameters_of,
)
from hvdtrain.ring.orders import OPEN_MPI_RING, KnownOrder
from hvdtrain.ring.transports import Transport, in_process_ring
from hvdtrain.tensors import copied_to_cpu

Result = TypeVar("Result")
_joined: Exchange | None = None
_made_dense = WeakTensorKeyDictionary()  # parameters with the hook of `make_gradients_dense`


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

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective: wait until every `.grad` is reduced over ranks.

        The next `optimizer.step()` uses the gradients without reducing them again. Missing ones of
        trainable parameters are zero: otherwise weight decay would change unused parameters on
        several ranks but not on one.
        """
        for parameter in parameters_of(optimizer):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

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


def make_gradients_dense(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Convert sparse gradients of `model` to dense ones as soon as a backward pass makes them, and
    conjugate them in memory where torch has put that off.

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
        if parameter.requires_grad and parameter not in _made_dense:
            parameter.register_post_accumulate_grad_hook(_make_dense)
            _made_dense[parameter] = True


def _make_dense(parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    if gradient is not None and (gradient.is_sparse or gradient.is_conj()):
        parameter.grad = gradient.to_dense().resolve_conj()


def join(connect: Callable[[], Exchange]) -> Exchange:
    """Collective: return the exchange of this process; the first call creates it by `connect`."""
    global _joined
    if _joined is None:
        _joined = connect()
    return _joined


def joined() -> Exchange | None:
    """Return the exchange that a script has joined by `hvdtrain.init`, or None."""
    return _joined


def run_on_all(exchange: Exchange, what: str, action: Callable[[], Result]) -> Result:
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


def check_same_settings(exchange: Exchange, what: str, settings: Mapping[str, object]) -> None:
    """Collective: raise AgreedFailure, naming the ranks, unless all have rank 0's settings.

    With other ones, ranks would exchange tensors that others do not know, and wait for ever.
    """
    expected = exchange.broadcast_object(settings, f"hvdtrain.{what}.settings")

    def check() -> None:
        for name, value in settings.items():
            if value != expected[name]:
                raise UsageError(f"{what}: {name}={value!r}, on rank 0 {expected[name]!r}")

    run_on_all(exchange, f"{what}.settings", check)


def agree_on_layout(
    exchange: Exchange, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Collective: raise AgreedFailure, naming the ranks, unless all have rank 0's layout."""
    layout = layout_of(model, optimizer)
    expected = exchange.broadcast_object(layout, "hvdtrain.layout")
    run_on_all(exchange, "layout", lambda: check_layout(layout, expected))


def adopt_optimizer_state(
    exchange: Exchange, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Collective: replace the optimizer's state by that of rank 0, whose layout all must have.

    Raises AgreedFailure, naming the ranks, if one has built another model or optimizer, or the same
    ones in another order (`layout_of`): parameters are reduced, and state is loaded, by place.
    """
    layout = layout_of(model, optimizer)
    # On the CPU: a broadcast tensor keeps its device, which belongs to another rank.
    root_state = (layout, copied_to_cpu(optimizer.state_dict())) if exchange.rank == 0 else None
    expected, state = exchange.broadcast_object(root_state, "hvdtrain.optimizer")

    def adopt() -> None:
        check_layout(layout, expected)
        load_exactly(optimizer, state)

    run_on_all(exchange, "distribute", adopt)


def params_sha256(model: torch.nn.Module, with_buffers: bool = True) -> str:
    """Return the SHA-256 over name, dtype, shape and little-endian bytes, sorted by name."""
    buffers = dict(model.named_buffers()) if with_buffers else {}
    return tensors_sha256(dict(model.named_parameters()) | buffers)


def tensors_sha256(named: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 over name, dtype, shape and little-endian bytes, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named.items()):
        values = tensor.detach().cpu()
        values = values.contiguous() if values.layout is torch.strided else values.to_dense()
        digest.update(f"{name}|{values.dtype}|{tuple(values.shape)}|".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_equal_on_all_ranks(
    model: torch.nn.Module, exchange: Exchange, when: str, with_buffers: bool = False
) -> None:
    """Collective: raise TrainingError, naming the ranks, unless all hold rank 0's parameters.

    `when`: point of the run, for the message. Buffers are compared only on request, because
    batch-norm statistics may differ between ranks.
    """
    local_hash = params_sha256(model, with_buffers)
    hashes = exchange.all_gather_object(local_hash, "hvdtrain.params_sha256")
    different = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
    if different:
        raise TrainingError(
            f"parameters differ between ranks {when}: {name_ranks(different)} held other values "
            "than rank 0"
        )
