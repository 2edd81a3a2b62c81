"""A launched job over its restarts: usable hosts, number of workers, and when to give up."""

import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.errors import EXIT_OK, PreflightError
from hvdtrain.launcher.absent import AbsentHosts
from hvdtrain.launcher.addresses import ANYWHERE, LOOPBACK
from hvdtrain.launcher.channel import Channel
from hvdtrain.launcher.doctor import Finding
from hvdtrain.launcher.doctor.examination import Examination, first_address, preflight, withdraw
from hvdtrain.launcher.doctor.sessions import HostSessions
from hvdtrain.launcher.horovodrun import (
    MASTER_ADDR,
    MASTER_PORT,
    agent_argv,
    horovodrun_argv,
    horovodrun_environment,
    mpi_prefix,
    search_path,
)
from hvdtrain.launcher.hosts import Host, take_slots
from hvdtrain.launcher.logs import Logs
from hvdtrain.launcher.processes import (
    StopRequests,
    allow_open_files,
    remove_sessions_of_dead_mpiruns,
    working_folders,
)
from hvdtrain.launcher.protocol import Orders, remove_ticket
from hvdtrain.launcher.ranks import Limits, Rank
from hvdtrain.launcher.retries import FIRST_PAUSE_S, LONGEST_PAUSE_S, Retries
from hvdtrain.launcher.ssh import SshOptions, SshSetup, is_local
from hvdtrain.launcher.supervise import Supervisor, Watch
from hvdtrain.launcher.timeline import Timeline
from hvdtrain.launcher.verdict import JobOutcome
from hvdtrain.log import counted, few
from hvdtrain.network import TOWARDS, address_of
from hvdtrain.pulse import COMMAND, JOB, RESTART, STOP_WITHIN

ANSWER_S = 1.5  # for a host of which a worker was lost
PREFLIGHT_TIMEOUT_S = 30.0
MASTER_PORTS = range(20000, 30000)  # below the ephemeral ports of operating systems


@dataclass(frozen=True)
class JobPlan:
    """The options of `hvdtrain launch`, resolved."""

    command: list[str]  # of each worker, at the first start
    restarted: list[str]  # the same at restarts: `train` with --resume auto
    workers: int
    min_workers: int
    hosts: tuple[Host, ...]
    controller: str
    interface: str | None
    ssh: SshOptions
    limits: Limits
    restarts: int
    settings: Mapping[str, str]
    verbose: bool
    typed: str  # the command line of `hvdtrain launch`, which workers record
    reason: str = ""  # why this controller; empty: the user has chosen it


