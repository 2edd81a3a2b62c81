"""Turns of contestants within one job, and ratios of their times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.exchange import Exchange

WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Ratio:
    """The spread of a ratio between two contestants over all rounds."""

    median: float
    lowest: float
    lower_quartile: float
    upper_quartile: float
    highest: float


@dataclass(frozen=True)
class Options:
    """Options of the benchmarks within one job; each uses those that apply to it."""

    rounds: int
    steps: int  # per round
    model: str
    batch_size: int  # per worker
    megabytes: float


@dataclass(frozen=True)
class Measured:
    """The results of a benchmark within one job."""

    what: str  # description of one step
    seconds: dict[str, list[float]]  # per step, by contestant and round
    ratios: dict[str, Ratio]
    megabytes: float | None = None  # per step, where the speed is given in MB/s


def run_rounds(
    contestants: Mapping[str, Callable[[], None]], rounds: int, steps: int, exchange: Exchange
) -> dict[str, list[float]]:
    """Collective: return the seconds per step on the slowest rank, by contestant and round.

    In a round each contestant makes `steps` steps; every other round is in reverse order, so that
    none always follows the same other.
    """
    for step in contestants.values():
        for _ in range(WARM_UP_STEPS):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        order = list(contestants.items())
        for name, step in order if number % 2 == 0 else reversed(order):
            exchange.all_gather_object(None, "hvdtrain.bench.start")
            started = time.perf_counter()
            for _ in range(steps):
                step()
            own = (time.perf_counter() - started) / steps
            seconds[name].append(max(exchange.all_gather_object(own, "hvdtrain.bench.end")))
    return seconds


def ratio(seconds: Mapping[str, list[float]], name: str, to: str) -> Ratio:
    """Return the time of `name` over that of `to` within rounds."""
    return spread([a / b for a, b in zip(seconds[name], seconds[to], strict=True)])


def spread(ratios: Sequence[float]) -> Ratio:
    """Return the spread of the ratios of one or more rounds."""
    lower, _, upper = (
        statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else [*ratios] * 3
    )
    return Ratio(statistics.median(ratios), min(ratios), lower, upper, max(ratios))
