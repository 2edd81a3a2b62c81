"""The launcher's end of the channel: connections of authenticated agents and their messages."""

import contextlib
import secrets
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable

from hvdtrain.launcher.protocol import (
    ALIVE_EVERY_S,
    HANDSHAKE_TIMEOUT_S,
    LONGEST_GREETING_BYTES,
    Connection,
    ConnectionLost,
    Message,
    is_proof,
    prove,
)
from hvdtrain.network import GuardedListener

BACKLOG = 1024
MOST_STRANGERS = 128  # unauthenticated connections, besides all agents of the job
PATIENCE_S = 0.5  # for an unanswered challenge, once there are more

OnMessage = Callable[[int, Message], None]  # receives rank and message
OnLost = Callable[[int], None]  # receives the rank whose connection is lost


def _boot_time_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while the machine sleeps


class Channel:
    """A listening socket for the agents of one job, and their connections."""

    def __init__(self, address: str, token: str, port: int = 0) -> None:
        """Listen on `address`; 0.0.0.0 means all addresses of this machine, 0 any free port."""
        self._token = token
        self.workers = 0  # how many agents may connect
        self.admitted: set[int] = set()  # the ranks whose agents have ever connected
        self._listener = socket.create_server((address, port), backlog=BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._guard = GuardedListener(self._listener, self._drop, PATIENCE_S)
        self._strangers: dict[Connection, tuple[str, float]] = {}  # challenge, since when
        self._agents: dict[int, Connection] = {}
        self._ranks: dict[Connection, int] = {}
        self._beat_s, self._longest_pause_s = _boot_time_s(), 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._keep_alive, name="keep-alive", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def connected(self) -> list[int]:
        """Return the ranks whose agents are connected."""
        return sorted(self._agents)

    def poll(self, timeout_s: float, on_message: OnMessage, on_lost: OnLost) -> None:
        """Accept connections and read messages for at most `timeout_s` of waiting."""
        # A listener is never ready to write: at rest, it must not wake the selector all the time.
        events = selectors.EVENT_WRITE if self._guard.rest_s else selectors.EVENT_READ
        self._selector.modify(self._listener, events)
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._accept()
            elif key.data in self._strangers:
                self._admit(key.data, on_message)
            else:
                self._receive(key.data, on_message, on_lost)
        now = time.monotonic()
        for stranger, (_, since_s) in list(self._strangers.items()):
            if now - since_s > HANDSHAKE_TIMEOUT_S:
                self._drop(stranger)
        for rank, agent in list(self._agents.items()):
            if agent.is_silent(now):
                self._dismiss(agent)
                self._drop(agent)
                on_lost(rank)

    def send(self, message: Message, rank: int | None = None) -> None:
        """Send to one rank's agent, or to all. A lost connection is noticed when reading."""
        agents = dict(self._agents)
        for number in sorted(agents) if rank is None else [rank]:
            if number in agents:
                with contextlib.suppress(ConnectionLost):
                    agents[number].send(message)

    def _keep_alive(self) -> None:
        """Send `alive` messages also while the launcher waits for its terminal or its disk."""
        while not self._closed.wait(ALIVE_EVERY_S):
            self._longest_pause_s = self.longest_pause_s
            self._beat_s = _boot_time_s()
            self.send({"alive": True})

    @property
    def longest_pause_s(self) -> float:
        """Return the longest time in which this process sent nothing: it, or its machine, slept."""
        return max(self._longest_pause_s, _boot_time_s() - self._beat_s)

    def close(self) -> None:
        self._closed.set()
        for connection in [*self._strangers, *self._agents.values()]:
            connection.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        sock = self._guard.accept(MOST_STRANGERS + self.workers)
        if sock is None:
            return
        try:
            connection = Connection(sock)
            challenge = secrets.token_hex(16)
            connection.send({"challenge": challenge})
        except (OSError, ConnectionLost):  # closed by the peer already
            sock.close()
            return
        self._strangers[connection] = (challenge, time.monotonic())
        self._guard.enter(connection)
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _admit(self, connection: Connection, on_message: OnMessage) -> None:
        """Check the answer to the challenge; drop the connection unless it is right."""
        challenge, _ = self._strangers[connection]
        try:
            messages = connection.receive(LONGEST_GREETING_BYTES)
            if not messages:
                return
            introduction = messages[0]
            rank = int(introduction.get("rank", -1))
            if not is_proof(introduction.get("proof"), self._token, "agent", challenge):
                self.turn_away(connection.peer)
                raise ConnectionLost("not an agent of this job")
            agent_challenge = str(introduction.get("challenge"))
            answer = {"proof": prove(self._token, "launcher", agent_challenge)}
            refusal = self.refusal(rank, introduction)
            connection.send(answer | (refusal or {}))
            if refusal:
                raise ConnectionLost(refusal["refused"])
        except (ConnectionLost, TypeError, ValueError, OverflowError):
            self._drop(connection)
            return
        del self._strangers[connection]
        self._guard.leave(connection)
        self._agents[rank], self._ranks[connection] = connection, rank
        self.admitted.add(rank)
        on_message(rank, {"hello": introduction})

    def turn_away(self, address: str) -> None:
        """Note that a peer which does not have the token was turned away."""

    def refusal(self, rank: int, introduction: Message) -> Message | None:
        """Return why a peer that has the token is not admitted (`Refused`); None if it is."""
        if rank in self._agents or not 0 <= rank < self.workers:
            return {"refused": "not an agent of this job"}
        return None

    def _receive(self, connection: Connection, on_message: OnMessage, on_lost: OnLost) -> None:
        rank = self._ranks.get(connection)
        if rank is None:
            return  # dropped earlier in this round
        try:
            messages = connection.receive()
        except ConnectionLost:
            self._drop(connection)
            on_lost(rank)
            return
        for message in messages:
            if "hello" not in message:  # which is of a new connection alone
                on_message(rank, message)

    def _dismiss(self, agent: Connection) -> None:
        """Let an agent that is suspended, or cut off, end its worker at once when it goes on."""
        poller = select.poll()  # select() takes no descriptor above 1023
        poller.register(agent, select.POLLOUT)
        if poller.poll(0):
            with contextlib.suppress(ConnectionLost):
                agent.send({"kill": True})
                agent.send({"leave": True})

    def _drop(self, connection: Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        self._strangers.pop(connection, None)
        self._guard.leave(connection)
        if (rank := self._ranks.pop(connection, None)) is not None:
            self._agents.pop(rank)
        connection.close()
