"""Running contestants in turns, and what to make of their times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.exchange import Exchange

WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Ratio:
    """Times of one contestant as multiples of another's in the same round."""

    median: float
    lowest: float
    lower_quartile: float
    upper_quartile: float
    highest: float


@dataclass(frozen=True)
class Options:
    """What a bench is asked for; each uses those that concern it."""

    rounds: int
    steps: int  # per round
    model: str
    batch_size: int  # per worker
    megabytes: float


@dataclass(frozen=True)
class Measured:
    """What a bench has found."""

    what: str  # one step, in words
    seconds: dict[str, list[float]]  # a step, by contestant and round
    ratios: dict[str, Ratio]
    megabytes: float | None = None  # a step, where its speed is one of moving bytes


def run_rounds(
    contestants: Mapping[str, Callable[[], None]], rounds: int, steps: int, exchange: Exchange
) -> dict[str, list[float]]:
    """Collective: seconds a step of each contestant in each round, as the slowest rank saw it.

    In a round each contestant makes `steps` steps; every other round goes in reverse order, so
    that none is always the one after a certain other.
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
    """How many times as long `name` took as `to`."""
    return spread([a / b for a, b in zip(seconds[name], seconds[to], strict=True)])


def spread(ratios: Sequence[float]) -> Ratio:
    """Of the ratios of all rounds, of which there is at least one."""
    lower, _, upper = (
        statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else [*ratios] * 3
    )
    return Ratio(statistics.median(ratios), min(ratios), lower, upper, max(ratios))
