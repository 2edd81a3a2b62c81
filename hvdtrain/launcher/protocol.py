"""The protocol between the launcher and its agents: a ticket on each host, then messages over TCP.

A ticket is a file with the launcher's address and a job's orders. Only the user can read it; what
horovodrun passes on would show in `ps`.

Messages are lines of JSON, in both directions. First each side proves that it has the job's token,
by an HMAC over a random challenge of the other side. Then each side sends at least one message a
second, so that a cut network is noticed.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain import network
from hvdtrain.errors import PreflightError
from hvdtrain.launcher.processes import own_passwd_entry

Message = dict[str, Any]

ALIVE_EVERY_S = 1.0
LOST_AFTER_S = 10.0  # without a message from the other side
AWAY_S = 3.0  # between two looks at a connection
HANDSHAKE_TIMEOUT_S = 10.0
LONGEST_LINE_BYTES = 1 << 22
LONGEST_GREETING_BYTES = 1 << 14
STALE_S = 86400.0  # agents read their ticket at the start


class ConnectionLost(Exception):
    """The peer closed the connection, timed out, or sent an invalid message."""


class Unproven(ConnectionLost):
    """The peer has not proven that it has the token, or hung up at the proof of this side."""


class Refused(ConnectionLost):
    """The peer has the token, and does not admit this side."""

    def __init__(self, reason: str, may_retry: bool) -> None:
        super().__init__(reason)
        self.may_retry = may_retry


class Connection:
    """A socket that sends and receives messages."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(LOST_AFTER_S)
        self._socket = sock
        self._arrived = b""
        self._unread: list[Message] = []
        self._sending = threading.Lock()
        self._heard_s = self._looked_s = time.monotonic()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def peer(self) -> str:
        """Return the address of the other side; empty once it is disconnected."""
        try:
            return str(self._socket.getpeername()[0])
        except OSError:
            return ""

    def is_silent(self, now: float) -> bool:
        """Return whether the other side is lost, by its silence; to be called all the time."""
        if now - self._looked_s > AWAY_S:  # suspended, or blocked on a full pipe: nothing was read
            self._heard_s = now
        self._looked_s = now
        return now - self._heard_s > LOST_AFTER_S

    def send(self, message: Message) -> None:
        """Send a message; raise ConnectionLost if that fails."""
        try:
            with self._sending:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self, limit: int = LONGEST_LINE_BYTES) -> list[Message]:
        """Return the messages completed by new data; an unfinished one has up to `limit` bytes."""
        if messages := self.take_unread():
            return messages
        try:
            data = self._socket.recv(1 << 18)
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not data:
            raise ConnectionLost("closed by the other side")
        self._heard_s = time.monotonic()
        *lines, self._arrived = (self._arrived + data).split(b"\n")
        if len(self._arrived) > limit:
            raise ConnectionLost("unterminated line")
        return [_read(line) for line in lines]

    def take_unread(self) -> list[Message]:
        """Return the messages that came with the last one of the handshake: no new data need follow
        them.
        """
        messages, self._unread = self._unread, []
        return messages

    def receive_one(self) -> Message:
        """Return one message of the handshake; keep further ones for `take_unread`, or `receive`,
        which the peer's next message triggers, at most ALIVE_EVERY_S later.
        """
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        while not (messages := self.receive(LONGEST_GREETING_BYTES)):
            if time.monotonic() > deadline:
                raise ConnectionLost("no greeting")
        self._unread = messages[1:]
        return messages[0]

    def close(self) -> None:
        self._socket.close()


def connect(address: tuple[str, int], token: str, introduction: Message) -> Connection:
    """Connect an agent, or a node, to its launcher.

    Raises ConnectionLost: Unproven unless both have the token, Refused if it is not admitted.
    """
    try:
        sock = socket.create_connection(address, timeout=HANDSHAKE_TIMEOUT_S)
    except OSError as error:
        raise ConnectionLost(f"{address[0]} port {address[1]}: {error}") from error
    connection = Connection(sock)
    try:
        challenge = str(connection.receive_one().get("challenge"))
        agent_challenge = secrets.token_hex(16)
        proof = prove(token, "agent", challenge)
        connection.send(introduction | {"proof": proof, "challenge": agent_challenge})
        answer = _answer(connection)
        if not is_proof(answer.get("proof"), token, "launcher", agent_challenge):
            raise Unproven("the peer does not hold this job's token")
        if "refused" in answer:
            raise Refused(str(answer["refused"]), bool(answer.get("may_retry")))
    except ConnectionLost:
        connection.close()
        raise
    return connection


