"""The speed of our ring beside Horovod's and another library's, by sums that take turns."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import distributed

from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.gpus import CPU
from hvdtrain.lab.bench.ratios import ratio
from hvdtrain.lab.bench.rounds import Measured, Options, run_rounds
from hvdtrain.network import address_of
from hvdtrain.ring import all_reduce
from hvdtrain.ring.operations import Array
from hvdtrain.ring.transports.mpi import MpiTransport

OUR_RING, ON_GPUS = "our ring", "Horovod, on GPUs"

Sum = Callable[[Array], Array]  # from this rank's values to the sum over ranks, possibly in place


def bench_ring(options: Options, exchange: Exchange) -> Measured:
    """Collective: measure the seconds for a sum of `options.megabytes` of float32, and our speed
    relative to the others'. Raises UsageError for a single process.
    """
    if exchange.size < 2:
        raise UsageError("bench ring: a ring has 2 ranks or more: use hvdtrain launch -np 2")
    ring = exchange.ring()
    sums: dict[str, Sum] = {OUR_RING: lambda values: all_reduce(values, ring, out=values)}
    over_mpi = MpiTransport() if exchange.controller == "mpi" else None
    if over_mpi:
        sums["our ring over MPI"] = lambda values: all_reduce(values, over_mpi, out=values)
        sums["mpi4py Allreduce"] = over_mpi.library_sum
    else:
        sums["torch.distributed"] = _join_torch_distributed(exchange)
    sums["Horovod"] = lambda values: exchange.sum_later(
        torch.from_numpy(values), "hvdtrain.bench.sum"
    )().numpy()
    itemsize = np.dtype(np.float32).itemsize
    length = max(int(options.megabytes * 1e6) // itemsize, 1)
    # Zeros stay as they are in repeated sums in place; unlike np.zeros, np.full commits the memory.
    contestants: dict[str, Callable[[], object]] = {
        name: partial(add, np.full(length, 0, np.float32)) for name, add in sums.items()
    }
    if options.device != CPU.type:
        on_gpu = partial(_sum_on_gpu, exchange, torch.device(options.device))
        sums[ON_GPUS] = lambda values: on_gpu(torch.from_numpy(values)).cpu().numpy()
        contestants[ON_GPUS] = partial(on_gpu, torch.zeros(length, device=options.device))
    for name, add in sums.items():
        _check(name, add, length, exchange)
    seconds = run_rounds(contestants, options, exchange)
    ring.close()
    if over_mpi:
        over_mpi.close()
    else:
        distributed.destroy_process_group()
    others = [name for name in sums if name != OUR_RING]
    ratios = {f"our speed / {name}": ratio(seconds[name], seconds[OUR_RING]) for name in others}
    return Measured(seconds, ratios, megabytes=length * itemsize / 1e6)


def _sum_on_gpu(exchange: Exchange, device: torch.device, values: torch.Tensor) -> torch.Tensor:
    """Collective: return Horovod's sum of values on the device, to which they are copied first."""
    return exchange.sum_later(values.to(device), "hvdtrain.bench.sum_on_gpu")()


def _join_torch_distributed(exchange: Exchange) -> Sum:
    """Collective: return the sum by torch's own Gloo group, over Horovod's interface."""
    interface = os.environ["HOROVOD_GLOO_IFACE"]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store_class = distributed.TCPStore  # type: ignore[attr-defined]  # public, but not listed
    store: Any = None
    if exchange.rank == 0:
        address = address_of(interface)
        assert address is not None  # Horovod has connected over it
        store = store_class(address, 0, is_master=True, wait_for_workers=False)
    endpoint = store and (store.host, store.port)
    host, port = exchange.broadcast_object(endpoint, "hvdtrain.bench.store")
    distributed.init_process_group(
        "gloo",
        store=store or store_class(host, port, is_master=False),
        rank=exchange.rank,
        world_size=exchange.size,
        timeout=timedelta(seconds=60),
    )

    def torch_sum(values: Array) -> Array:
        distributed.all_reduce(torch.from_numpy(values))
        return values

    return torch_sum


def _check(name: str, add: Sum, length: int, exchange: Exchange) -> None:
    """Collective: raise TrainingError unless the contestant sums correctly."""
    pattern = np.arange(length, dtype=np.int64) % 251  # such sums are exact in float32
    total = add(((exchange.rank + 1) * pattern).astype(np.float32))
    if not np.array_equal(total, pattern * sum(range(1, exchange.size + 1))):
        raise TrainingError(f"{name}: the sum over {exchange.size} ranks is wrong")
