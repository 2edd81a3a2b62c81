"""Where the time of a recovery goes."""

from __future__ import annotations

import pytest

from hvdtrain.launcher import timeline
from hvdtrain.launcher.ranks import Rank
from hvdtrain.launcher.timeline import Timeline

FURTHEST = 7


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test sets."""
    at_s = [100.0]
    monkeypatch.setattr(timeline.time, "monotonic", lambda: at_s[0])
    return at_s


def recover(at: Timeline, clock: list[float], ranks: list[Rank]) -> list[str]:
    """Let two ranks start and train, one after the other, a second for each; return the lines."""
    lines = []
    for change in (
        {"state": "running"},
        {"speaks": True},
        {"phase": "prepare"},
        {"phase": "data", "step": 6},
        {"step": FURTHEST},
        {"step": FURTHEST + 1},
    ):
        for rank in ranks:
            for name, value in change.items():
                setattr(rank, name, value)
            clock[0] += 1.0
            lines.append(at.follow(ranks, FURTHEST))
    return [line for line in lines if line]


def test_the_parts_of_a_recovery(clock: list[float]) -> None:
    """Fails when a part is missing or has the time of another, when a moment counts before the last
    rank has reached it, when steps that are repeated count as new ones, or a line comes twice.
    """
    at, ranks = Timeline(), [Rank(0), Rank(1)]
    assert recover(at, clock, ranks) == [], "a first start is no recovery"
    at.fail(clock[0] - 3.0, clock[0])
    for moment, seconds in (("ended", 4.0), ("paused", 1.0), ("checked", 2.0)):
        clock[0] += seconds
        at.pass_(moment)
    lines = recover(at, clock, [Rank(0), Rank(1)])
    assert lines == [
        "back after 21.0 s: noticed 3.0, ended 4.0, paused 1.0, checked 2.0, started 2.0, "
        "imported 2.0, joined 2.0, loaded 2.0, caught up 3.0"
    ]


def test_a_start_that_fails_before_it_has_caught_up(clock: list[float]) -> None:
    """Fails when the time of a restart that failed is not part of the recovery."""
    at = Timeline()
    at.fail(clock[0], clock[0])
    clock[0] += 10.0
    assert at.follow([Rank(0, state="running")], FURTHEST) == ""
    at.fail(clock[0], clock[0] + 0.5)
    clock[0] += 0.5
    (line,) = recover(at, clock, [Rank(0)])
    assert line.startswith("back after 16.5 s: earlier starts 10.0, noticed 0.5, started 1.0, ")
