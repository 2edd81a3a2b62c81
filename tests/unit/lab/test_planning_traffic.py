"""What `hvdtrain plan` says that each rank sends is what audits and canonical sums send."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.audit.capture import BLOCK_ELEMENTS, Parts, make_blocks
from hvdtrain.lab.plan import traffic
from tests.simulated import audited, summed

# In two buckets and two blocks, several and one alone, not divisible by 256 or by the ranks.
LENGTHS = [10, 70_001, 300, 1, 2_560, 256]
WORKERS = [2, 5]


@pytest.mark.parametrize("workers", WORKERS)
def test_an_audit_sends_what_is_planned(workers: int) -> None:
    """Fails if bytes or messages of an audit are others, or it does not pass."""
    planned, counted = traffic.of_audit(LENGTHS, workers), audited(LENGTHS, workers)
    assert counted.is_right
    assert counted.messages == planned.messages
    assert counted.sent_bytes == pytest.approx(planned.sent_bytes)


@pytest.mark.parametrize("workers", WORKERS)
def test_canonical_sums_send_what_is_planned(workers: int) -> None:
    """Fails if bytes or messages of canonical sums are others, or the sums are wrong."""
    in_backward_order = LENGTHS[::-1]
    planned = traffic.of_canonical_sums(in_backward_order, workers)
    counted = summed(LENGTHS, workers)
    assert counted.is_right
    assert counted.messages == planned.messages
    assert counted.sent_bytes == pytest.approx(planned.sent_bytes)


@pytest.mark.parametrize("of", [traffic.of_gradients, traffic.of_canonical_sums, traffic.of_audit])
def test_the_traffic_of_a_rank_stays_bounded(of) -> None:
    """Fails if the messages of a rank grow with N as in buckets and blocks of one size, or its
    bytes beyond twice the gradients' (an audit: four times).
    """
    lengths = [64, 147_456, 512, 2_359_296, 1_000] * 40
    few, many = of(lengths, 8), of(lengths, 512)
    assert many.messages < few.messages * 512 / 8 / 2
    assert many.sent_bytes < 4.01 * traffic.VALUE * sum(lengths)
    assert many.held_bytes < 2 * traffic.VALUE * sum(lengths)


@pytest.mark.parametrize("lengths", [LENGTHS, [70_000] * 3, [65_536, 5, 65_531], [0, 7, 0], []])
def test_blocks_are_those_of_an_audit(lengths: list[int]) -> None:
    """Fails if they are counted otherwise than they are cut."""
    pieces = Parts(lengths, 1, 0, None, BLOCK_ELEMENTS).of_audit(0)
    parameters = [torch.nn.Parameter(torch.empty(0))] * len(lengths)
    blocks = make_blocks(pieces, parameters, BLOCK_ELEMENTS)
    assert traffic.blocks_of(lengths, BLOCK_ELEMENTS) == len(blocks)


def test_the_largest_model_is_planned_at_once() -> None:
    """Fails if the time or memory of a plan grows with the elements of a model."""
    assert traffic.of_audit([1 << 58] * 3, 2).messages == 3 * (1 << 58) // BLOCK_ELEMENTS + 1


def test_one_worker_sends_nothing() -> None:
    """Fails if a single process is planned to exchange with itself."""
    for of in (traffic.of_gradients, traffic.of_canonical_sums, traffic.of_audit):
        assert (of(LENGTHS, 1).sent_bytes, of(LENGTHS, 1).messages) == (0, 0)


def test_a_model_without_parameters() -> None:
    """Fails if a model in which nothing is trained breaks the table."""
    rows = traffic.by_workers([], [1, 2])
    assert len(traffic.table(rows)) == 5
