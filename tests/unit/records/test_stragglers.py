"""Which ranks are reported as slow, from when to when, and that noise is not."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest

from hvdtrain.documents import FIELDS, check
from hvdtrain.records.stragglers import BLOCKS, Row, Stragglers, lines_of, medians_of_others
from hvdtrain.train.clock import PHASES, OwnTimes
from tests.unit.threads import ThreadExchange, connect, run_ranks

STEPS = 10  # of an interval
SAMPLES = 80.0
STEP_S = 0.1  # of which the ranks compute for half


def rows_of(compute_s: Sequence[float], data_s: Sequence[float] = ()) -> list[Row]:
    """Of an interval, from the seconds of each rank in one step."""
    data_s = data_s or [0.0001] * len(compute_s)
    return [
        (SAMPLES, STEPS * data, STEPS * compute)
        for data, compute in zip(data_s, compute_s, strict=True)
    ]


def judge(
    intervals: Sequence[Sequence[Row]], steps: int = STEPS, step_s: float = STEP_S
) -> tuple[list[tuple[int, str]], Stragglers]:
    """Return the lines, with the step at which they are printed, and the judgement."""
    judged = Stragglers([f"host{rank // 2}" for rank in range(max(map(len, intervals)) or 1)])
    lines = [
        (number * steps, line)
        for number, rows in enumerate(intervals, start=1)
        for line in judged.judge(rows, number * steps, step_s)
    ]
    return lines, judged


def slow(ratio: float, ranks: int = 4) -> list[Row]:
    """Of an interval in which rank 2 computes for longer."""
    return rows_of([0.05 * (ratio if rank == 2 else 1) for rank in range(ranks)])


def test_a_slow_rank_is_reported_once_and_when_it_is_slow_no_more() -> None:
    """Fails if rank, host, phase, ratio or length is wrong, the line is repeated or late, or one
    interval as fast as the others ends it.
    """
    lines, judged = judge([*[slow(1)] * 2, *[slow(2.1)] * 5, slow(1), slow(2.1), *[slow(1)] * 4])
    assert lines == [
        (50, "rank 2 on host1 is slow: compute 2.1 times the median of the other workers, "
         "for 30 steps"),
        (120, "rank 2 on host1 is no longer slow: compute, after 60 steps"),
    ]  # fmt: skip
    (record,) = judged.records
    assert record.pop("ratio") == pytest.approx(2.1)
    assert record == {"rank": 2, "host": "host1", "phase": "compute", "steps": 60}
    assert judged.current == []


def test_a_change_is_reported() -> None:
    """Fails if a rank that becomes much slower, or less slow, is not reported again, or on the way
    there as well, or the record does not hold the mean.
    """
    lines, judged = judge([*[slow(2)] * 4, *[slow(4)] * 4, *[slow(2.5)] * 4])
    assert [(step, line.split(" times")[0]) for step, line in lines] == [
        (30, "rank 2 on host1 is slow: compute 2.0"),
        (70, "rank 2 on host1 is now slow: compute 4.0"),
        (110, "rank 2 on host1 is now slow: compute 2.5"),
    ]
    assert judged.current == [judged.records[0] | {"ratio": pytest.approx(2.5)}]
    assert judged.records[0]["ratio"] == pytest.approx((2 + 4 + 2.5) / 3)


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_noise_is_not_reported(ranks: int) -> None:
    """Fails if a rank is named among ranks that are alike, whose mean times over an interval
    vary by a tenth, and of which one now and then is stopped for a while.
    """
    random.seed(ranks)
    intervals = []
    for number in range(1000):
        times = [0.05 * random.lognormvariate(0, 0.1) for _ in range(ranks)]
        times[number // 20 % ranks] *= 6 if number % 20 == 0 else 1
        intervals.append(rows_of(times, [random.expovariate(1000) for _ in range(ranks)]))
    assert judge(intervals)[0] == []


def test_medians_of_others() -> None:
    """Fails if a value is in the median that it is compared with, or equal ones are mixed up."""
    random.seed(1)
    for count in (2, 3, 4, 7, 8):
        values = [float(random.randrange(5)) for _ in range(count)]
        others = [values[:index] + values[index + 1 :] for index in range(count)]
        assert medians_of_others(values) == [statistics.median(rest) for rest in others]


def test_a_rank_that_is_slow_at_times_is_not_reported() -> None:
    """Fails if less than three intervals in a row are enough."""
    assert judge([slow(3), slow(3), slow(1)] * 20)[0] == []


def test_one_rank_is_never_slow() -> None:
    """Fails if a single rank is compared with none."""
    assert judge([[]] * 10)[0] == []
    assert judge([rows_of([0.05])] * 10)[0] == []


def test_of_two_ranks_the_slow_one_is_reported() -> None:
    """Fails if the slow rank's own time is in the median that it is compared with (1.3 times)."""
    ((step, line),), _ = judge([rows_of([0.05, 0.1])] * 6)
    assert step == 30 and line.startswith("rank 1 on host0 is slow: compute 2.0 times")


