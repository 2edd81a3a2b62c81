"""The exchange over Horovod. This is the one file that imports it.

Every collective bears a name: unnamed ones are counted per rank and can deadlock.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousServer

from hvdtrain import slurm
from hvdtrain.errors import PeerFailure, PreflightError, TrainingError, UsageError
from hvdtrain.exchange import AVERAGE, Reduction
from hvdtrain.parameters import check_equal_on_all_ranks
from hvdtrain.ring.orders import KnownOrder, UnknownOrder, known_order
from hvdtrain.ring.transports import Transport
from hvdtrain.ring.transports.mpi import MpiTransport, library_version
from hvdtrain.ring.transports.tcp import TcpTransport, listen
from hvdtrain.scheduling import new_threads_do_not_push

ABANDON_TIMEOUT_S = 2.0
POLL_S = 1e-4
SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface

REDUCTIONS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max}
COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}
Tensors = list[torch.Tensor]
Trainable = tuple[frozenset[int], frozenset[int]]

# Set before hvd.init() unless the user has set them (docs: Horovod's and Open MPI's parameters).
ENVIRONMENT_DEFAULTS = {
    # Each tensor by itself: which tensors fuse depends on timing, and so, from three ranks on,
    # would the order of summation. Without fusion a run repeats.
    "HOROVOD_FUSION_THRESHOLD": "0",
    # Open MPI spins while it waits; where workers fill the cores that takes compute time.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


class HorovodExchange:
    """All ranks of one horovodrun. Make one a process: Horovod cannot be initialised twice."""

    def __init__(self) -> None:
        """Collective: initialise Horovod. Raises PreflightError when it cannot be."""
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
        self.controller = "mpi" if hvd.mpi_enabled() else "gloo"
        # With fusion, which tensors travel together depends on timing.
        self.repeatable = self.size <= 2 or os.environ["HOROVOD_FUSION_THRESHOLD"] == "0"
        self._named: dict[str, torch.nn.Parameter] = {}
        self._watched: Trainable = (frozenset(), frozenset())

    def __deepcopy__(self, memo: dict[int, Any]) -> HorovodExchange:
        """Layers that hold it may be copied; it stays the one of this process."""
        return self

    def distribute(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        grad_accum_steps: int = 1,
        reduction: Reduction = AVERAGE,
    ) -> torch.optim.Optimizer:
        """Collective: wrap in Horovod's DistributedOptimizer and spread rank 0's state.

        Optimizer state goes first, by its state_dict, and parameters last: Horovod's
        broadcast_optimizer_state may take a dummy step that moves parameters on other ranks.
        Raises TrainingError, naming the ranks, if parameters differ afterwards.
        """
        wrapped: torch.optim.Optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=COMPRESSIONS[reduction.compression],
            backward_passes_per_step=grad_accum_steps,
            op=REDUCTIONS[reduction.op],
        )
        state = hvd.broadcast_object(wrapped.state_dict(), 0, name="hvdtrain.optimizer")
        wrapped.load_state_dict(state)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        self._named = dict(model.named_parameters())
        for parameter in self._named.values():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_coalesce)
        self._watched = self._trainable(wrapped)
        check_equal_on_all_ranks(model, self, "after the initial broadcast", with_buffers=True)
        return wrapped

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective: wait until Horovod has reduced every gradient.

        Raises TrainingError when the model or the optimizer has trainable parameters that were
        not trainable, or not there, when it was wrapped: Horovod would silently leave them out.
        """
        if self._trainable(optimizer) != self._watched:
            raise TrainingError(self._explain_unwatched(optimizer))
        for handle, _ in [*optimizer._handles.values()]:  # type: ignore[attr-defined]
            if isinstance(handle, int):  # else not begun yet, or a sparse gradient's
                _rest_until_done(handle)
        optimizer.synchronize()  # type: ignore[attr-defined]

    def already_reduced(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        skipping: AbstractContextManager[None] = optimizer.skip_synchronize()  # type: ignore[attr-defined]
        return skipping

    def sum_later(self, values: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        handle = hvd.allreduce_async(values, name=name, op=hvd.Sum)
        return lambda: hvd.synchronize(handle)

    def all_reduce(self, tensors: Tensors, op: str, name: str, submission: str) -> Tensors:
        """Collective: each tensor's sum, average, min or max over ranks.

        `submission`: alone or together: each by itself, all begun before the first is awaited;
        grouped: as one group, which Horovod fuses up to HOROVOD_FUSION_THRESHOLD, and only then.
        """
        if submission == "grouped":
            reduced = hvd.grouped_allreduce(tensors, op=REDUCTIONS[op], name=name)
            return list(reduced)
        return _finish(
            hvd.allreduce_async(tensor, op=REDUCTIONS[op], name=f"{name}.{number}")
            for number, tensor in enumerate(tensors)
        )

    def reduce_scatter(self, tensors: Tensors, op: str, name: str, submission: str) -> Tensors:
        """Collective: this rank's share of each tensor's sum or average; see `all_reduce`.

        Shares are of rows; the first ranks' are longer by one where N does not divide them.
        """
        if submission == "grouped":
            return list(hvd.grouped_reducescatter(tensors, op=REDUCTIONS[op], name=name))
        return _finish(
            hvd.reducescatter_async(tensor, op=REDUCTIONS[op], name=f"{name}.{number}")
            for number, tensor in enumerate(tensors)
        )

    def all_gather(self, tensors: Tensors, name: str, submission: str) -> Tensors:
        """Collective: every rank's tensors, joined in rank order; see `all_reduce`."""
        if submission == "grouped":
            return list(hvd.grouped_allgather(tensors, name=name))
        return _finish(
            hvd.allgather_async(tensor, name=f"{name}.{number}")
            for number, tensor in enumerate(tensors)
        )

    def broadcast(self, tensors: Tensors, root: int, name: str, submission: str) -> Tensors:
        """Collective: rank `root`'s tensors; Horovod has no groups for them, and fuses none."""
        return _finish(
            hvd.broadcast_async(tensor, root, name=f"{name}.{number}")
            for number, tensor in enumerate(tensors)
        )

    def broadcast_object(self, value: Any, name: str) -> Any:
        return hvd.broadcast_object(value, 0, name=name)

    def all_gather_object(self, value: Any, name: str) -> list[Any]:
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

    def close(self) -> None:
        # The first rank to shut down ends Horovod, and finalizes MPI, under all the others: none
        # may while another still uses it (to free the ring's communicator, say).
        hvd.allreduce(torch.zeros(1), name="hvdtrain.close")
        hvd.shutdown()

    def abandon(self) -> None:
        # It waits for ranks that may be gone, so it gets a thread and a limit.
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
        """Collective: a ring over all ranks that does not go through Horovod's operations.

        Under the mpi controller it shares Horovod's MPI, else it is of sockets: the addresses
        and a secret made by rank 0 are told through Horovod.
        """
        if self.controller == "mpi":
            return MpiTransport()
        listener = listen(interface_address(os.environ["HOROVOD_GLOO_IFACE"]))
        addresses = self.all_gather_object(listener.getsockname()[:2], "hvdtrain.ring.addresses")
        token = hvd.broadcast_object(secrets.token_bytes(32), 0, name="hvdtrain.ring.token")
        return TcpTransport(self.rank, listener, addresses, token)

    def _trainable(self, optimizer: torch.optim.Optimizer) -> Trainable:
        """Ids of the trainable parameters: of the model, and of the optimizer."""
        in_optimizer = (p for group in optimizer.param_groups for p in group["params"])
        return (
            frozenset(id(p) for p in self._named.values() if p.requires_grad),
            frozenset(id(p) for p in in_optimizer if p.requires_grad),
        )

    def _explain_unwatched(self, optimizer: torch.optim.Optimizer) -> str:
        before, now = self._watched, self._trainable(optimizer)
        names = {id(parameter): name for name, parameter in self._named.items()}
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
            f"{' and '.join(changes)}. Horovod reduces only what it was given then: "
            "freeze and unfreeze before distribute(), or distribute a new optimizer"
        )


def _coalesce(parameter: torch.Tensor) -> None:
    """A sparse gradient holds a row once for each time that it was looked up. Horovod gathers all
    of them: added up before, less travels, and each rank adds one term to a sum, as its bound has.
    """
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.coalesce()


def _rest_until_done(handle: int) -> None:
    """Collective: hvd.synchronize() spins while it waits, which takes time from Horovod's own
    thread where workers fill the cores (horovod/torch/mpi_ops_v2.cc, WaitAndClear).
    """
    while not hvd.poll(handle):
        time.sleep(POLL_S)


def _finish(handles: Iterable[int]) -> Tensors:
    """Collective: await what has been begun; all of it is begun first."""
    return [hvd.synchronize(handle) for handle in list(handles)]


def interface_address(interface: str) -> str:
    """The IPv4 address of the interface that horovodrun has chosen."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[20:24])


def ring_of_horovod() -> Transport:
    """Collective: a ring over the ranks of a script that has called hvd.init() itself.

    Raises UsageError when it has not.
    """
    if not hvd.is_initialized():
        raise UsageError("GradientAudit: call hvd.init() before")
    return HorovodExchange().ring()


def _join_step() -> None:
    """Collective: what horovodrun does for its workers, among the tasks of a step of srun."""
    variables, address = slurm.meet(slurm.Step.from_environment(os.environ), _start_rendezvous)
    chosen = os.environ.get("HOROVOD_GLOO_IFACE")
    interface = chosen or slurm.interface_of(address, interface_address)
    os.environ.update(variables | {"HOROVOD_GLOO_IFACE": interface})
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _start_rendezvous(ranks: list[dict[str, str]]) -> int:
    """Start Horovod's rendezvous, as horovodrun does, in a thread. Returns its port."""
    server = RendezvousServer()
    port: int = server.start()
    names = ("rank", "local_rank", "cross_rank", "size", "local_size", "cross_size")
    numbers = [{name: int(it[f"HOROVOD_{name.upper()}"]) for name in names} for it in ranks]
    hosts = [it["HOROVOD_HOSTNAME"] for it in ranks]
    server.init([SlotInfo(host, **own) for host, own in zip(hosts, numbers, strict=True)])
    return port


def prove() -> int:
    """Collective: one all-reduce whose result is known. Returns the exit code.

    `launch/setup` runs it by `horovodrun -np 2 python -m hvdtrain.comm` on each controller.
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
