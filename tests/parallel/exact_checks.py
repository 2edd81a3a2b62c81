"""Run by horovodrun on every rank: Horovod's own sums and averages, reproduced bit for bit.

Rank 0 prints one JSON line a case: what was reduced, and how many elements differ in any bit. The
wrong order is tried too, on values where it must show.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch

from hvdtrain.exchange.horovod import HorovodExchange
from hvdtrain.ring.orders import (
    GLOO_RING,
    MPI_RING,
    KnownOrder,
    differing_bits,
    reproduce,
)
from hvdtrain.ring.transports import Transport
from tests.rings import rank_data, special_data

MIB = 1 << 20
Make = Callable[[int, int, np.dtype], np.ndarray]
DTYPES = ("float16", "float32", "float64", "int32", "int64")


def lengths(size: int, itemsize: int) -> list[int]:
    """Around the number of ranks, Gloo's piece of 1 MiB, and the few bytes that are not summed by a
    ring over MPI, where the partition changes.
    """
    limits = (2 * size * MIB, size * MPI_RING.few_bytes)
    around = [limit // itemsize + more for limit in limits for more in (-1, 0, 1)]
    few = [0, 1, 2, 3, size - 1, size, size + 1, 2 * size, 2 * size + 1, 4 * size + 3]
    return sorted({*few, 100, 1009, 65_537, MIB // itemsize + 1, *around})


def check(
    values: np.ndarray, exchange: HorovodExchange, ring: Transport, order: KnownOrder, op: str
) -> int:
    """Collective: the number of elements, on any rank, that differ from the reproduction."""
    name = f"exact.{op}.{values.dtype}.{values.size}"
    horovod_op = {"sum": hvd.Sum, "average": hvd.Average}[op]
    before = values.copy()
    actual = hvd.allreduce(torch.from_numpy(values), name=name, op=horovod_op).numpy()
    expected = reproduce(values, ring, order, op)
    np.testing.assert_array_equal(values.view(np.uint8), before.view(np.uint8))
    own = int(differing_bits(actual, expected).sum())
    return max(exchange.all_gather_object(own, f"{name}.differing"))


def cases(dtype: str, size: int) -> list[tuple[int, Make, str, bool]]:
    """(length, maker of values, op, with the wrong order) of every case of one type."""
    floating = dtype.startswith("float")
    found = []
    for length in lengths(size, np.dtype(dtype).itemsize):
        ops = ("average", "sum") if length < 2000 else ("sum",)
        found += [(length, rank_data, op, False) for op in ops]
    if floating:
        found += [(20_011, special_data, op, False) for op in ("average", "sum")]
        found += [(1009, rank_data, "sum", True)]
    if dtype == "float32":
        found += [(3_000_001, rank_data, "sum", False)]
        found += [(2 * size * MIB // 4 + 1, rank_data, "average", False)]  # several pieces
    return found


def shares_memory() -> bool:
    """Whether Horovod has mapped memory of the ranks of a host, of which there is no file."""
    maps = Path("/proc/self/maps").read_text()
    return re.search(r"/memfd:horovod-\S+ \(deleted\)", maps) is not None


def main() -> int:
    torch.set_num_threads(1)
    exchange = HorovodExchange()
    order = exchange.summation_order()
    wrong = MPI_RING if order == GLOO_RING else GLOO_RING
    ring = exchange.ring()
    for dtype in DTYPES:
        for length, make, op, is_wrong in cases(dtype, exchange.size):
            values = make(exchange.rank, length, np.dtype(dtype))
            differing = check(values, exchange, ring, wrong if is_wrong else order, op)
            line = {"order": order.name, "dtype": dtype, "length": length, "op": op}
            line |= {"wrong_order": is_wrong, "differing": differing, "in_memory": shares_memory()}
            if exchange.rank == 0:
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
    ring.close()
    exchange.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
