"""Rings and data for the tests of the ring."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from hvdtrain.ring.transports import Transport, in_process_ring
from hvdtrain.ring.transports.tcp import TcpTransport, listen

LONG, LONGEST = 100_003, 1_000_003  # primes; the last is sent in several chunks
TOKEN = bytes(range(32))
Result = TypeVar("Result")


def lengths_for(size: int) -> list[int]:
    """0, 1, around the number of ranks, and a long one that no number of ranks divides."""
    return sorted({0, 1, size - 1, size, size + 1, LONGEST if size == 3 else LONG})


def rank_data(rank: int, length: int, dtype: Any) -> np.ndarray:
    """Values that differ by rank and by position, so that mixed-up ranks cannot pass.

    For floats of many magnitudes and both signs, so that sums are rounded and order matters.
    """
    if np.issubdtype(dtype, np.integer):
        return rank * 1_000_003 + np.arange(length, dtype=dtype) * (rank + 1)
    generator = np.random.default_rng([rank, length])
    decades = 3 if np.dtype(dtype) == np.float16 else 6  # it ends at 65504
    values = generator.standard_normal(length) * 10.0 ** generator.integers(
        -decades, decades, length
    )
    return (values + rank).astype(dtype)


def special_data(rank: int, length: int, dtype: Any) -> np.ndarray:
    """Any bits at all, and every pair of special values: zeros of both signs, subnormals, the
    largest, infinities, NaN, terms that cancel, and where Gloo's float16 loses a term.
    """
    dtype = np.dtype(dtype)
    numbers = np.finfo(dtype)
    few = [0.0, -0.0, 1.0, -1.0, numbers.smallest_subnormal, -numbers.smallest_subnormal]
    few += [numbers.tiny, numbers.max, numbers.min, np.inf, -np.inf, np.nan, 15360.0, 32768.0]
    generator = np.random.default_rng([rank, length])
    count = length * dtype.itemsize
    values = np.frombuffer(generator.bytes(count), dtype).copy()
    special = np.array(few, dtype)
    # Rank r steps through the values len(few)^r times slower: all combinations for two ranks.
    places = np.arange(length // 2)
    values[: length // 2] = special[places // len(few) ** (rank % 3) % len(few)]
    return values


class Counting:
    """A transport that records how many bytes each of its messages has."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.sent: list[int] = []

    def sendrecv(self, outgoing: np.ndarray, incoming: np.ndarray, **options: Any) -> None:
        self.sent.append(outgoing.nbytes)
        self.inner.sendrecv(outgoing, incoming, **options)

    def close(self) -> None:
        self.inner.close()


def run_in_process(size: int, work: Callable[[Transport], Result]) -> list[Result]:
    """Run `work` for each rank of an in-process ring, in threads; the results in rank order.

    Raises the exception of the lowest rank that failed. Threads that hand on to one another are
    several times faster on one core.
    """
    cores = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[worker % len(cores)]})
    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(work, in_process_ring(size)))
    finally:
        os.sched_setaffinity(0, cores)


def run_tcp_ring(size: int, work: Callable[[Transport], Any], token: bytes = TOKEN) -> list[Any]:
    """Run `work` for each rank of a ring of real sockets, in threads of this process."""
    listeners = [listen("127.0.0.1") for _ in range(size)]
    addresses = [listener.getsockname() for listener in listeners]

    def run(rank: int) -> Any:
        transport = TcpTransport(rank, listeners[rank], addresses, token, timeout_s=30)
        try:
            return work(transport)
        finally:
            transport.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
