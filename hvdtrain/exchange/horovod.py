"""The exchange over Horovod. This is the only file that imports it.

Every collective has a name: Horovod numbers unnamed ones per rank, so they can deadlock.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import horovod
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousServer
from horovod.torch.mpi_ops import is_homogeneous

from hvdtrain import slurm
from hvdtrain.errors import PeerFailure, PreflightError, UsageError
from hvdtrain.exchange import (
    AVERAGE,
    Pending,
    Reduction,
    adopt_optimizer_state,
    agree_on_layout,
    check_equal_on_all_ranks,
    check_same_settings,
    make_gradients_dense,
)
from hvdtrain.exchange.buckets import Bucket, messages_of
from hvdtrain.exchange.connect import own_address
from hvdtrain.exchange.distributed_optimizer import (
    Trainable,
    carrier_of,
    is_dense,
    is_reduced,
    parameters_of,
    reduce_before_step,
)
from hvdtrain.exchange.dtypes import ADDED_AS
from hvdtrain.exchange.gpus import CPU, find_own_gpu
from hvdtrain.exchange.waiting import (
    StallWatch,
    coarse_timer,
    new_threads_do_not_push,
    rest_until,
    waits,
)
from hvdtrain.network import OF_GLOO, OF_NCCL, interface_of, take_own_interface
from hvdtrain.ring.orders import KnownOrder, UnknownOrder, known_order
from hvdtrain.ring.transports import Transport
from hvdtrain.ring.transports.mpi import library_version
from hvdtrain.ring.transports.tcp import join_ring
from hvdtrain.tensors import copied_to_cpu
from hvdtrain.topology import Topology

ABANDON_TIMEOUT_S = 2.0

REDUCTIONS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max}
COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}
Tensors = list[torch.Tensor]

BY_HOST = "HOROVOD_GLOO_HIERARCHICAL_ALLREDUCE"  # read by the builds of hvdtrain.horovod_build

# Set before hvd.init() unless the user has set them (docs: Horovod's and Open MPI's parameters).
ENVIRONMENT_DEFAULTS = {
    # No fusion: which tensors fuse depends on timing, and so, with three or more ranks, would the
    # order of summation. Without fusion a run is repeatable.
    "HOROVOD_FUSION_THRESHOLD": "0",
    # With several workers a host, Gloo's ring over all would send more over the network.
    BY_HOST: "1",
    # Open MPI spins while it waits, which takes compute time if workers occupy all cores.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


class HorovodExchange:
    """The exchange of all ranks of a job; one per process: Horovod cannot be initialised twice."""

    def __init__(self) -> None:
        """Collective: initialise Horovod. Raises PreflightError if that fails.

        Raises UsageError if it has not connected any of the processes that the launcher started.
        """
        if not hvd.is_initialized():
            take_own_interface()
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
        self.local_rank: int = hvd.local_rank()
        # Without NCCL, GPU tensors are copied to the host for the operation.
        self.takes_gpu_tensors = bool(hvd.cuda_built() or hvd.rocm_built())
        self.has_nccl = bool(hvd.nccl_built())
        Topology.from_environment().check_joined(self.size)
        self.controller = "mpi" if hvd.mpi_enabled() else "gloo"
        self.repeatable = self.size <= 2 or os.environ.get("HOROVOD_FUSION_THRESHOLD") == "0"
        self.stalls = StallWatch()
        self._per_host = self._added_first()
        self.ring_size = self.size // max(self._per_host, 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> HorovodExchange:
        """Return the same object, so that layers that hold it can be copied."""
        return self

    @waits
    def _added_first(self) -> int:
        """Collective: return the ranks of each host if Gloo adds these first, else 1; 0 if it does
        and they are not adjacent.
        """
        local_size, hosts = hvd.local_size(), hvd.cross_size()
        by_host = getattr(horovod, "GLOO_BY_HOST", False) and os.environ.get(BY_HOST) == "1"
        if not by_host or self.controller != "gloo":
            return 1
        if not is_homogeneous() or local_size == 1 or hosts == 1:
            return 1
        rank_by_host = hvd.cross_rank() * local_size + hvd.local_rank()
        places = self.all_gather_object(rank_by_host, "hvdtrain.places")
        return local_size if places == list(range(self.size)) else 0

    @waits
    def distribute(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        grad_accum_steps: int = 1,
        reduction: Reduction = AVERAGE,
        adopt: bool = True,
    ) -> torch.optim.Optimizer:
        """Collective: let Horovod reduce gradients, and broadcast rank 0's state.

        Raises what `broadcast_state` does, UsageError if the optimizer is already distributed, and
        AgreedFailure if a rank's settings are not rank 0's.
        """
        if hasattr(optimizer, "carrier"):
            raise UsageError("distribute: this optimizer is distributed already: make a new one")
        make_gradients_dense(model, optimizer)
        settings = asdict(reduction) | {"grad_accum_steps": grad_accum_steps}
        check_same_settings(self, "distribute", settings)
        # First: both compare what buckets are made of.
        if adopt:
            self.broadcast_state(model, optimizer)
        else:
            agree_on_layout(self, model, optimizer)
        messages = messages_of(model, optimizer, reduction.bucket_bytes if self.size > 1 else 0)
        buckets = [
            Bucket(message, grad_accum_steps)
            for message in messages
            if len(message) > 1 or next(iter(message.values())).dtype in ADDED_AS
        ]
        bucketed = {parameter for bucket in buckets for parameter in bucket.message.values()}
        named = {f"bucket.{next(iter(bucket.message))}": bucket.flat for bucket in buckets}
        named |= {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter not in bucketed
        }
        alone = [parameter for parameter in parameters_of(optimizer) if parameter not in bucketed]
        carrier = hvd.DistributedOptimizer(
            torch.optim.SGD([*alone, *(bucket.flat for bucket in buckets)]),
            named_parameters=named.items(),
            compression=COMPRESSIONS[reduction.compression],
            backward_passes_per_step=grad_accum_steps,
            op=REDUCTIONS[reduction.op],
        )
        staged = not self.has_nccl and any(parameter.device.type != "cpu" for parameter in alone)
        reduce_before_step(optimizer, carrier, buckets, self.reduce_gradients, copies=int(staged))
        carrier.watched = Trainable(model, optimizer)
        return optimizer

    @waits
    def broadcast_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Collective: replace parameters, buffers and optimizer state by those of rank 0.

        Optimizer state is sent first, as a state_dict, and parameters last: Horovod's
        broadcast_optimizer_state may take a dummy step that changes parameters on other ranks.
        Raises TrainingError, naming the ranks, if parameters differ afterwards, and AgreedFailure
        if a rank's model or optimizer is built otherwise than rank 0's (`adopt_optimizer_state`).
        """
        adopt_optimizer_state(self, model, optimizer)
        with coarse_timer():
            state = model.state_dict()
            tensors = {name: value for name, value in state.items() if is_dense(value)}
            # Horovod does not broadcast tensors that are not contiguous, such as those of
            # channels_last layers, nor types such as bool and bfloat16: bytes are sent.
            flat = {name: tensor.contiguous().reshape(-1) for name, tensor in tensors.items()}
            hvd.broadcast_parameters(
                {name: tensor.view(torch.uint8) for name, tensor in flat.items() if tensor.numel()},
                root_rank=0,
            )
            for name, tensor in tensors.items():
                if not tensor.is_contiguous():
                    tensor.copy_(flat[name].view(tensor.shape))
            if others := {name: value for name, value in state.items() if name not in tensors}:
                others = self.broadcast_object(copied_to_cpu(others), "hvdtrain.further_state")
                model.load_state_dict(others, strict=False)
        check_equal_on_all_ranks(model, self, "after the initial broadcast", with_buffers=True)

    def retire(self, optimizer: torch.optim.Optimizer) -> None:
        carrier_of(optimizer).undo()

    def begin_pass(self, optimizer: torch.optim.Optimizer) -> None:
        carrier_of(optimizer).flight.begin_pass()

    @waits
    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective: wait until Horovod has reduced every gradient.

        Raises TrainingError if code has changed a gradient meanwhile, or has added, removed or
        converted trainable parameters since `distribute`.
        """
        carrier = carrier_of(optimizer)
        if is_reduced(carrier):
            return
        carrier.watched.check(optimizer)
        # Parameters without a gradient on this rank may have one on others: begin all, then wait.
        for parameter in carrier._requires_update:
            if carrier._handles.get(parameter, (None, None))[0] is None:
                carrier._handles[parameter] = carrier._allreduce_grad_async(parameter)
        # Poll first: hvd.synchronize() spins (horovod/torch/mpi_ops_v2.cc, WaitAndClear). A handle
        # that is not an integer is not begun.
        handles = [handle for handle, _ in carrier._handles.values()]
        rest_until(lambda: all(hvd.poll(handle) for handle in handles if isinstance(handle, int)))
        optimizer.synchronize()  # type: ignore[attr-defined]

    def begin_reduction(self, values: torch.Tensor, op: str, name: str) -> Pending:
        return _Pending(self, hvd.allreduce_async_(values, name=name, op=REDUCTIONS[op]))

    def sum_later(self, values: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        return _Pending(self, hvd.allreduce_async(values, name=name, op=hvd.Sum)).wait

    def all_reduce(self, tensors: Tensors, op: str, name: str, submission: str) -> Tensors:
        """Collective: return each tensor's sum, average, min or max over ranks.

        `submission`: alone or together: one operation per tensor, all begun before the first is
        awaited; grouped: one group, which Horovod fuses, but only up to HOROVOD_FUSION_THRESHOLD.
        """
        if submission == "grouped":
            return list(hvd.grouped_allreduce(tensors, op=REDUCTIONS[op], name=name))
        return _each(hvd.allreduce_async, tensors, name, op=REDUCTIONS[op])

    def reduce_scatter(self, tensors: Tensors, op: str, name: str, submission: str) -> Tensors:
        """Collective: return this rank's rows of each tensor's sum or average; see `all_reduce`.

        If N does not divide the number of rows, the first ranks receive one more.
        """
        if submission == "grouped":
            return list(hvd.grouped_reducescatter(tensors, op=REDUCTIONS[op], name=name))
        return _each(hvd.reducescatter_async, tensors, name, op=REDUCTIONS[op])

    def all_gather(self, tensors: Tensors, name: str, submission: str) -> Tensors:
        """Collective: return every rank's tensors, joined in rank order; see `all_reduce`."""
        if submission == "grouped":
            return list(hvd.grouped_allgather(tensors, name=name))
        return _each(hvd.allgather_async, tensors, name)

    def broadcast(self, tensors: Tensors, root: int, name: str, submission: str) -> Tensors:
        """Collective: return rank `root`'s tensors. Horovod neither groups nor fuses broadcasts."""
        return _each(hvd.broadcast_async, tensors, name, root_rank=root)

    @waits
    @coarse_timer()
    def broadcast_object(self, value: Any, name: str) -> Any:
        pickled = _pickled(value if self.rank == 0 else None)
        size = hvd.broadcast(torch.tensor([len(pickled)]), 0, name=f"{name}.size")
        buffer = pickled if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        hvd.broadcast_(buffer, 0, name=name)  # in place: it may be a whole state
        return value if self.rank == 0 else pickle.loads(buffer.numpy().data)

    @waits
    @coarse_timer()
    def all_gather_object(self, value: Any, name: str) -> list[Any]:
        pickled = _pickled(value)
        sizes = hvd.allgather(torch.tensor([len(pickled)]), name=f"{name}.sizes")
        parts = hvd.allgather(pickled, name=name).split(sizes.tolist())
        return [pickle.loads(part.numpy()) for part in parts]

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
        built_in = getattr(horovod, "MPI_ORDER", "")  # of the builds of hvdtrain.horovod_build
        library = library_version() if self.controller == "mpi" and not built_in else ""
        try:
            return known_order(
                self.controller, self.size, os.environ, library, built_in, self._per_host
            )
        except UnknownOrder as error:
            raise UsageError(f"--audit=exact: {error}") from error

    def ring(self) -> Transport:
        """Collective: return a ring over all ranks that does not use Horovod's operations.

        It uses sockets on both controllers, and does not share Horovod's MPI: two threads that wait
        in Open MPI at the same time can both hang for half a minute, and one rank that leaves
        finalizes MPI for all others. Raises PreflightError if the network interface is unknown.
        """
        gather = partial(self.all_gather_object, name="hvdtrain.ring.addresses")
        return join_ring(self.rank, own_address(), gather)


