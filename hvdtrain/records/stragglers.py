"""Ranks that the others wait for, as they take longer to read or to compute their samples.

Rank 0 judges intervals of BLOCK_STEPS steps or more. A phase of a rank is slow in one if it takes

- RATIO times as long as the median of the other ranks, and RATIO times as long as the median of
  their times per sample, for its own samples: a rank that was given more is not slow; and
- so much longer that the others wait for WAIT of the time of a step.

It is reported after BLOCKS slow intervals in a row, and no longer after as many others.
"""

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hvdtrain.documents import STRAGGLER
from hvdtrain.log import counted
from hvdtrain.pulse import BEFORE_EXCHANGE

BLOCK_STEPS, BLOCKS = 10, 3
RATIO = 1.4
WAIT = 0.1
CHANGED = 1.5  # factor between a ratio and the one last reported, from which it is reported again
SHORTEST_S = 1e-6
LARGEST = 1e9  # ratio that is shown

# Of one rank in an interval: the count of its samples, and the seconds of BEFORE_EXCHANGE.
Row = Sequence[float]
Name = tuple[int, str, str]  # rank, host, phase


class _Block(NamedTuple):
    """A phase of a rank in an interval."""

    is_slow: bool
    steps: int
    ratio: float


class _Phase:
    """A phase of a rank, over the run."""

    def __init__(self) -> None:
        self.blocks: deque[_Block] = deque(maxlen=BLOCKS)
        self.steps = 0  # for which it has been slow; 0: it is not reported as slow
        self.reported = 0.0  # the ratio last reported

    @property
    def ratio(self) -> float:
        return statistics.fmean(block.ratio for block in self.blocks)

    @property
    def has_changed(self) -> bool:
        """Return whether the ratio has been another than was reported, in each interval."""
        changes = [block.ratio / self.reported for block in self.blocks]
        return min(changes) >= CHANGED or max(changes) <= 1 / CHANGED


class Stragglers:
    """The slow ranks of a run."""

    def __init__(
        self, hosts: Sequence[str], step: int = 0, before: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """`hosts`: of each rank. `step`, `before`: where the run is resumed, its `records` then."""
        self._hosts, self._step = hosts, step
        self._sums = {(r["rank"], r["host"], r["phase"]): (r["ratio"], r["steps"]) for r in before}
        self._phases = {
            (rank, host, phase): _Phase()
            for rank, host in enumerate(hosts)
            for phase in BEFORE_EXCHANGE
        }
        self._rows: list[list[float]] = []
        self._steps, self._step_s = 0, 0.0

    @property
    def records(self) -> list[dict[str, Any]]:
        """Return each phase of a rank that was slow, its mean ratio meanwhile, and for how long."""
        return [_record(name, *sums) for name, sums in self._sums.items()]

    @property
    def current(self) -> list[dict[str, Any]]:
        """Return what is slow now, with the ratio of the last intervals."""
        return [
            _record(name, phase.ratio, phase.steps)
            for name, phase in self._phases.items()
            if phase.steps
        ]

    def judge(self, rows: Sequence[Row], step: int, step_s: float) -> list[str]:
        """Return a line on each rank that has become slow, slower, or as fast as the others.

        `rows`: of all ranks, in the interval that ends with `step`; none with a single rank.
        `step_s`: the mean time of a step.
        """
        steps, self._step = step - self._step, step
        self._steps += steps
        self._step_s += steps * step_s
        before = self._rows or [[0.0] * len(row) for row in rows]
        self._rows = [
            [a + b for a, b in zip(*both, strict=True)] for both in zip(before, rows, strict=True)
        ]
        if self._steps < BLOCK_STEPS or not rows:
            return []
        lines: list[str] = []
        for column, phase in enumerate(BEFORE_EXCHANGE, start=1):
            for rank, block in self._blocks(column):
                name = (rank, self._hosts[rank], phase)
                self._phases[name].blocks.append(block)
                lines += self._report(name, self._phases[name])
        self._rows, self._steps, self._step_s = [], 0, 0.0
        return lines

    def _blocks(self, column: int) -> Iterator[tuple[int, _Block]]:
        """Yield each rank with its interval; ranks without samples are not compared."""
        working = [rank for rank, row in enumerate(self._rows) if row[0]]
        counts = [self._rows[rank][0] for rank in working]
        seconds = [self._rows[rank][column] for rank in working]
        as_long_s = medians_of_others(seconds)
        per_sample_s = medians_of_others([s / n for s, n in zip(seconds, counts, strict=True)])
        for rank, count, rank_s, long_s, sample_s in zip(
            working, counts, seconds, as_long_s, per_sample_s, strict=True
        ):
            usual_s = max(long_s, count * sample_s, SHORTEST_S)
            is_slow = rank_s >= RATIO * usual_s and rank_s - usual_s >= WAIT * self._step_s
            yield rank, _Block(is_slow, self._steps, rank_s / usual_s)

    def _report(self, name: Name, phase: _Phase) -> Iterator[str]:
        newest, slow = phase.blocks[-1], sum(block.is_slow for block in phase.blocks)
        if phase.steps and not slow:
            rank, host, what = name
            steps = counted(phase.steps, "step")
            yield f"rank {rank} on {host} is no longer slow: {what}, after {steps}"
            phase.steps = 0
        elif phase.steps and newest.is_slow:
            self._add(name, phase, [newest])
            if phase.has_changed:
                phase.reported = phase.ratio
                yield _line(_record(name, phase.ratio, phase.steps), "is now")
        elif slow == BLOCKS:
            self._add(name, phase, phase.blocks)
            phase.reported = phase.ratio
            yield _line(_record(name, phase.ratio, phase.steps), "is")

    def _add(self, name: Name, phase: _Phase, blocks: Iterable[_Block]) -> None:
        """Add slow intervals to the sums of a phase."""
        for block in blocks:
            phase.steps += block.steps
            ratio, steps = self._sums.get(name, (0.0, 0))
            both = steps + block.steps
            self._sums[name] = ((ratio * steps + block.ratio * block.steps) / both, both)


def medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each value the median of the others: of a single one, itself."""
    if len(values) < 2:
        return list(values)
    ordered, last = sorted(values), len(values) - 2

    def median_without(position: int) -> float:
        middle = (last // 2, (last + 1) // 2)
        return sum(ordered[index + (index >= position)] for index in middle) / 2

    return [median_without(bisect_left(ordered, value)) for value in values]


def lines_of(records: Iterable[Mapping[str, Any]], verb: str = "was") -> Iterator[str]:
    """Yield a line for each of the `records` of a run, as its summary holds them."""
    for record in records:
        if record.keys() >= STRAGGLER.keys() and 0 < record["ratio"] < LARGEST:
            yield _line(record, verb)


def _line(record: Mapping[str, Any], verb: str) -> str:
    """Return 'rank 2 on b is slow: compute 2.1 times the median of the other workers, for ...'."""
    return (
        f"rank {record['rank']} on {record['host']} {verb} slow: {record['phase']} "
        f"{record['ratio']:.1f} times the median of the other workers, for "
        f"{counted(record['steps'], 'step')}"
    )


def _record(name: Name, ratio: float, steps: int) -> dict[str, Any]:
    return dict(zip(STRAGGLER, (*name, ratio, steps), strict=True))
