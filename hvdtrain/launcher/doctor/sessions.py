"""The launcher's end of the probes: one child process per host (ssh, or Python itself for this
machine), a protocol of lines, hosts in parallel, every wait bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, TypeVar

from hvdtrain.interpreter import module_argv, python_path
from hvdtrain.launcher.doctor import Facts, Finding
from hvdtrain.launcher.doctor.probe import LONGEST_LIFE_S, MARKER, STAY
from hvdtrain.launcher.doctor.ssh_failures import NoAnswer, explain, takes_small_packets
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.processes import has_ended
from hvdtrain.launcher.ssh import SshSetup, is_local

PROBE = module_argv("hvdtrain.launcher.doctor.probe")
# Variables that horovodrun passes to the workers.
HANDED_ON = ("LD_LIBRARY_PATH", "PATH", "XDG_CACHE_HOME")
LONGEST_LINE = 4_000_000
NOISE_KEPT = 20
STEP_S = 15.0  # for an answer to anything but the first request
END_S = 2.0  # for a process to end after its input is closed

Result = TypeVar("Result")


class ProbeSession:
    """A probe process on one host, until it is closed.

    `command`: another one, which is to run on a distant host and answers as the probe does.
    """

    def __init__(self, host: Host, ssh: SshSetup, command: Sequence[str] = ()) -> None:
        self.host, self._ssh = host, ssh
        self.local = is_local(host)
        self.noise: list[str] = []
        self._unread = b""
        self._closing = threading.Lock()
        self._error_text = ""
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        # The same as horovodrun's workers: this Python, by its path, with this PYTHONPATH.
        path = [f"{name}={value}" for name, value in python_path(os.environ).items()]
        remote = ["env", *path, *PROBE] if path else PROBE
        self._process = subprocess.Popen(
            PROBE if self.local else ssh.argv(host, command or remote),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C is the launcher's to handle
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.input, self.output = self._process.stdin, self._process.stdout
        self._arrival = select.poll()
        self._arrival.register(self.output, select.POLLIN)

    def ask(self, request: Mapping[str, Any], deadline: float) -> Facts:
        """Send a request and wait for its answer until `deadline` (of time.monotonic).

        Raises NoAnswer.
        """
        environment = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
        environment |= python_path(os.environ)
        self.send(json.dumps({"environment": environment, "local": self.local, **request}))
        return self.answer(deadline)

    def send(self, line: str) -> None:
        """Send a line; a process that has ended shows this in its answer."""
        with contextlib.suppress(OSError, ValueError):
            self.input.write(f"{line}\n".encode())
            self.input.flush()

    def answer(self, deadline: float) -> Facts:
        """Wait for the next answer until `deadline` (of time.monotonic). Raises NoAnswer."""
        while (line := self._line(deadline)) != MARKER:
            if line.strip() and len(self.noise) < NOISE_KEPT:
                self.noise.append(line[:200])
        answer = self._line(deadline)
        try:
            return Facts(**json.loads(answer))
        except (ValueError, TypeError):
            self.noise.append(answer[:200])
            raise self._no_answer() from None

    def ask_again(self, request: Mapping[str, Any]) -> Facts:
        """Return the answer within STEP_S; without values if there is none."""
        try:
            return self.ask(request, time.monotonic() + STEP_S)
        except NoAnswer as error:
            return Facts({}, {"answer": error.stderr.strip() or "none in time"})

    def answers_within(self, limit_s: float) -> bool:
        """Return whether the host answers; the session is closed if it does not."""
        try:
            self.ask({"do": "ping"}, time.monotonic() + limit_s)
        except NoAnswer:
            return False
        return True

    def ask_or_explain(
        self, request: Mapping[str, Any], limit_s: float, try_small_packets: bool = False
    ) -> Facts | Finding:
        """Return the answer within `limit_s`, or the finding that there is none.

        `try_small_packets`: see also whether the host is reached in these alone.
        """
        try:
            return self.ask(request, time.monotonic() + limit_s)
        except NoAnswer as error:
            small = try_small_packets and takes_small_packets(self.host, self._ssh, error)
            return explain(self.host, self._ssh.by_hand(self.host), error, small)

    def _line(self, deadline: float) -> str:
        """Return the next line of output; raise NoAnswer at its end, or at the deadline."""
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._arrival.poll(left_s * 1000):
                raise self._no_answer(timed_out=True)
            data = os.read(self.output.fileno(), 1 << 16)
            if not (data or self._unread) or len(self._unread) > LONGEST_LINE:
                raise self._no_answer()
            self._unread += data or b"\n"
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace").rstrip("\r")

    def _no_answer(self, timed_out: bool = False) -> NoAnswer:
        """Close the session; return the reason for the missing answer."""
        self.close(at_once=timed_out)
        exit_code = None if timed_out else self._process.returncode
        return NoAnswer(exit_code, self._error_text, self.noise)

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None or has_ended(self._process.pid)

    def close(self, at_once: bool = False) -> None:
        """Close the probe's input, which ends it; kill it if it does not end, or `at_once`.

        Its output stays open, since another thread may wait for a line.
        """
        process = self._process
        with self._closing:
            if process.returncode is not None:
                return
            with contextlib.suppress(OSError):
                self.input.close()
            deadline = time.monotonic() + (0.0 if at_once else END_S)
            # Not reaped before it is killed, so that its pid cannot be reused.
            while not has_ended(process.pid) and time.monotonic() < deadline:
                time.sleep(0.005)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # includes its children
            process.wait()
            self._stderr.seek(0)
            self._error_text = self._stderr.read(20_000).decode(errors="replace")
            self._stderr.close()


class HostSessions:
    """One session with each host, opened again only after it has ended."""

    def __init__(self, ssh: SshSetup, command: Sequence[str] = ()) -> None:
        """`command`: as of ProbeSession."""
        self._ssh, self._command = ssh, command
        self._sessions: dict[str, ProbeSession] = {}  # by host.address
        self._stayed_s = time.monotonic()

    def open(self, hosts: Sequence[Host]) -> dict[str, ProbeSession]:
        """Return a session with each host, by host.address."""
        for host in hosts:
            session = self._sessions.get(host.address)
            if session is None or session.has_ended:
                self.close([host.address])
                self._sessions[host.address] = ProbeSession(host, self._ssh, self._command)
        return {host.address: self._sessions[host.address] for host in hosts}

    def stay(self) -> None:
        """Keep the probes, which end by themselves LONGEST_LIFE_S after the last request."""
        if time.monotonic() - self._stayed_s > LONGEST_LIFE_S / 4:
            self._stayed_s = time.monotonic()
            for session in self._sessions.values():
                session.send(json.dumps({"do": STAY}))

    @property
    def addresses(self) -> list[str]:
        return [*self._sessions]

    def close(self, addresses: Collection[str], at_once: bool = False) -> None:
        """End the sessions with these hosts; `at_once`: they do not answer."""
        ended = {a: self._sessions.pop(a) for a in [*addresses] if a in self._sessions}
        on_all(lambda session: session.close(at_once), ended)
        for session in ended.values():
            session.output.close()

    def __enter__(self) -> HostSessions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close([*self._sessions])


@contextlib.contextmanager
def open_sessions(
    hosts: Sequence[Host], ssh: SshSetup, command: Sequence[str] = ()
) -> Iterator[dict[str, ProbeSession]]:
    """Run a probe, or `command`, on every host while the context lasts; yield the sessions by
    host.address.
    """
    with HostSessions(ssh, command) as sessions:
        yield sessions.open(hosts)


def on_all(
    work: Callable[[ProbeSession], Result], sessions: Mapping[str, ProbeSession]
) -> dict[str, Result]:
    """Run `work` for every host concurrently. On an exception (Ctrl-C), close all sessions."""
    with ThreadPoolExecutor(max_workers=max(1, len(sessions))) as threads:
        futures = {host: threads.submit(work, session) for host, session in sessions.items()}
        try:
            return {host: future.result() for host, future in futures.items()}
        except BaseException:  # closing ends the waits of the other threads
            for session in sessions.values():
                session.close()
            raise
