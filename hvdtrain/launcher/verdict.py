"""The verdict on a start of a job: which rank failed first, why, and whether a restart may help."""

import itertools
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hvdtrain.errors import EXIT_FAILED, EXIT_PREFLIGHT, name_ranks, shell_code
from hvdtrain.horovod_build.runner.any_shell import SSH_ENDED
from hvdtrain.launcher.nodes import NO_CONNECTION
from hvdtrain.launcher.ranks import SUSPENDED_STATES, Limits, Rank
from hvdtrain.pulse import ENDED, STOP_SIGNALS

OTHERS_SHOWN = 8  # further ranks in a message
LINES_SHOWN = 12
_SSH_LOST = re.compile(r"Process (\d+) exit with status code 255\b")
_TASK_FAILED = "Launching horovod task function was not successful"
_HINTS = {
    "SIGKILL": " (sent by a user, or by the kernel when memory ran out: see dmesg)",
    "SIGSEGV": " (a fault in native code)",
    "SIGABRT": " (an abort in native code)",
    "SIGBUS": " (often a full /dev/shm)",
}


@dataclass(frozen=True)
class JobOutcome:
    """The result of one start of a job."""

    exit_code: int
    text: str = ""  # the verdict; empty after success
    may_retry: bool = False
    steps: int = 0  # highest step of any rank
    wrong_rank: int | None = None  # the one that computes wrongly: its host must not be used again
    lost_ranks: tuple[int, ...] = ()  # those whose hosts cannot be reached
    regroups: bool = False  # it has saved, to go on with more hosts


@dataclass
class Evidence:
    """Observations of one start, from which the verdict is made."""

    ranks: list[Rank]
    limits: Limits
    log_folder: Path
    # What ended it first: "a rank", "start" (too slow), "silence", "horovodrun", or "regroup".
    cause: str = ""
    silent: list[Rank] = field(default_factory=list)
    standstill: list[str] = field(default_factory=list)  # the ranks when it was found, in words
    stacks: dict[int, list[str]] | None = None  # lines by rank; None: not requested
    requested: list[int] = field(default_factory=list)  # signals to the launcher
    saved: int | None = None  # step of the newest checkpoint, 0: none; None: not reported
    horovodrun_lines: list[str] = field(default_factory=list)  # output of horovodrun
    own_pause_s: float = 0.0  # in which the launcher did nothing, so that agents gave it up

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
        self.standstill += [f"{rank.label} {explain_end(rank)}" for rank in left[:OTHERS_SHOWN]]


def judge(seen: Evidence) -> JobOutcome:
    """Return the outcome of a start: exit code, explanation, and whether a restart may help."""
    steps = max((rank.step for rank in seen.ranks), default=0)
    lost = tuple(rank.number for rank in seen.ranks if rank.state == "lost")
    outcome = partial(JobOutcome, steps=steps, lost_ranks=lost)
    if all(rank.state == "ended" and not rank.has_failed for rank in seen.ranks):
        if seen.requested and not all(rank.phase == ENDED for rank in seen.ranks):
            return outcome(128 + seen.requested[0], _explain_stop(seen))  # before its end
        return outcome(0)
    if seen.requested:
        unsaved = [rank for rank in _unsaved(seen) if rank.speaks]
        if not unsaved:
            return outcome(128 + seen.requested[0], _explain_stop(seen))
        at_fault, text = first_to_fail(unsaved) or unsaved[0], _explain_stop(seen, lost=True)
        if at_fault.put_down:
            return outcome(128 + seen.requested[0], text)
        return outcome(EXIT_FAILED, f"{text}:\n{_explain_failure(seen, at_fault)}")
    if seen.cause == "regroup" and not _unsaved(seen):
        return outcome(EXIT_FAILED, "every worker has saved", True, regroups=True)
    if seen.own_pause_s:
        text = (
            f"this launcher was suspended, or its machine asleep, for {seen.own_pause_s:.0f} s: "
            "the hosts have taken it for dead, and their workers have saved and ended"
        )
        return outcome(EXIT_FAILED, text, True)
    if seen.cause == "silence":
        return outcome(EXIT_FAILED, _explain_standstill(seen), True)
    if seen.cause == "start" or all(rank.state == "waiting" for rank in seen.ranks):
        return outcome(EXIT_PREFLIGHT, _explain_start(seen), True)
    first = first_to_fail(_unsaved(seen) if seen.cause == "regroup" else seen.ranks)
    if first is None or seen.cause == "horovodrun":
        return outcome(EXIT_FAILED, _explain_horovodrun(seen), True)
    code = shell_code(first.exit_code or EXIT_FAILED)
    if first.speaks and is_of_stop(first.exit_code):
        name = signal.Signals(code - 128).name
        text = f"stopped by {name} to a worker: every worker has ended"
        return outcome(code, text + _explain_lost(seen))
    text, wrong = _explain_failure(seen, first), first.wrong_rank
    # An exit code alone means nothing: scripts, and Open MPI, have the same ones for other things.
    return outcome(code, text, not first.final or wrong is not None, wrong_rank=wrong)


