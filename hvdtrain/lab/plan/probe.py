"""Latency and bandwidth of a network: the program that times all-reduces, and the fit to them.

    horovodrun -np 2 -H alpha:1,beta:1 python -m hvdtrain.lab.plan.probe network.json

measures between two hosts and writes the file for `hvdtrain plan --network network.json`, which
otherwise starts the program on this machine.

K tensors of b bytes that are submitted together to Horovod, each reduced separately in a ring of N
workers, take

    c + K * 2 (N - 1) * (latency + b / (N bandwidth))

where c does not depend on K and b: it is the agreement of the ranks, which begins at once, as they
wait for the result. The three unknowns are found by least squares over several K and b, with errors
relative to the fitted time, as times differ by orders of magnitude: gamma regression, by iterated
weights (P. McCullagh, J. Nelder, "Generalized Linear Models", 1989, chapter 8).
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.evidence.children import ChildFailure, run_command
from hvdtrain.interpreter import module_argv
from hvdtrain.lab.plan.predicting import Link, negotiation_messages
from hvdtrain.lab.plan.profiles import (
    COUNT,
    SECONDS,
    TEXT,
    Kind,
    is_count,
    is_seconds,
    read_fields,
    wrong_rows,
    wrong_values,
)
from hvdtrain.launcher.horovodrun import horovodrun_argv, horovodrun_environment

if TYPE_CHECKING:
    from hvdtrain.exchange.horovod import HorovodExchange

# Tensors submitted together, and bytes of each: from latency-bound to bandwidth-bound.
SHAPES = (
    *((tensors, size) for size in (4, 4 << 10, 64 << 10) for tensors in (1, 8, 32)),
    *((tensors, 1 << 20) for tensors in (1, 8)),
    *((1, size) for size in (4 << 20, 16 << 20)),
)
REPEATS = 15  # after one warm-up
DEFAULT_CYCLE_MS = 1.0  # Horovod's default
LEAST_POINTS = 4  # one more than unknowns
LIMIT_S = 120.0  # of a measurement, which takes some seconds
ITERATIONS = 25  # of the weights, which converge in far fewer
SEVERAL: Kind = (lambda n: is_count(n) and n > 1, "a whole number of at least 2 was expected")
POSITIVE: Kind = (lambda s: is_seconds(s) and s > 0, "seconds above 0 were expected")
FIELDS = {"workers": SEVERAL, "controller": TEXT, "cycle_s": SECONDS}
POINT_FIELDS = {"tensors": COUNT, "size_bytes": COUNT, "seconds": POSITIVE}
EXAMPLE = '{"tensors": 1, "size_bytes": 4096, "seconds": 0.002}'

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """The time of one all-reduce of `tensors` tensors of `size_bytes` bytes each."""

    tensors: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class Network:
    """The measured points, and the three fitted unknowns."""

    workers: int
    controller: str
    cycle_s: float
    points: tuple[Point, ...]
    link: Link
    negotiation_message_s: float
    residuals: tuple[float, ...]  # of each point: measured / fitted time - 1

    @property
    def worst_residual(self) -> float:
        return max(map(abs, self.residuals))

    @property
    def typical_residual(self) -> float:
        """Root mean square of the residuals."""
        return math.sqrt(math.fsum(r * r for r in self.residuals) / len(self.residuals))


def fit(workers: int, controller: str, cycle_s: float, points: Sequence[Point]) -> Network:
    """Fit the unknowns to `points`. Raises TrainingError if times do not grow with bytes."""
    steps = 2 * (workers - 1)
    times = np.array([point.seconds for point in points])
    messages = np.array([point.tensors * steps for point in points])
    sizes = np.array([point.size_bytes for point in points])
    terms = np.stack([np.ones(len(points)), messages, messages * sizes / workers], axis=1)
    fitted, unknowns = times, np.zeros(3)
    for _ in range(ITERATIONS):
        unknowns = _positive_least_squares(terms / fitted[:, None], times / fitted)
        fitted = terms @ unknowns
    constant_s, latency_s, seconds_per_byte = unknowns.tolist()
    if not seconds_per_byte > 0:
        raise TrainingError("network: the times of all-reduces do not grow with their bytes")
    return Network(
        workers=workers,
        controller=controller,
        cycle_s=cycle_s,
        points=tuple(points),
        link=Link(latency_s, 1 / seconds_per_byte),
        negotiation_message_s=constant_s / negotiation_messages(workers),
        residuals=tuple((times / fitted - 1).tolist()),
    )


def _positive_least_squares(terms: Floats, wanted: Floats) -> Floats:
    """Return the x >= 0 that minimises |terms @ x - wanted|, by trying each subset of unknowns
    with the others set to 0.
    """
    count = terms.shape[1]
    best, least = np.zeros(count), math.inf
    for choice in range(1, 1 << count):
        used = [column for column in range(count) if choice >> column & 1]
        solution, *_ = np.linalg.lstsq(terms[:, used], wanted, rcond=None)
        error = float(np.sum((terms[:, used] @ solution - wanted) ** 2))
        if (solution >= 0).all() and error < least:
            best, least = np.zeros(count), error
            best[used] = solution
    return best


def read_network(path: Path, flag: str = "--network") -> Network:
    """Read and fit a file of this program. Raises UsageError with every problem of the file."""
    content = read_fields(path, flag, _problems)
    points = [Point(**point) for point in content["points"]]
    try:
        return fit(content["workers"], content["controller"], content["cycle_s"], points)
    except TrainingError as error:
        raise UsageError(f"{flag}={path}: {error}") from error


def _problems(content: dict[str, Any]) -> Iterator[str]:
    yield from wrong_values(content, FIELDS)
    yield from wrong_rows(content, "points", LEAST_POINTS, POINT_FIELDS, EXAMPLE)


def measure_network(controller: str) -> Network:
    """Measure with two workers on this machine, started by horovodrun and ended on return.

    Raises TrainingError if they fail or exceed LIMIT_S.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-plan-") as folder:
        file = Path(folder, "network.json")
        probe = [*module_argv("hvdtrain.lab.plan.probe"), str(file)]
        argv = horovodrun_argv(probe, 2, controller)
        environment = horovodrun_environment(os.environ, {}, None)
        try:
            run_command(argv, environment, file.parent, LIMIT_S, "not finished after {:g} s")
        except ChildFailure as failure:
            raise TrainingError(
                f"network: the measurement failed: {failure}\n"
                "Give --latency-us and --bandwidth-gbit-s to skip the measurement"
            ) from failure
        return read_network(file, "probe")


