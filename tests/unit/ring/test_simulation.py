"""Many ranks in one thread, and the trace that the documentation shows."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.errors import TransportError
from hvdtrain.ring import algorithm, all_reduce
from hvdtrain.ring.algorithm import Transfer
from tests.ring_trace import (
    draw_picture,
    draw_table,
    run_in_step,
    simulate_all_reduce,
    simulate_broadcast,
    trace_all_reduce,
)
from tests.rings import rank_data, run_in_process

DOCS = Path(__file__).parents[3] / "docs" / "ring.md"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_simulation_is_bit_for_bit_the_ring(size: int) -> None:
    """Fails if a simulated rank's result differs from a real transport's in any bit."""
    for length in (0, 1, size, 5 * size + 2):
        data = [rank_data(rank, length, np.float32) for rank in range(size)]
        real = run_in_process(
            size, lambda transport, d=data: all_reduce(d[transport.rank], transport)
        )
        simulated = simulate_all_reduce(data)
        assert [r.tobytes() for r in simulated] == [r.tobytes() for r in real]


def test_a_thousand_ranks_in_one_process() -> None:
    """Fails if 1,024 ranks give a wrong sum, or take minutes."""
    size, length = 1024, 1500
    started = time.process_time()
    data = [np.arange(length, dtype=np.int32) * (rank % 7) + rank for rank in range(size)]
    results = simulate_all_reduce(data)
    expected = np.sum(data, axis=0, dtype=np.int32)
    assert all(np.array_equal(result, expected) for result in results)
    assert time.process_time() - started < 30


def test_simulated_broadcast() -> None:
    """Fails if the root's values do not reach every rank."""
    buffers = [rank_data(rank, 11, np.int64) for rank in range(5)]
    simulate_broadcast(buffers, root=3)
    assert all(np.array_equal(buffer, rank_data(3, 11, np.int64)) for buffer in buffers)


def test_a_simulated_message_that_does_not_fit_is_refused() -> None:
    """Fails if ranks that disagree on lengths are simulated as if nothing were wrong."""
    short, long = np.zeros(2), np.zeros(3)
    with pytest.raises(TransportError, match="expects 2 elements and is sent 3"):
        run_in_step([iter([Transfer(long, short)]), iter([Transfer(long, short)])])
    with pytest.raises(ValueError, match="shorter"):
        run_in_step([iter([Transfer(short, short)]), iter([])])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_the_trace_is_a_ring(size: int) -> None:
    """Fails if a rank sends to another than the next, twice in a step, or a partial sum twice."""
    messages = trace_all_reduce(size)
    assert len(messages) == 2 * (size - 1) * size
    assert all(message.receiver == (message.sender + 1) % size for message in messages)
    assert set(Counter((m.step, m.sender) for m in messages).values()) <= {1}
    for message in messages:
        assert len(message.ranks) == min(message.step, size)
        assert message.step >= size or message.sender in message.ranks
    # Each segment crosses each link but two at most twice: 2 (N - 1) times in all.
    assert set(Counter(m.segment for m in messages).values()) <= {2 * (size - 1)}


def test_the_algorithms_head_shows_the_trace_of_three_ranks() -> None:
    """Fails if the table at the head of the algorithm is not what the algorithm does."""
    lines = re.findall(r"^ +step (\d).*?((?: +\d>\d:\d)+)$", algorithm.__doc__, re.M)
    shown = [
        (int(step), *map(int, cell))
        for step, cells in lines
        for cell in re.findall(r"(\d)>(\d):(\d)", cells)
    ]
    assert shown == [(m.step, m.sender, m.receiver, m.segment) for m in trace_all_reduce(3)]


@pytest.mark.parametrize("size", [3, 4])
def test_the_documentation_shows_the_trace(size: int) -> None:
    """Fails if picture or table in docs/ring.md is not what the algorithm does."""
    text = DOCS.read_text("utf-8")
    messages = trace_all_reduce(size)
    assert draw_table(messages) in text
    if size == 3:
        assert draw_picture(messages) in text


@pytest.mark.parametrize("size", [0, 63])
def test_a_trace_has_its_limits(size: int) -> None:
    """Fails if a trace whose bits would overflow is drawn."""
    with pytest.raises(ValueError, match="1 to 62"):
        trace_all_reduce(size)
