"""The launcher's end of the channel: the agents that have proven themselves, and what they say."""

from __future__ import annotations

import contextlib
import secrets
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
    knows_token,
    prove,
)
from hvdtrain.listener import Door

BACKLOG = 1024
AWAY_S = 3.0  # between two polls
MOST_STRANGERS = 128  # besides all agents of the job
PATIENCE_S = 0.5  # with those who have not answered, once there are more


class Channel:
    """Listens for the agents of one job."""

    def __init__(self, address: str, token: str) -> None:
        """`address`: on which to listen; 0.0.0.0: on all that this machine has."""
        self._token = token
        self.workers = 0  # how many may come
        self._listener = socket.create_server((address, 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._door = Door(self._listener, self._drop, PATIENCE_S)
        self._watched = False  # whether the selector looks at the listener
        self._strangers: dict[Connection, tuple[str, float]] = {}  # challenge, since when
        self._agents: dict[int, Connection] = {}
        self._polled_s = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._keep_alive, name="keep-alive", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def connected(self) -> list[int]:
        """The ranks whose agents are there."""
        return sorted(self._agents)

    def poll(
        self,
        timeout_s: float,
        hear: Callable[[int, Message], None],
        lose: Callable[[int], None],
    ) -> None:
        """Take what comes: `hear` gets rank and message, `lose` the rank whose agent is gone."""
        self._watch_door()
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._accept()
            elif key.data in self._strangers:
                self._admit(key.data, hear)
            else:
                self._receive(key.data, hear, lose)
        now = time.monotonic()
        for stranger, (_, since_s) in list(self._strangers.items()):
            if now - since_s > HANDSHAKE_TIMEOUT_S:
                self._drop(stranger)
        away_s, self._polled_s = now - self._polled_s, now
        for rank, agent in list(self._agents.items()):
            if away_s > AWAY_S:  # it was us who did not listen: behind a full pipe, say
                agent.heard_s = now
            elif agent.is_silent:
                self._drop(agent)
                lose(rank)

    def tell(self, message: Message, rank: int | None = None) -> None:
        """To one rank's agent, or to all; who is gone is noticed when reading."""
        agents = dict(self._agents)
        for number in sorted(agents) if rank is None else [rank]:
            if number in agents:
                with contextlib.suppress(ConnectionLost):
                    agents[number].send(message)

    def _keep_alive(self) -> None:
        """Agents hear from us also while the launcher waits for its terminal or its disk."""
        while not self._closed.wait(ALIVE_EVERY_S):
            self.tell({"alive": True})

    def close(self) -> None:
        self._closed.set()
        for connection in [*self._strangers, *self._agents.values()]:
            connection.close()
        self._listener.close()
        self._selector.close()

    def _watch_door(self) -> None:
        """Look at the listener, but not while nobody is let in: it would wake us all the time."""
        if self._watched == (self._door.rest_s == 0):
            return
        self._watched = not self._watched
        if self._watched:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        else:
            self._selector.unregister(self._listener)

    def _accept(self) -> None:
        sock = self._door.accept(MOST_STRANGERS + self.workers)
        if sock is None:
            return
        try:
            connection = Connection(sock)
            challenge = secrets.token_hex(16)
            connection.send({"challenge": challenge})
        except (OSError, ConnectionLost):  # hung up already
            sock.close()
            return
        self._strangers[connection] = (challenge, time.monotonic())
        self._door.enter(connection)
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _admit(self, connection: Connection, hear: Callable[[int, Message], None]) -> None:
        """A stranger has answered the challenge, or not."""
        challenge, _ = self._strangers[connection]
        try:
            messages = connection.receive(LONGEST_GREETING_BYTES)
            if not messages:
                return
            introduction = messages[0]
            rank = int(introduction.get("rank", -1))
            proven = knows_token(self._token, challenge, introduction)
            if not proven or rank in self._agents or not 0 <= rank < self.workers:
                raise ConnectionLost("a stranger")
            own = str(introduction.get("challenge"))
            connection.send({"proof": prove(self._token, "launcher", own)})
        except (ConnectionLost, TypeError, ValueError, OverflowError):
            self._drop(connection)
            return
        del self._strangers[connection]
        self._door.leave(connection)
        self._agents[rank] = connection
        hear(rank, {"hello": introduction})

    def _receive(
        self,
        connection: Connection,
        hear: Callable[[int, Message], None],
        lose: Callable[[int], None],
    ) -> None:
        rank = next((r for r, agent in self._agents.items() if agent is connection), None)
        if rank is None:
            return  # dropped while this round was under way
        try:
            messages = connection.receive()
        except ConnectionLost:
            self._drop(connection)
            lose(rank)
            return
        for message in messages:
            hear(rank, message)

    def _drop(self, connection: Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        self._strangers.pop(connection, None)
        self._door.leave(connection)
        for rank, agent in list(self._agents.items()):
            if agent is connection:
                del self._agents[rank]
        connection.close()
