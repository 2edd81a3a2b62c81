"""The verdict over what was seen of a job, without processes."""

from __future__ import annotations

import signal
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cgroups import explain_kills
from hvdtrain.launcher.ranks import Limits, Rank
from hvdtrain.launcher.verdict import Evidence, explain_end, explain_silence, first_to_fail, judge

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


def silent(silent_s: float, phase: str, step: int = 7, speaks: bool = True, **fields: Any) -> Rank:
    """Rank 2, without progress for `silent_s`."""
    return rank(2, silent_s=silent_s, phase=phase, step=step, speaks=speaks, **fields)


def foreign(number: int, code: int, ended_s: float, *lines: str) -> Rank:
    """A script that is not ours, which ended with these lines."""
    return rank(number, code, ended_s, last_lines=deque(lines))


def number_of(rank: Rank | None) -> int | None:
    return None if rank is None else rank.number


SLEPT = "this launcher was suspended, or its machine asleep, for 45 s"
FULL = explain_kills(1, 600 << 20)
CASES = [
    # The launcher was suspended, so that the hosts took it for dead.
    (evidence(rank(0, state="lost"), rank(1, state="lost"), own_pause_s=45.0), 1, True, SLEPT),
    # Memory that ran out in a container, of a worker and of a process that it has started.
    (evidence(rank(0, -9, 1.0, memory=FULL)), 137, True, f"by SIGKILL ({FULL}), the first"),
    (evidence(rank(0, 1, 1.0, memory=FULL)), 1, True, f"exit code 1, the first to fail; {FULL}"),
    # All well; also where a signal came too late to matter.
    (evidence(rank(0, 0), rank(1, 0)), 0, False, ""),
    (
        evidence(*(rank(n, 0, speaks=True, phase="end") for n in (0, 1)), requested=[15]),
        0,
        False,
        "",
    ),
    # All have saved, to go on with more hosts; one could not; or the user stopped it meanwhile.
    (evidence(rank(0, 143), rank(1, 0), cause="regroup"), 1, True, "every worker has saved"),
    (
        evidence(rank(0, 143, 1.0, speaks=True), rank(1, -9, 2.0, speaks=True), cause="regroup"),
        137,
        True,
        "rank 1 on host1 was killed by SIGKILL",
    ),
    (
        evidence(rank(0, 143), rank(1, 143), cause="regroup", requested=[15]),
        143,
        False,
        "stopped by SIGTERM",
    ),
    # A script that saves on a stop, and ends as if all were done.
    (evidence(rank(0, 0), rank(1, 0), requested=[15]), 143, False, "stopped by SIGTERM"),
    (evidence(*(rank(n, 0, speaks=True, phase="end", step=9) for n in (0, 1))), 0, False, ""),
    # All have left their training as if it were done.
    (
        evidence(*(rank(n, 0, speaks=True, phase="data", step=9) for n in (0, 1))),
        1,
        True,
        "ended with exit code 0, in the middle of its training",
    ),
    # A stop is no failure, whatever the workers made of it.
    (evidence(rank(0, 143), rank(1, 143), requested=[15]), 143, False, "every worker was notified"),
    (
        evidence(rank(0, 143), rank(1, -9, put_down=True), requested=[2, 2]),
        130,
        False,
        "rank 1 had not ended before the second signal: killed",
    ),
    # It was sent while workers were starting, or after a host was lost.
    (
        evidence(rank(0, state="waiting"), rank(1, 143), requested=[15]),
        143,
        False,
        "stopped by SIGTERM: rank 0 had not started",
    ),
    (
        evidence(rank(0, -9, put_down=True), rank(1, state="lost"), requested=[15]),
        143,
        False,
        "rank 0 had not ended within 60 s (--stop-within-s): killed; rank 1 cannot be reached any",
    ),
    # But for a worker of hvdtrain that has not saved.
    (
        evidence(rank(0, 1, speaks=True), rank(1, 143, speaks=True), requested=[15]),
        1,
        False,
        "not saved:\nrank 0 on host0 ended with exit code 1",
    ),
    (
        evidence(*(rank(n, -9, speaks=True, put_down=True) for n in (0, 1)), requested=[15]),
        143,
        False,
        "ranks 0, 1 had not ended within 60 s (--stop-within-s): killed. What it last did is not "
        "saved",
    ),
    # The step that is kept, if workers have reported it, is named as long as others are lost.
    (
        evidence(rank(0, 143, speaks=True, step=9), requested=[15], saved=6),
        143,
        False,
        "every worker was notified and has ended. What it last did is not saved (the checkpoint of "
        "step 6 is kept)",
    ),
    (
        evidence(rank(0, 138, speaks=True, step=9), saved=6),
        138,
        False,
        "SIGUSR1 to a worker: every worker has ended. What it last did is not saved (the",
    ),
    (
        evidence(rank(0, -9, speaks=True, put_down=True, step=9), requested=[2, 2], saved=0),
        130,
        False,
        "rank 0 had not ended before the second signal: killed. What it last did is not saved",
    ),
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
    # What starting again cannot repair.
    (evidence(rank(0, 2, 1.0, final=True), rank(1, 143, 2.0)), 2, False, "exit code 2"),
    (evidence(rank(0, 17, 1.0, final=True), rank(1, 17, 2.0)), 17, False, "exit code 17"),
    # The same codes of a script, or of Open MPI, whose MPI_ERR_INTERN is 17, say nothing.
    (evidence(rank(0, 2, 1.0), rank(1, 143, 2.0)), 2, True, "exit code 2"),
    (evidence(rank(0, 17, 1.0), rank(1, 17, 2.0)), 17, True, "exit code 17"),
    # Without the host that computes wrongly, it may.
    (evidence(rank(0, 17, 1.0, final=True, wrong_rank=1), rank(1, 17, 2.0)), 17, True, "code 17"),
    # A worker that agreed on a stop; one that was killed by the signal has agreed on nothing.
    (evidence(rank(0, 143, 1.0, speaks=True)), 143, False, "SIGTERM to a worker"),
    (evidence(rank(0, -15, 1.0, speaks=True)), 143, True, "was killed by SIGTERM"),
    # Nobody came.
    (evidence(Rank(0), Rank(1), cause="start"), 3, True, "no contact from ranks 0, 1"),
    (
        evidence(Rank(0), Rank(1), horovodrun_lines=["ssh: no"]),
        3,
        True,
        "ended before the workers had started. Output of horovodrun:\n  | ssh: no",
    ),
    # horovodrun's end under workers that were well.
    (
        evidence(
            rank(0, 143, 1.0, speaks=True),
            rank(1),
            cause="horovodrun",
            horovodrun_lines=["Process 1 exit with status code 255."],
        ),
        1,
        True,
        "the ssh connection that started rank 1 on host1 was lost",
    ),
]


