"""The exchange over Horovod. This is the only file that imports it.

Every collective has a name: Horovod numbers unnamed ones per rank, so they can deadlock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import horovod
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousServer
from horovod.torch.mpi_ops import is_homogeneous, mpi_lib

from hvdtrain.errors import PeerFailure, PreflightError, UsageError
from hvdtrain.exchange import AVERAGE, Pending, Reduction
from hvdtrain.exchange.agreement import (
    adopt_optimizer_state,
    agree_on_layout,
    check_equal_on_all_ranks,
    check_same_settings,
)
from hvdtrain.exchange.buckets import make_buckets, with_buckets
from hvdtrain.exchange.connect import BY_HOST, HostSums, own_address, prepare_environment
from hvdtrain.exchange.distributed_optimizer import (
    Trainable,
    is_reduced,
    looks_finite,
    reduce_before_step,
    reducer_of,
)
from hvdtrain.exchange.gradients import is_dense, make_gradients_dense
from hvdtrain.exchange.objects import content_in, head_of, is_small, length_in, pickled, unpickled
from hvdtrain.exchange.waiting import StallWatch, do_not_push, push, rest_until, thread_ids, waits
from hvdtrain.ring.orders import KnownOrder, UnknownOrder, known_order
from hvdtrain.ring.transports import Transport
from hvdtrain.ring.transports.mpi import library_version
from hvdtrain.ring.transports.tcp import join_ring
from hvdtrain.tensors import copied_to_cpu
from hvdtrain.topology import Topology

ABANDON_TIMEOUT_S = 2.0
Tensors = list[torch.Tensor]
REDUCTIONS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max}
COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}
# Of our builds. In others no sum is found finite as it is formed, and hvd.synchronize() spins.
is_finite = getattr(mpi_lib, "horovod_torch_is_finite", lambda handle: False)
wait = getattr(mpi_lib, "horovod_torch_wait", lambda handle: rest_until(partial(hvd.poll, handle)))


class HorovodExchange:
    """The exchange of all ranks of a job; one per process: Horovod cannot be initialised twice."""

    def __init__(self) -> None:
        """Collective: initialise Horovod. Raises PreflightError if that fails.

        Raises UsageError if it has not connected any of the processes that the launcher started.
        """
        prepare_environment(hvd.is_initialized(), _start_rendezvous)
        threads_before = thread_ids()
        try:
            hvd.init()
        except (RuntimeError, ValueError, HorovodInternalError) as error:
            raise PreflightError(f"Horovod cannot start: {error}") from error
        self._calm_threads = do_not_push(thread_ids() - threads_before)
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
        self._host_sums = self._find_host_sums()
        in_one_place = hvd.local_size() if self._host_sums is HostSums.FIRST else 1
        self.ring_size = self.size // in_one_place

    def __deepcopy__(self, memo: dict[int, Any]) -> HorovodExchange:
        """Return the same object, so that layers that hold it can be copied."""
        return self

    @waits
    def _find_host_sums(self) -> HostSums:
        """Collective: return whether Gloo adds the ranks of each host first."""
        by_host = getattr(horovod, "GLOO_BY_HOST", False) and os.environ.get(BY_HOST) == "1"
        has_several = is_homogeneous() and 1 not in (hvd.local_size(), hvd.cross_size())
        if not by_host or self.controller != "gloo" or not has_several:
            return HostSums.NONE
        rank_by_host = hvd.cross_rank() * hvd.local_size() + self.local_rank
        places = self.all_gather_object(rank_by_host, "hvdtrain.places")
        return HostSums.FIRST if places == list(range(self.size)) else HostSums.FIRST_APART

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
        if hasattr(optimizer, "reducer"):
            raise UsageError("distribute: this optimizer is distributed already: make a new one")
        make_gradients_dense(model, optimizer)
        settings = asdict(reduction) | {"grad_accum_steps": grad_accum_steps}
        check_same_settings(self, "distribute", settings)
        # First: both compare what buckets are made of.
        if adopt:
            self.broadcast_state(model, optimizer)
        else:
            agree_on_layout(self, model, optimizer)
        bucket_bytes = reduction.bucket_bytes if self.size > 1 else 0
        buckets = make_buckets(model, optimizer, bucket_bytes, grad_accum_steps)
        named, alone = with_buckets(model, optimizer, buckets)
        reducer = hvd.DistributedOptimizer(
            torch.optim.SGD([*alone, *(bucket.flat for bucket in buckets)]),
            named_parameters=named.items(),
            compression=COMPRESSIONS[reduction.compression],
            backward_passes_per_step=grad_accum_steps,
            op=REDUCTIONS[reduction.op],
        )
        if hvd.local_size() < hvd.size() and len(reducer._requires_update) > 1:
            # Between hosts, messages that overlap computing lose more if they begin late.
            push(self._calm_threads)
        staged = not self.has_nccl and any(parameter.device.type != "cpu" for parameter in alone)
        reduce_before_step(optimizer, reducer, buckets, self.reduce_gradients, copies=int(staged))
        reducer.watched = Trainable(model, optimizer)
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
        reducer_of(optimizer).undo()

    def begin_pass(self, optimizer: torch.optim.Optimizer) -> None:
        reducer_of(optimizer).flight.begin_pass()

    @waits
    def reduce_gradients(self, optimizer: torch.optim.Optimizer, look: bool = False) -> bool:
        """Collective: wait until Horovod has reduced every gradient. True: all are surely finite.

        Raises TrainingError if code has changed a gradient meanwhile, or has added, removed or
        converted trainable parameters since `distribute`.
        """
        reducer = reducer_of(optimizer)
        if is_reduced(reducer):
            return False
        reducer.watched.check(optimizer)
        # Parameters without a gradient on this rank may have one on others: begin all, then wait.
        for parameter in reducer._requires_update:
            if reducer._handles.get(parameter, (None, None))[0] is None:
                reducer._handles[parameter] = reducer._allreduce_grad_async(parameter)
        are_finite: bool = reducer.flight.are_as_added and len(reducer._handles) > 0
        for message, (handle, context) in list(reducer._handles.items()):
            if handle is None:  # not begun: on a single rank there is nothing to wait for
                are_finite = False
                continue
            wait(handle)
            if are_finite and not is_finite(handle):  # while later ones are on their way
                are_finite = look and looks_finite(message, context)
        optimizer.synchronize()  # type: ignore[attr-defined]
        return are_finite

    def begin_reduction(self, values: torch.Tensor, op: str, name: str) -> Pending:
        return _Pending(self, hvd.allreduce_async_(values, name=name, op=REDUCTIONS[op]))

    def sum_later(self, values: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        return _Pending(self, hvd.allreduce_async(values, name=name, op=hvd.Sum)).wait

    def collective(
        self, kind: str, tensors: Tensors, name: str, submission: str, op: str = "", root: int = 0
    ) -> Tensors:
        """Collective: return the results of an operation of Horovod on each of the tensors.

        `kind`: allreduce: by `op`: sum, average, min or max; reducescatter: this rank's rows of a
        sum or average; if N does not divide their number, the first ranks receive one more;
        allgather: the tensors of every rank, joined in rank order; broadcast: those of `root`.
        `submission`: alone or together: one operation per tensor, all begun before the first is
        awaited; grouped: one group, which Horovod fuses, but only up to HOROVOD_FUSION_THRESHOLD.
        """
        is_reduction = kind in ("allreduce", "reducescatter")
        options: dict[str, Any] = {"op": REDUCTIONS[op]} if is_reduction else {}
        if kind == "broadcast":
            options["root_rank"] = root
        elif submission == "grouped":  # Horovod neither groups nor fuses broadcasts
            return list(getattr(hvd, f"grouped_{kind}")(tensors, name=name, **options))
        begin = getattr(hvd, f"{kind}_async")
        handles = [
            begin(tensor, name=f"{name}.{number}", **options)
            for number, tensor in enumerate(tensors)
        ]
        return [_result(handle) for handle in handles]

    @waits
    def broadcast_object(self, value: Any, name: str) -> Any:
        content = pickled(value if self.rank == 0 else None)
        head = hvd.broadcast(head_of(content), 0, name=f"{name}.head")
        if is_small(length := length_in(head)):
            content = content_in(head)
        else:
            content = content if self.rank == 0 else torch.empty(length, dtype=torch.uint8)
            hvd.broadcast_(content, 0, name=name)  # in place: it may be a whole state
        return value if self.rank == 0 else unpickled(content)

    @waits
    def all_gather_object(self, value: Any, name: str) -> list[Any]:
        content = pickled(value)
        heads = hvd.allgather(head_of(content)[None], name=f"{name}.heads")
        lengths = list(map(length_in, heads))
        if is_small(max(lengths)):
            return [unpickled(content_in(head)) for head in heads]
        return list(map(unpickled, hvd.allgather(content, name=name).split(lengths)))

    @contextmanager
    def peer_failures(self) -> Iterator[None]:
        try:
            yield
        except HorovodInternalError as error:
            raise PeerFailure(
                "a collective broke off, as it does when another rank fails "
                f"({str(error).strip().partition('. ')[0]})"
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
        per_host = self.size // self.ring_size if self._host_sums != HostSums.FIRST_APART else 0
        try:
            return known_order(self.controller, self.size, os.environ, library, built_in, per_host)
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


def _result(handle: int) -> torch.Tensor:
    """Collective: wait for one operation; return its result."""
    wait(handle)
    return hvd.synchronize(handle)  # type: ignore[no-any-return]


def ring_of_horovod() -> Transport:
    """Collective: return a ring over a script's ranks. Raises UsageError before hvd.init()."""
    if not hvd.is_initialized():
        raise UsageError("GradientAudit: call hvd.init() first")
    return HorovodExchange().ring()


def _start_rendezvous(ranks: list[dict[str, str]]) -> int:
    """Start Horovod's rendezvous server in a thread, as horovodrun does. Returns its port."""
    server = RendezvousServer()
    port: int = server.start()
    names = ("rank", "local_rank", "cross_rank", "size", "local_size", "cross_size")
    numbers = [{name: int(each[f"HOROVOD_{name.upper()}"]) for name in names} for each in ranks]
    pairs = zip(ranks, numbers, strict=True)
    server.init([SlotInfo(each["HOROVOD_HOSTNAME"], **slot) for each, slot in pairs])
    return port