def test_two_slow_ranks_of_four_are_reported() -> None:
    """Fails if a second slow rank, such as of the same host, hides the first."""
    lines, _ = judge([rows_of([0.05, 0.05, 0.1, 0.12])] * 3)
    assert [line.split(" times")[0] for _, line in lines] == [
        "rank 2 on host1 is slow: compute 2.0",
        "rank 3 on host1 is slow: compute 2.4",
    ]


def test_slow_data_is_told_from_slow_computing() -> None:
    """Fails if the phase is wrong, or one for which nobody waits for long is reported."""
    lines, _ = judge([rows_of([0.05] * 3, [0.001, 0.04, 0.001])] * 3)
    assert [line.split(" times")[0] for _, line in lines] == ["rank 1 on host0 is slow: data 40.0"]
    assert judge([rows_of([0.05] * 3, [0.001, 0.01, 0.001])] * 3)[0] == []  # 9 % of a step


@pytest.mark.parametrize(
    ("compute_s", "samples", "reported"),
    [
        ([0.1, 0.05, 0.05], [160, 80, 80], 0),
        ([0.1, 0.1, 0.1], [20, 80, 80], 0),  # measured weights: nobody waits
        ([0.1, 0.05, 0.05], [40, 80, 80], 1),
        ([0.1, 0.0, 0.0], [160, 0, 0], 0),
        ([0.0, 0.05, 0.05], [0, 80, 80], 0),
    ],
)
def test_more_samples_may_take_longer(
    compute_s: list[float], samples: list[float], reported: int
) -> None:
    """Fails if a rank is reported for the size of its share, or one that nobody waits for."""
    rows = [(count, *row[1:]) for count, row in zip(samples, rows_of(compute_s), strict=True)]
    assert len(judge([rows] * 4)[0]) == reported


def test_short_intervals_are_joined() -> None:
    """Fails if --log-interval 1 judges single steps."""
    lines, _ = judge([slow(2)] * 40, steps=1, step_s=STEP_S * STEPS)
    assert [step for step, _ in lines] == [STEPS * BLOCKS]


def test_a_resumed_run_adds_to_its_records() -> None:
    """Fails if records are lost, or not added up, or are not what readers accept."""
    _, first = judge([slow(2)] * 4)
    second = Stragglers(["host0", "host0", "host1", "elsewhere"], 40, first.records)
    for step in (50, 60, 70):
        second.judge(slow(4), step, STEP_S)
    second.judge(rows_of([0.05, 0.05, 0.05, 0.2]), 80, STEP_S)
    ((rank, steps),) = [(record["rank"], record["steps"]) for record in second.records]
    assert (rank, steps) == (2, 70)
    assert second.records[0]["ratio"] == pytest.approx((4 * 2 + 3 * 4) / 7)
    check({"stragglers": second.records}, FIELDS["summary.json"])
    broken = [{"rank": 1}, second.records[0] | {"ratio": 10**400}]
    assert list(lines_of([*broken, *second.records])) == [
        "rank 2 on host1 was slow: compute 2.9 times the median of the other workers, for 70 steps"
    ]


def test_own_times_of_all_ranks() -> None:
    """Fails if a row is another rank's, a phase another, or an interval keeps those before."""

    def work(exchange: ThreadExchange) -> list[list[list[float]]]:
        own, read = OwnTimes(exchange), []
        for interval in (0, 1):
            for step in range(2):
                value = 1000 * exchange.rank + 100 * interval + 10 * step
                own.add(value, [value + number for number in range(len(PHASES))])
            own.start()
            read.append(own.read())
        return [*read, own.read()]

    expected = [
        [[2 * (1000 * rank + 100 * interval) + 10 + 2 * n for n in range(2)] for rank in range(3)]
        for interval in (0, 1)
    ]
    expected = [[[row[0], *row] for row in rows] for rows in expected]
    assert run_ranks(connect(3), work) == [[*expected, []]] * 3
