"""Each fault does to a result what its name states, on its ranks, and nothing elsewhere."""

from __future__ import annotations

import random

import pytest
import torch

from hvdtrain.evidence.verify.collectives import FAULTS, CaseContext, Delivered, inject

SIZE = 3
TERMS = [1000 * rank + torch.arange(7, dtype=torch.float64) / 3 for rank in range(SIZE)]


def place(rank: int) -> CaseContext:
    return CaseContext(rank, SIZE, lambda local, dropped: TERMS[dropped])


def results(fault: str, op: str, **more: torch.Tensor) -> list[tuple[bool, torch.Tensor]]:
    """(whether it was changed, the value) on each rank, after a reduction went through `fault`."""
    done = []
    for rank in range(SIZE):
        total = sum(TERMS)
        value = total / SIZE if op == "average" else total.clone()
        delivered = Delivered(value, op, TERMS[rank].clone(), **more)
        changed = inject(fault, delivered, place(rank), random.Random(5))
        done.append((changed, value))
    return done


def test_bitflip() -> None:
    """Fails if not exactly one bit of one rank's value is turned, or the sign of its report."""
    done = results("bitflip", "sum")
    assert sorted(changed for changed, _ in done) == [False, False, True]
    honest = sum(TERMS)
    for changed, value in done:
        turned = value.view(torch.int64) ^ honest.view(torch.int64)
        bits = sum(int(pattern).bit_count() for pattern in turned.tolist())
        assert bits == (1 if changed else 0)


@pytest.mark.parametrize("op", ["sum", "average"])
def test_drop_rank(op: str) -> None:
    """Fails if what is missing is not one rank's whole term, the same on every rank."""
    done = results("drop-rank", op)
    assert all(changed for changed, _ in done)
    scale = SIZE if op == "average" else 1
    for _, value in done:
        assert torch.equal(value, done[0][1])
    missing = [sum(TERMS) - scale * done[0][1] - term for term in TERMS]
    assert sum(bool(rest.abs().max() < 1e-9) for rest in missing) == 1


def test_sum_for_mean() -> None:
    """Fails if an average is not turned into the sum."""
    for changed, value in results("sum-for-mean", "average"):
        assert changed
        torch.testing.assert_close(value, sum(TERMS), rtol=1e-15, atol=0)


def test_mean_for_sum() -> None:
    """Fails if a sum is not turned into the average."""
    for changed, value in results("mean-for-sum", "sum"):
        assert changed
        torch.testing.assert_close(value, sum(TERMS) / SIZE, rtol=1e-15, atol=0)


def test_swap_results() -> None:
    """Fails if the two tensors do not hold one another's values afterwards."""
    value, other = torch.arange(4.0), torch.arange(4.0) + 10
    assert inject("swap-results", Delivered(value, "sum", other=other), place(0), random.Random(1))
    assert value.tolist() == [10, 11, 12, 13]
    assert other.tolist() == [0, 1, 2, 3]


def test_stale() -> None:
    """Fails if the result is not that of the step before, or that one is changed."""
    before = torch.arange(7, dtype=torch.float64)
    for changed, value in results("stale", "sum", previous=before):
        assert changed
        assert torch.equal(value, before)
    assert torch.equal(before, torch.arange(7, dtype=torch.float64))


def test_nan() -> None:
    """Fails if not one element, the same on every rank, is NaN."""
    places = [value.isnan().nonzero().tolist() for _, value in results("nan", "sum")]
    assert len(places[0]) == 1
    assert places == [places[0]] * SIZE


def test_half_precision() -> None:
    """Fails if values keep more than float16's digits."""
    for changed, value in results("half-precision", "average"):
        assert changed
        assert torch.equal(value, (sum(TERMS) / SIZE).half().double())


@pytest.mark.parametrize(
    ("fault", "delivered"),
    [
        ("sum-for-mean", Delivered(torch.ones(3), "sum")),
        ("mean-for-sum", Delivered(torch.ones(3), "average")),
        ("drop-rank", Delivered(torch.ones(3), "max", torch.ones(3))),
        ("drop-rank", Delivered(torch.ones(3), "sum")),
        ("swap-results", Delivered(torch.ones(3), "sum", other=torch.zeros(4))),
        ("swap-results", Delivered(torch.ones(3), "sum")),
        ("stale", Delivered(torch.ones(3), "sum")),
        ("stale", Delivered(torch.ones(3), "sum", previous=torch.ones(3))),
        ("nan", Delivered(torch.ones(3, dtype=torch.int32), "sum")),
        ("half-precision", Delivered(torch.ones(3, dtype=torch.int64), "sum")),
        ("half-precision", Delivered(torch.full((3,), 0.1).half(), "sum")),
        *((fault, Delivered(torch.empty(0), "average", torch.empty(0))) for fault in FAULTS),
    ],
)
def test_where_a_fault_means_nothing(fault: str, delivered: Delivered) -> None:
    """Fails if a fault that changed nothing is reported as injected."""
    before = delivered.value.clone()
    alone = CaseContext(0, 1, lambda local, dropped: local)
    assert not inject(fault, delivered, alone, random.Random(0))
    assert torch.equal(delivered.value, before)


@pytest.mark.parametrize("fault", FAULTS)
def test_dice_stay_in_step(fault: str) -> None:
    """Fails if ranks with results of unlike lengths draw differently: they would part for good."""
    after = []
    for rank, length in enumerate([5, 4, 0]):
        dice = random.Random(3)
        value = torch.ones(length)
        own = CaseContext(rank, SIZE, lambda local, dropped: local)
        inject(fault, Delivered(value, "sum", value.clone()), own, dice)
        after.append(dice.random())
    assert len(set(after)) == 1
