"""The verdict over what was seen of a job, without processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hvdtrain.launcher.ranks import Evidence, Limits, Rank, judge

LOGS = Path("logs")


def rank(number: int, code: int | None = None, ended_s: float = 0.0, **fields: object) -> Rank:
    """A rank that runs, or has ended with `code`."""
    state = "running" if code is None else "ended"
    found = Rank(number, host=f"host{number}", state=state, exit_code=code, ended_s=ended_s)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def evidence(*ranks: Rank, **fields: object) -> Evidence:
    return Evidence(list(ranks), Limits(600.0, 60.0), LOGS, **fields)  # type: ignore[arg-type]


CASES = [
    # All well; also where a signal came too late to matter.
    (evidence(rank(0, 0), rank(1, 0)), 0, False, ""),
    (evidence(rank(0, 0), rank(1, 0), requested=[15]), 0, False, ""),
    # A stop is no failure, whatever the workers made of it.
    (evidence(rank(0, 143), rank(1, 143), requested=[15]), 143, False, "every worker was notified"),
    (evidence(rank(0, 143), rank(1, -9), requested=[2, 2]), 130, False, "rank 1 had not ended"),
    # The first that failed of itself gives the code.
    (evidence(rank(0, 1, 2.0, peer=True), rank(1, 7, 3.0)), 7, True, "rank 1 on host1 ended with"),
    (evidence(rank(0, -9, 9.0, put_down=True), rank(1, -11, 3.0)), 139, True, "SIGSEGV"),
    # Victims all, and one that the launcher had to end: it is never the cause.
    (
        evidence(rank(0, -9, 5.0, put_down=True), rank(1, 1, 3.0, peer=True)),
        1,
        True,
        "rank 1 on host1 ended with exit code 1",
    ),
    # One that has left the others with 0 in the middle of their work.
    (
        evidence(rank(0, 0, 2.0, step=3, phase="data"), rank(1, 1, 3.0, peer=True)),
        1,
        True,
        "rank 0 on host0 ended with exit code 0, in phase data of step 3 while others were still "
        "at work: all ranks must make the same number of steps\nthen rank 1 on host1 ended",
    ),
    # Every rank is named: in the order of their ends, more than fit by number, and those killed.
    (
        evidence(
            rank(0, 3, 1.0),
            *(rank(number, 4, 30.0 - number) for number in range(1, 11)),
            rank(11, -9, 2.0),
        ),
        3,
        True,
        "then rank 3 on host3 ended with exit code 4\nthen ranks 2, 1\nthen rank 11: killed by",
    ),
    # What starting again cannot mend.
    (evidence(rank(0, 2, 1.0), rank(1, 143, 2.0)), 2, False, "exit code 2"),
    (evidence(rank(0, 17, 1.0), rank(1, 17, 2.0)), 17, False, "exit code 17"),
    # A worker that agreed on a stop; one that was killed by the signal has agreed on nothing.
    (evidence(rank(0, 143, 1.0, speaks=True)), 143, False, "SIGTERM to a worker"),
    (evidence(rank(0, -15, 1.0, speaks=True)), 143, True, "was killed by SIGTERM"),
    # Nobody came.
    (evidence(Rank(0), Rank(1), cause="start"), 3, True, "no contact from ranks 0, 1"),
    (
        evidence(Rank(0), Rank(1), engine_lines=["ssh: no"]),
        3,
        True,
        "ended before the workers had started. Output of horovodrun:\n  | ssh: no",
    ),
    # horovodrun's end under workers that were well.
    (
        evidence(
            rank(0, 143, 1.0, speaks=True),
            rank(1),
            cause="engine",
            engine_lines=["Process 1 exit with status code 255."],
        ),
        1,
        True,
        "the ssh connection that started rank 1 on host1 was lost",
    ),
]


@pytest.mark.parametrize(("seen", "code", "may_retry", "part"), CASES)
def test_verdict(seen: Evidence, code: int, may_retry: bool, part: str) -> None:
    """Fails when the exit code is another rank's than the first one's to fail, when a victim or a
    rank that the launcher ended is blamed, or when a restart is tried in vain or not at all.
    """
    outcome = judge(seen)
    assert (outcome.exit_code, outcome.may_retry) == (code, may_retry), outcome.text
    assert part in outcome.text


def test_a_standstill_is_told_as_it_was() -> None:
    """Fails when the verdict shows ranks as they are after they were ended."""
    stopped = rank(1, speaks=True, silent_s=61.0, phase="data", step=3, process_state="T")
    waits = rank(0, speaks=True, silent_s=60.0, phase="exchange", step=3)
    seen = evidence(waits, stopped, rank(2, 0))
    seen.find_standstill([stopped])
    stopped.process_state, stopped.exit_code = "", -signal.SIGKILL
    lines = ["Thread 0x1 (most recent call first):", "  File a", ""]
    lines += ["Current thread 0x2 (most recent call first):", "  File b", "", "Extension modules"]
    seen.stacks = {0: lines}
    text = judge(seen).text
    assert "rank 1 on host1: stopped (SIGSTOP), in phase data of step 3, for 61 s\n" in text
    assert "rank 0 on host0: silent, in phase exchange of step 3, for 60 s (waits)\n" in text
    assert "rank 2 on host2 ended with exit code 0\n" in text
    assert "rank 0 on host0, Python stacks:\n  | Current thread" in text
    assert "File b" in text and "File a" not in text and "Extension" not in text
    assert "rank 1 on host1 returned no Python stacks" in text
