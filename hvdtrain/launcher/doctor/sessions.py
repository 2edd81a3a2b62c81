"""The launcher's end of the probes: one child process per host (ssh, or Python itself for this
machine), a protocol of lines, hosts in parallel, every wait bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from hvdtrain.launcher.doctor.facts import Facts
from hvdtrain.launcher.doctor.probe import HANDED_ON, MARKER
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.processes import has_ended
from hvdtrain.launcher.ssh import SshSetup, is_local

PROBE = ("-m", "hvdtrain.launcher.doctor.probe")
MOST_LINES = 100_000  # of noise
LONGEST_LINE = 4_000_000
NOISE_KEPT = 20
END_S = 2.0  # for a process to end after its input is closed

Result = TypeVar("Result")


class NoAnswer(Exception):
    """Failure of a probe to answer, with its exit code and output."""

    def __init__(self, exit_code: int | None, stderr: str, noise: Sequence[str]) -> None:
        """`exit_code` None: timed out."""
        super().__init__(stderr)
        self.exit_code = exit_code
        self.stderr = stderr
        self.noise = tuple(noise)


@dataclass(frozen=True)
class Reply:
    """An answer, with the times of the request and of its arrival by this machine's clock."""

    facts: Facts
    asked: float
    answered: float


class ProbeSession:
    """A probe process on one host, until it is closed."""

    def __init__(self, host: Host, ssh: SshSetup) -> None:
        self.host = host
        self.local = is_local(host)
        self.noise: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._closed = False
        self._closing = threading.Lock()
        self._error_text = ""
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            self._command(ssh),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C is the launcher's to handle
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _command(self, ssh: SshSetup) -> list[str]:
        if self.local:
            return [sys.executable, *PROBE]
        # The same as horovodrun's workers: this Python, by its path, with this PYTHONPATH.
        path = os.environ.get("PYTHONPATH")
        environment = ["env", f"PYTHONPATH={path}"] if path else []
        return ssh.argv(self.host, [*environment, sys.executable, *PROBE])

    def ask(self, request: Mapping[str, Any], deadline: float) -> Reply:
        """Send a request and wait for its answer until `deadline` (of time.monotonic).

        Raises NoAnswer.
        """
        environment = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
        asked = time.time()
        line = json.dumps({"environment": environment, "local": self.local, **request}) + "\n"
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended; the reason is read below
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        answer = self._next_answer(deadline)
        answered = time.time()
        try:
            return Reply(Facts.from_json(json.loads(answer)), asked, answered)
        except (ValueError, AttributeError):
            self.noise.append(answer[:200])
            raise self._no_answer(deadline) from None

    def _next_answer(self, deadline: float) -> str:
        while (line := self._line(deadline)) != MARKER:
            if line.strip() and len(self.noise) < NOISE_KEPT:
                self.noise.append(line[:200])
        return self._line(deadline)

    def _line(self, deadline: float) -> str:
        try:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise self._no_answer(deadline) from None
        if line is None:
            raise self._no_answer(deadline)
        return line

    def _no_answer(self, deadline: float) -> NoAnswer:
        """Return the reason for the missing answer: the process has ended, or timed out."""
        in_time = time.monotonic() < deadline
        self.close()
        code = self._process.returncode
        return NoAnswer(code if in_time else None, self._error_text, self.noise)

    def _read(self) -> None:
        output = self._process.stdout
        assert output is not None
        with contextlib.suppress(OSError, ValueError):  # closed under it
            for _ in range(MOST_LINES):
                line = output.readline(LONGEST_LINE)
                if not line:
                    break
                self._lines.put(line.decode(errors="replace").rstrip("\r\n"))
        self._lines.put(None)

    def close(self) -> None:
        """Close the probe's input, which ends it; kill it if it does not end."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._end()

    def _end(self) -> None:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        _wait_unreaped(process.pid, END_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # includes its children
        process.wait()
        self._reader.join(END_S)
        process.stdout.close()
        self._stderr.seek(0)
        self._error_text = self._stderr.read(20_000).decode(errors="replace")
        self._stderr.close()


def _wait_unreaped(pid: int, seconds: float) -> None:
    """Wait for a child to end without reaping it, so that its pid cannot be reused."""
    deadline = time.monotonic() + seconds
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.005)


@contextlib.contextmanager
def open_sessions(hosts: Sequence[Host], ssh: SshSetup) -> Iterator[dict[str, ProbeSession]]:
    """Run a probe on every host while the context lasts; yield the sessions by host.address."""
    sessions: dict[str, ProbeSession] = {}
    try:
        for host in hosts:
            sessions[host.address] = ProbeSession(host, ssh)
        yield sessions
    finally:
        on_all(ProbeSession.close, sessions)


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
