"""Weights and virtual workers of ranks by speed; tests/parallel/test_balance.py measures speeds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.exchange import SingleProcess
from hvdtrain.records.stragglers import BLOCK_STEPS
from hvdtrain.run.balance import GAIN, Moves, as_weights, counts_for, follower_of, gain
from hvdtrain.run.script_input import read_options
from hvdtrain.train.metering import Totals
from tests.unit.jobs import made_up_data, make_job
from tests.unit.threads import ThreadExchange, connect, run_ranks


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([100.0], (1.0,)),
        ([100.0, 95.0, 91.0], (1.0, 1.0, 1.0)),  # as a measurement of equal ones varies
        ([100.0, 50.0], (1.0, 0.5)),
        ([33.0, 100.0, 100.0], (0.33, 1.0, 1.0)),
        ([100.0, 0.01], (1.0, 0.01)),  # no rank is left out
        ([100.0, None, 50.0], (1.0, 0.75, 0.5)),
        ([None, None], (1.0, 1.0)),
    ],
)
def test_weights_are_in_proportion_to_speeds(
    speeds: list[float | None], expected: tuple[float, ...]
) -> None:
    """Fails if equal workers get unequal shares, or a slow one none."""
    assert as_weights(speeds) == expected


@pytest.mark.parametrize(
    ("seconds", "workers", "expected"),
    [
        ([1.0, 1.0], 4, [2, 2]),
        ([1.0, 1.0], 5, [3, 2]),
        ([1.0, 2.0], 6, [4, 2]),
        ([1.0, 2.1], 4, [3, 1]),  # 2 + 2 would take 4.2
        ([1.0, 50.0, 1.0], 8, [4, 1, 3]),  # no rank is left out
        ([2.0, 1.0, 1.0], 3, [1, 1, 1]),
        ([0.7], 5, [5]),
    ],
)
def test_the_last_rank_ends_as_early_as_possible(
    seconds: list[float], workers: int, expected: list[int]
) -> None:
    """Fails if a rank without virtual workers is left, or other counts would be faster."""
    assert counts_for(seconds, workers) == expected
    for counts in product(range(1, workers + 1), repeat=len(seconds)):
        if sum(counts) == workers:
            assert gain(seconds, expected, counts) <= 1e-12


def moves_of(
    seconds: list[list[float]], counts: list[int], steps: int = BLOCK_STEPS
) -> list[tuple[int, list[int]]]:
    """Return the number of each interval after which virtual workers move, and the new counts.

    `seconds`: of each interval, what each rank takes for one of them.
    """
    moves, moved = Moves(step=7), []
    for number, each in enumerate(seconds, start=1):
        own_s = [n * one * steps for n, one in zip(counts, each, strict=True)]
        rows = [[0.0, own / 4, own * 3 / 4] for own in own_s]  # reading, and computing
        decision = moves.judge(rows, 7 + number * steps, counts)
        if decision is not None:
            counts, measured = decision
            assert measured == pytest.approx(each)
            moved.append((number, counts))
    return moved


ALIKE, SLOW = [0.1, 0.1], [0.1, 0.2]


def test_virtual_workers_move_as_a_neighbour_comes_and_goes() -> None:
    """Fails if they stay on a slow rank or do not come back, or if an interval counts that began
    with other counts.
    """
    assert moves_of([ALIKE] * 4 + [SLOW] * 6 + [ALIKE] * 6, [3, 3]) == [(6, [4, 2]), (12, [3, 3])]
    # The first interval does not count.
    assert moves_of([SLOW] * 3, [3, 3]) == [(3, [4, 2])]


def test_noise_moves_nothing() -> None:
    """Fails if one slow interval moves virtual workers, or a gain that is small, or if they move
    to and fro.
    """
    assert moves_of([ALIKE, *[ALIKE, SLOW, ALIKE] * 9], [3, 3]) == []
    slightly = [[0.1, 0.1 * (1 + GAIN)]] * 20
    assert moves_of(slightly, [3, 3]) == []
    assert moves_of([[0.1, 0.2], [0.2, 0.1]] * 20, [3, 3]) == []
    assert len(moves_of([SLOW] * 40, [3, 3])) == 1


def test_short_intervals_are_added() -> None:
    """Fails if times of a few steps decide."""
    quick = moves_of([ALIKE] * 10 + [SLOW] * 20, [3, 3], steps=BLOCK_STEPS // 5)
    assert quick == [(20, [4, 2])]
    assert moves_of([SLOW] * 3, [3, 3], steps=10 * BLOCK_STEPS) == [(3, [4, 2])]


def configured(**batch: Any) -> TrainConfig:
    config = TrainConfig()
    return replace(config, batch=replace(config.batch, virtual_workers=4, **batch))


def test_ranks_move_virtual_workers_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if ranks decide differently, what was decided is not done, or no line says so."""
    exchanges, config = connect(2), configured(rank_weights="auto")
    jobs = [make_job(made_up_data(20), 8, exchange, virtual=4) for exchange in exchanges]

    def work(exchange: ThreadExchange) -> list[int]:
        job = jobs[exchange.rank]
        follower = follower_of(config, job, exchange, step=0)
        assert follower is not None
        for step in (10, 20, 30):
            counts = follower.shares.counts
            rows = [[1.0, 0.0, counts[0] * 0.1], [1.0, 0.0, counts[1] * 0.3]]
            follower.interval_end(Totals(step, 1, 0, 0, 0.0, {}, 0.0, of_ranks=rows))
        return follower.shares.counts

    assert run_ranks(exchanges, work) == [[3, 1], [3, 1]]
    assert capsys.readouterr().out == (
        "step 30: virtual workers move: rank 0 2 -> 3, rank 1 2 -> 1; "
        "one takes 30 ms on rank 1, 10 ms on rank 0\n"
    )


def test_what_stays(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if virtual workers move where weights were given, or where a move would cost more than
    it brings, or if that is not said.
    """
    exchange, auto = connect(2)[0], configured(rank_weights="auto")
    job = make_job(made_up_data(20), 8, exchange, virtual=4)
    assert follower_of(configured(rank_weights="1,2"), job, exchange, 0) is None
    assert follower_of(configured(), job, exchange, 0) is None
    assert follower_of(auto, job, SingleProcess(), 0) is None
    assert capsys.readouterr().out == ""
    streamed: Any = SimpleNamespace(in_order=True)
    in_order = replace(job, data=replace(job.data, train=streamed))
    assert follower_of(auto, in_order, exchange, 0) is None
    on_device = replace(job, device=torch.device("cuda"))
    assert follower_of(auto, on_device, exchange, 0) is None
    assert capsys.readouterr().out.count("virtual workers stay on their ranks: ") == 2


def test_a_script_needs_virtual_workers_to_follow() -> None:
    """Fails if shares that cannot be measured are accepted, or virtual workers refused."""
    with pytest.raises(UsageError, match="so speeds cannot be measured before: give weights"):
        read_options({"rank_weights": "auto"})
    config, _ = read_options({"rank_weights": "auto", "virtual_workers": 4})
    assert (config.batch.rank_weights, config.batch.weights(2)) == ("auto", (1.0, 1.0))
