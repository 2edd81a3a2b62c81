"""The protocol between the launcher and its agents: lines of JSON over TCP, in both directions.

First each side proves that it has the job's token, by an HMAC over a random challenge of the other
side. Then each side sends at least one message a second, so that a cut network is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from typing import Any

Message = dict[str, Any]

ALIVE_EVERY_S = 1.0
LOST_AFTER_S = 10.0  # without a message from the other side
HANDSHAKE_TIMEOUT_S = 10.0
LONGEST_LINE_BYTES = 1 << 22
LONGEST_GREETING_BYTES = 1 << 14


class ConnectionLost(Exception):
    """The peer closed the connection, timed out, or sent an invalid message."""


class Connection:
    """A socket that sends and receives messages."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(LOST_AFTER_S)
        self._socket = sock
        self._arrived = b""
        self._unread: list[Message] = []
        self._sending = threading.Lock()
        self.heard_s = time.monotonic()

    def fileno(self) -> int:
        """Return the socket's file descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def is_silent(self) -> bool:
        """Return whether nothing has arrived for more than LOST_AFTER_S."""
        return time.monotonic() - self.heard_s > LOST_AFTER_S

    def send(self, message: Message) -> None:
        """Send a message; raise ConnectionLost if that fails."""
        try:
            with self._sending:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self, limit: int = LONGEST_LINE_BYTES) -> list[Message]:
        """Wait for data and return the messages completed by it, possibly none.

        Raises ConnectionLost when the peer has closed, or an unfinished line exceeds `limit` bytes.
        """
        if self._unread:
            messages, self._unread = self._unread, []
            return messages
        try:
            data = self._socket.recv(1 << 18)
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not data:
            raise ConnectionLost("closed by the other side")
        self.heard_s = time.monotonic()
        *lines, self._arrived = (self._arrived + data).split(b"\n")
        if len(self._arrived) > limit:
            raise ConnectionLost("unterminated line")
        return [_read(line) for line in lines]

    def receive_one(self, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Message:
        """Return one message of the handshake, in however many pieces it arrives.

        Further messages are kept for the next call, which the peer's next message triggers, at most
        ALIVE_EVERY_S later.
        """
        deadline = time.monotonic() + timeout_s
        while not (messages := self.receive(LONGEST_GREETING_BYTES)):
            if time.monotonic() > deadline:
                raise ConnectionLost("no greeting")
        self._unread = messages[1:]
        return messages[0]

    def close(self) -> None:
        self._socket.close()


def connect(address: tuple[str, int], token: str, introduction: Message) -> Connection:
    """Connect an agent to its launcher; raise ConnectionLost unless the peer has the token."""
    try:
        sock = socket.create_connection(address, timeout=HANDSHAKE_TIMEOUT_S)
    except OSError as error:
        raise ConnectionLost(f"{address[0]} port {address[1]}: {error}") from error
    connection = Connection(sock)
    try:
        challenge = str(connection.receive_one().get("challenge"))
        own = secrets.token_hex(16)
        proof = prove(token, "agent", challenge)
        connection.send(introduction | {"proof": proof, "challenge": own})
        if not _same(connection.receive_one().get("proof"), prove(token, "launcher", own)):
            raise ConnectionLost("the peer does not hold this job's token")
    except ConnectionLost:
        connection.close()
        raise
    return connection


def prove(token: str, side: str, challenge: str) -> str:
    """Return the proof of one side (`agent` or `launcher`): an HMAC that requires the token."""
    text = f"{side} {challenge}".encode("utf-8", "replace")
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def knows_token(token: str, challenge: str, introduction: Message) -> bool:
    """Check an agent's proof, on the launcher's side."""
    return _same(introduction.get("proof"), prove(token, "agent", challenge))


def _same(given: object, expected: str) -> bool:
    """Compare as bytes: for text that is not ASCII, hmac.compare_digest raises TypeError."""
    return hmac.compare_digest(str(given).encode("utf-8", "replace"), expected.encode())


def _read(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConnectionLost("not a message") from error
    if not isinstance(message, dict):
        raise ConnectionLost("not a message")
    return message


WAITING = "exchange"  # the phase in which a rank waits for others
OWN = ("data", "compute", "update")  # phases of a step that depend on this rank alone
STEPS_SHOWN = 10  # steps over which a rank's own time is averaged


class WorkerPulse:
    """The reader of one worker's pulse pipe (written by hvdtrain/pulse.py)."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._rest = b""
        self._figures: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._beat_s = time.monotonic()
        self._phase, self._step, self._began_s = "start", 0, 0.0
        self._busy_s = 0.0  # time of this step so far in the phases OWN
        self._busy_of_steps: list[float] = []
        self.speaker = 0  # id of the process that writes to the pipe, in its PID namespace

    def fileno(self) -> int:
        return self._fd

    def read(self) -> bool:
        """Read the available data; return False once the worker has closed its end."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._fd, 1 << 16)
            if not data:
                return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):
                self._take(line.decode("utf-8", "replace"))
        return True

    def take_figures(self) -> dict[str, Any]:
        """Return the newest figures and clear them."""
        figures, self._figures = self._figures, {}
        return figures

    def report(self) -> dict[str, Any]:
        """Return step, phase, seconds since the last beat, own time in a step, and how it ended."""
        steps = self._busy_of_steps
        return {
            "step": self._step,
            "phase": self._phase,
            "silent_s": round(time.monotonic() - self._beat_s, 3),
            "busy_s": round(sum(steps) / len(steps), 6) if steps else None,
            "speaks": self.speaker != 0,
        } | self._last

    def _take(self, line: str) -> None:
        kind, text = line[:1], line[1:]
        if kind == "+":
            self._beat_s = time.monotonic()
            phase, step, began = text.split(" ")
            self._change(phase, int(step), float(began))
        elif kind == "=":
            self._figures = dict(json.loads(text))
        elif kind == "!":
            self._last = dict(json.loads(text))
        elif kind == "?":
            self.speaker = int(text)
            self._beat_s = time.monotonic()

    def _change(self, phase: str, step: int, began_s: float) -> None:
        if self._phase in OWN and self._began_s:
            self._busy_s += began_s - self._began_s
        if step != self._step:
            if self._step:
                self._busy_of_steps = [*self._busy_of_steps, self._busy_s][-STEPS_SHOWN:]
            self._busy_s = 0.0
        self._phase, self._step, self._began_s = phase, step, began_s
