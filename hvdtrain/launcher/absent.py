"""Hosts that a job goes on without: tried in the background, until they answer and are fit."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from hvdtrain.launcher.doctor import failed
from hvdtrain.launcher.doctor.examination import preflight
from hvdtrain.launcher.doctor.sessions import HostSessions
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.ssh import SshSetup

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # between two tries; doubled if an answer was no use
CHECK_S = 15.0
TICK_S = 0.2


class AbsentHosts:
    """The absent hosts of one job."""

    def __init__(self, ssh: SshSetup, sessions: HostSessions) -> None:
        self._ssh, self._sessions = ssh, sessions
        self._hosts: dict[str, Host] = {}  # by address
        self._answered: set[str] = set()
        self._pauses_s: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._try_all, name="absent hosts", daemon=True)

    def leave_out(self, hosts: Collection[Host]) -> None:
        """Go on without these hosts; end what is connected with them."""
        self._sessions.close([host.address for host in hosts], at_once=True)
        for host in hosts:
            self._answered.discard(host.address)
            pause_s = self._pauses_s.get(host.address, FIRST_PAUSE_S / 2)
            self._pauses_s[host.address] = min(2 * pause_s, LONGEST_PAUSE_S)
            self._hosts[host.address] = host
        if self._hosts and not self._thread.is_alive():
            self._thread.start()

    def take_back(self) -> None:
        """Forget them all: the next start tries each of them."""
        self._hosts.clear()
        self._answered.clear()

    @property
    def addresses(self) -> Collection[str]:
        return [*self._hosts]

    @property
    def answering(self) -> list[str]:
        """Return the addresses of those that could be used again."""
        return sorted(self._answered)

    def _try_all(self) -> None:
        due_s: dict[str, float] = {}
        while not self._over.wait(TICK_S):
            for address, host in [*self._hosts.items()]:
                now_s = time.monotonic()
                if address in self._answered or now_s < due_s.get(address, 0.0):
                    continue
                if self._is_fit(host) and address in self._hosts:
                    self._answered.add(address)
                due_s[address] = time.monotonic() + self._pauses_s[address]

    def _is_fit(self, host: Host) -> bool:
        with HostSessions(self._ssh) as sessions:
            slots = {host.address: host.slots}
            report = preflight(sessions.open([host]), self._ssh, 0, None, CHECK_S, slots=slots)
        return not failed(report.findings)

    def __enter__(self) -> AbsentHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