@pytest.mark.parametrize(("seen", "code", "may_retry", "part"), CASES)
def test_verdict(seen: Evidence, code: int, may_retry: bool, part: str) -> None:
    """Fails when the exit code is another rank's than the first one's to fail, when a victim or a
    rank that the launcher ended is blamed, or when a hopeless restart is tried or a useful one is
    not.
    """
    outcome = judge(seen)
    assert (outcome.exit_code, outcome.may_retry) == (code, may_retry), outcome.text
    assert part in outcome.text


def test_an_error_is_shown_once() -> None:
    """Fails when the verdict repeats the one-line error of rank 0, which was shown as it is, or
    leaves out that of another rank, or what a script wrote last.
    """
    lines = deque(["step 9", "hvdtrain: error on rank 0 on alpha: no"])
    for number, speaks, quoted in ((0, True, False), (1, True, True), (0, False, True)):
        text = judge(evidence(rank(number, 1, last_lines=lines, speaks=speaks))).text
        assert ("hvdtrain: error" in text) is ("its last lines" in text) is quoted, text


def test_a_traceback_is_shown_once() -> None:
    """Fails when the verdict repeats the traceback that rank 0 has printed, however long it is."""
    lines = deque(["  File ...", "KeyError: 'nothing'"])
    for number, reported, quoted in ((0, True, False), (1, True, True), (0, False, True)):
        seen = rank(number, 1, last_lines=lines, speaks=True, reported=reported)
        assert ("KeyError" in judge(evidence(seen)).text) is quoted


