"""The program that times all-reduces of several sizes; `hvdtrain plan` starts it on this machine.

    horovodrun -np 2 -H alpha:1,beta:1 python -m hvdtrain.lab.plan.probe network.json

measures between two hosts and writes the file for `hvdtrain plan --network network.json`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from hvdtrain.exchange.horovod import HorovodExchange
from hvdtrain.lab.plan.network import Point

# Tensors submitted together, and bytes of each: from latency-bound to bandwidth-bound.
SHAPES = (
    *((tensors, size) for size in (4, 4 << 10, 64 << 10) for tensors in (1, 8, 32)),
    *((tensors, 1 << 20) for tensors in (1, 8)),
    *((1, size) for size in (4 << 20, 16 << 20)),
)
REPEATS = 15  # after one warm-up
DEFAULT_CYCLE_MS = 1.0  # Horovod's default


def probe(exchange: HorovodExchange, cycle_s: float) -> list[Point]:
    """Collective: return the median time of each shape."""
    dice = random.Random(0)  # the same on every rank
    return [
        Point(tensors, size, _time(exchange, tensors, size, cycle_s, dice))
        for tensors, size in SHAPES
    ]


def _time(
    exchange: HorovodExchange, tensors: int, size_bytes: int, cycle_s: float, dice: random.Random
) -> float:
    """Collective: return the median seconds from the submission of the last rank.

    Ranks sleep for a random part of two cycles before they submit, so that the mean wait is half
    a cycle, as the fit assumes.
    """
    values = [torch.zeros(size_bytes // 4) for _ in range(tensors)]
    own = []
    for _ in range(1 + REPEATS):
        time.sleep(dice.uniform(0, 2 * cycle_s))
        started = time.perf_counter()
        exchange.all_reduce(values, "sum", f"hvdtrain.probe.{size_bytes}", "together")
        own.append(time.perf_counter() - started)
    by_rank: list[list[float]] = exchange.all_gather_object(own[1:], "hvdtrain.probe.times")
    from_last_submission: list[float] = [min(times) for times in zip(*by_rank, strict=True)]
    return statistics.median(from_last_submission)


def main() -> int:
    """Collective: measure; rank 0 writes the file named by `sys.argv[1]`. Return the exit code."""
    torch.set_num_threads(1)
    cycle_s = float(os.environ.get("HOROVOD_CYCLE_TIME", DEFAULT_CYCLE_MS)) / 1000
    exchange = HorovodExchange()
    points = probe(exchange, cycle_s)
    if exchange.rank == 0:
        content = {
            "workers": exchange.size,
            "controller": exchange.controller,
            "cycle_s": cycle_s,
            "points": [asdict(point) for point in points],
        }
        Path(sys.argv[1]).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    exchange.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
