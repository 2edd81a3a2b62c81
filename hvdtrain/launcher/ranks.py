"""The state of each rank as seen by the launcher, and which ranks hold up the others."""

import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.pulse import BEGUN, ENDED, WAITING

STOP_WITHIN_S = 60.0
LAST_LINES = 15
LONGEST_LINE = 500  # characters of each; the logs hold the full lines
PREPARING = (BEGUN, "prepare")  # phases before the first step: they may download
SUSPENDED_STATES = {"T": "stopped (SIGSTOP)", "t": "held by a debugger"}
# Output of scripts that end because another rank has failed.
_VICTIM = re.compile(
    r"HorovodInternalError|has been shut down|Connection (reset|closed) by peer|"
    r"MPI_ERR_PROC_FAILED|Broken pipe"
)


@dataclass
class Rank:
    """One rank, as reported by its agent."""

    number: int
    host: str = ""
    state: str = "waiting"  # then running, ended, or lost: its agent is gone or unreachable
    process_state: str = ""  # state letter of the worker in /proc
    step: int = 0
    phase: str = BEGUN
    silent_s: float = 0.0
    heard_s: float = field(default_factory=time.monotonic)  # time of its last report
    busy_s: float | None = None  # own time in a step
    speaks: bool = False  # whether it reports phases: a worker of hvdtrain
    exit_code: int | None = None  # minus n after signal n
    ended_s: float = 0.0
    reported: bool = False  # it has printed the error that it ended with
    folder: str = ""  # of its run
    peer: bool = False  # ended because another rank had failed
    final: bool = False  # ended with an error that a restart cannot change, as it has reported
    wrong_rank: int | None = None  # the rank that an audit, which ended this one, found to be wrong
    spoke_s: float = field(default_factory=time.monotonic)  # time of its last output
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    suspended_s: float = 0.0  # time.monotonic() when it was suspended; 0: it is not
    memory: str = ""  # what the kernel did when its container's memory ran out, in words
    put_down: bool = False  # killed by the launcher, after the job had failed

    @property
    def label(self) -> str:
        """Return 'rank 1 on alpha', as used in messages."""
        return f"rank {self.number}" + (f" on {self.host}" if self.host else "")

    @property
    def is_preparing(self) -> bool:
        """Return whether it is before its first step, or for other scripts, its first output."""
        return self.phase in PREPARING if self.speaks else not self.last_lines

    @property
    def has_failed(self) -> bool:
        return self.state == "lost" or (
            self.state == "ended" and (self.exit_code != 0 or self.left_early)
        )

    @property
    def left_early(self) -> bool:
        """Return whether its process ended as if all were well, such as by os._exit(0), while it
        trained: the others would wait for it.
        """
        trained = self.speaks and self.phase not in (BEGUN, ENDED)
        return self.state == "ended" and self.exit_code == 0 and trained

    @property
    def is_victim(self) -> bool:
        """Return whether it ended because another rank had failed."""
        return self.peer or (not self.speaks and bool(_VICTIM.search("\n".join(self.last_lines))))

    def take(self, report: dict[str, Any]) -> None:
        """Update the state from an agent's report."""
        self.step, self.phase = int(report["step"]), str(report["phase"])
        self.heard_s = time.monotonic()
        self.busy_s, self.speaks = report["busy_s"], bool(report["speaks"])
        silence_s = time.monotonic() - self.spoke_s  # the only sign of progress of other scripts
        self.silent_s = float(report["silent_s"]) if self.speaks else silence_s
        self.process_state = str(report.get("state", self.process_state))
        if self.process_state not in SUSPENDED_STATES:
            self.suspended_s = 0.0
        elif not self.suspended_s:
            self.suspended_s = time.monotonic()
        self.reported, self.peer = "peer" in report, bool(report.get("peer", False))
        self.wrong_rank, self.final = report.get("wrong_rank"), bool(report.get("final", False))
        self.folder = str(report.get("folder", ""))

    def keep(self, lines: Iterable[str]) -> None:
        """Keep the last lines of output, for the verdict."""
        self.last_lines.extend(line[:LONGEST_LINE] for line in lines if line.strip())

    def end(self, exit_code: int) -> None:
        self.state, self.exit_code, self.ended_s = "ended", exit_code, time.monotonic()


@dataclass(frozen=True)
class Limits:
    """Time limits of a job, in seconds."""

    start_timeout_s: float  # until all workers run, and until each is prepared
    watchdog_timeout_s: float  # from then on, without progress
    stop_within_s: float = STOP_WITHIN_S  # from a signal until what still runs is killed

    def of(self, rank: Rank) -> float:
        """Return for how many seconds a rank may be silent."""
        return max(self.start_timeout_s if rank.is_preparing else 0.0, self.watchdog_timeout_s)


def silent_ranks(ranks: Sequence[Rank], limits: Limits) -> list[Rank]:
    """Return the ranks that cause a standstill; empty while the job makes progress.

    Silence alone is no fault: a rank may wait for others in the exchange, or run a script that
    reports no phases, or have ended its training while rank 0 uploads the end of the run. The job
    stands still if ranks are suspended, or silent in their own work (these are returned), or if all
    ranks are silent.
    """
    running = [rank for rank in ranks if rank.state == "running"]
    silent = [rank for rank in running if rank.silent_s > limits.of(rank)]
    since_s = time.monotonic() - limits.watchdog_timeout_s
    suspended = [rank for rank in silent if rank.process_state in SUSPENDED_STATES]
    suspended = [rank for rank in suspended if rank.speaks or rank.suspended_s < since_s]
    busy = [rank for rank in silent if rank.speaks and rank.phase not in (WAITING, ENDED)]
    return suspended or busy or (silent if len(silent) == len(running) else [])
