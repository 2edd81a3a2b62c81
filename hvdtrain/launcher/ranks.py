"""What the launcher knows of each rank, and whom a failure is put down to."""

from __future__ import annotations

import re
import signal
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.launcher.worker_pulse import WAITING

LAST_LINES = 15
LONGEST_LINE = 500  # characters of each; the logs have all
PREPARING = ("start", "prepare")  # phases before the first step: they may download
STOPPED_STATES = {"T": "stopped (SIGSTOP)", "t": "held by a debugger"}
# How scripts end that Horovod tells of another rank's failure.
_VICTIM = re.compile(
    r"HorovodInternalError|has been shut down|Connection (reset|closed) by peer|"
    r"MPI_ERR_PROC_FAILED|Broken pipe"
)
_HINTS = {
    "SIGKILL": " (by someone, or by the kernel where memory ran out: see dmesg)",
    "SIGSEGV": " (a fault in native code)",
    "SIGABRT": " (native code gave up)",
    "SIGBUS": " (often a full /dev/shm)",
}


@dataclass
class Rank:
    """One rank, as its agent has told it."""

    number: int
    host: str = ""
    state: str = "waiting"  # then running, ended or lost
    process_state: str = ""  # of the worker, as /proc has it
    step: int = 0
    phase: str = "start"
    silent_s: float = 0.0
    busy_s: float | None = None  # own time in a step
    speaks: bool = False  # tells its phases: a worker of hvdtrain
    exit_code: int | None = None  # minus n after signal n
    ended_s: float = 0.0
    peer: bool = False  # ended because another rank had failed
    spoke_s: float = field(default_factory=time.monotonic)  # its last line of output
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    stopped_s: float = 0.0  # since when it has been stopped (time.monotonic()); 0: it is not
    put_down: bool = False  # by the launcher, once the job had failed

    @property
    def place(self) -> str:
        """As messages name it."""
        return f"rank {self.number}" + (f" on {self.host}" if self.host else "")

    @property
    def is_preparing(self) -> bool:
        """Whether it has not come to its first step, or to its first line, of other scripts."""
        return self.phase in PREPARING if self.speaks else not self.last_lines

    @property
    def has_failed(self) -> bool:
        return self.state == "lost" or (self.state == "ended" and self.exit_code != 0)

    @property
    def is_victim(self) -> bool:
        """Whether it ended because of another rank."""
        return self.peer or (not self.speaks and bool(_VICTIM.search("\n".join(self.last_lines))))

    def _take_state(self, letter: str) -> None:
        self.process_state = letter
        if letter not in STOPPED_STATES:
            self.stopped_s = 0.0
        elif not self.stopped_s:
            self.stopped_s = time.monotonic()

    def take(self, report: dict[str, Any]) -> None:
        """An agent's report."""
        self.step, self.phase = int(report["step"]), str(report["phase"])
        self.busy_s, self.speaks = report["busy_s"], bool(report["speaks"])
        silence_s = time.monotonic() - self.spoke_s  # all there is to see of other scripts
        self.silent_s = float(report["silent_s"]) if self.speaks else silence_s
        self._take_state(str(report.get("state", self.process_state)))
        self.peer = bool(report.get("peer", False))

    def keep(self, lines: Iterable[str]) -> None:
        """Lines of its output; the last ones are shown if it fails."""
        self.last_lines.extend(line[:LONGEST_LINE] for line in lines if line.strip())

    def end(self, exit_code: int) -> None:
        self.state, self.exit_code, self.ended_s = "ended", exit_code, time.monotonic()

    def lose(self) -> None:
        """Its agent is gone, or cannot be reached."""
        self.state, self.ended_s = "lost", time.monotonic()


def first_to_fail(ranks: Sequence[Rank]) -> Rank | None:
    """The first that failed of itself. Where all are victims of another, the first that has left
    them with exit code 0, in the middle of their work; where nobody has, the first of them.
    """
    failed = [rank for rank in ranks if rank.has_failed]
    if failed and all(rank.is_victim or rank.put_down for rank in failed):
        failed = [r for r in ranks if r.state == "ended" and r.exit_code == 0] or failed
    return min(failed, key=lambda r: (r.put_down, r.is_victim, r.ended_s), default=None)


@dataclass(frozen=True)
class Limits:
    """How long a job may take for what."""

    start_timeout_s: float  # until all workers run, and for each until it is prepared
    watchdog_timeout_s: float  # from then on, without progress

    def of(self, rank: Rank) -> float:
        """For how long a rank may be silent."""
        if rank.is_preparing:
            return max(self.start_timeout_s, self.watchdog_timeout_s)
        return self.watchdog_timeout_s


def silent_ranks(ranks: Sequence[Rank], limits: Limits) -> list[Rank]:
    """Whom to put a standstill down to; empty while the job moves.

    A rank that waits for others in the exchange is silent rightly, and so may be one of a script
    that tells no phases. So only where all are silent, or one in work of its own, is there a
    standstill; then those outside the exchange are named.
    """
    running = [rank for rank in ranks if rank.state == "running"]
    silent = [rank for rank in running if rank.silent_s > limits.of(rank)]
    now = time.monotonic()
    stopped = [
        rank
        for rank in silent
        if rank.process_state in STOPPED_STATES
        and (rank.speaks or now - rank.stopped_s > limits.watchdog_timeout_s)
    ]
    busy = [rank for rank in silent if rank.speaks and rank.phase != WAITING]
    if stopped or busy:
        return stopped or busy
    return silent if running and len(silent) == len(running) else []


def explain_end(rank: Rank) -> str:
    """How a failed rank ended."""
    code = rank.exit_code
    if rank.state == "lost":
        return "cannot be reached any more: its agent was killed, or its host or network is down"
    if code is not None and code < 0:
        known = -code in set(signal.Signals)
        name = signal.Signals(-code).name if known else f"signal {-code}"
        return f"was killed by {name}{_HINTS.get(name, '')}"
    return f"ended with exit code {code}"


def explain_silence(rank: Rank) -> str:
    """What a silent rank was doing."""
    state = STOPPED_STATES.get(rank.process_state)
    where = f", in phase {rank.phase}" if rank.speaks else ""
    where += f" of step {rank.step}" if rank.step else ""
    return f"{rank.place}: {state or 'silent'}{where}, for {rank.silent_s:.0f} s"
