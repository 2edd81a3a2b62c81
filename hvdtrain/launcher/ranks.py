"""The state of each rank as seen by the launcher, and the verdict on a start of a job."""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.errors import (
    EXIT_FAILED,
    EXIT_MISMATCH,
    EXIT_OK,
    EXIT_PREFLIGHT,
    EXIT_USAGE,
    name_ranks,
)
from hvdtrain.pulse import WAITING

LAST_LINES = 15
LONGEST_LINE = 500  # characters of each; the logs hold the full lines
OTHERS_SHOWN = 8  # further ranks in a message
LINES_SHOWN = 12
FINAL = (EXIT_USAGE, EXIT_MISMATCH)  # exit codes of a worker that a restart cannot change
STOPPED = tuple(128 + n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
PREPARING = ("start", "prepare")  # phases before the first step: they may download
STOPPED_STATES = {"T": "stopped (SIGSTOP)", "t": "held by a debugger"}
# Output of scripts that end because another rank has failed.
_VICTIM = re.compile(
    r"HorovodInternalError|has been shut down|Connection (reset|closed) by peer|"
    r"MPI_ERR_PROC_FAILED|Broken pipe"
)
_SSH_LOST = re.compile(r"Process (\d+) exit with status code 255\b")
_HINTS = {
    "SIGKILL": " (sent by a user, or by the kernel when memory ran out: see dmesg)",
    "SIGSEGV": " (a fault in native code)",
    "SIGABRT": " (an abort in native code)",
    "SIGBUS": " (often a full /dev/shm)",
}


@dataclass
class Rank:
    """One rank, as reported by its agent."""

    number: int
    host: str = ""
    state: str = "waiting"  # then running, ended, or lost: its agent is gone or unreachable
    process_state: str = ""  # state letter of the worker in /proc
    step: int = 0
    phase: str = "start"
    silent_s: float = 0.0
    busy_s: float | None = None  # own time in a step
    speaks: bool = False  # whether it reports phases: a worker of hvdtrain
    exit_code: int | None = None  # minus n after signal n
    ended_s: float = 0.0
    peer: bool = False  # ended because another rank had failed
    spoke_s: float = field(default_factory=time.monotonic)  # time of its last output
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    stopped_s: float = 0.0  # time.monotonic() when it was stopped; 0: it is not
    put_down: bool = False  # killed by the launcher, after the job had failed

    @property
    def place(self) -> str:
        """Return 'rank 1 on alpha', as used in messages."""
        return f"rank {self.number}" + (f" on {self.host}" if self.host else "")

    @property
    def is_preparing(self) -> bool:
        """Return whether it is before its first step, or for other scripts, its first output."""
        return self.phase in PREPARING if self.speaks else not self.last_lines

    @property
    def has_failed(self) -> bool:
        return self.state == "lost" or (self.state == "ended" and self.exit_code != 0)

    @property
    def is_victim(self) -> bool:
        """Return whether it ended because another rank had failed."""
        return self.peer or (not self.speaks and bool(_VICTIM.search("\n".join(self.last_lines))))

    def take(self, report: dict[str, Any]) -> None:
        """Update the state from an agent's report."""
        self.step, self.phase = int(report["step"]), str(report["phase"])
        self.busy_s, self.speaks = report["busy_s"], bool(report["speaks"])
        silence_s = time.monotonic() - self.spoke_s  # the only sign of progress of other scripts
        self.silent_s = float(report["silent_s"]) if self.speaks else silence_s
        self.process_state = str(report.get("state", self.process_state))
        if self.process_state not in STOPPED_STATES:
            self.stopped_s = 0.0
        elif not self.stopped_s:
            self.stopped_s = time.monotonic()
        self.peer = bool(report.get("peer", False))

    def keep(self, lines: Iterable[str]) -> None:
        """Keep the last lines of output, for the verdict."""
        self.last_lines.extend(line[:LONGEST_LINE] for line in lines if line.strip())

    def end(self, exit_code: int) -> None:
        self.state, self.exit_code, self.ended_s = "ended", exit_code, time.monotonic()


def first_to_fail(ranks: Sequence[Rank]) -> Rank | None:
    """Return the first rank that failed by itself; None if no rank has failed."""
    failed = [rank for rank in ranks if rank.has_failed]
    if failed and all(rank.is_victim or rank.put_down for rank in failed):
        # Victims of one that left early, if any.
        failed = [r for r in ranks if r.state == "ended" and r.exit_code == 0] or failed
    return min(failed, key=lambda r: (r.put_down, r.is_victim, r.ended_s), default=None)


@dataclass(frozen=True)
class Limits:
    """Time limits of a job, in seconds."""

    start_timeout_s: float  # until all workers run, and until each is prepared
    watchdog_timeout_s: float  # from then on, without progress

    def of(self, rank: Rank) -> float:
        """Return for how many seconds a rank may be silent."""
        least_s = self.start_timeout_s if rank.is_preparing else 0.0
        return max(least_s, self.watchdog_timeout_s)


def silent_ranks(ranks: Sequence[Rank], limits: Limits) -> list[Rank]:
    """Return the ranks that cause a standstill; empty while the job makes progress.

    Silence alone is no fault: a rank may wait for others in the exchange, or run a script that
    reports no phases. The job stands still if ranks are stopped, or silent in their own work (these
    are returned), or if all ranks are silent.
    """
    running = [rank for rank in ranks if rank.state == "running"]
    silent = [rank for rank in running if rank.silent_s > limits.of(rank)]
    since_s = time.monotonic() - limits.watchdog_timeout_s
    stopped = [
        rank
        for rank in silent
        if rank.process_state in STOPPED_STATES and (rank.speaks or rank.stopped_s < since_s)
    ]
    busy = [rank for rank in silent if rank.speaks and rank.phase != WAITING]
    return stopped or busy or (silent if len(silent) == len(running) else [])


def explain_end(rank: Rank) -> str:
    code = rank.exit_code
    if rank.state == "lost":
        return "cannot be reached any more: its agent was killed, or its host or network is down"
    if code is not None and code < 0:
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(-code, f"signal {-code}")
        return f"was killed by {name}{_HINTS.get(name, '')}"
    return f"ended with exit code {code}"


def explain_silence(rank: Rank) -> str:
    state = STOPPED_STATES.get(rank.process_state, "silent")
    where = f", in phase {rank.phase}" if rank.speaks else ""
    where += f" of step {rank.step}" if rank.step else ""
    return f"{rank.place}: {state}{where}, for {rank.silent_s:.0f} s"


@dataclass(frozen=True)
class JobOutcome:
    """The result of one start of a job."""

    exit_code: int
    text: str = ""  # the verdict; empty after success
    may_retry: bool = False
    steps: int = 0  # highest step of any rank


@dataclass
class Evidence:
    """Observations of one start, from which the verdict is made."""

    ranks: list[Rank]
    limits: Limits
    log_folder: Path
    # What ended it first: "a rank", "start" (too slow), "silence", or "engine" (horovodrun).
    cause: str = ""
    silent: list[Rank] = field(default_factory=list)
    standstill: list[str] = field(default_factory=list)  # the ranks when it was found, in words
    stacks: dict[int, list[str]] | None = None  # lines by rank; None: not requested
    requested: list[int] = field(default_factory=list)  # signals to the launcher
    engine_lines: list[str] = field(default_factory=list)  # output of horovodrun

    def blame(self, cause: str) -> None:
        """Record the cause of the end, unless one is recorded already."""
        self.cause = self.cause or cause

    def find_standstill(self, silent: list[Rank]) -> None:
        """Record a standstill and describe all ranks now, before they are killed."""
        self.blame("silence")
        self.silent = silent
        others = [rank for rank in self.ranks if rank.state == "running" and rank not in silent]
        left = [rank for rank in self.ranks if rank.state == "ended"]
        self.standstill = [explain_silence(rank) for rank in silent[:OTHERS_SHOWN]]
        self.standstill += [f"{explain_silence(rank)} (waits)" for rank in others[:OTHERS_SHOWN]]
        self.standstill += [f"{rank.place} {explain_end(rank)}" for rank in left[:OTHERS_SHOWN]]


def judge(seen: Evidence) -> JobOutcome:
    """Return the outcome of a start: exit code, explanation, and whether a restart may help."""
    steps = max((rank.step for rank in seen.ranks), default=0)

    def outcome(exit_code: int, text: str, may_retry: bool = False) -> JobOutcome:
        return JobOutcome(exit_code, text, may_retry, steps)

    if all(rank.state == "ended" and rank.exit_code == 0 for rank in seen.ranks):
        return outcome(EXIT_OK, "")
    if seen.requested:
        return outcome(128 + seen.requested[0], _explain_stop(seen))
    if seen.cause == "silence":
        return outcome(EXIT_FAILED, _explain_standstill(seen), True)
    if seen.cause == "start" or all(rank.state == "waiting" for rank in seen.ranks):
        return outcome(EXIT_PREFLIGHT, _explain_start(seen), True)
    first = first_to_fail(seen.ranks)
    if first is None or seen.cause == "engine":
        return outcome(EXIT_FAILED, _explain_engine(seen), True)
    code = first.exit_code or EXIT_FAILED
    code = code if code > 0 else 128 - code
    if first.speaks and first.exit_code in STOPPED:
        name = signal.Signals(code - 128).name
        return outcome(code, f"{name} to a worker: all have stopped")
    return outcome(code, _explain_failure(seen, first), code not in FINAL)


def _explain_stop(seen: Evidence) -> str:
    killed = [r.number for r in seen.ranks if r.state != "ended" or r.exit_code == -signal.SIGKILL]
    how = "every worker was notified and has ended"
    if killed:
        how = f"{name_ranks(killed)} had not ended, and was killed"
    return f"stopped by {signal.Signals(seen.requested[0]).name}: {how}"


def _explain_failure(seen: Evidence, first: Rank) -> str:
    why = " while others were still at work: all ranks must make the same number of steps"
    where = f", in phase {first.phase} of step {first.step}" if first.step else ""
    how = f", the first to fail{where}" if first.has_failed else f"{where}{why}"
    lines = [f"{first.place} {explain_end(first)}{how}"]
    if first.last_lines:
        lines += ["its last lines:", *_quoted(first.last_lines)]
    after = [rank for rank in seen.ranks if rank.has_failed and rank is not first]
    killed = [rank.number for rank in after if rank.exit_code == -signal.SIGKILL]
    others = sorted((r for r in after if r.number not in killed), key=lambda rank: rank.ended_s)
    lines += [f"then {rank.place} {explain_end(rank)}" for rank in others[:OTHERS_SHOWN]]
    if others[OTHERS_SHOWN:]:
        lines.append(f"then {name_ranks([rank.number for rank in others[OTHERS_SHOWN:]])}")
    if killed:
        by = "the launcher or horovodrun, or by the kernel when memory ran out"
        lines.append(f"then {name_ranks(killed)}: killed by SIGKILL, by {by}")
    return "\n".join([*lines, f"log: {seen.log_folder / f'rank.{first.number}.log'}"])


def _explain_standstill(seen: Evidence) -> str:
    slowest = seen.silent[0]
    flag = "--start-timeout-s" if slowest.is_preparing else "--watchdog-timeout-s"
    lines = [f"no progress for {seen.limits.of(slowest):g} s ({flag})", *seen.standstill]
    for rank in seen.ranks:
        if frames := _main_thread((seen.stacks or {}).get(rank.number, [])):
            lines += [f"{rank.place}, Python stacks:", *_quoted(frames)]
        else:
            lines.append(f"{rank.place} returned no Python stacks")
    return "\n".join([*lines, f"logs, with all stacks: {seen.log_folder}"])


def _explain_start(seen: Evidence) -> str:
    what = "horovodrun ended before the workers had started"
    if seen.cause == "start":
        missing = name_ranks([rank.number for rank in seen.ranks if rank.state == "waiting"])
        limit_s = seen.limits.start_timeout_s
        what = f"no contact from {missing} for {limit_s:g} s (--start-timeout-s)"
    advice = f"log: {seen.log_folder / 'horovodrun.log'}. `hvdtrain doctor` runs more checks"
    return f"{what}. {_engine_output(seen)}\n{advice}"


def _explain_engine(seen: Evidence) -> str:
    """Explain an end of horovodrun while its workers ran: usually a broken SSH connection."""
    text = "horovodrun ended while its workers were running"
    ended = [int(number) for number in _SSH_LOST.findall("\n".join(seen.engine_lines))]
    if ended and ended[-1] < len(seen.ranks):
        place = seen.ranks[ended[-1]].place
        text = f"the ssh connection that started {place} was lost (ssh's exit code 255)"
    return f"{text}. {_engine_output(seen)}"


def _engine_output(seen: Evidence) -> str:
    last = [line for line in seen.engine_lines if line.strip()][-LINES_SHOWN:]
    return "\n".join(["Output of horovodrun:", *_quoted(last)])


def _quoted(lines: Sequence[str]) -> list[str]:
    return [f"  | {line}" for line in lines]


def _main_thread(lines: list[str]) -> list[str]:
    """Return the main thread's stack from faulthandler's output, where it is the last one."""
    starts = [at for at, line in enumerate(lines) if "(most recent call first)" in line]
    frames = itertools.takewhile(str.strip, lines[starts[-1] :]) if starts else []
    return list(frames)[:LINES_SHOWN]
