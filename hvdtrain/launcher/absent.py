"""Hosts that a job goes on without: tried in the background, until they answer and are fit."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hvdtrain.launcher.doctor.examination import preflight
from hvdtrain.launcher.doctor.sessions import HostSessions
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.ssh import SshSetup

SILENT_PAUSE_S = 2.0  # until a host that did not answer is tried again
UNFIT_PAUSE_S, LONGEST_PAUSE_S = 1.0, 600.0  # one that answered, but is unfit; doubled each time
CHECK_S = 15.0
TICK_S = 0.2
END_S = 5.0


@dataclass
class AbsentHost:
    """A host, and when it is to be tried again."""

    host: Host
    is_fit: bool = False
    due_s: float = 0.0
    pause_s: float = UNFIT_PAUSE_S

    def put_off(self, pause_s: float | None = None) -> None:
        """Try it again after this pause, by default a longer one each time."""
        self.is_fit = False
        self.due_s = time.monotonic() + (self.pause_s if pause_s is None else pause_s)
        if pause_s is None:
            self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)


class AbsentHosts:
    """The absent hosts of one job."""

    def __init__(self, ssh: SshSetup, sessions: HostSessions) -> None:
        """`sessions`: those of the job."""
        self._ssh, self._sessions, self._trial = ssh, sessions, HostSessions(ssh)
        self._hosts: dict[str, AbsentHost] = {}  # by address
        self._remembered: dict[str, AbsentHost] = {}  # those that were absent before
        self.channel = 0, ""  # port and address at which the launcher listens, to be reached
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._try_all, name="absent hosts", daemon=True)

    def leave_out(self, hosts: Collection[Host]) -> None:
        """Go on without these hosts; end what is connected with them."""
        self._sessions.close([host.address for host in hosts], at_once=True)
        for host in hosts:
            absent = self._remembered.setdefault(host.address, AbsentHost(host))
            absent.put_off()
            self._hosts[host.address] = absent
        if self._hosts and not self._thread.is_alive():
            self._thread.start()

    def take_back(self) -> None:
        """Forget that they are absent: the next start tries each of them."""
        self._hosts = {}

    @property
    def addresses(self) -> Collection[str]:
        return [*self._hosts]

    @property
    def answering(self) -> list[str]:
        """Return the addresses of those that could be used again."""
        return sorted(address for address, absent in self._hosts.items() if absent.is_fit)

    def _try_all(self) -> None:
        while not self._over.wait(TICK_S):
            now_s = time.monotonic()
            due = [a for a in self._hosts.values() if not a.is_fit and a.due_s <= now_s]
            if due:
                try:
                    self._try(due)
                except Exception:  # such as too many open files: they stay absent
                    for absent in due:
                        absent.put_off()

    def _try(self, absent_hosts: Sequence[AbsentHost]) -> None:
        port, address = self.channel
        with self._trial as sessions:
            hosts = [absent.host for absent in absent_hosts]
            slots = {host.address: host.slots for host in hosts}
            report = preflight(
                sessions.open(hosts), self._ssh, port, None, CHECK_S, address, slots, thorough=False
            )
        unfit = {finding.host for finding in report.findings if finding.status == "fail"}
        for absent in absent_hosts:
            if absent.host.address not in report.facts:
                absent.put_off(SILENT_PAUSE_S)
            elif unfit & {absent.host.address, ""}:
                absent.put_off()
            else:
                absent.is_fit = True

    def __enter__(self) -> AbsentHosts:
        return self

    def __exit__(self, *_: object) -> None:
        """End the trial in progress."""
        self._over.set()
        deadline = time.monotonic() + END_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._trial.close(self._trial.addresses, at_once=True)
            self._thread.join(TICK_S)
