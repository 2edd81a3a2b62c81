"""How a job ended, whom that is put down to, and what the user is told of it."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.errors import (
    EXIT_FAILED,
    EXIT_MISMATCH,
    EXIT_OK,
    EXIT_PREFLIGHT,
    EXIT_USAGE,
    name_ranks,
)
from hvdtrain.launcher.ranks import (
    Limits,
    Rank,
    explain_end,
    explain_silence,
    first_to_fail,
)

FINAL = (EXIT_USAGE, EXIT_MISMATCH)  # of a worker: starting again changes nothing
STOPPED = tuple(128 + n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
OTHERS_SHOWN = 8  # ranks besides the one that a message is about
LINES_SHOWN = 12
_ENDED_PROCESS = re.compile(r"Process (\d+) exit with status code (\d+)")


@dataclass(frozen=True)
class Outcome:
    """How one start of a job ended."""

    exit_code: int
    text: str = ""  # the verdict, where it did not end well
    may_retry: bool = False
    steps: int = 0  # the furthest that was seen


@dataclass
class Evidence:
    """What was seen of one start."""

    ranks: list[Rank]
    limits: Limits
    log_folder: Path
    # What ended it first: "a rank", "start" (too slow), "silence", or "engine" (horovodrun).
    cause: str = ""
    silent: list[Rank] = field(default_factory=list)
    standstill: list[str] = field(default_factory=list)  # who was silent, as it was found
    stacks: dict[int, list[str]] | None = None  # lines by rank; None: not asked for
    requested: list[int] = field(default_factory=list)  # signals to the launcher
    engine_lines: list[str] = field(default_factory=list)  # what horovodrun has said

    def blame(self, cause: str) -> None:
        """The first cause counts."""
        self.cause = self.cause or cause

    def find_standstill(self, silent: list[Rank]) -> None:
        """Nothing moves any more; told now, since these ranks are about to be ended."""
        self.blame("silence")
        self.silent = silent
        others = [rank for rank in self.ranks if rank.state == "running" and rank not in silent]
        self.standstill = [explain_silence(rank) for rank in silent[:OTHERS_SHOWN]]
        self.standstill += [f"{explain_silence(rank)} (waits)" for rank in others[:OTHERS_SHOWN]]
        left = [rank for rank in self.ranks if rank.state == "ended"]
        self.standstill += [f"{rank.place} {explain_end(rank)}" for rank in left[:OTHERS_SHOWN]]


def judge(seen: Evidence) -> Outcome:
    """The verdict."""
    steps = max((rank.step for rank in seen.ranks), default=0)

    def outcome(exit_code: int, text: str = "", may_retry: bool = False) -> Outcome:
        return Outcome(exit_code, text, may_retry, steps)

    if all(rank.state == "ended" and rank.exit_code == 0 for rank in seen.ranks):
        return outcome(EXIT_OK)
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
    name = signal.Signals(seen.requested[0]).name
    killed = [r.number for r in seen.ranks if r.state != "ended" or r.exit_code == -signal.SIGKILL]
    if killed:
        return f"stopped by {name}: {name_ranks(killed)} had not ended, and was killed"
    return f"stopped by {name}: every worker was told, and has ended"


def _explain_failure(seen: Evidence, first: Rank) -> str:
    lines = [f"{first.place} {explain_end(first)}"]
    if first.has_failed:
        lines[0] += ", the first to fail"
    else:
        lines[0] += " while others were still at work: all ranks must make the same number of steps"
    if first.step:
        lines[0] += f", in phase {first.phase} of step {first.step}"
    if first.last_lines:
        lines += ["its last lines:", *_quoted(first.last_lines)]
    others = [
        f"then {rank.place} {explain_end(rank)}"
        for rank in seen.ranks
        if rank is not first and rank.has_failed and rank.exit_code != -signal.SIGKILL
    ]
    log = seen.log_folder / f"rank.{first.number}.log"
    return "\n".join([*lines, *others[:OTHERS_SHOWN], f"log: {log}"])


def _explain_standstill(seen: Evidence) -> str:
    slowest = seen.silent[0]
    flag = "--start-timeout-s" if slowest.is_preparing else "--watchdog-timeout-s"
    lines = [f"no progress for {seen.limits.of(slowest):g} s ({flag})", *seen.standstill]
    for rank in seen.ranks:
        frames = (seen.stacks or {}).get(rank.number, [])
        if frames := _main_thread(frames):
            lines += [f"{rank.place}, Python stacks:", *_quoted(frames)]
        else:
            lines.append(f"{rank.place} gives no Python stacks")
    return "\n".join([*lines, f"logs, with all stacks: {seen.log_folder}"])


def _explain_start(seen: Evidence) -> str:
    missing = [rank.number for rank in seen.ranks if rank.state == "waiting"]
    if seen.cause == "start":
        what = f"nothing was heard of {name_ranks(missing)} for {seen.limits.start_timeout_s:g} s"
        what += " (--start-timeout-s)"
    else:
        what = "horovodrun ended before the workers had started"
    advice = f"log: {seen.log_folder / 'horovodrun.log'}. `hvdtrain doctor` tests more"
    return "\n".join([f"{what}. It said:", *_last(seen.engine_lines), advice])


def _explain_engine(seen: Evidence) -> str:
    """horovodrun ended under workers that were well: mostly a broken SSH connection."""
    found = [_ENDED_PROCESS.search(line) for line in seen.engine_lines]
    ended = next((match for match in reversed(found) if match and match[2] == "255"), None)
    if ended and int(ended[1]) < len(seen.ranks):
        place = seen.ranks[int(ended[1])].place
        text = f"the ssh connection that {place} was started by broke off (ssh's exit code 255)"
    else:
        text = "horovodrun ended while its workers were running"
    return "\n".join([f"{text}. horovodrun said:", *_last(seen.engine_lines)])


def _last(lines: Sequence[str]) -> list[str]:
    return _quoted([line for line in lines if line.strip()][-LINES_SHOWN:])


def _quoted(lines: Sequence[str]) -> list[str]:
    return [f"  | {line}" for line in lines]


def _main_thread(lines: list[str]) -> list[str]:
    """Of what faulthandler has written, the main thread, which comes last."""
    starts = [at for at, line in enumerate(lines) if "(most recent call first)" in line]
    if not starts:
        return []
    frames = itertools.takewhile(str.strip, lines[starts[-1] :])
    return list(frames)[:LINES_SHOWN]