class LaunchJob:
    """A job: its first start, and restarts after failures as often as the plan allows."""

    def __init__(
        self,
        plan: JobPlan,
        logs: Logs,
        stop: StopRequests,
        notify: Callable[[str], None],
        show: Callable[[Watch], None],
    ) -> None:
        """`notify` receives lines for the user; `show` the job's state, several times a second."""
        self._plan, self._logs, self._stop = plan, logs, stop
        self._notify, self._show = notify, show
        self._placed: Sequence[Host] = ()  # of the last start
        self._watch = Watch([])  # of the last start
        self._timeline, self._retries = Timeline(), Retries(plan.restarts)
        self._name = secrets.token_hex(8)

    def run(self) -> JobOutcome:
        """Return the last outcome; raise PreflightError if the first start fails its checks."""
        allow_open_files(200 + 5 * len(self._plan.hosts) + 2 * self._plan.workers)  # pipes, logs
        with (
            SshSetup(self._plan.hosts, self._plan.ssh) as self._ssh,
            HostSessions(self._ssh) as self._sessions,
            AbsentHosts(self._ssh, self._sessions) as self._absent,
        ):
            return self._run()

    def _run(self) -> JobOutcome:
        outcome = JobOutcome(EXIT_OK)
        for start in itertools.count():
            began_s = time.monotonic()
            try:
                outcome = self._start_when_fit(start) if start else self._start(0)
            except PreflightError as error:
                if not start:
                    raise
                return replace(outcome, text=f"{outcome.text}\nnot restarted: {error}")
            if not outcome.may_retry or (self._retries.are_used_up and not outcome.regroups):
                return outcome
            self._notify(outcome.text)
            if reason := self._prepare_restart(outcome, time.monotonic() - began_s):
                return replace(outcome, text=reason)
        raise AssertionError("without end")

    def _prepare_restart(self, outcome: JobOutcome, lasted_s: float) -> str | None:
        """Choose the hosts of the next start, and wait; return the reason if there is none."""
        if outcome.wrong_rank is not None and (left := self._leave_out(outcome.wrong_rank)):
            return f"not restarted: {left}"
        if reason := self._retries.note(outcome, lasted_s):
            return f"{outcome.text}\n{reason}"
        self._timeline.fail(self._watch.failed_s, self._watch.noticed_s)
        self._timeline.pass_("ended")
        if outcome.regroups:
            self._absent.take_back()
            return None
        pause_s = self._retries.pause_s
        pause = f" in {pause_s:g} s" if pause_s else ""
        self._notify(f"restart {self._retries.failures} of {self._plan.restarts}{pause}")
        self._go_on_without({self._host_of(rank) for rank in outcome.lost_ranks})
        if pause_s:
            time.sleep(pause_s)
        self._timeline.pass_("paused")
        return None

    def _go_on_without(self, lost: Collection[str]) -> None:
        """Leave out those of the hosts that do not answer, if the others suffice."""
        lost_hosts = [host for host in self._plan.hosts if host.address in lost]
        sessions = self._sessions.open(lost_hosts)
        silent = [h for h in lost_hosts if not sessions[h.address].answers_within(ANSWER_S)]
        without = {host.address for host in silent}.union(self._absent.addresses)
        slots = sum(host.slots for host in self._plan.hosts if host.address not in without)
        if slots < self._plan.min_workers:
            self._absent.take_back()  # the next start waits for them
        elif silent:
            self._absent.leave_out(silent)
            names = few([host.address for host in silent])
            self._notify(f"left out until it answers again: {names}")

    def _must_regroup(self) -> bool:
        """Return whether hosts answer again that the job, which can save, goes on without."""
        ranks, names = self._watch.ranks, few(self._absent.answering)
        saves = self._watch.saved is not None and all(rank.step > 0 for rank in ranks)
        needed = len(ranks) < self._plan.workers and not self._retries.are_used_up
        if not (names and saves and needed):
            return False
        self._notify(f"answers again: {names}; saving, to go on with it")
        return True

    def _host_of(self, rank: int) -> str:
        return [host.address for host in self._placed for _ in range(host.slots)][rank]

    def _leave_out(self, rank: int) -> str | None:
        """Leave the host of a rank out of all further starts; return the reason if none is left."""
        wrong = self._host_of(rank)
        others = tuple(host for host in self._plan.hosts if host.address != wrong)
        slots = sum(host.slots for host in others)
        if slots < self._plan.min_workers:
            return (
                f"without {wrong}, which computes wrongly, the hosts have "
                f"{counted(slots, 'slot')} (--min-np={self._plan.min_workers})"
            )
        self._plan = replace(self._plan, hosts=others)
        self._notify(f"left out: {wrong} computes wrongly, as rank {rank} has shown")
        return None

    def _start_when_fit(self, start: int) -> JobOutcome:
        """Restart the job; wait up to the start timeout for hosts that fail their checks."""
        deadline = time.monotonic() + self._plan.limits.start_timeout_s
        pause_s, reported = FIRST_PAUSE_S, ""
        while True:
            try:
                return self._start(start)
            except PreflightError as error:
                self._absent.take_back()  # one that is back may do
                if time.monotonic() + pause_s > deadline:
                    raise
                if str(error) != reported:
                    self._notify(f"waiting for hosts: {error}")
                reported = str(error)
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _start(self, start: int) -> JobOutcome:
        """Start the job once, on the hosts that pass their checks, and run it to its end."""
        plan = self._plan
        hosts = tuple(plan.hosts) if start else take_slots(plan.hosts, plan.workers)
        hosts = tuple(host for host in hosts if host.address not in self._absent.addresses)
        token, job = secrets.token_hex(32), f"{os.getpid()}-{secrets.token_hex(4)}"
        with ExitStack() as stack:
            address = channel_address(hosts, plan.interface)
            channel = Channel(address, token)
            stack.callback(channel.close)
            self._absent.channel = channel.port, address
            stack.callback(remove_ticket, job)
            report = self._check(hosts, channel.port, address, self._ticket(job, token, start))
            self._placed = ()
            stack.callback(self._withdraw, job, hosts, report, channel)
            plan = self._place(hosts, report, start)
            channel.workers, self._placed = plan.workers, plan.hosts
            names = ", ".join(f"{host.address}:{host.slots}" for host in plan.hosts)
            self._logs.note(f"start {start + 1}: {counted(plan.workers, 'worker')} on {names}")
            self._timeline.pass_("checked")
            self._watch = Watch([Rank(number) for number in range(plan.workers)], restarts=start)
            supervisor = Supervisor(
                command=job_argv(plan, self._ssh, job),
                environment=horovodrun_environment(os.environ, plan.settings, self._ssh.path)
                | master_of(self._plan.interface, plan.hosts, report),
                channel=channel,
                logs=self._logs,
                limits=plan.limits,
                watch=self._watch,
                requested=lambda: list(self._stop.numbers),
                show=self._follow,
                may_restart=not self._retries.are_used_up,
                must_regroup=self._must_regroup,
            )
            stack.callback(remove_sessions_of_dead_mpiruns)
            with self._stop.noted():
                return supervisor.run()

    def _check(
        self, hosts: Sequence[Host], port: int, address: str, ticket: Mapping[str, Any]
    ) -> Examination:
        """Check the hosts, and leave the ticket on them."""
        slots, sessions = slots_by_host(hosts, self._plan.workers), self._sessions.open(hosts)
        report = preflight(sessions, self._ssh, port, ticket, PREFLIGHT_TIMEOUT_S, address, slots)
        if not self._plan.restarts:
            self._sessions.close([*sessions])
        return report

    def _follow(self, watch: Watch) -> None:
        self._show(watch)
        self._sessions.stay()
        if line := self._timeline.follow(watch.ranks, self._retries.furthest):
            self._notify(line)

    def _withdraw(
        self, job: str, hosts: Sequence[Host], report: Examination, channel: Channel
    ) -> None:
        """Remove the ticket from the hosts where no agent has joined, which would have done so."""
        joined = {self._host_of(rank) for rank in channel.admitted}
        left = [host for host in hosts if host.address in report.facts.keys() - joined]
        withdraw(self._sessions.open([host for host in left if not is_local(host)]), job)

    def _ticket(self, job: str, token: str, start: int) -> dict[str, Any]:
        # `python` is the one that runs hvdtrain. On nodes, the probe adds their own environment.
        here = {} if self._plan.ssh.hub else {**os.environ, "PATH": search_path(os.environ)}
        orders = Orders(
            token=token,
            command=self._plan.restarted if start else self._plan.command,
            folders=working_folders(),
            hostname=socket.gethostname(),
            environment={
                **here,
                **self._plan.settings,
                RESTART: str(start),
                JOB: self._name,
                COMMAND: self._plan.typed,
                STOP_WITHIN: f"{self._plan.limits.stop_within_s:g}",
            },
            furthest=self._retries.furthest,
        )
        on_nodes, keeps = bool(self._plan.ssh.hub), self._plan.restarts > 0
        text = orders.as_text()
        return {"job": job, "ticket": text, "own_environment": on_nodes, "keeps": keeps}

    def _place(self, hosts: Sequence[Host], report: Examination, start: int) -> JobPlan:
        """Return the plan of this start: the first needs every host, a restart --min-np slots."""
        plan = self._plan
        problems = [item for item in report.findings if item.status == "fail"]
        for item in report.findings:
            if item.status == "warn":
                self._notify(f"warning: {explain(item)}")
        if problems and not start:
            raise PreflightError("\n".join(map(explain, problems)))
        unfit = {item.host for item in problems}
        fit = [host for host in hosts if host.address not in unfit and "" not in unfit]
        slots = sum(host.slots for host in fit)
        if slots < plan.min_workers:
            raise PreflightError(
                f"--min-np={plan.min_workers}: the usable hosts have {counted(slots, 'slot')}\n"
                + "\n".join(map(explain, problems))
            )
        for item in problems:
            self._notify(f"left out: {explain(item)}")
        if problems:
            self._absent.leave_out([host for host in hosts if host not in fit])
        workers, interface = min(plan.workers, slots), plan.interface or report.interface
        return replace(plan, workers=workers, hosts=take_slots(fit, workers), interface=interface)


