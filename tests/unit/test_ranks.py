"""Whom a failure or a standstill is put down to, over ranks that are made up."""

from __future__ import annotations

import signal
import time
from collections import deque

import pytest

from hvdtrain.launcher.ranks import (
    LAST_LINES,
    LONGEST_LINE,
    Limits,
    Rank,
    explain_end,
    explain_silence,
    first_to_fail,
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


def foreign(number: int, code: int, at_s: float, *lines: str) -> Rank:
    """Of a script that is not ours, which ended with these lines."""
    rank = ended(number, code, at_s, speaks=False)
    rank.last_lines.extend(lines)
    return rank


def number_of(rank: Rank | None) -> int | None:
    return None if rank is None else rank.number


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        ([], None),
        ([Rank(0), Rank(1)], None),
        ([running(0, 1), ended(1, 0)], None),
        ([ended(0, 1, 5.0), ended(1, 1, 4.0)], 1),
        ([ended(0, 0, 1.0), ended(1, -9, 5.0)], 1),
        # A victim can end before the one who has failed: that one may still write what it met.
        ([ended(0, 1, 4.0, peer=True), ended(1, 1, 5.0)], 1),
        ([ended(0, 1, 4.0, peer=True), ended(1, 1, 3.0, peer=True)], 1),
        # An agent is missed only after a while, long after its peers have ended.
        ([ended(0, 1, 4.0, peer=True), change(Rank(1), state="lost", ended_s=14.0)], 1),
        ([ended(0, 1, 4.0), change(Rank(1), state="lost", ended_s=14.0)], 0),
        ([change(Rank(0), state="lost", ended_s=2.0), ended(1, -9, 3.0)], 0),
        ([running(0, 0), Rank(1), ended(2, 17, 1.0)], 2),
        # One has left the others with 0 in the middle; it may well be reported after them.
        ([ended(0, 0, 4.1), ended(1, 1, 4.0, peer=True)], 0),
        ([ended(0, 1, 4.0, peer=True), ended(1, 0, 3.0), ended(2, 0, 2.0)], 2),
        ([ended(0, 0, 1.0), ended(1, -9, 5.0, put_down=True), ended(2, 1, 2.0, peer=True)], 0),
        # Those that have ended well are no cause of a failure of another's own.
        ([ended(0, 0, 1.0), ended(1, 1, 2.0, peer=True), ended(2, 3, 5.0)], 2),
    ],
)
def test_who_failed_first(ranks: list[Rank], first: int | None) -> None:
    """Fails when a victim is blamed for its peer, or ranks that are well, or wait, are blamed."""
    assert number_of(first_to_fail(ranks)) == first


VICTIM_LINES = [
    "horovod.common.exceptions.HorovodInternalError: [/b/gloo/pair.cc:589] Read error [127.0.0.1]",
    "RuntimeError: Horovod has been shut down. This was caused by an exception",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "IOException: Connection closed by peer [10.0.0.1]:4242",
]


@pytest.mark.parametrize("line", VICTIM_LINES)
def test_a_foreign_victim_is_known_by_its_lines(line: str) -> None:
    """Fails when, of scripts that tell nothing but their output, the first to end is blamed
    although it says itself that another one had failed.
    """
    victim = foreign(0, 1, 2.0, "Traceback", line, "")
    cause = foreign(1, 1, 3.0, "Traceback", "ValueError: no such sample")
    assert number_of(first_to_fail([victim, cause])) == 1
    assert number_of(first_to_fail([victim, foreign(2, 1, 3.0, line)])) == 0


def test_our_own_workers_tell_themselves() -> None:
    """Fails when a worker of ours is taken for a victim because of a word in its output."""
    cause = ended(0, 1, 2.0)
    cause.last_lines.append("OSError: Broken pipe")
    assert number_of(first_to_fail([cause, ended(1, 1, 2.5)])) == 0


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


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (ended(0, 1), "ended with exit code 1"),
        (ended(0, 143), "ended with exit code 143"),
        (ended(0, -signal.SIGKILL), "was killed by SIGKILL (sent by a user, or by the kernel when"),
        (ended(0, -signal.SIGSEGV), "was killed by SIGSEGV (a fault in native code)"),
        (ended(0, -signal.SIGABRT), "was killed by SIGABRT (an abort in native code)"),
        (ended(0, -signal.SIGBUS), "was killed by SIGBUS (often a full /dev/shm)"),
        (ended(0, -signal.SIGTERM), "was killed by SIGTERM"),
        (ended(0, -40), "was killed by signal 40"),
        (change(Rank(0), state="lost"), "cannot be reached any more: its agent was killed, or its"),
        (change(Rank(0), state="lost", exit_code=-9), "cannot be reached any more"),
    ],
)
def test_ends_are_explained(rank: Rank, text: str) -> None:
    """Fails when a signal is shown as a number though it has a name, raises for want of a name, or
    a lost host is said to have ended.
    """
    assert explain_end(rank).startswith(text)


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (running(2, 61.4, "step"), "rank 2 on host2: silent, in phase step of step 7, for 61 s"),
        (
            running(2, 61, process_state="T"),
            "rank 2 on host2: stopped (SIGSTOP), in phase exchange of step 7, for 61 s",
        ),
        (
            running(2, 61, process_state="t"),
            "rank 2 on host2: held by a debugger, in phase exchange of step 7, for 61 s",
        ),
        (running(2, 700, "prepare", step=0), "rank 2 on host2: silent, in phase prepare, for 700"),
        (running(2, 61, "start", speaks=False, step=0), "rank 2 on host2: silent, for 61 s"),
        (running(2, 9, "step", host=""), "rank 2: silent, in phase step of step 7, for 9 s"),
    ],
)
def test_silence_is_explained(rank: Rank, text: str) -> None:
    """Fails when rank, host, phase, step or time is missing, or a stopped process is not named as
    stopped.
    """
    assert explain_silence(rank).startswith(text)


def test_reports_are_taken() -> None:
    """Fails when what an agent reports is mixed up, when the silence of a script that tells no
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
