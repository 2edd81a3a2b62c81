"""What one exchange takes: the formulas against messages that are counted one by one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.lab.plan.predicting import (
    METHODS,
    Cluster,
    Cost,
    Link,
    hierarchical_ring,
    naive,
    negotiation_messages,
    parameter_server,
    ring,
)
from tests.ring_trace import trace_all_reduce

SLOW, FAST = Link(20e-6, 1e9), Link(3e-6, 16e9)
LINKS = st.builds(Link, st.floats(0, 1e-3), st.floats(1e6, 1e12))
SIZES = st.floats(1, 1e10)
UNHURRIED = settings(deadline=None)


def flat(link: Link) -> Cluster:
    """One worker a host."""
    return Cluster(link, link)


def play_ring(cluster: Cluster, workers: int, size_bytes: float) -> float:
    """When the last message arrives of the ring's own schedule, as the algorithm has sent it.

    A message starts once what it carries has arrived and the link is free; it keeps the link busy
    for its bytes, and arrives a latency after.
    """
    arrived = dict.fromkeys(range(workers), 0.0)
    free = dict.fromkeys(range(workers), 0.0)
    messages = trace_all_reduce(workers)
    for step in range(1, 2 * workers - 1):
        before = dict(arrived)
        for message in (m for m in messages if m.step == step):
            sender, receiver = message.sender, message.receiver
            same = sender // cluster.workers_per_host == receiver // cluster.workers_per_host
            link = cluster.inside if same else cluster.between
            begun = max(before[sender], free[sender])
            free[sender] = begun + link.occupied_s(size_bytes / workers)
            arrived[receiver] = free[sender] + link.latency_s
    return max(arrived.values())


@pytest.mark.parametrize("workers", [2, 3, 4, 7, 16, 62])
@pytest.mark.parametrize("size", [4, 1e5, 1e9])
def test_ring_of_equal_links_is_its_own_schedule(workers: int, size: float) -> None:
    """Fails when the formula is not the time of the messages that the ring really sends."""
    cluster = flat(SLOW)
    assert ring(cluster, workers, size) == pytest.approx(play_ring(cluster, workers, size))


@pytest.mark.parametrize(("hosts", "each"), [(2, 2), (2, 8), (4, 4), (8, 4), (15, 4)])
@pytest.mark.parametrize("size", [4, 1e5, 1e9])
def test_ring_over_hosts_keeps_the_pace_of_its_schedule(hosts: int, each: int, size: float) -> None:
    """Fails when pace is not that of the ring's own messages, to within a few at either end."""
    cluster, workers = Cluster(SLOW, FAST, each), hosts * each
    played = play_ring(cluster, workers, size)
    a_few = 3 * (SLOW.seconds(size / workers) + each * FAST.seconds(size / workers))
    assert ring(cluster, workers, size) == pytest.approx(played, abs=a_few)


@pytest.mark.parametrize("workers", [2, 3, 8, 1000])
def test_ring_sends_2_n_minus_1_over_n(workers: int) -> None:
    """Fails when without latency a ring's time is not its bytes by its bandwidth."""
    cluster = flat(Link(0.0, 1e9))
    assert ring(cluster, workers, 5e8) == pytest.approx(2 * (workers - 1) / workers * 0.5)
    assert hierarchical_ring(cluster, workers, 5e8) == pytest.approx(ring(cluster, workers, 5e8))


def test_ring_with_one_slow_link_is_as_slow_as_that() -> None:
    """Fails when fast links inside hosts hide what the slow one between them must carry."""
    cluster = Cluster(Link(0.0, 1e9), Link(0.0, 1e12), workers_per_host=4)
    assert ring(cluster, 16, 1e9) == pytest.approx(2 * 15 / 16)


def test_hierarchical_ring_by_hand() -> None:
    """Fails when a level is left out, or carries other than its part: 3 hosts of 4 workers.

    Inside 2 x 3 messages of S/4; between hosts 2 x 2 of S/3 in all, as local ranks share the link.
    """
    cluster, size = Cluster(SLOW, FAST, 4), 12e6
    expected = 6 * FAST.seconds(3e6) + 4 * SLOW.seconds(4e6)
    assert hierarchical_ring(cluster, 12, size) == pytest.approx(expected)
    assert hierarchical_ring(cluster, 4, size) == pytest.approx(6 * FAST.seconds(3e6))


