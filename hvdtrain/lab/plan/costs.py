"""Seconds of one exchange of S bytes over N workers, by method. Pure functions.

The model is the usual one: a message of m bytes takes latency + m / bandwidth; a process (and the
network card of a host) sends one message and receives one at a time, full duplex. (R. Thakur,
R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005;
their third term, the time to add, is part of the measured bandwidth.)

    ring                all ranks in one ring, in the order of hosts: 2 (N - 1) messages of S / N
    hierarchical_ring   reduce-scatter in each host, a ring between hosts for each local rank's
                        part, all-gather in each host
    naive               gather to one rank, which sums, and broadcast: 2 (N - 1) messages of S
    parameter_server    every worker pushes to and pulls from each of K servers: S / K each
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


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
    servers: int | None = None  # parameter servers; None: as many as hosts

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
    """Return the seconds for one ring all-reduce.

    Source: P. Patarasuk, X. Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of
    Workstations" (2009). Of the N hops of the ring, one per host leads to another host. A segment
    is forwarded as soon as it arrives, so a step takes the mean over all hops, which each segment
    passes in turn, or the busy time of the slowest link, whichever is longer (the maximum cycle
    mean of the dependencies: F. Baccelli et al., "Synchronization and Linearity", 1992,
    chapter 3). With equal links this is the textbook's latency + S / (N bandwidth).
    """
    if workers == 1:
        return 0.0
    hosts = cluster.hosts(workers)
    far = hosts if hosts > 1 else 0
    segment = size_bytes / workers
    far_s, near_s = far * cluster.between.seconds(segment), 0.0
    busy_s = cluster.between.occupied_s(segment) if far else 0.0
    if workers > far:
        near_s = (workers - far) * cluster.inside.seconds(segment)
        busy_s = max(busy_s, cluster.inside.occupied_s(segment))
    return 2 * (workers - 1) * max((far_s + near_s) / workers, busy_s)


def hierarchical_ring(cluster: Cluster, workers: int, size_bytes: float) -> float:
    """Return the seconds for one all-reduce on two levels, as HOROVOD_HIERARCHICAL_ALLREDUCE does.

    Source: H. Mikami et al., "Massively Distributed SGD" (2018). The rings between hosts, one for
    each local rank, share the link of the host: together they move as many bytes as one ring over
    H hosts. If the last host is not full, the full hosts determine the time.
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
    """Return the seconds to push gradients to K servers, one part each, and to pull parameters.

    Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014).
    Servers have links of their own (inside the host if there is only one). A server handles N
    messages of S / K each way; a worker handles K, over a link shared by the workers of its host.
    """
    if workers == 1:
        return 0.0
    link = cluster.bottleneck(workers)
    servers = cluster.servers or cluster.hosts(workers)
    sharing = cluster.local(workers) if cluster.hosts(workers) > 1 else 1
    server_s = workers * link.seconds(size_bytes / servers)
    worker_s = servers * link.latency_s + link.occupied_s(sharing * size_bytes)
    return 2 * max(server_s, worker_s)


METHODS: Mapping[str, Cost] = {
    "ring": ring,
    "hierarchical_ring": hierarchical_ring,
    "naive": naive,
    "parameter_server": parameter_server,
}


def negotiation_messages(kind: str, workers: int) -> int:
    """Return the number of successive messages in which the ranks agree on the next exchange.

    tree: gather and broadcast on binomial trees, as in MPI libraries (Thakur et al.); linear: each
    rank in turn with rank 0, as in Horovod until June 2018 (its pull request 276).
    """
    if kind == "linear":
        return 2 * (workers - 1)
    return 2 * math.ceil(math.log2(workers))
