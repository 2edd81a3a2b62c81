"""The state of a rank, and which ranks hold up the others, over ranks that are made up."""

from __future__ import annotations

import time
from collections import deque

import pytest

from hvdtrain.launcher.ranks import (
    LAST_LINES,
    LONGEST_LINE,
    Limits,
    Rank,
    silent_ranks,
)

LIMITS = Limits(start_timeout_s=600.0, watchdog_timeout_s=60.0)


def ended(number: int, code: int, at_s: float = 1.0, **fields: object) -> Rank:
    rank = Rank(number, f"host{number}", "ended", exit_code=code, ended_s=at_s, speaks=True)
    return change(rank, **fields)


def running(number: int, silent_s: float, phase: str = "exchange", **fields: object) -> Rank:
    rank = Rank(number, f"host{number}", "running", "S", step=7, speaks=True)
    rank.phase, rank.silent_s = phase, silent_s
    return change(rank, **fields)


def quiet(number: int, silent_s: float, **fields: object) -> Rank:
    """Of a script that is not ours, and has written a line."""
    rank = running(number, silent_s, "start", speaks=False, last_lines=deque(["loss 1"]))
    return change(rank, **fields)


def change(rank: Rank, **fields: object) -> Rank:
    for name, value in fields.items():
        setattr(rank, name, value)
    return rank


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([], []),
        ([running(0, 59), running(1, 59, "step")], []),
        # One works on, silently; the others wait for it, for as long.
        ([running(0, 70), running(1, 65, "step"), running(2, 70)], [1]),
        # It is found before those who wait have waited for long.
        ([running(0, 1), running(1, 65, "load"), running(2, 2)], [1]),
        # Waiting for one who is not silent, as in a long epoch of data of its own.
        ([running(0, 70), running(1, 3, "step")], []),
        ([running(0, 70), running(1, 70)], [0, 1]),
        # Rank 0 uploads at the end, or downloads at the start, and the others wait for it.
        ([running(0, 1, "save"), running(1, 61, "end")], []),
        ([running(0, 61, "save"), running(1, 70, "end")], [0]),
        ([running(0, 61, "end"), running(1, 70, "end")], [0, 1]),
        ([running(0, 300, "prepare"), running(1, 300)], []),
        ([running(0, 70), running(1, 61, process_state="T")], [1]),
        ([running(0, 61, "step"), running(1, 61, process_state="t")], [1]),
        ([running(0, 1), running(1, 30, process_state="T")], []),
        # Those who are not there any more, or not yet, keep nobody from being silent.
        ([running(0, 70), ended(1, 0), Rank(2)], [0]),
        ([ended(0, 0), ended(1, 1)], []),
        ([change(Rank(0), state="lost", speaks=True, silent_s=99.0)], []),
        # Before the first step there may be data to fetch.
        ([running(0, 599, "prepare"), running(1, 300, "start")], []),
        ([running(0, 601, "prepare"), running(1, 300)], [0]),
        # Of other scripts there is only their output, and often but one rank writes any.
        ([quiet(0, 59), quiet(1, 1e6)], []),
        ([quiet(0, 61), quiet(1, 99)], [0, 1]),
        ([quiet(0, 9), quiet(1, 99, process_state="T")], [1]),
        ([quiet(0, 61), quiet(1, 99, last_lines=deque())], []),
        ([quiet(0, 61), quiet(1, 601, last_lines=deque())], [0, 1]),
    ],
)
def test_who_is_silent(ranks: list[Rank], named: list[int]) -> None:
    """Fails when one who waits is named for one who hangs, a job that moves is ended, a hang is
    missed, or preparing is given no more time than a step.
    """
    assert [rank.number for rank in silent_ranks(ranks, LIMITS)] == named


def test_a_longer_watchdog_holds_for_preparing_too() -> None:
    """Fails when preparing is given less time than any later phase."""
    limits = Limits(start_timeout_s=10.0, watchdog_timeout_s=60.0)
    assert limits.of(running(0, 0, "prepare")) == limits.of(running(0, 0, "step")) == 60.0
    assert LIMITS.of(running(0, 0, "prepare")) == 600.0 and LIMITS.of(running(0, 0)) == 60.0
    assert LIMITS.of(quiet(0, 0)) == 60.0
    assert LIMITS.of(quiet(0, 0, last_lines=deque())) == 600.0


def test_reports_are_taken() -> None:
    """Fails when what an agent reports is mixed up, when the silence of a script that reports no
    phases is not that of its output, or when more lines are kept than are shown.
    """
    rank = Rank(1)
    report = {"step": 3, "phase": "save", "silent_s": 1.5, "busy_s": 0.25, "speaks": True}
    before_s = time.monotonic()
    rank.take(report | {"state": "R"})
    shown = (rank.step, rank.phase, rank.silent_s, rank.busy_s, rank.speaks, rank.process_state)
    assert shown == (3, "save", 1.5, 0.25, True, "R")
    assert not rank.peer
    rank.take(report | {"peer": True})
    assert rank.process_state == "R" and rank.is_victim
    assert not rank.has_failed
    rank.spoke_s = time.monotonic() - 40.0
    rank.take(report | {"speaks": False, "silent_s": 0.0})
    assert 40.0 <= rank.silent_s < 60.0  # since its last line of output
    rank.end(-11)
    assert rank.has_failed and rank.exit_code == -11 and rank.ended_s >= before_s
    rank.keep([*map(str, range(99)), "", " \t", "x" * 5_000_000])
    assert len(rank.last_lines) == LAST_LINES and rank.last_lines[-2] == "98"
    assert rank.last_lines[-1] == "x" * LONGEST_LINE  # a verdict is no place for megabytes