def time_all_reduces(exchange: HorovodExchange, cycle_s: float) -> list[Point]:
    """Collective: return the median seconds of each shape from the submission of the last rank.

    Ranks sleep for a random part of two cycles before they submit, so that Horovod's thread pauses.
    """
    dice = random.Random(0)  # the same on every rank
    points = []
    for tensors, size in SHAPES:
        values = [torch.zeros(size // 4) for _ in range(tensors)]
        local_s = []
        for _ in range(1 + REPEATS):
            time.sleep(dice.uniform(0, 2 * cycle_s))
            started = time.perf_counter()
            exchange.collective("allreduce", values, f"hvdtrain.probe.{size}", "together", op="sum")
            local_s.append(time.perf_counter() - started)
        by_rank: list[list[float]] = exchange.all_gather_object(local_s[1:], "hvdtrain.probe.times")
        from_last_submission = map(min, zip(*by_rank, strict=True))
        points.append(Point(tensors, size, statistics.median(from_last_submission)))
    return points


def main() -> int:
    """Collective: measure; rank 0 writes the file named by `sys.argv[1]`. Return the exit code."""
    from hvdtrain.exchange.horovod import HorovodExchange  # only here: `plan` may do without

    torch.set_num_threads(1)
    cycle_s = float(os.environ.get("HOROVOD_CYCLE_TIME", DEFAULT_CYCLE_MS)) / 1000
    exchange = HorovodExchange()
    points = time_all_reduces(exchange, cycle_s)
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