def _pickled(value: Any) -> torch.Tensor:
    """Return an object as bytes. hvd.broadcast_object and hvd.allgather_object convert each byte in
    Python (60 ns), and the first holds the number of bytes in 32 bits.
    """
    stream = io.BytesIO()
    cloudpickle.dump(value, stream)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


@dataclass(frozen=True)
class _Pending:
    """A reduction in progress."""

    exchange: HorovodExchange
    handle: int

    def done(self) -> bool:
        return bool(hvd.poll(self.handle))

    def wait(self) -> torch.Tensor:
        with self.exchange.stalls.waiting():
            return _result(self.handle)


def _each(begin: Callable[..., int], tensors: Tensors, name: str, **options: Any) -> Tensors:
    """Collective: begin an operation for each tensor; return the results."""
    handles = [
        begin(tensor, name=f"{name}.{number}", **options) for number, tensor in enumerate(tensors)
    ]
    return [_result(handle) for handle in handles]


def _result(handle: int) -> torch.Tensor:
    """Collective: wait for one operation; return its result."""
    rest_until(lambda: bool(hvd.poll(handle)))
    reduced: torch.Tensor = hvd.synchronize(handle)
    return reduced


def ring_of_horovod() -> Transport:
    """Collective: return a ring over a script's ranks. Raises UsageError before hvd.init()."""
    if not hvd.is_initialized():
        raise UsageError("GradientAudit: call hvd.init() first")
    return HorovodExchange().ring()


