"""One ssh connection to each host, by which all its workers are started.

Horovod opens one for each worker, all at once. sshd refuses some of more than ten that have not
logged in yet (`MaxStartups 10:30:100` by default, sshd_config(5)), and a job of 32 workers a host
would need 32 logins. A part of Horovod (`horovod/runner/util`).
"""

import base64
import contextlib
import json
import os
import subprocess
import sys
import threading
import zlib
from collections import Counter
from pathlib import Path
from shlex import quote
from typing import IO, Any

from horovod.runner.common.util.safe_shell_exec import prefix_connection
from horovod.runner.util import host_starter, threads
from horovod.runner.util.any_shell import SSH_ENDED
from horovod.runner.util.remote import open_ssh_command

LOST = 255  # the exit code of ssh where the connection fails
KILL_AFTER_S = host_starter.GRACE_S + 10  # for the host to end its workers once it is asked to


class HostConnection:
    """The connection to a host, and the workers on it."""

    def __init__(self, host: str, port: int | None, identity_file: str | None) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._is_ready = self._is_lost = False
        self._codes: dict[int, int] = {}  # exit codes by rank
        self._pipes: dict[int, list[int]] = {}  # by rank, to write its stdout and stderr to
        self._words: list[str] = []  # of ssh, or of the login
        self._ssh = subprocess.Popen(
            f"exec {open_ssh_command(quote(starting_command()), host, port, identity_file)}",
            shell=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for horovodrun, which stops the workers
        )
        self._errors = threads.in_thread(self._read_errors)
        threads.in_thread(self._read_frames)

    def execute(
        self,
        command: str,
        index: int,
        stdout: Any,
        stderr: Any,
        events: list[threading.Event],
        prefix_output_with_timestamp: bool,
    ) -> int:
        """Run a worker, of rank `index`, to its end; return its exit code.

        The parameters are those of `horovod.runner.common.util.safe_shell_exec.execute`.
        """
        forwards, stop = [], threading.Event()
        for name, stream in (("stdout", stdout or sys.stdout), ("stderr", stderr or sys.stderr)):
            reading, writing = os.pipe()
            source = os.fdopen(reading, "rb", buffering=0)
            arguments = (source, stream, name, index, prefix_output_with_timestamp)
            forwards.append((writing, threads.in_thread(prefix_connection, arguments)))
        with self._lock:
            self._pipes[index] = [writing for writing, _ in forwards]
            self._changed.wait_for(lambda: self._is_ready or self._is_lost)
        self._order({"start": index, "command": command})
        for event in events:
            threads.on_event(event, self._stop, (index,), stop=stop, silent=True)
        with self._lock:
            self._changed.wait_for(lambda: index in self._codes or self._is_lost)
            code = self._codes.get(index)
        stop.set()
        for writing, thread in forwards:
            os.close(writing)
            thread.join()
        if code is None:
            code = self._ssh.wait() or LOST
            self._errors.join(1)
            said = self._words[0] if self._words else "it printed nothing"
            print(f"{SSH_ENDED}{self._host} ended with exit code {code}: {said}", flush=True)
        return code

    def close(self) -> None:
        """Close the connection: the host ends what is left; an ssh that hangs is killed."""
        assert self._ssh.stdin is not None
        with self._lock, contextlib.suppress(OSError):
            self._ssh.stdin.close()
        try:
            self._ssh.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self._ssh.kill()

    def _stop(self, rank: int) -> None:
        self._order({"stop": rank})
        timer = threading.Timer(KILL_AFTER_S, self._ssh.kill)  # where the host does not answer
        timer.daemon = True
        timer.start()

    def _order(self, order: dict[str, Any]) -> None:
        assert self._ssh.stdin is not None
        # If the connection is lost, the reader of frames says so.
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._ssh.stdin.write(json.dumps(order).encode() + b"\n")
            self._ssh.stdin.flush()

    def _read_errors(self) -> None:
        """Keep and print what ssh and the login write; the starter itself writes nothing there."""
        assert self._ssh.stderr is not None
        for line in self._ssh.stderr:
            if text := line.decode(errors="replace").strip():
                self._words.append(text)
                print(f"{self._host}: {text}", file=sys.stderr, flush=True)

    def _read_frames(self) -> None:
        """Hand out the output and the exit codes of the workers until the connection ends."""
        stream, header = self._ssh.stdout, host_starter.HEADER
        assert stream is not None
        skip_past(host_starter.READY, stream)
        self._note(is_ready=True)
        while len(head := stream.read(header.size)) == header.size:
            rank, kind, length = header.unpack(head)
            data = stream.read(length)
            if kind == host_starter.ENDED:
                self._codes[rank] = int(data)
                self._note()
            else:
                pipe = self._pipes[rank][kind - host_starter.STDOUT]
                while data:
                    data = data[os.write(pipe, data) :]
        self._note(is_lost=True)

    def _note(self, is_ready: bool = False, is_lost: bool = False) -> None:
        with self._lock:
            self._is_ready |= is_ready
            self._is_lost |= is_lost
            self._changed.notify_all()


def skip_past(mark: bytes, stream: IO[bytes]) -> None:
    """Read a stream up to and with a mark, or to its end."""
    read = b""
    while not read.endswith(mark):
        byte = stream.read(1)
        if not byte:
            return
        read = (read + byte)[-len(mark) :]


def starting_command() -> str:
    """Return the command that runs the starter: of characters that no login shell changes."""
    text = base64.b64encode(zlib.compress(Path(host_starter.__file__).read_bytes(), 9)).decode()
    code = f'import base64,zlib;exec(zlib.decompress(base64.b64decode("{text}")))'
    return f"env {quote(sys.executable)} -I -S -c '{code}'"


class HostConnections:
    """The connections to all hosts: each is open while a worker of its host runs."""

    def __init__(self, port: int | None = None, identity_file: str | None = None) -> None:
        self._port, self._identity_file = port, identity_file
        self._lock = threading.Lock()
        self._by_host: dict[str, HostConnection] = {}
        self._users: Counter[str] = Counter()

    def execute(self, host: str, command: str, **options: Any) -> int:
        """Run a worker on a host to its end (`HostConnection.execute`); return its exit code."""
        with self._lock:
            if not self._users[host]:
                self._by_host[host] = HostConnection(host, self._port, self._identity_file)
            self._users[host] += 1
            connection = self._by_host[host]
        try:
            return connection.execute(command, **options)
        finally:
            with self._lock:
                self._users[host] -= 1
                is_last = not self._users[host]
            if is_last:
                connection.close()
