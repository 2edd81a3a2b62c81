"""A step: what is ready when, what waits for what. By hand, and for any gradients at all."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.lab.plan.predicting import (
    METHODS,
    Cluster,
    Link,
    Queue,
    Scenario,
    compute_factor,
    exchange,
    expected_maximum,
    fuse,
    largest_useful,
    predict,
    worker_counts,
)
from hvdtrain.lab.plan.profiles import Gradient, Profile

UNHURRIED = settings(deadline=None)
ONE_EACH = Queue(cycle_s=0.0, fusion_bytes=0)
LINK = Link(1e-4, 1e8)


def gradients(*rows: tuple[int, float]) -> list[Gradient]:
    """(bytes, ready at) each."""
    return [Gradient(f"g{place}", *row) for place, row in enumerate(rows)]


def profile(*rows: tuple[int, float], **changes: object) -> Profile:
    values = {"name": "net", "batch_size": 8, "forward_s": 0.5, "backward_s": 1.0}
    values |= {"update_s": 0.1, "gradients": tuple(gradients(*rows))}
    return Profile(**values | changes)  # type: ignore[arg-type]


def setting(found: Profile, link: Link = LINK, **changes: object) -> Scenario:
    values = {"profile": found, "cluster": Cluster(link, link), "queue": ONE_EACH}
    return Scenario(**values | changes)  # type: ignore[arg-type]


# Each exchange takes a second a byte, and 10 s.
CASES = {
    "one after the other": (((1, 0.0), (2, 100.0)), ONE_EACH, 0.0, 112.0, 23.0, 2),
    "the second waits for the first": (((5, 0.0), (2, 3.0)), ONE_EACH, 0.0, 27.0, 27.0, 2),
    "fused, as both are ready": (((5, 0.0), (2, 0.0)), Queue(0.0, 100), 0.0, 17.0, 17.0, 1),
    "fused while the first travels": (
        *(((5, 0.0), (2, 3.0), (3, 4.0)), Queue(0.0, 100), 0.0),
        *(15.0 + 15.0, 30.0, 2),
    ),
    "too much for one buffer": (((5, 0.0), (2, 0.0)), Queue(0.0, 6), 0.0, 27.0, 27.0, 2),
    "a bucket waits for its last": (
        *(((5, 0.0), (2, 3.0)), Queue(0.0, bucket_bytes=100), 0.0),
        *(20.0, 17.0, 1),
    ),
    "a large one goes ahead": (
        *(((5, 0.0), (9, 1.0), (2, 20.0)), Queue(0.0, bucket_bytes=8), 0.0),
        *(20.0 + 17.0, 19.0 + 17.0, 2),
    ),
    "asleep until the next cycle": (((1, 0.5), (1, 9.0)), Queue(4.0, 0), 0.0, 26.0, 22.0, 2),
    "awake once the rank waits": (((1, 0.5),), Queue(4.0, 0), 0.0, 11.5, 11.0, 1),
    "asleep though the rank waits": (((1, 0.5),), Queue(4.0, sleeps=True), 0.0, 15.0, 11.0, 1),
    "ready just as it wakes up": (((1, 4.0),), Queue(4.0, 0), 0.0, 15.0, 11.0, 1),
    "cycles are counted from the last wake-up": (
        *(((1, 0.0), (1, 1.0), (1, 50.0)), Queue(20.0, 0), 0.0),
        *(50.0 + 11.0, 33.0, 3),
    ),
    "no sleep after a long exchange": (
        *(((30, 0.0), (1, 1.0)), Queue(20.0, 0), 0.0),
        *(40.0 + 11.0, 51.0, 2),
    ),
    "an agreement each time": (((1, 0.0), (2, 100.0)), ONE_EACH, 7.0, 119.0, 37.0, 2),
    "one agreement for all that is ready": (((1, 0.0), (2, 0.0)), ONE_EACH, 7.0, 30.0, 30.0, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_by_hand(name: str) -> None:
    """Fails when a gradient starts before it is ready, or while another travels, or sleeps on."""
    rows, queue, negotiation_s, end, busy, count = CASES[name]
    found = exchange(gradients(*rows), lambda size: 10.0 + size, queue, negotiation_s)
    assert (found.end_s, found.busy_s, found.exchanges) == (end, busy, count)


@pytest.mark.parametrize(
    ("limit", "buffers"), [(0, [3, 4, 9, 1]), (7, [7, 9, 1]), (10, [7, 10]), (99, [17])]
)
def test_fusion_takes_neighbours(limit: int, buffers: list[int]) -> None:
    """Fails when order is changed, a buffer overflows, or a large tensor is lost."""
    assert list(fuse([3, 4, 9, 1], limit)) == buffers


ROWS = st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 100)), min_size=1, max_size=12)


@settings(UNHURRIED, max_examples=30)
@given(
    rows=ROWS,
    cycle=st.sampled_from([0.0, 0.3, 5.0]),
    fusion=st.integers(0, 3000),
    bucket=st.integers(0, 3000),
    negotiation=st.floats(0, 3),
)
def test_any_gradients(rows, cycle: float, fusion: int, bucket: int, negotiation: float) -> None:
    """Fails when an exchange is lost, ends before it can have been made, or idles without need."""
    ordered = gradients(*sorted(rows, key=lambda row: row[1]))
    seen: list[float] = []

    def cost(size: float) -> float:
        seen.append(size)
        return 1.0 + size / 100

    found = exchange(ordered, cost, Queue(cycle, fusion, bucket), negotiation)
    assert sum(seen) == sum(g.size_bytes for g in ordered) and found.exchanges == len(seen)
    last = ordered[-1].ready_s
    assert found.end_s >= max(last, found.busy_s) - 1e-9
    # It never sleeps longer than a cycle at a time, and only where something was late.
    assert found.end_s <= last + found.busy_s + cycle * (1 + len(ordered)) + 1e-6


def test_a_step_by_hand() -> None:
    """Fails when phases are not added up: 2 workers, gradients of 0.2 s and 0.4 s at 1e8 B/s.

    Ready at 0.3 and 1.0 (the end of the backward pass), so the second is exposed in full.
    """
    found = setting(profile((20_000_000, 0.3), (40_000_000, 1.0)), Link(0.0, 1e8))
    two = predict(found, "ring", 2)
    assert two.exposed_s == pytest.approx(0.4)
    assert two.step_s == pytest.approx(0.5 + 1.0 + 0.4 + 0.1)
    assert two.busy_s == pytest.approx(0.6)
    assert two.samples_per_s == pytest.approx(2 * 8 / 2.0)
    assert two.efficiency == pytest.approx(1.6 / 2.0)
    assert two.efficiency_without_overlap == pytest.approx(1.6 / 2.2)


def test_buckets_grow_with_the_ring() -> None:
    """Fails when 256 workers send more messages than `train` would: 4 of 2 MiB travel together in
    16 MiB, of 64 hosts with 4 workers each in 4 MiB, and none of them in 1 MiB.
    """
    layers = profile(*((2 << 20, 0.1 * place) for place in range(4)))
    found = setting(layers, cluster=Cluster(LINK, LINK, 4), queue=None)
    messages = {("ring", 256): 1, ("hierarchical_ring", 256): 2, ("ring", 16): 4}
    for (method, workers), expected in messages.items():
        assert predict(found, method, workers).exchanges == expected


@pytest.mark.parametrize("method", METHODS)
def test_a_perfect_network_costs_nothing(method: str) -> None:
    """Fails when efficiency is below 1 without latency, with any bandwidth, and without cycles."""
    found = setting(profile((10**6, 0.2), (10**8, 1.0)), Link(0.0, 1e30))
    for workers in (1, 2, 17, 1024):
        assert predict(found, method, workers).efficiency == pytest.approx(1)


@pytest.mark.parametrize("method", METHODS)
def test_one_worker_is_the_profile(method: str) -> None:
    """Fails when one worker waits for anything."""
    alone = predict(setting(profile((10**8, 1.0))), method, 1)
    assert (alone.efficiency, alone.busy_s, alone.exchanges) == (1, 0, 0)
    assert alone.step_s == pytest.approx(1.6)


@pytest.mark.parametrize("method", METHODS)
@UNHURRIED
@given(
    rows=st.lists(st.tuples(st.integers(4, 10**8), st.floats(0, 1)), min_size=1, max_size=6),
    workers=st.integers(2, 600),
    per_host=st.integers(1, 8),
)
def test_efficiency_is_a_share(method: str, rows, workers: int, per_host: int) -> None:
    """Fails when the result is more than N times one, or hiding an exchange makes a step longer."""
    ordered = sorted(rows, key=lambda row: row[1])
    found = setting(profile(*ordered), cluster=Cluster(LINK, Link(1e-6, 1e10), per_host))
    predicted = predict(found, method, workers)
    assert 0 < predicted.efficiency_without_overlap <= predicted.efficiency + 1e-12
    assert predicted.efficiency <= 1 + 1e-12


@pytest.mark.parametrize(("workers", "factor"), [(1, 1), (2, 1), (3, 1.5), (4, 2), (8, 2)])
def test_workers_take_turns_on_cores(workers: int, factor: float) -> None:
    """Fails when four workers a host compute on two cores as if they had four."""
    found = setting(profile((4, 1.0)), cluster=Cluster(LINK, LINK, 4), cores_per_host=2)
    assert compute_factor(found, workers) == factor


def test_expected_maximum_of_dice() -> None:
    """Fails when it is not the mean over all throws: every outcome is counted."""
    faces = [1.0, 2.0, 5.0, 5.0]
    for draws in (1, 2, 3, 4):
        throws = [max(throw) for throw in itertools.product(faces, repeat=draws)]
        assert expected_maximum(faces, draws) == pytest.approx(sum(throws) / len(throws))
    assert expected_maximum(faces, 10**6) == pytest.approx(5)


def test_no_spread_unless_measured() -> None:
    """Fails when waiting for the slowest is made up, or what was measured is not used."""
    for times, workers, factor in (((), 1000, 1), ((1.0, 3.0), 1, 1), ((1.0, 3.0), 2, 2.5 / 2)):
        found = setting(profile((4, 1.0), step_times_s=times))
        assert compute_factor(found, workers) == pytest.approx(factor)
    spread = profile((4, 1.0), step_times_s=(1.6, 1.6, 3.2))
    expected = [predict(setting(spread), "ring", n).compute_s for n in (1, 2, 1000)]
    mean = 6.4 / 3
    largest = [mean, (1.6 * 4 + 3.2 * 5) / 9, 3.2]
    assert expected == pytest.approx([1.6 * value / mean for value in largest])


def test_largest_useful_is_the_last_good_one() -> None:
    """Fails when bisection stops beside it: the next N is below the limit, this one is not."""
    found = setting(profile((10**7, 1.0)))
    useful = largest_useful(found, "naive", 1024, 0.6)
    assert predict(found, "naive", useful.workers).efficiency >= 0.6
    assert predict(found, "naive", useful.workers + 1).efficiency < 0.6
    assert not useful.is_limit and useful.workers not in worker_counts(1024)


def test_largest_useful_may_be_the_limit_or_one() -> None:
    """Fails when an open end passes for an end, or nothing is useful."""
    found = setting(profile((4, 1.0)), Link(0.0, 1e30))
    open_end = largest_useful(found, "ring", 100, 0.99)
    assert (open_end.workers, open_end.is_limit) == (100, True)
    slow = dataclasses.replace(found, cluster=Cluster(Link(10.0, 1.0), Link(10.0, 1.0)))
    assert largest_useful(slow, "ring", 100, 0.5).workers == 1


@pytest.mark.parametrize(
    ("most", "counts"), [(2, [1, 2]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])]
)
def test_worker_counts(most: int, counts: list[int]) -> None:
    """Fails when a power of two, or what was asked for, is left out or twice in."""
    assert worker_counts(most) == counts