def _join_step() -> None:
    """Collective: set Horovod's variables, as horovodrun does, in all tasks of a Slurm step."""
    variables, address = slurm.meet(slurm.SlurmStep.from_environment(os.environ), _start_rendezvous)
    interface = os.environ.get(OF_GLOO) or interface_of(address)
    if interface is None:
        raise PreflightError(
            f"no network interface of this host has the address {address}; set {OF_GLOO} to the "
            "name of the interface that connects the hosts of the job"
        )
    os.environ.update(variables | {OF_GLOO: interface})
    os.environ.setdefault(OF_NCCL, interface)


def _start_rendezvous(ranks: list[dict[str, str]]) -> int:
    """Start Horovod's rendezvous server in a thread, as horovodrun does. Returns its port."""
    server = RendezvousServer()
    port: int = server.start()
    names = ("rank", "local_rank", "cross_rank", "size", "local_size", "cross_size")
    numbers = [
        {name: int(variables[f"HOROVOD_{name.upper()}"]) for name in names} for variables in ranks
    ]
    hosts = [variables["HOROVOD_HOSTNAME"] for variables in ranks]
    server.init([SlotInfo(host, **slot) for host, slot in zip(hosts, numbers, strict=True)])
    return port


def prove() -> None:
    """Collective: exit with code 1 unless an all-reduce gives its known result; on the ranks' GPUs
    too, if Horovod is built with NCCL and each rank has one.

    `hvdtrain install-horovod` runs `horovodrun -np 2 python -m hvdtrain.exchange.horovod`, for each
    controller.
    """
    exchange = HorovodExchange()
    gpu = find_own_gpu(exchange).device if exchange.has_nccl else None
    wrong = [
        str(device)
        for device in (CPU, gpu)
        if device is not None and not _adds_right(exchange, device)
    ]
    exchange.close()
    if exchange.size < 2 or wrong:
        where = f" on {', '.join(wrong)}" if gpu else ""
        sys.exit(f"all-reduce over {exchange.size} ranks gave a wrong sum{where}")


def _adds_right(exchange: HorovodExchange, device: torch.device) -> bool:
    """Collective: return whether an all-reduce of tensors on the device gives its known result."""
    ranks, values = exchange.size, torch.arange(1000, dtype=torch.float64, device=device)
    total = exchange.sum_later(values + 1000 * exchange.rank, f"hvdtrain.prove.{device.type}")()
    return torch.equal(total, ranks * values + 1000 * sum(range(ranks)))


if __name__ == "__main__":
    prove()
