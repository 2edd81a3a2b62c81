"""Supervision of one start of a job: horovodrun, its agents, and the response to failures.

    starting -> running -> all ended with exit code 0 ----------------------------> release
                   |-> a rank fails, is lost, or falls silent --> grace --> kill --> release
                   |-> a signal to stop --> the workers save and end --------------> release

horovodrun runs until the agents receive "leave", so all decisions are made here, the same for both
controllers.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain import cgroups
from hvdtrain.launcher.channel import Channel
from hvdtrain.launcher.logs import Logs
from hvdtrain.launcher.processes import descendants, kill_all, spared_by_slurm, start_of
from hvdtrain.launcher.protocol import LOST_AFTER_S, Message
from hvdtrain.launcher.ranks import Limits, Rank, silent_ranks
from hvdtrain.launcher.verdict import Evidence, JobOutcome, judge

TICK_S = 0.1
SHORTEST_TURN_S = 0.02  # each looks at all ranks, of which hundreds may report every second
PEERS_GRACE_S = 3.0  # for other ranks to end, and for rank 0 to write its summary
RESTART_GRACE_S = 0.3  # the same, if it is known which rank has failed, and a restart follows
HOROVODRUN_GRACE_S = 20.0  # least time for workers to save once horovodrun is ending
STACKS_WAIT_S = 2.0
NEXT_START_S = 0.5  # before the next start, for horovodrun of this one to end
LEAVE_WAIT_S = 10.0  # for horovodrun to end after "leave"
STOP_WAIT_S = 3.0  # then, for it to end after SIGTERM
SSH_WAIT_S = 0.5  # then, for each ssh that it started to end
MPIRUN_WAIT_S = 15.0  # the same for mpirun, which ends its daemons, on a busy machine
KILL_WAIT_S = 2.0  # then, for these to end once they are killed


@dataclass
class Watch:
    """The state of one start of a job, for the view."""

    ranks: list[Rank]
    figures: dict[str, Any] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)
    restarts: int = 0
    failed_s: float = 0.0  # time of the last sign of life before the failure that has ended it
    noticed_s: float = 0.0  # when it was noticed

    @property
    def saved(self) -> int | None:
        """Return the step of the newest checkpoint, 0 without one; None: it keeps none itself."""
        step: int | None = self.figures.get("saved", self.figures.get("before", {}).get("steps"))
        return step


class Supervisor:
    """The supervisor of one start of a job."""

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        channel: Channel,
        logs: Logs,
        limits: Limits,
        watch: Watch,
        requested: Callable[[], list[int]],
        show: Callable[[Watch], None],
        may_restart: bool = False,
        must_regroup: Callable[[], bool] = lambda: False,
    ) -> None:
        """`command` starts horovodrun; `requested` returns the signals to stop received so far.
        `may_restart`: whether a failure is followed by another start. `must_regroup` returns
        whether the job is to save and to start again, with other hosts.
        """
        self._may_restart, self._must_regroup = may_restart, must_regroup
        self._command, self._environment = command, environment
        self._channel, self._logs, self._limits = channel, logs, limits
        self._watch, self._requested, self._show = watch, requested, show
        self._ranks = watch.ranks
        self._signals_passed_on, self._all_here = 0, False
        self._broadcasts: list[Message] = []
        self._evidence = Evidence(watch.ranks, limits, logs.folder)
        logs.shown_ranks = None

    def run(self) -> JobOutcome:
        """Start horovodrun, supervise it, end all its processes, and return the outcome."""
        horovodrun = subprocess.Popen(
            spared_by_slurm(self._command),
            env=self._environment,
            cwd="/",  # exists on every host; agents change to the job's folder
            stdin=subprocess.DEVNULL,
            stdout=self._logs.horovodrun,
            stderr=self._logs.horovodrun,
            start_new_session=True,
        )
        try:
            while not self._is_over(horovodrun):
                self._turn()
            self._watch.noticed_s = time.monotonic()
            self._watch.failed_s = self._watch.noticed_s - self._silence_s()
            self._settle()
        finally:
            self._release(horovodrun)
        self._evidence.horovodrun_lines = self._logs.horovodrun_lines()
        self._evidence.requested = self._requested()
        self._evidence.saved = self._watch.saved
        self._evidence.log_folder = self._logs.folder
        return judge(self._evidence)

    def _broadcast(self, message: Message) -> None:
        """Send to all agents, including those that connect later."""
        self._broadcasts.append(message)
        self._channel.send(message)

    def _turn(self) -> None:
        began_s = time.monotonic()
        self._channel.poll(TICK_S, self._receive, self._lose)
        self._show(self._watch)
        if self._all_here:  # agents that join are let in one a turn
            time.sleep(max(0.0, began_s + SHORTEST_TURN_S - time.monotonic()))

    def _is_over(self, horovodrun: subprocess.Popen[bytes]) -> bool:
        """Return whether the job has ended or must be ended; record the cause."""
        if all(rank.state == "ended" for rank in self._ranks) or self._pass_on_signals():
            return True
        if any(rank.has_failed for rank in self._ranks):
            return True
        if horovodrun.poll() is not None:
            self._evidence.blame("horovodrun")
        if self._evidence.cause == "horovodrun":
            return True
        late = time.monotonic() - self._watch.started_s > self._limits.start_timeout_s
        if late and any(rank.state == "waiting" for rank in self._ranks):
            self._evidence.blame("start")
            return True
        if self._must_regroup():
            self._evidence.blame("regroup")
            self._broadcast({"signal": signal.SIGTERM})
            return True
        if silent := silent_ranks(self._ranks, self._limits):
            self._evidence.find_standstill(silent)
        return bool(silent)

    def _silence_s(self) -> float:
        """Return for how long a failure was not noticed, as far as the launcher can know."""
        if self._evidence.silent:
            return self._evidence.silent[0].silent_s
        lost = [rank.heard_s for rank in self._ranks if rank.state == "lost"]
        return time.monotonic() - min(lost) if lost else 0.0

    def _settle(self) -> None:
        """Give the ranks time to end by themselves, then kill the rest."""
        if self._evidence.cause == "silence":
            self._ask_for_stacks()
        else:
            grace_s = self._peers_grace_s()
            if self._signals_passed_on or self._evidence.cause == "regroup":
                grace_s = self._limits.stop_within_s
            if self._evidence.cause == "horovodrun":  # the workers still run and may save
                self._broadcast({"signal": signal.SIGTERM})
                self._wait_for_all(HOROVODRUN_GRACE_S)
                if all(rank.state != "lost" for rank in self._ranks):  # else none can save
                    grace_s = self._limits.stop_within_s - HOROVODRUN_GRACE_S
            self._wait_for_all(grace_s)
        for rank in self._ranks:
            rank.put_down = rank.state == "running"
        self._broadcast({"kill": True})
        self._wait_for_all(PEERS_GRACE_S, patient=False)

    def _peers_grace_s(self) -> float:
        """Return how long other ranks may go on after a failure."""
        failed = [rank for rank in self._ranks if rank.has_failed]
        is_clear = any(not rank.is_victim for rank in failed)
        if self._may_restart and is_clear and all(rank.speaks for rank in self._ranks):
            return RESTART_GRACE_S
        return PEERS_GRACE_S

    def _wait_for_all(self, limit_s: float, patient: bool = True) -> None:
        """Wait until no worker runs; if `patient`, until a second signal at the latest."""
        deadline = time.monotonic() + limit_s
        while any(rank.state == "running" for rank in self._ranks) and time.monotonic() < deadline:
            self._turn()
            if self._pass_on_signals() > 1 and patient:
                return

    def _release(self, horovodrun: subprocess.Popen[bytes]) -> None:
        """Release the agents, and end horovodrun; before a restart, do not wait for its end."""
        self._broadcast({"kill": True})
        self._broadcast({"leave": True})
        deadline = time.monotonic() + LEAVE_WAIT_S
        well = all(rank.state == "ended" for rank in self._ranks)
        while self._channel.connected and time.monotonic() < deadline:
            self._channel.poll(TICK_S, self._receive, self._lose)
        alone_s = LEAVE_WAIT_S if well else 0.0
        family_s = MPIRUN_WAIT_S if "--mpi" in self._command else SSH_WAIT_S
        limits_s = (alone_s, family_s)
        ending = threading.Thread(target=_end, args=(horovodrun, *limits_s), name="horovodrun")
        ending.start()  # not a daemon: the launcher does not end before
        may_go_on = self._may_restart and not self._requested()
        ending.join(NEXT_START_S if may_go_on else None)

    def _pass_on_signals(self) -> int:
        """Send the first signal to the workers; return the number of signals received."""
        requested = self._requested()
        # Workers that save for a regroup would take a second signal for impatience.
        if requested and not self._signals_passed_on and self._evidence.cause != "regroup":
            # Workers do not handle SIGHUP, the signal of a closed terminal.
            stop_signal = signal.SIGTERM if requested[0] == signal.SIGHUP else requested[0]
            self._broadcast({"signal": stop_signal})
            within = f"within {self._limits.stop_within_s:g} s"
            self._logs.note(f"{signal.Signals(requested[0]).name}: workers asked to stop {within}")
        self._signals_passed_on = len(requested)
        return self._signals_passed_on

    def _ask_for_stacks(self) -> None:
        self._logs.note("Python stacks, requested by the watchdog:")
        self._evidence.stacks = {}
        self._channel.send({"stacks": True})
        deadline = time.monotonic() + STACKS_WAIT_S
        while time.monotonic() < deadline:
            self._turn()

    def _receive(self, number: int, message: Message) -> None:
        rank = self._ranks[number]
        match message:
            case {"hello": hello}:
                rank.host, rank.state = str(hello.get("host") or hello.get("hostname")), "running"
                rank.spoke_s = time.monotonic()
                self._logs.open(number)
                for broadcast in self._broadcasts:
                    self._channel.send(broadcast, number)
                self._all_here = all(other.state != "waiting" for other in self._ranks)
                if self._all_here:
                    self._channel.send({"all_here": True})
            case {"output": output}:
                rank.spoke_s = time.monotonic()
                lines = self._logs.write(number, output)
                rank.keep(lines)
                if self._evidence.stacks is not None:
                    self._evidence.stacks.setdefault(number, []).extend(lines)
            case {"alive": report}:
                self._take(rank, report)
            case {"horovodrun_signal": _}:
                self._evidence.blame("horovodrun")
            case {"figures": figures}:
                self._watch.figures |= figures
            case {"ended": exit_code}:
                if "pulse" in message:
                    self._take(rank, message["pulse"])
                rank.memory = cgroups.explain_kills(**message.get("memory", {}))
                rank.end(int(exit_code))
                rank.keep(self._logs.finish(number))
                if rank.has_failed:
                    self._evidence.blame("a rank")
                    # The same traceback of others is for their logs.
                    self._logs.shown_ranks = self._logs.shown_ranks or frozenset({0, number})

    def _take(self, rank: Rank, report: dict[str, Any]) -> None:
        rank.take(report)
        if rank.number == 0 and rank.folder:
            self._logs.follow(rank.folder)

    def _lose(self, number: int) -> None:
        rank = self._ranks[number]
        if rank.state == "running":
            rank.state, rank.ended_s = "lost", time.monotonic()
            if self._channel.longest_pause_s > LOST_AFTER_S:
                self._evidence.own_pause_s = self._channel.longest_pause_s
            rank.keep(self._logs.finish(number))
            self._evidence.blame("a rank")


def _end(horovodrun: subprocess.Popen[bytes], alone_s: float, family_s: float) -> None:
    """Wait for horovodrun to end by itself; then end its process group, and whatever it started.

    The ssh to a host that is gone has a session of its own, and stays; so do the semaphores that
    horovodrun shares with the parent of this ssh.

    `alone_s`: for horovodrun to end by itself; `family_s`: then, for what it started.
    """
    family: dict[int, str] = {}
    for number, limit_s in ((0, alone_s), (signal.SIGTERM, STOP_WAIT_S)):
        family |= {pid: start_of(pid) for pid in descendants(horovodrun.pid)}
        with contextlib.suppress(ProcessLookupError):
            os.killpg(horovodrun.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            horovodrun.wait(limit_s)
    horovodrun.kill()
    kill_at_s = time.monotonic() + family_s
    while left := [pid for pid, start in family.items() if start and start_of(pid) == start]:
        if time.monotonic() > kill_at_s:
            kill_all(left, kill_at_s)
        if time.monotonic() > kill_at_s + KILL_WAIT_S:
            break
        time.sleep(TICK_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(horovodrun.pid, signal.SIGKILL)
    horovodrun.wait()
