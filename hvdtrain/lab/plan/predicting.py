"""Step time and efficiency on N workers, and the largest N that is of use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.lab.plan.costs import METHODS, Cluster, negotiation_messages
from hvdtrain.lab.plan.overlap import Queue, exchange
from hvdtrain.lab.plan.profiles import Gradient, Profile
from hvdtrain.lab.plan.stragglers import slowdown


@dataclass(frozen=True)
class Scenario:
    """All that a prediction is made from."""

    profile: Profile
    cluster: Cluster
    queue: Queue
    negotiation: str = "tree"  # or linear
    negotiation_message_s: float | None = None  # None: the latency of the link
    cores_per_host: int | None = None  # None: every worker computes undisturbed
    compute_speed: float = 1.0  # relative to the profile's


@dataclass(frozen=True)
class Prediction:
    """One method on N workers."""

    method: str
    workers: int
    step_s: float
    compute_s: float  # of the slowest worker, without exchange
    busy_s: float  # of the exchange, hidden or not
    exposed_s: float  # of it, after the backward pass
    exchanges: int
    samples_per_s: float
    efficiency: float  # throughput / (N x throughput of 1)
    efficiency_without_overlap: float  # the same if no exchange were hidden by the backward pass


@dataclass(frozen=True)
class Useful:
    """The largest N whose efficiency, and that of every N of the table below it, is enough."""

    workers: int
    efficiency: float
    is_limit: bool  # it is the largest N that was asked for


def compute_factor(setting: Scenario, workers: int) -> float:
    """How many times as long computing takes as in the profile.

    Slower for the slowest of N, by the spread that was measured; and where a host has more workers
    than cores, which take turns on them.
    """
    cores = setting.cores_per_host
    shared = max(setting.cluster.local(workers) / cores, 1.0) if cores else 1.0
    return slowdown(setting.profile.step_times_s, workers) * shared / setting.compute_speed


def predict(setting: Scenario, method: str, workers: int) -> Prediction:
    """The batch of each worker stays as it is (weak scaling)."""
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
    """1, 2, 4, ... and `most` itself."""
    return sorted({1 << power for power in range(most.bit_length())} | {most})


def largest_useful(setting: Scenario, method: str, most: int, least_efficiency: float) -> Useful:
    """Searched among the table's N first, then by bisection between the last that is good and the
    first that is not.
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
    """Every method at every N."""
    return [predict(setting, method, workers) for workers in counts for method in METHODS]