def _answer(connection: Connection) -> Message:
    """Return the answer to a proof. Raises Unproven if the peer hangs up instead."""
    try:
        return connection.receive_one()
    except ConnectionLost as error:
        if isinstance(error.__cause__, TimeoutError):
            raise
        raise Unproven(str(error)) from error


def prove(token: str, side: str, challenge: str) -> str:
    """Return the proof of one side (`agent` or `launcher`): an HMAC that requires the token."""
    text = challenge.encode("utf-8", "replace")
    return network.prove(token.encode(), f"{side} ".encode(), text).hex()


def is_proof(proof: object, token: str, side: str, challenge: str) -> bool:
    """Check a proof, as bytes: for text that is not ASCII, hmac.compare_digest raises TypeError."""
    expected = prove(token, side, challenge).encode()
    return hmac.compare_digest(str(proof).encode("utf-8", "replace"), expected)


def _read(line: bytes) -> Message:
    with contextlib.suppress(ValueError, RecursionError):
        message = json.loads(line)
        if isinstance(message, dict):
            return message
    raise ConnectionLost("not a message")


def ticket_paths(job: str, environment: Mapping[str, str]) -> list[Path]:
    """Return the possible paths of a job's ticket, best first.

    There are several, since workers get the launcher's HOME and XDG_CACHE_HOME, which may not be
    valid on this host. The host's name separates hosts that share a home directory.
    """
    entry = own_passwd_entry()
    home = entry.pw_dir if entry else "/"
    cache = Path(environment.get("XDG_CACHE_HOME", ""))
    caches = [cache] if cache.is_absolute() else []
    caches += [Path(environment.get("HOME", home), ".cache"), Path(home, ".cache")]
    name = f"{job}.{socket.gethostname()}"
    return [folder / "hvdtrain" / "launch" / name for folder in dict.fromkeys(caches)]


def write_ticket(content: Mapping[str, Any], environment: Mapping[str, str]) -> Path:
    """Write `content` (with its "job") to the first writable path; raise OSError if none is."""
    problems = []
    for path in ticket_paths(content["job"], environment):
        _remove_stale(path.parent)
        try:
            _write_private(path, json.dumps(content))
            return path
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
    raise OSError("; ".join(problems))


def read_ticket(job: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Return what the probe wrote on this host; None without a private file of this user."""
    for path in ticket_paths(job, environment):
        with contextlib.suppress(OSError, ValueError):
            status = path.stat()
            if status.st_uid == os.getuid() and not status.st_mode & 0o077:
                content = json.loads(path.read_text("utf-8"))
                return content if isinstance(content, dict) else None
    return None


def remove_ticket(job: str) -> None:
    for path in ticket_paths(job, os.environ):
        with contextlib.suppress(OSError):
            path.unlink()


def _remove_stale(folder: Path) -> None:
    """Remove old tickets, left by agents that were killed: they hold users' environments."""
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.parent.chmod(0o700)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=".ticket-")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Orders:
    """The orders of one job's agents: the worker command and where to run it."""

    token: str  # shared by the launcher and the agents
    command: list[str]  # of each worker
    folders: list[str]  # paths of the working directory of the workers, the best first
    hostname: str  # of the machine where launch was called
    environment: dict[str, str]  # the user's, there
    furthest: int = 0  # step of the starts before, after which the first one is reported at once

    @property
    def folder(self) -> str:
        """Return the working directory by the first of its paths that this host has."""
        return next((folder for folder in self.folders if Path(folder).is_dir()), self.folders[-1])

    @property
    def ring_token(self) -> str:
        """Return the workers' own secret, from which the token cannot be derived."""
        return hmac.digest(self.token.encode(), b"ring", "sha256").hex()

    def as_text(self) -> str:
        return json.dumps(asdict(self))


class HostOrders(NamedTuple):
    """The orders of a job as one host has them."""

    orders: Orders
    launcher: tuple[str, int]  # address and port
    login: dict[str, str] | None  # the login's variables (`horovodrun.login_of`)
    job_folder: str | None  # see hvdtrain/launcher/job_folder.py; None: the job is not restarted


def read_orders(job: str) -> HostOrders:
    """Return the orders in this host's ticket. Raises PreflightError without it."""
    content = read_ticket(job)
    if content is None:
        raise PreflightError(
            f"job {job} has left no orders on {socket.gethostname()}. Agents are started by "
            "`hvdtrain launch` alone"
        )
    address, port = content["channel"]
    orders = Orders(**json.loads(content["ticket"]))
    return HostOrders(orders, (address, port), content.get("login"), content.get("job_folder"))
