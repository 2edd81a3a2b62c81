"""`hvdtrain bench ring`: our ring in Python, compared with the all-reduce of C++ libraries.

Under mpi the peer is MPI's own all-reduce, called through mpi4py, and our ring also runs over MPI;
under gloo the peer is that of torch.distributed over Gloo. All of these work in place. Horovod's
is included for information (it copies its input, and waits for its next cycle).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
from torch import distributed

from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.connect import interface_address
from hvdtrain.lab.bench.turns import Measured, Options, ratio, run_rounds
from hvdtrain.ring import all_reduce
from hvdtrain.ring.operations import Array
from hvdtrain.ring.transports.mpi import MpiTransport

OURS, OURS_OVER_MPI = "our ring", "our ring over MPI"
MPI, GLOO, HOROVOD = "mpi4py Allreduce", "torch.distributed", "Horovod"
DTYPE = np.float32
PEER_TIMEOUT = timedelta(seconds=60)

Sum = Callable[[Array], Array]  # from this rank's values to the sum over ranks, possibly in place


def bench_ring(options: Options, exchange: Exchange) -> Measured:
    """Collective: measure the seconds for a sum of `options.megabytes` of float32, and our speed
    relative to the others'. Raises UsageError for a single process.
    """
    if exchange.size < 2:
        raise UsageError("bench ring: a ring has 2 ranks or more (horovodrun -np 2 ...)")
    ring = exchange.ring()
    sums: dict[str, Sum] = {OURS: lambda values: all_reduce(values, ring, out=values)}
    over_mpi = MpiTransport() if exchange.controller == "mpi" else None
    if over_mpi:
        sums[OURS_OVER_MPI] = lambda values: all_reduce(values, over_mpi, out=values)
        sums[MPI] = over_mpi.library_sum
    else:
        sums[GLOO] = _join_torch_distributed(exchange)
    sums[HOROVOD] = lambda values: exchange.sum_later(
        torch.from_numpy(values), "hvdtrain.bench.sum"
    )().numpy()
    length = max(int(options.megabytes * 1e6) // np.dtype(DTYPE).itemsize, 1)
    megabytes = length * np.dtype(DTYPE).itemsize / 1e6
    for name, sum_over_ranks in sums.items():
        _check(name, sum_over_ranks, length, exchange)
    contestants = {name: _repeated(sum_over_ranks, length) for name, sum_over_ranks in sums.items()}
    seconds = run_rounds(contestants, options.rounds, options.steps, exchange)
    ring.close()
    if over_mpi:
        over_mpi.close()
    else:
        distributed.destroy_process_group()
    return Measured(
        what=f"sum of {megabytes:g} MB of float32",
        seconds=seconds,
        ratios={f"our speed / {name}": ratio(seconds, name, OURS) for name in sums if name != OURS},
        megabytes=megabytes,
    )


def _join_torch_distributed(exchange: Exchange) -> Sum:
    """Collective: return the sum by torch's own Gloo group, over Horovod's interface."""
    interface = os.environ["HOROVOD_GLOO_IFACE"]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store_class = distributed.TCPStore  # type: ignore[attr-defined]  # public, but not listed
    store, place = None, None
    if exchange.rank == 0:
        host = interface_address(interface)
        store = store_class(host, 0, is_master=True, wait_for_workers=False)
        place = (host, store.port)
    host, port = exchange.broadcast_object(place, "hvdtrain.bench.store")
    distributed.init_process_group(
        "gloo",
        store=store or store_class(host, port, is_master=False),
        rank=exchange.rank,
        world_size=exchange.size,
        timeout=PEER_TIMEOUT,
    )

    def torch_sum(values: Array) -> Array:
        distributed.all_reduce(torch.from_numpy(values))
        return values

    return torch_sum


def _check(name: str, sum_over_ranks: Sum, length: int, exchange: Exchange) -> None:
    """Collective: raise TrainingError unless the contestant sums correctly."""
    pattern = np.arange(length, dtype=np.int64) % 251  # such sums are exact in float32
    total = sum_over_ranks(((exchange.rank + 1) * pattern).astype(DTYPE))
    if not np.array_equal(total, pattern * sum(range(1, exchange.size + 1))):
        raise TrainingError(f"{name}: the sum over {exchange.size} ranks is wrong")


def _repeated(sum_over_ranks: Sum, length: int) -> Callable[[], None]:
    """Return a step that sums zeros, which repeated sums in place leave unchanged."""
    values = np.empty(length, DTYPE)
    values.fill(0)  # unlike np.zeros, this commits the memory

    def step() -> None:
        sum_over_ranks(values)

    return step
