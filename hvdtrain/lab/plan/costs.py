"""What one exchange of S bytes over N workers takes, by method. Pure functions.

The model is the usual one: a message of m bytes takes latency + m / bandwidth, a process (and a
host's network card) sends one message and receives one at a time, both at once. (R. Thakur,
R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005;
their third term, the time to add, is within the bandwidth that is measured.)

    ring                all ranks in one ring, in the order of hosts: 2 (N - 1) messages of S / N
    hierarchical_ring   reduce-scatter in each host, a ring between hosts for each local rank's
                        part, all-gather in each host
    naive               all to one rank, which adds up, and back: 2 (N - 1) messages of S
    parameter_server    every worker pushes to and pulls from each of K servers: S / K each
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A connection between two workers."""

    latency_s: float  # of a message without bytes
    bandwidth_bytes_per_s: float  # in each direction

    def seconds(self, size_bytes: float) -> float:
        """Of one message."""
        return self.latency_s + self.occupied_s(size_bytes)

    def occupied_s(self, size_bytes: float) -> float:
        """For how long one message keeps the next one waiting."""
        return size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """Hosts of as many workers each, filled one after the other."""

    between: Link  # of a host with another: all its workers share it
    inside: Link  # of two workers on one host: each pair has its own
    workers_per_host: int = 1
    servers: int | None = None  # of the parameter server; None: as many as hosts

    def hosts(self, workers: int) -> int:
        """How many hosts so many workers take."""
        return -(-workers // self.workers_per_host)

    def local(self, workers: int) -> int:
        """Workers on the fullest host."""
        return min(workers, self.workers_per_host)

    def bottleneck(self, workers: int) -> Link:
        """What a message between far workers travels over."""
        return self.between if self.hosts(workers) > 1 else self.inside


Cost = Callable[[Cluster, int, float], float]


def ring(cluster: Cluster, workers: int, size_bytes: float) -> float:
    """Seconds for one ring all-reduce: P. Patarasuk, X. Yuan, "Bandwidth Optimal All-reduce
    Algorithms for Clusters of Workstations" (2009).

    Of the N hops around the ring, one a host leads to another host. A segment is passed on as soon
    as it is there, so the pace of a step is the mean hop, as one segment meets them all in turn,
    or what keeps the slowest link busy, whichever is longer (the largest mean over cycles of the
    dependencies: F. Baccelli et al., "Synchronization and Linearity", 1992, chapter 3). With
    equal links it is the textbook's latency + S / (N bandwidth).
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
    """Seconds for one all-reduce on two levels, as Horovod's HOROVOD_HIERARCHICAL_ALLREDUCE does:
    H. Mikami et al., "Massively Distributed SGD" (2018).

    The rings between hosts, one for each local rank, share the host's link: together they move
    what one ring over H hosts moves. Where the last host is not full, the full ones decide.
    """
    local, hosts = cluster.local(workers), cluster.hosts(workers)
    inside_s = 2 * (local - 1) * cluster.inside.seconds(size_bytes / local)
    return inside_s + 2 * (hosts - 1) * cluster.between.seconds(size_bytes / hosts)


def naive(cluster: Cluster, workers: int, size_bytes: float) -> float:
    """Seconds to gather all at rank 0, message after message, and to send the sum back alike."""
    local = cluster.local(workers)
    near_s = (local - 1) * cluster.inside.seconds(size_bytes)
    return 2 * (near_s + (workers - local) * cluster.between.seconds(size_bytes))


def parameter_server(cluster: Cluster, workers: int, size_bytes: float) -> float:
    """Seconds to push gradients to K servers, each of which holds one part, and to pull what they
    make of it: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server"
    (2014).

    Servers have links of their own (inside the host where there is one host only). A server takes
    N messages of S / K each way; a worker K, through a link that its host's workers share.
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
    """Messages, one after the other, by which the ranks agree on what to exchange next.

    tree: a gather and a broadcast on binomial trees, as MPI libraries do (Thakur et
    al.); linear: one by one with rank 0, as Horovod did until June 2018 (its pull request 276).
    """
    if kind == "linear":
        return 2 * (workers - 1)
    return 2 * math.ceil(math.log2(workers))