def _unsaved(seen: Evidence) -> list[Rank]:
    return [rank for rank in seen.ranks if not _has_stopped_well(rank)]


def _has_stopped_well(rank: Rank) -> bool:
    """Return whether a worker of hvdtrain ended as it does after saving, or before there was
    anything to save.
    """
    return rank.state == "waiting" or (
        rank.state == "ended" and (rank.exit_code == 0 or is_of_stop(rank.exit_code))
    )


def is_of_stop(exit_code: int | None) -> bool:
    """Return whether an exit code is that of a worker which a signal has stopped."""
    return exit_code in {128 + number for number in STOP_SIGNALS}


def first_to_fail(ranks: Sequence[Rank]) -> Rank | None:
    """Return the first rank that failed by itself; None if no rank has failed."""
    failed = [rank for rank in ranks if rank.has_failed]
    if failed and all(rank.is_victim or rank.put_down for rank in failed):
        # Victims of one that left early, if any.
        failed = [r for r in ranks if r.state == "ended" and r.exit_code == 0] or failed
    return min(failed, key=lambda r: (r.put_down, r.is_victim, r.ended_s), default=None)


def explain_end(rank: Rank) -> str:
    code = rank.exit_code
    if rank.state == "lost":
        return "cannot be reached any more: its agent was killed, or its host or network is down"
    if code is not None and code < 0:
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(-code, f"signal {-code}")
        if rank.memory and name == "SIGKILL":
            return f"was killed by {name} ({rank.memory})"
        return f"was killed by {name}{_HINTS.get(name, '')}"
    early = ", in the middle of its training" if rank.left_early else ""
    return f"ended with exit code {code}{early}"


def explain_silence(rank: Rank) -> str:
    state = SUSPENDED_STATES.get(rank.process_state, "silent")
    where = f", in phase {rank.phase}" if rank.speaks else ""
    where += f" of step {rank.step}" if rank.step else ""
    return f"{rank.label}: {state}{where}, for {rank.silent_s:.0f} s"


def _explain_stop(seen: Evidence, lost: bool = False) -> str:
    limit = f"within {seen.limits.stop_within_s:g} s (--stop-within-s)"
    late = f"had not ended {limit if len(seen.requested) == 1 else 'before the second signal'}"
    numbers_by_end = {
        f"{late}: killed": [rank.number for rank in seen.ranks if rank.put_down],
        "had not started": [rank.number for rank in seen.ranks if rank.state == "waiting"],
        "cannot be reached any more": [rank.number for rank in seen.ranks if rank.state == "lost"],
    }
    ends = [f"{name_ranks(numbers)} {end}" for end, numbers in numbers_by_end.items() if numbers]
    how = "; ".join(ends) or "every worker was notified and has ended"
    return f"stopped by {signal.Signals(seen.requested[0]).name}: {how}{_explain_lost(seen, lost)}"


def _explain_lost(seen: Evidence, lost: bool = False) -> str:
    """Return, after a stop, that the last steps are not saved, and which one is; empty if all are.

    `lost`: they are not, even if no step was reported.
    """
    lost = lost or (seen.saved is not None and seen.saved < max(rank.step for rank in seen.ranks))
    kept = f" (the checkpoint of step {seen.saved} is kept)" if seen.saved else ""
    return f". What it last did is not saved{kept}" if lost else ""