def slots_by_host(hosts: Sequence[Host], workers: int) -> dict[str, int]:
    """Return how many workers each host gets if all hosts are fit."""
    most = min(workers, sum(host.slots for host in hosts))
    return {host.address: host.slots for host in take_slots(hosts, most)}


def channel_address(hosts: Sequence[Host], interface: str | None) -> str:
    """Return the address on which to listen for agents: loopback, one interface's, or all."""
    if all(is_local(host) for host in hosts):
        return LOOPBACK
    if interface is None:
        return ANYWHERE
    if address := address_of(interface):
        return address
    raise PreflightError(f"--network-interface={interface}: has no IPv4 address here")


def explain(finding: Finding) -> str:
    """Format a finding as one paragraph."""
    where = f"{finding.host}: " if finding.host else ""
    return f"{where}{finding.check}: {finding.text}{'. ' if finding.fix else ''}{finding.fix}"


def master_of(chosen: str | None, hosts: Sequence[Host], report: Examination) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT: the first host as the others reach it, a random port.

    Unless the user has `chosen` an interface, workers also use theirs towards this address.
    """
    address = first_address(hosts, report.facts)
    towards = {} if chosen or len(hosts) == 1 else {TOWARDS: address}
    return {MASTER_ADDR: address, MASTER_PORT: str(secrets.choice(MASTER_PORTS)), **towards}


def job_argv(plan: JobPlan, ssh: SshSetup, job: str) -> list[str]:
    """Return the command that starts a job's agents on the hosts of a plan."""
    return horovodrun_argv(
        agent_argv(job),
        plan.workers,
        plan.controller,
        [(ssh.name_of(host), host.slots) for host in plan.hosts],
        interface=plan.interface,
        start_timeout_s=max(1, round(plan.limits.start_timeout_s)),
        verbose=plan.verbose,
        prefix=mpi_prefix(),
    )
