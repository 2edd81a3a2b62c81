"""The exchange over Horovod. This is the only file that imports it.

Every collective has a name: Horovod numbers unnamed ones per rank, so they can deadlock.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousServer

from hvdtrain import slurm
from hvdtrain.errors import PeerFailure, PreflightError, TrainingError, UsageError
from hvdtrain.exchange import AVERAGE, Reduction, agree, make_gradients_dense
from hvdtrain.exchange.connect import interface_address, own_address
from hvdtrain.exchange.distributed_optimizer import (
    carrier_of,
    is_reduced,
    load_exactly,
    reduce_before_step,
)
from hvdtrain.exchange.parameters import check_equal_on_all_ranks, copied_to_cpu
from hvdtrain.exchange.waiting import (
    StallWatch,
    coarse_timer,
    new_threads_do_not_push,
    rest_until,
    waits,
)
from hvdtrain.pulse import RING_TOKEN
from hvdtrain.ring.orders import KnownOrder, UnknownOrder, known_order
from hvdtrain.ring.transports import Transport
from hvdtrain.ring.transports.mpi import library_version
from hvdtrain.ring.transports.tcp import TcpTransport, listen, token_of_launcher
from hvdtrain.topology import Topology

ABANDON_TIMEOUT_S = 2.0

REDUCTIONS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max}
COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}
Tensors = list[torch.Tensor]
Trainable = tuple[frozenset[int], frozenset[int]]

# Set before hvd.init() unless the user has set them (docs: Horovod's and Open MPI's parameters).
ENVIRONMENT_DEFAULTS = {
    # No fusion: which tensors fuse depends on timing, and so, with three or more ranks, would the
    # order of summation. Without fusion a run is repeatable.
    "HOROVOD_FUSION_THRESHOLD": "0",
    # Open MPI spins while it waits, which takes compute time if workers occupy all cores.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


class Distributed(NamedTuple):
    """The parameters of a model by name, and those that were trainable at `distribute`."""

    named: dict[str, torch.nn.Parameter]
    watched: Trainable


class HorovodExchange:
    """The exchange of all ranks of a job; one per process: Horovod cannot be initialised twice."""

    def __init__(self) -> None:
        """Collective: initialise Horovod.

        Raises PreflightError if that fails, and UsageError if Horovod has not connected any of the
        processes that the launcher started.
        """
        for name, value in ENVIRONMENT_DEFAULTS.items():
            os.environ.setdefault(name, value)
        if slurm.is_step(os.environ):
            _join_step()
        try:
            with new_threads_do_not_push():
                hvd.init()
        except (RuntimeError, ValueError, HorovodInternalError) as error:
            raise PreflightError(f"Horovod cannot start: {error}") from error
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        Topology.from_environment().check_joined(self.size)
        self.controller = "mpi" if hvd.mpi_enabled() else "gloo"
        self.repeatable = self.size <= 2 or os.environ["HOROVOD_FUSION_THRESHOLD"] == "0"
        self.stalls = StallWatch()
        self._distributed: WeakKeyDictionary[torch.optim.Optimizer, Distributed] = (
            WeakKeyDictionary()
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> HorovodExchange:
        """Return the same object, so that layers that hold it can be copied."""
        return self

    @waits
    def distribute(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        grad_accum_steps: int = 1,
        reduction: Reduction = AVERAGE,
    ) -> torch.optim.Optimizer:
        """Collective: let Horovod reduce gradients, and broadcast rank 0's state.

        Optimizer state is sent first, as a state_dict, and parameters last: Horovod's
        broadcast_optimizer_state may take a dummy step that changes parameters on other ranks.
        Returns the same optimizer. Raises TrainingError, naming the ranks, if parameters differ
        afterwards, AgreedFailure if rank 0's state does not fit, and UsageError if the optimizer is
        already distributed.
        """
        if hasattr(optimizer, "carrier"):
            raise UsageError("distribute: this optimizer is distributed already: make a new one")
        make_gradients_dense(model, optimizer)
        carrier = hvd.DistributedOptimizer(
            torch.optim.SGD([p for group in optimizer.param_groups for p in group["params"]]),
            named_parameters=model.named_parameters(),
            compression=COMPRESSIONS[reduction.compression],
            backward_passes_per_step=grad_accum_steps,
            op=REDUCTIONS[reduction.op],
        )
        reduce_before_step(optimizer, carrier, self.reduce_gradients)
        # On the CPU: a broadcast tensor keeps its device, which belongs to another rank.
        own = copied_to_cpu(optimizer.state_dict()) if self.rank == 0 else None
        state = self.broadcast_object(own, "hvdtrain.optimizer")
        agree(self, "distribute", lambda: load_exactly(optimizer, state))
        with coarse_timer():
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        named = dict(model.named_parameters())
        self._distributed[optimizer] = Distributed(named, _trainable(named, optimizer))
        check_equal_on_all_ranks(model, self, "after the initial broadcast", with_buffers=True)
        return optimizer

    @waits
    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective: wait until Horovod has reduced every gradient.

        Raises TrainingError if code has changed a gradient meanwhile, or if the set of trainable
        parameters of the model or the optimizer has changed since `distribute`: Horovod would
        silently omit new ones.
        """
        carrier = carrier_of(optimizer)
        if is_reduced(carrier):
            return
        known = self._distributed[optimizer]
        if _trainable(known.named, optimizer) != known.watched:
            raise TrainingError(_explain_unwatched(known, optimizer))
        # Parameters without a gradient on this rank may have one on others: begin all, then wait.
        for parameter in carrier._requires_update:
            if carrier._handles.get(parameter, (None, None))[0] is None:
                carrier._handles[parameter] = carrier._allreduce_grad_async(parameter)
        # Poll first: hvd.synchronize() wakes up every 0.05 ms while it waits
        # (horovod/torch/mpi_ops_v2.cc, WaitAndClear). A handle that is not an integer is not begun.
        handles = [handle for handle, _ in carrier._handles.values()]
        rest_until(lambda: all(hvd.poll(it) for it in handles if isinstance(it, int)))
        optimizer.synchronize()  # type: ignore[attr-defined]

    def sum_later(self, values: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        handle = hvd.allreduce_async(values, name=name, op=hvd.Sum)
        return lambda: self._await(handle)

    @waits
    def _await(self, handle: int) -> torch.Tensor:
        return _result(handle)

    def all_reduce(self, tensors: Tensors, op: str, name: str, submission: str) -> Tensors:
        """Collective: return each tensor's sum, average, min or max over ranks.

        `submission`: alone or together: one operation per tensor, all begun before the first is
        awaited; grouped: one group, which Horovod fuses, but only up to HOROVOD_FUSION_THRESHOLD.
        """
        if submission == "grouped":
            reduced = hvd.grouped_allreduce(tensors, op=REDUCTIONS[op], name=name)
            return list(reduced)
        return _finish(
            hvd.allreduce_async(tensor, op=REDUCTIONS[op], name=f"{name}.{number}")
            for number, tensor in enumerate(tensors)
        )

    def reduce_scatter(self, tensors: Tensors, op: str, name: str, submission: str) -> Tensors:
        """Collective: return this rank's rows of each tensor's sum or average; see `all_reduce`.

        If N does not divide the number of rows, the first ranks receive one more.
        """
        if submission == "grouped":
            return list(hvd.grouped_reducescatter(tensors, op=REDUCTIONS[op], name=name))
        return _finish(
            hvd.reducescatter_async(tensor, op=REDUCTIONS[op], name=f"{name}.{number}")
            for number, tensor in enumerate(tensors)
        )

    def all_gather(self, tensors: Tensors, name: str, submission: str) -> Tensors:
        """Collective: return every rank's tensors, joined in rank order; see `all_reduce`."""
        if submission == "grouped":
            return list(hvd.grouped_allgather(tensors, name=name))
        return _finish(
            hvd.allgather_async(tensor, name=f"{name}.{number}")
            for number, tensor in enumerate(tensors)
        )

    def broadcast(self, tensors: Tensors, root: int, name: str, submission: str) -> Tensors:
        """Collective: return rank `root`'s tensors; `submission` has no effect here.

        Horovod has no grouped broadcast, and does not fuse broadcasts.
        """
        return _finish(
            hvd.broadcast_async(tensor, root, name=f"{name}.{number}")
            for number, tensor in enumerate(tensors)
        )

    @waits
    def broadcast_object(self, value: Any, name: str) -> Any:
        with coarse_timer():
            return hvd.broadcast_object(value, 0, name=name)

    @waits
    def all_gather_object(self, value: Any, name: str) -> list[Any]:
        with coarse_timer():
            return list(hvd.allgather_object(value, name=name))

    @contextmanager
    def peer_failures(self) -> Iterator[None]:
        try:
            yield
        except HorovodInternalError as error:
            cause = str(error).strip().partition(". ")[0]
            raise PeerFailure(
                f"a collective broke off, as it does when another rank fails ({cause})"
            ) from error

    def start_timeline(self, path: Path) -> None:
        if self.rank == 0:
            hvd.start_timeline(str(path))

    def stop_timeline(self) -> None:
        if self.rank == 0:
            hvd.stop_timeline()

    def watch_stalls(self, give_up: Callable[[PeerFailure], None]) -> None:
        if self.size > 1:
            self.stalls.start(give_up)

    @waits
    def close(self) -> None:
        # The first rank to shut down ends Horovod and finalizes MPI for all others, so wait until
        # no rank uses it any more (for example, to free the ring's communicator).
        self.sum_later(torch.zeros(1), "hvdtrain.close")()
        hvd.shutdown()

    def abandon(self) -> None:
        # The shutdown waits for ranks that may have ended, so it runs in a thread with a limit.
        shutdown = threading.Thread(target=hvd.shutdown, name="abandon", daemon=True)
        shutdown.start()
        shutdown.join(ABANDON_TIMEOUT_S)

    def summation_order(self) -> KnownOrder:
        library = library_version() if self.controller == "mpi" else ""
        try:
            return known_order(self.controller, self.size, os.environ, library)
        except UnknownOrder as error:
            raise UsageError(f"--audit=exact: {error}") from error

    def ring(self) -> Transport:
        """Collective: return a ring over all ranks that does not use Horovod's operations.

        It uses sockets on both controllers. The addresses are exchanged through Horovod, and so is
        a secret if the launcher has given none. It does not share Horovod's MPI: two threads that
        wait in Open MPI at the same time can both hang for half a minute, and one rank that leaves
        finalizes MPI for the rings of all others. Raises PreflightError if the network interface is
        unknown.
        """
        listener = listen(own_address())
        own = (listener.getsockname()[:2], RING_TOKEN in os.environ)
        addresses, given = zip(*self.all_gather_object(own, "hvdtrain.ring.addresses"), strict=True)
        token = token_of_launcher(given)
        if token is None:
            token = self.broadcast_object(secrets.token_bytes(32), "hvdtrain.ring.token")
        return TcpTransport(self.rank, listener, addresses, token)


def _trainable(
    named: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> Trainable:
    """Return the ids of the trainable parameters of the model and of the optimizer."""
    in_optimizer = (p for group in optimizer.param_groups for p in group["params"])
    return (
        frozenset(id(p) for p in named.values() if p.requires_grad),
        frozenset(id(p) for p in in_optimizer if p.requires_grad),
    )


def _explain_unwatched(known: Distributed, optimizer: torch.optim.Optimizer) -> str:
    before, now = known.watched, _trainable(known.named, optimizer)
    names = {id(parameter): name for name, parameter in known.named.items()}
    changes = [
        f"{len(group)} {verb} (such as {names.get(min(group), 'one not in the model')})"
        for group, verb in (
            ((now[0] - before[0]) | (now[1] - before[1]), "added or unfrozen"),
            ((before[0] - now[0]) | (before[1] - now[1]), "removed or frozen"),
        )
        if group
    ]
    return (
        "the trainable parameters have changed since the optimizer was distributed: "
        f"{' and '.join(changes)}. Horovod reduces only the parameters of that time: "
        "freeze and unfreeze before distribute(), or distribute a new optimizer"
    )


def _finish(handles: Iterable[int]) -> Tensors:
    """Collective: wait for all operations; consuming `handles` begins all of them first."""
    return [_result(handle) for handle in list(handles)]


def _result(handle: int) -> torch.Tensor:
    """Collective: wait for one operation; return its result."""
    rest_until(lambda: bool(hvd.poll(handle)))
    reduced: torch.Tensor = hvd.synchronize(handle)
    return reduced


def ring_of_horovod() -> Transport:
    """Collective: return a ring over the ranks of a script that has called hvd.init() itself.

    Raises UsageError if it has not.
    """
    if not hvd.is_initialized():
        raise UsageError("GradientAudit: call hvd.init() first")
    return HorovodExchange().ring()


def _join_step() -> None:
    """Collective: set Horovod's variables, as horovodrun does, in all tasks of a Slurm step."""
    variables, address = slurm.meet(slurm.Step.from_environment(os.environ), _start_rendezvous)
    chosen = os.environ.get("HOROVOD_GLOO_IFACE")
    interface = chosen or slurm.interface_of(address, interface_address)
    os.environ.update(variables | {"HOROVOD_GLOO_IFACE": interface})
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _start_rendezvous(ranks: list[dict[str, str]]) -> int:
    """Start Horovod's rendezvous server in a thread, as horovodrun does. Returns its port."""
    server = RendezvousServer()
    port: int = server.start()
    names = ("rank", "local_rank", "cross_rank", "size", "local_size", "cross_size")
    numbers = [{name: int(it[f"HOROVOD_{name.upper()}"]) for name in names} for it in ranks]
    hosts = [it["HOROVOD_HOSTNAME"] for it in ranks]
    server.init([SlotInfo(host, **own) for host, own in zip(hosts, numbers, strict=True)])
    return port


def prove() -> int:
    """Collective: check one all-reduce whose result is known. Returns the exit code.

    `launch/setup` runs it as `horovodrun -np 2 python -m hvdtrain.exchange.horovod` on each
    controller.
    """
    exchange = HorovodExchange()
    own = torch.arange(1000, dtype=torch.float64) + 1000 * exchange.rank
    total = exchange.sum_later(own, "hvdtrain.prove")()
    ranks = exchange.size
    expected = ranks * torch.arange(1000, dtype=torch.float64) + 1000 * sum(range(ranks))
    exchange.close()
    if ranks < 2 or not torch.equal(total, expected):
        print(f"all-reduce over {ranks} ranks gave a wrong sum", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(prove())