def _explain_failure(seen: Evidence, first: Rank) -> str:
    why = " while others were still at work: all ranks must make the same number of steps"
    where = f", in phase {first.phase} of step {first.step}" if first.step else ""
    how = f", the first to fail{where}" if first.has_failed else f"{where}{why}"
    lines = [f"{first.label} {explain_end(first)}{how}"]
    if first.memory and first.exit_code != -signal.SIGKILL:
        lines[0] += f"; {first.memory}"
    last = first.last_lines[-1] if first.last_lines else ""
    has_reported = first.reported or (first.speaks and last.startswith("hvdtrain: error"))
    # What rank 0 has reported stands above, and in the summary.
    if last and not (first.number == 0 and has_reported):
        lines += ["its last lines:", *_quoted(first.last_lines)]
    after = [rank for rank in seen.ranks if rank.has_failed and rank is not first]
    killed = [rank.number for rank in after if rank.exit_code == -signal.SIGKILL]
    others = sorted((r for r in after if r.number not in killed), key=lambda rank: rank.ended_s)
    lines += [f"then {rank.label} {explain_end(rank)}" for rank in others[:OTHERS_SHOWN]]
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
            lines += [f"{rank.label}, Python stacks:", *_quoted(frames)]
        else:
            lines.append(f"{rank.label} returned no Python stacks")
    return "\n".join([*lines, f"logs, with all stacks: {seen.log_folder}"])


def _explain_start(seen: Evidence) -> str:
    what = "horovodrun ended before the workers had started"
    if seen.cause == "start":
        missing = name_ranks([rank.number for rank in seen.ranks if rank.state == "waiting"])
        limit_s = seen.limits.start_timeout_s
        what = f"no contact from {missing} for {limit_s:g} s (--start-timeout-s)"
    advice = f"log: {seen.log_folder / 'horovodrun.log'}. `hvdtrain doctor` runs more checks"
    return f"{what}{_reason(seen)}. {_horovodrun_output(seen)}\n{advice}"


def _explain_horovodrun(seen: Evidence) -> str:
    """Explain an end of horovodrun while its workers ran: usually a broken SSH connection."""
    text = "horovodrun ended while its workers were running"
    ended = [int(number) for number in _SSH_LOST.findall("\n".join(seen.horovodrun_lines))]
    if ended and ended[-1] < len(seen.ranks):
        label = seen.ranks[ended[-1]].label
        text = f"the ssh connection that started {label} was lost (ssh's exit code 255)"
        if missing := re.search(f"{NO_CONNECTION} .*", _reason(seen)):
            cause = missing[0].removeprefix("hvdtrain: ")
            return f"the host of {label} was lost: {cause}. {_horovodrun_output(seen)}"
    return f"{text}{_reason(seen)}. {_horovodrun_output(seen)}"


def _reason(seen: Evidence) -> str:
    """Return the first words of ssh, or of what it ran, in the output of horovodrun."""
    lines = [line.strip() for line in seen.horovodrun_lines if line.strip()]
    for line, following in itertools.pairwise([*lines, ""]):
        if line.startswith(SSH_ENDED):
            return f": {line}"
        if line.startswith(_TASK_FAILED):
            return f": {following}"
    # ssh's words stand above the frame in which mpirun explains what it means.
    ssh_lines = list(itertools.takewhile(lambda line: not line.startswith("-----"), lines))
    return f": {ssh_lines[0]}" if ssh_lines and len(ssh_lines) < len(lines) else ""


def _horovodrun_output(seen: Evidence) -> str:
    last = [line for line in seen.horovodrun_lines if line.strip()][-LINES_SHOWN:]
    return "\n".join(["Output of horovodrun:", *_quoted(last)])


def _quoted(lines: Sequence[str]) -> list[str]:
    return [f"  | {line}" for line in lines]


def _main_thread(lines: list[str]) -> list[str]:
    """Return the main thread's stack from faulthandler's output, where it is the last one."""
    starts = [at for at, line in enumerate(lines) if "(most recent call first)" in line]
    frames = itertools.takewhile(str.strip, lines[starts[-1] :]) if starts else []
    return list(frames)[:LINES_SHOWN]
