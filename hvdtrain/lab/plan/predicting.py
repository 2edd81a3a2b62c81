"""Predicted step time on N workers: cost of an exchange, its overlap with the backward pass.

The cost of an exchange of S bytes follows the usual model: a message of m bytes takes latency +
m / bandwidth; a process (and the network card of a host) sends one message and receives one at a
time, full duplex. (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005; their third term, the time to add, is part of the measured bandwidth.)
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hvdtrain.exchange.buckets import grouped, suitable_bucket_bytes
from hvdtrain.lab.plan.profiles import Gradient, Profile


@dataclass(frozen=True)
class Link:
    """A connection between two workers."""

    latency_s: float  # of an empty message
    bandwidth_bytes_per_s: float  # in each direction

    def seconds(self, size_bytes: float) -> float:
        """Return the seconds for one message."""
        return self.latency_s + self.occupied_s(size_bytes)

    def occupied_s(self, size_bytes: float) -> float:
        """Return the seconds for which one message delays the next."""
        return size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """Hosts with `workers_per_host` workers each, filled one after the other."""

    between: Link  # between two hosts: shared by all workers of a host
    inside: Link  # between two workers on one host: one per pair
    workers_per_host: int = 1

    def hosts(self, workers: int) -> int:
        """Return the number of hosts that `workers` occupy."""
        return -(-workers // self.workers_per_host)

    def local(self, workers: int) -> int:
        """Return the number of workers on the fullest host."""
        return min(workers, self.workers_per_host)

    def bottleneck(self, workers: int) -> Link:
        """Return the link between the most distant workers."""
        return self.between if self.hosts(workers) > 1 else self.inside


Cost = Callable[[Cluster, int, float], float]


def ring(cluster: Cluster, workers: int, size_bytes: float) -> float:
    """Return the seconds for one all-reduce in a ring: 2 (N - 1) messages of S / N.

    Source: P. Patarasuk, X. Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of
    Workstations" (2009). Of the N hops of the ring, one per host leads to another host. A segment
    is forwarded as soon as it arrives, so a step takes the mean over all hops, which each segment
    passes in turn, or the busy time of the slowest link, whichever is longer (the maximum cycle
    mean of the dependencies: F. Baccelli et al., "Synchronization and Linearity", 1992,
    chapter 3). With equal links this is the textbook's latency + S / (N bandwidth).
    """
    hosts, segment = cluster.hosts(workers), size_bytes / workers
    far = hosts if hosts > 1 else 0
    hops = [(cluster.between, far), (cluster.inside, workers - far)]
    mean_s = sum(count * link.seconds(segment) for link, count in hops) / workers
    busy_s = max(link.occupied_s(segment) for link, count in hops if count)
    return 2 * (workers - 1) * max(mean_s, busy_s)


def hierarchical_ring(cluster: Cluster, workers: int, size_bytes: float) -> float:
    """Return the seconds for one all-reduce on two levels, as HOROVOD_HIERARCHICAL_ALLREDUCE does:
    reduce-scatter in each host, a ring between hosts for each local rank's part, all-gather.

    Source: H. Mikami et al., "Massively Distributed SGD" (2018). The rings between hosts share the
    link of the host: together they move as many bytes as one ring over H hosts. If the last host
    is not full, the full hosts determine the time.
    """
    local, hosts = cluster.local(workers), cluster.hosts(workers)
    inside_s = 2 * (local - 1) * cluster.inside.seconds(size_bytes / local)
    return inside_s + 2 * (hosts - 1) * cluster.between.seconds(size_bytes / hosts)


def naive(cluster: Cluster, workers: int, size_bytes: float) -> float:
    """Return the seconds to gather on rank 0 and to broadcast the sum, one message at a time."""
    local = cluster.local(workers)
    near_s = (local - 1) * cluster.inside.seconds(size_bytes)
    return 2 * (near_s + (workers - local) * cluster.between.seconds(size_bytes))


def parameter_server(cluster: Cluster, workers: int, size_bytes: float) -> float:
    """Return the seconds to push gradients to K servers, one per host, and to pull parameters.

    Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014).
    Servers have links of their own (inside the host if there is only one). A server handles N
    messages of S / K each way; a worker handles K, over a link shared by the workers of its host.
    """
    if workers == 1:
        return 0.0
    link, servers = cluster.bottleneck(workers), cluster.hosts(workers)
    sharing = cluster.local(workers) if servers > 1 else 1
    server_s = workers * link.seconds(size_bytes / servers)
    worker_s = servers * link.latency_s + link.occupied_s(sharing * size_bytes)
    return 2 * max(server_s, worker_s)


METHODS: Mapping[str, Cost] = {
    "ring": ring,
    "hierarchical_ring": hierarchical_ring,
    "naive": naive,
    "parameter_server": parameter_server,
}


def negotiation_messages(workers: int) -> int:
    """Return the number of successive messages in which the ranks agree on the next exchange:
    gather and broadcast on binomial trees, as in MPI libraries (Thakur et al.).
    """
    return 2 * math.ceil(math.log2(workers))


@dataclass(frozen=True)
class Queue:
    """Parameters of the queue that collects gradients for an exchange."""

    cycle_s: float = 0.001  # HOROVOD_CYCLE_TIME's default
    fusion_bytes: int = 0  # messages that are ready at the same time are fused up to this size
    bucket_bytes: int = 0  # smaller gradients share a message
    sleeps: bool = False  # until the next cycle also where the rank waits, as Horovod's own does


@dataclass(frozen=True)
class Scenario:
    """All inputs of a prediction."""

    profile: Profile
    cluster: Cluster
    queue: Queue | None = Queue()  # None: as `train` sets it for N workers
    negotiation_message_s: float | None = None  # None: the latency of the link
    cores_per_host: int | None = None  # None: every worker computes undisturbed


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
class LargestUsefulN:
    """The largest N that, like every smaller N of the table, is efficient enough."""

    workers: int
    efficiency: float
    is_limit: bool  # whether it is the largest N requested


class ExchangeTimes(NamedTuple):
    """The times of all exchanges of a step."""

    end_s: float  # from the beginning of the backward pass
    busy_s: float  # in exchanges and negotiations
    exchanges: int


def predict(setting: Scenario, method: str, workers: int) -> Prediction:
    """Predict one method on N workers, each with the batch of the profile (weak scaling)."""
    profile, cluster = setting.profile, setting.cluster
    factor = compute_factor(setting, workers)
    exchanged = ExchangeTimes(0.0, 0.0, 0)
    if workers > 1:
        message_s = setting.negotiation_message_s
        if message_s is None:
            message_s = cluster.bottleneck(workers).latency_s
        exchanged = exchange(
            [Gradient(g.name, g.size_bytes, factor * g.ready_s) for g in profile.gradients],
            lambda size: METHODS[method](cluster, workers, size),
            queue_of(setting, method, workers),
            negotiation_messages(workers) * message_s,
        )
    exposed_s = max(exchanged.end_s - factor * profile.backward_s, 0.0)
    compute_s = factor * profile.step_s
    step_s = compute_s + exposed_s
    alone_s = compute_factor(setting, 1) * profile.step_s
    return Prediction(
        method=method,
        workers=workers,
        step_s=step_s,
        compute_s=compute_s,
        busy_s=exchanged.busy_s,
        exposed_s=exposed_s,
        exchanges=exchanged.exchanges,
        samples_per_s=workers * profile.batch_size / step_s,
        efficiency=alone_s / step_s,
        efficiency_without_overlap=alone_s / (compute_s + exchanged.busy_s),
    )


def queue_of(setting: Scenario, method: str, workers: int) -> Queue:
    """Return the queue of the scenario, or the one that `train` has with N workers."""
    if setting.queue is not None:
        return setting.queue
    ring_size = setting.cluster.hosts(workers) if METHODS[method] is hierarchical_ring else workers
    return Queue(bucket_bytes=suitable_bucket_bytes(ring_size))


def compute_factor(setting: Scenario, workers: int) -> float:
    """Return the factor by which computation takes longer than in the profile.

    It includes the measured spread, as the slowest of N workers counts, and the sharing of cores
    on a host with more workers than cores.
    """
    times, cores = setting.profile.step_times_s, setting.cores_per_host
    slowest = expected_maximum(times, workers) / statistics.fmean(times) if times else 1.0
    shared = max(setting.cluster.local(workers) / cores, 1.0) if cores else 1.0
    return max(slowest, 1.0) * shared


def expected_maximum(values: Sequence[float], draws: int) -> float:
    """Return the expected maximum of `draws` independent draws from the measured values.

    Of m sorted values the i-th is the maximum with probability (i/m)^N - ((i-1)/m)^N (the
    empirical distribution: H. A. David, H. N. Nagaraja, "Order Statistics", 2003, chapter 2).
    No tail is assumed, so the result never exceeds the largest value: with N well above m it is a
    lower bound.
    """
    count = len(values)
    return math.fsum(
        value * ((i / count) ** draws - ((i - 1) / count) ** draws)
        for i, value in enumerate(sorted(values), start=1)
    )


def exchange(
    gradients: Sequence[Gradient],
    cost: Callable[[float], float],
    queue: Queue,
    negotiation_s: float,
) -> ExchangeTimes:
    """Simulate the exchange of the gradients of one step.

    `gradients`: in the order in which they become ready. `cost`: maps bytes to seconds. Once the
    last is ready the rank waits for the result.
    """
    gradients = in_buckets(gradients, queue.bucket_bytes)
    now, end, busy, exchanges, done = 0.0, 0.0, 0.0, 0, 0
    ends_s = max((gradient.ready_s for gradient in gradients), default=0.0)
    awaited_s = math.inf if queue.sleeps else ends_s
    while done < len(gradients):
        ready_s = gradients[done].ready_s
        if ready_s > now and queue.cycle_s > 0:  # asleep, and awake once a cycle
            now += math.ceil((ready_s - now) / queue.cycle_s) * queue.cycle_s
            now = min(now, awaited_s)
        now = max(now, ready_s)  # rounding must not put it before `ready_s`
        ready = [g for g in gradients[done:] if g.ready_s <= now]
        buffers = [cost(size) for size in fuse([g.size_bytes for g in ready], queue.fusion_bytes)]
        spent = negotiation_s + math.fsum(buffers)
        end, busy = now + spent, busy + spent
        now = max(end, min(now + queue.cycle_s, max(now, awaited_s)))
        done, exchanges = done + len(ready), exchanges + len(buffers)
    return ExchangeTimes(end, busy, exchanges)


def in_buckets(gradients: Sequence[Gradient], bucket_bytes: int) -> list[Gradient]:
    """Return the messages in which gradients travel, each ready with the last gradient of it."""
    sizes = [gradient.size_bytes for gradient in gradients]
    return [
        replace(gradients[group[-1]], size_bytes=sum(sizes[index] for index in group))
        for group in grouped(sizes, bucket_bytes)
    ]


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


def worker_counts(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`, and `most` itself."""
    return sorted({1 << power for power in range(most.bit_length())} | {most})


def largest_useful(
    setting: Scenario, method: str, most: int, least_efficiency: float
) -> LargestUsefulN:
    """Return the largest useful N: search the N of the table, then bisect between the last
    efficient one and the first inefficient one.
    """

    def is_bad(workers: int) -> bool:
        return predict(setting, method, workers).efficiency < least_efficiency

    workers = most
    counts = worker_counts(most)
    first_bad = next(filter(is_bad, counts), None)
    if first_bad is not None:  # above 1, which has an efficiency of 1
        last_good = counts[counts.index(first_bad) - 1]
        workers = last_good + bisect_left(range(last_good + 1, first_bad), True, key=is_bad)
    return LargestUsefulN(workers, predict(setting, method, workers).efficiency, first_bad is None)
