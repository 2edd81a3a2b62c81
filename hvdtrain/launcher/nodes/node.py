"""The end of a node other than node rank 0: it connects, and runs what it is sent."""

import os
import queue
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import IO, Any

from hvdtrain.errors import PreflightError, Stopped
from hvdtrain.launcher.nodes import CODING, FIRST_NODE, SECRET, Rendezvous
from hvdtrain.launcher.processes import spared_by_slurm
from hvdtrain.launcher.protocol import (
    ALIVE_EVERY_S,
    Connection,
    ConnectionLost,
    Message,
    Refused,
    Unproven,
    connect,
)
from hvdtrain.launcher.worker import CANNOT_START, become_subreaper, kill_descendants
from hvdtrain.pulse import STOP_SIGNALS

RETRY_S = 1.0
REST_S = 1.0  # for output that processes left behind may still write
END_S = 45.0  # for workers to save and end once node rank 0 is lost; the starter takes 30 s
CHUNK_BYTES = 1 << 16


class NodeCommand:
    """A command that node rank 0 has sent, with its input and output."""

    def __init__(
        self, command: str, environment: dict[str, str], send: Callable[..., None]
    ) -> None:
        """`send` receives what to answer, as keywords."""
        self._send = send
        self._input: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            spared_by_slurm(["/bin/sh", "-c", command]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=environment,
            start_new_session=True,  # a Ctrl-C is for this process, which passes it on
        )
        for work in (self._write_input, self._wait):
            threading.Thread(target=work, daemon=True).start()

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def write(self, data: bytes) -> None:
        """Give the command input; no bytes mean its end."""
        self._input.put(data)

    def _write_input(self) -> None:
        stream = self.process.stdin
        assert stream is not None
        with suppress(OSError):  # it reads no more
            while data := self._input.get():
                stream.write(data)
                stream.flush()
        with suppress(OSError):
            stream.close()

    def _wait(self) -> None:
        """Send the output, then the exit code."""
        streams = {"output": self.process.stdout, "errors": self.process.stderr}
        readers = [
            threading.Thread(target=self._read, args=item, daemon=True) for item in streams.items()
        ]
        for reader in readers:
            reader.start()
        code = self.process.wait()
        for reader in readers:
            reader.join(REST_S)
        self.write(b"")
        self._send(ended=code if code >= 0 else 128 - code)

    def _read(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            while data := os.read(stream.fileno(), CHUNK_BYTES):
                self._send(**{name: data.decode(CODING)})


class JoinedNode:
    """A node, until the job is over."""

    def __init__(
        self, rendezvous: Rendezvous, limit_s: float, notify: Callable[[str], None]
    ) -> None:
        """`limit_s`: how long to wait for node rank 0. `notify` receives lines for the user."""
        self._rendezvous, self._limit_s, self._notify = rendezvous, limit_s, notify
        self._connection: Connection | None = None
        self._commands: dict[int, NodeCommand] = {}
        self._signals: list[int] = []
        self._stopped = 0
        os.environ.pop(SECRET, None)  # not for what is started here

    def run(self) -> int:
        """Run what node rank 0 sends; return the exit code of the job.

        Raises PreflightError if it cannot be reached, or refuses this node, and Stopped.
        """
        become_subreaper()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note_signal)
        try:
            while True:
                self._connection = self._connect()
                self._notify(f"{self._name} has joined {self._rendezvous.address}")
                try:
                    return self._serve(self._connection)
                except ConnectionLost as error:
                    self._notify(f"the connection to node rank 0 is lost: {error}")
                finally:
                    self._end_commands()
        finally:
            kill_descendants()

    @property
    def _name(self) -> str:
        return f"node rank {self._rendezvous.rank} of {self._rendezvous.nodes}"

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _connect(self) -> Connection:
        """Connect to node rank 0, which may be started later."""
        there, deadline = self._rendezvous, time.monotonic() + self._limit_s
        hello = {"rank": there.rank, "hostname": socket.gethostname(), "job": there.job}
        self._notify(f"{self._name}: connecting to {there.address}, for {self._limit_s:.0f} s")
        while True:
            if self._signals:
                raise Stopped(self._signals[0])
            try:
                return connect((there.host, there.port), there.secret, hello)
            except Unproven as error:
                raise PreflightError(
                    f"node rank 0 at {there.address} does not have the secret of this node "
                    f"({error}): give the same to all nodes"
                ) from None
            except Refused as error:
                reason = f"node rank 0 at {there.address} refuses this node: {error}"
                if not error.may_retry:
                    raise PreflightError(reason) from None
            except ConnectionLost as error:
                reason = f"node rank 0 cannot be reached within {self._limit_s:.0f} s: {error}"
            if time.monotonic() > deadline:
                raise PreflightError(reason)
            time.sleep(RETRY_S)

    def _serve(self, connection: Connection) -> int:
        """Answer messages until the job is over; return its exit code."""
        alive_s = 0.0
        while True:
            now = time.monotonic()
            if now - alive_s >= ALIVE_EVERY_S:
                alive_s = now
                connection.send({"alive": True})
            while self._stopped < len(self._signals):
                connection.send({"stop": self._signals[self._stopped]})
                self._stopped += 1
            if select.select([connection], [], [], 0.1)[0]:
                for message in connection.receive():
                    if "over" in message:
                        text = f": {message['text']}" if message.get("text") else ""
                        self._notify(f"the job has ended with exit code {message['over']}{text}")
                        return int(message["over"])
                    self._handle(connection, message)
            if connection.is_silent(time.monotonic()):
                raise ConnectionLost("no message from there")

    def _handle(self, connection: Connection, message: Message) -> None:
        match message:
            case {"start": number, "command": command}:

                def send(**answer: Any) -> None:
                    with suppress(ConnectionLost):  # which the reader notices
                        connection.send({"to": number, **answer})

                running = {n: each for n, each in self._commands.items() if each.runs}
                environment = os.environ | {FIRST_NODE: connection.peer}
                try:
                    self._commands = running | {number: NodeCommand(command, environment, send)}
                except OSError as error:  # no process could be made
                    send(errors=f"{error}\n")
                    send(ended=CANNOT_START)
            case {"input": data, "of": number}:
                if number in self._commands:
                    self._commands[number].write(data.encode(CODING))

    def _end_commands(self) -> None:
        """End the input of all commands, which ends them; kill those that do not end in time."""
        if self._connection:
            self._connection.close()
        for command in self._commands.values():
            command.write(b"")
        deadline = time.monotonic() + END_S
        for command in self._commands.values():
            with suppress(subprocess.TimeoutExpired):
                command.process.wait(max(0.0, deadline - time.monotonic()))
        for command in self._commands.values():
            if command.runs:
                with suppress(ProcessLookupError):
                    os.killpg(command.process.pid, signal.SIGKILL)
        self._commands.clear()


def run_node(rendezvous: Rendezvous, limit_s: float, notify: Callable[[str], None]) -> int:
    """Run this node until the job is over; return the exit code of the job."""
    return JoinedNode(rendezvous, limit_s, notify).run()
