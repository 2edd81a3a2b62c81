"""Predictions: overlap of backward pass and exchange, step time, efficiency, largest useful N."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hvdtrain.lab.plan.costs import METHODS, Cluster, negotiation_messages
from hvdtrain.lab.plan.profiles import Gradient, Profile


@dataclass(frozen=True)
class Scenario:
    """All inputs of a prediction."""

    profile: Profile
    cluster: Cluster
    queue: Queue
    negotiation: str = "tree"  # or "linear"
    negotiation_message_s: float | None = None  # None: the latency of the link
    cores_per_host: int | None = None  # None: every worker computes undisturbed
    compute_speed: float = 1.0  # relative to the profile's


@dataclass(frozen=True)
class Prediction:
    """The prediction for one method on N workers."""

    method: str
    workers: int
    step_s: float
    compute_s: float  # of the slowest worker, without exchange
    busy_s: float  # of the exchange, overlapped or not
    exposed_s: float  # of the exchange, after the backward pass
    exchanges: int
    samples_per_s: float
    efficiency: float  # throughput / (N x throughput of 1)
    efficiency_without_overlap: float  # if no exchange overlapped the backward pass


@dataclass(frozen=True)
class Useful:
    """The largest N that, like every smaller N of the table, is efficient enough."""

    workers: int
    efficiency: float
    is_limit: bool  # whether it is the largest N requested


def compute_factor(setting: Scenario, workers: int) -> float:
    """Return the factor by which computation takes longer than in the profile.

    It includes the measured spread, as the slowest of N workers counts, and the sharing of cores
    on a host with more workers than cores.
    """
    cores = setting.cores_per_host
    shared = max(setting.cluster.local(workers) / cores, 1.0) if cores else 1.0
    return slowdown(setting.profile.step_times_s, workers) * shared / setting.compute_speed


def predict(setting: Scenario, method: str, workers: int) -> Prediction:
    """Predict one method on N workers, each with the batch of the profile (weak scaling)."""
    profile, cluster = setting.profile, setting.cluster
    factor = compute_factor(setting, workers)
    backward_s, end_s, busy_s, exchanges = factor * profile.backward_s, 0.0, 0.0, 0
    if workers > 1:
        found = exchange(
            [Gradient(g.name, g.size_bytes, factor * g.ready_s) for g in profile.gradients],
            lambda size: METHODS[method](cluster, workers, size),
            setting.queue,
            _negotiation_s(setting, workers),
        )
        end_s, busy_s, exchanges = found.end_s, found.busy_s, found.exchanges
    exposed_s = max(end_s - backward_s, 0.0)
    compute_s = factor * profile.step_s
    step_s = compute_s + exposed_s
    alone_s = compute_factor(setting, 1) * profile.step_s
    return Prediction(
        method=method,
        workers=workers,
        step_s=step_s,
        compute_s=compute_s,
        busy_s=busy_s,
        exposed_s=exposed_s,
        exchanges=exchanges,
        samples_per_s=workers * profile.batch_size / step_s,
        efficiency=alone_s / step_s,
        efficiency_without_overlap=alone_s / (compute_s + busy_s),
    )


def _negotiation_s(setting: Scenario, workers: int) -> float:
    message_s = setting.negotiation_message_s
    if message_s is None:
        message_s = setting.cluster.bottleneck(workers).latency_s
    return negotiation_messages(setting.negotiation, workers) * message_s


def worker_counts(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`, and `most` itself."""
    return sorted({1 << power for power in range(most.bit_length())} | {most})


def largest_useful(setting: Scenario, method: str, most: int, least_efficiency: float) -> Useful:
    """Return the largest useful N: search the N of the table, then bisect between the last
    efficient one and the first inefficient one.
    """
    counts = worker_counts(most)
    first_bad = next((n for n in counts if not _is_good(setting, method, n, least_efficiency)), 0)
    if first_bad == 0:
        return Useful(most, predict(setting, method, most).efficiency, is_limit=True)
    good, bad = max((n for n in counts if n < first_bad), default=1), first_bad
    while bad - good > 1:
        middle = (good + bad) // 2
        if _is_good(setting, method, middle, least_efficiency):
            good = middle
        else:
            bad = middle
    return Useful(good, predict(setting, method, good).efficiency, is_limit=False)