def test_the_page_shows_a_verdict() -> None:
    """Fails when docs/several-machines.md shows another verdict than the launcher prints."""
    ranks = [
        rank(0, 1, 3.0, host="alpha", peer=True),
        rank(1, 1, 2.0, host="alpha", peer=True),
        rank(2, -signal.SIGKILL, 1.0, host="beta", step=124, phase="compute"),
        rank(3, -signal.SIGKILL, 4.0, host="beta", put_down=True),
    ]
    outcome = judge(Evidence(ranks, Limits(600.0, 60.0), Path("runs/resnet50/logs")))
    assert (outcome.exit_code, outcome.may_retry) == (137, True)
    page = Path(__file__).parents[3] / "docs" / "several-machines.md"
    assert f"\nhvdtrain launch: {outcome.text}\nhvdtrain launch: exit code 137" in page.read_text()


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        ([], None),
        ([Rank(0), Rank(1)], None),
        ([rank(0), rank(1, 0)], None),
        ([rank(0, 1, 5.0), rank(1, 1, 4.0)], 1),
        ([rank(0, 0, 1.0), rank(1, -9, 5.0)], 1),
        # A victim can end before the one who has failed: that one may still write what it met.
        ([rank(0, 1, 4.0, peer=True), rank(1, 1, 5.0)], 1),
        ([rank(0, 1, 4.0, peer=True), rank(1, 1, 3.0, peer=True)], 1),
        # An agent is missed only after a while, long after its peers have ended.
        ([rank(0, 1, 4.0, peer=True), rank(1, state="lost", ended_s=14.0)], 1),
        ([rank(0, 1, 4.0), rank(1, state="lost", ended_s=14.0)], 0),
        ([rank(0, state="lost", ended_s=2.0), rank(1, -9, 3.0)], 0),
        ([rank(0), Rank(1), rank(2, 17, 1.0)], 2),
        ([rank(0), rank(1, 0, 1.0, speaks=True, phase="compute", step=3)], 1),
        ([rank(0), rank(1, 0, 1.0, speaks=True, phase="end", step=3)], None),
        ([rank(0), rank(1, 0, 1.0, speaks=True)], None),
        # One has left the others with 0 in the middle; it may well be reported after them.
        ([rank(0, 0, 4.1), rank(1, 1, 4.0, peer=True)], 0),
        ([rank(0, 1, 4.0, peer=True), rank(1, 0, 3.0), rank(2, 0, 2.0)], 2),
        ([rank(0, 0, 1.0), rank(1, -9, 5.0, put_down=True), rank(2, 1, 2.0, peer=True)], 0),
        # Those that have ended well are no cause of a failure of another's own.
        ([rank(0, 0, 1.0), rank(1, 1, 2.0, peer=True), rank(2, 3, 5.0)], 2),
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
    """Fails when, of scripts that report nothing but their output, the first to end is blamed
    although its own output names another one that failed.
    """
    victim = foreign(0, 1, 2.0, "Traceback", line, "")
    cause = foreign(1, 1, 3.0, "Traceback", "ValueError: no such sample")
    assert number_of(first_to_fail([victim, cause])) == 1
    assert number_of(first_to_fail([victim, foreign(2, 1, 3.0, line)])) == 0


def test_our_own_workers_report_themselves() -> None:
    """Fails when a worker of ours is taken for a victim because of a word in its output."""
    cause = rank(0, 1, 2.0, speaks=True, last_lines=deque(["OSError: Broken pipe"]))
    assert number_of(first_to_fail([cause, rank(1, 1, 2.5, speaks=True)])) == 0


@pytest.mark.parametrize(
    ("ended", "text"),
    [
        (rank(0, 1), "ended with exit code 1"),
        (rank(0, 143), "ended with exit code 143"),
        (rank(0, -signal.SIGKILL), "was killed by SIGKILL (sent by a user, or by the kernel when"),
        (rank(0, -signal.SIGSEGV), "was killed by SIGSEGV (a fault in native code)"),
        (rank(0, -signal.SIGABRT), "was killed by SIGABRT (an abort in native code)"),
        (rank(0, -signal.SIGBUS), "was killed by SIGBUS (often a full /dev/shm)"),
        (rank(0, -signal.SIGTERM), "was killed by SIGTERM"),
        (rank(0, -40), "was killed by signal 40"),
        (rank(0, state="lost"), "cannot be reached any more: its agent was killed, or its"),
        (rank(0, -9, state="lost"), "cannot be reached any more"),
    ],
)
def test_ends_are_explained(ended: Rank, text: str) -> None:
    """Fails when a signal is shown as a number though it has a name, raises for want of a name, or
    a lost host is reported to have ended.
    """
    assert explain_end(ended).startswith(text)


@pytest.mark.parametrize(
    ("silenced", "text"),
    [
        (silent(61.4, "step"), "rank 2 on host2: silent, in phase step of step 7, for 61 s"),
        (
            silent(61, "exchange", process_state="T"),
            "rank 2 on host2: stopped (SIGSTOP), in phase exchange of step 7, for 61 s",
        ),
        (
            silent(61, "exchange", process_state="t"),
            "rank 2 on host2: held by a debugger, in phase exchange of step 7, for 61 s",
        ),
        (silent(700, "prepare", step=0), "rank 2 on host2: silent, in phase prepare, for 700"),
        (silent(61, "start", speaks=False, step=0), "rank 2 on host2: silent, for 61 s"),
        (silent(9, "step", host=""), "rank 2: silent, in phase step of step 7, for 9 s"),
    ],
)
def test_silence_is_explained(silenced: Rank, text: str) -> None:
    """Fails when rank, host, phase, step or time is missing, or a suspended process is not named as
    one.
    """
    assert explain_silence(silenced).startswith(text)


def test_a_standstill_is_reported() -> None:
    """Fails when the verdict shows ranks as they are after they were ended."""
    suspended = rank(1, speaks=True, silent_s=61.0, phase="data", step=3, process_state="T")
    waits = rank(0, speaks=True, silent_s=60.0, phase="exchange", step=3)
    seen = evidence(waits, suspended, rank(2, 0))
    seen.find_standstill([suspended])
    suspended.process_state, suspended.exit_code = "", -signal.SIGKILL
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