def test_naive_is_linear_in_n() -> None:
    """Fails when rank 0 does not take every message in turn, and send as many."""
    times = [naive(flat(SLOW), workers, 1e6) for workers in (1, 2, 3, 4)]
    assert times == pytest.approx([2 * n * SLOW.seconds(1e6) for n in range(4)])
    mixed = 2 * (3 * FAST.seconds(1e6) + 4 * SLOW.seconds(1e6))
    assert naive(Cluster(SLOW, FAST, 4), 8, 1e6) == pytest.approx(mixed)


@pytest.mark.parametrize(
    ("per_host", "expected"),
    [
        (1, 1e8 / 1e9),
        (4, 4 * 1e8 / 1e9),  # two servers, and a link that four workers share
        (8, 8 * 1e8 / 1e9),  # one server takes what all send
    ],
)
def test_parameter_server_bytes(per_host: int, expected: float) -> None:
    """Fails when the busiest link of 8 workers is taken to carry other than it does, each way."""
    link = Link(0.0, 1e9)
    cluster = Cluster(link, link, per_host)
    assert parameter_server(cluster, 8, 1e8) == pytest.approx(2 * expected)


def test_parameter_server_takes_a_message_of_each_worker() -> None:
    """Fails when latency is not that of the process with most messages."""
    link = Link(1e-3, 1e30)
    assert parameter_server(Cluster(link, link, 4), 8, 1) == pytest.approx(2 * 8e-3)


@pytest.mark.parametrize("cost", METHODS.values())
@UNHURRIED
@given(link=LINKS, inside=LINKS, each=st.integers(1, 16), size=SIZES)
def test_one_worker_exchanges_nothing(
    cost: Cost, link: Link, inside: Link, each: int, size: float
) -> None:
    """Fails when a single worker is charged for anything."""
    assert cost(Cluster(link, inside, each), 1, size) == 0


@pytest.mark.parametrize("cost", METHODS.values())
@UNHURRIED
@given(link=LINKS, each=st.integers(1, 16), workers=st.integers(2, 2000), size=SIZES)
def test_cost_is_monotonic(cost: Cost, link: Link, each: int, workers: int, size: float) -> None:
    """Fails when more bytes, more latency or less bandwidth make an exchange faster, or where all
    links are alike and one worker is alone on its host, more workers do.
    """
    seconds = cost(Cluster(link, link, each), workers, size)
    assert 0 < seconds < math.inf
    assert cost(Cluster(link, link, each), workers, 2 * size) >= seconds
    later = Link(link.latency_s + 1e-6, link.bandwidth_bytes_per_s)
    narrower = Link(link.latency_s, link.bandwidth_bytes_per_s / 2)
    assert cost(Cluster(later, later, each), workers, size) >= seconds
    assert cost(Cluster(narrower, narrower, each), workers, size) >= seconds
    alone = [cost(Cluster(link, link), count, size) for count in (workers, workers + 1)]
    assert alone[1] >= alone[0] * (1 - 1e-12)


@UNHURRIED
@given(link=LINKS, each=st.integers(1, 16), workers=st.integers(2, 500), size=SIZES)
def test_nothing_beats_the_bound_of_bandwidth(
    link: Link, each: int, workers: int, size: float
) -> None:
    """Fails when an exchange moves its bytes faster than its slowest link can: 2 (N - 1) / N of
    them at every worker's own (Patarasuk and Yuan 2009), with one worker a host.
    """
    least = 2 * (workers - 1) / workers * link.occupied_s(size)
    for cost in METHODS.values():
        assert cost(flat(link), workers, size) >= least * (1 - 1e-12)


@pytest.mark.parametrize(("workers", "messages"), [(2, 2), (3, 4), (1024, 20)])
def test_messages_of_an_agreement(workers: int, messages: int) -> None:
    """Fails when the depth of the tree is another."""
    assert negotiation_messages(workers) == messages