def _is_good(setting: Scenario, method: str, workers: int, least_efficiency: float) -> bool:
    return predict(setting, method, workers).efficiency >= least_efficiency


def predict_all(setting: Scenario, counts: Sequence[int]) -> list[Prediction]:
    """Predict every method at every N."""
    return [predict(setting, method, workers) for workers in counts for method in METHODS]


@dataclass(frozen=True)
class Queue:
    """Parameters of the queue that collects gradients for an exchange."""

    cycle_s: float = 0.001  # HOROVOD_CYCLE_TIME's default
    fusion_bytes: int = 0  # 0: each tensor separately, as hvdtrain trains


@dataclass(frozen=True)
class Exchanged:
    """The times of all exchanges of a step."""

    end_s: float  # from the beginning of the backward pass
    busy_s: float  # in exchanges and negotiations
    exchanges: int


def exchange(
    gradients: Sequence[Gradient],
    cost: Callable[[float], float],
    queue: Queue,
    negotiation_s: float,
) -> Exchanged:
    """Simulate the exchange of the gradients of one step.

    `gradients`: in the order in which they become ready. `cost`: maps bytes to seconds.
    """
    now, end, busy, exchanges, done = 0.0, 0.0, 0.0, 0, 0
    while done < len(gradients):
        now = _next_wake_up(now, gradients[done].ready_s, queue.cycle_s)
        ready = [g for g in gradients[done:] if g.ready_s <= now]
        buffers = [cost(size) for size in fuse([g.size_bytes for g in ready], queue.fusion_bytes)]
        spent = negotiation_s + math.fsum(buffers)
        end, busy = now + spent, busy + spent
        now = max(end, now + queue.cycle_s)
        done, exchanges = done + len(ready), exchanges + len(buffers)
    return Exchanged(end, busy, exchanges)


def _next_wake_up(now: float, ready_s: float, cycle_s: float) -> float:
    """Return the first of now, now + cycle, now + 2 cycles, ... that is not before `ready_s`."""
    if ready_s <= now:
        return now
    if cycle_s == 0:
        return ready_s
    wake_up = now + math.ceil((ready_s - now) / cycle_s) * cycle_s
    return max(wake_up, ready_s)  # rounding must not put it before ready_s


def fuse(sizes: Sequence[float], limit_bytes: int) -> Iterator[float]:
    """Yield buffer sizes: neighbours share one up to the limit; a larger tensor has its own."""
    filled = 0.0
    for size in sizes:
        if filled and filled + size > limit_bytes:
            yield filled
            filled = 0.0
        filled += size
    if filled:
        yield filled


def expected_maximum(values: Sequence[float], draws: int) -> float:
    """Return the expected maximum of `draws` independent draws from the measured values.

    Of m sorted values the i-th is the maximum with probability (i/m)^N - ((i-1)/m)^N (the
    empirical distribution: H. A. David, H. N. Nagaraja, "Order Statistics", 2003, chapter 2).
    No tail is assumed, so the result never exceeds the largest value: with N well above m it is a
    lower bound.
    """
    count = len(values)
    return math.fsum(
        value * ((place / count) ** draws - ((place - 1) / count) ** draws)
        for place, value in enumerate(sorted(values), start=1)
    )


def slowdown(step_times_s: Sequence[float], workers: int) -> float:
    """Return expected slowest of N workers / mean of one; 1 without measured times."""
    if not step_times_s:
        return 1.0
    mean = math.fsum(step_times_s) / len(step_times_s)
    return max(expected_maximum(step_times_s, workers) / mean, 1.0)
