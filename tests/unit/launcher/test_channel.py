"""The launcher's channel over real sockets: who is let in, what is received, and who counts as
lost.

Every wait has an end (LIMIT_S), after which the test fails.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hvdtrain.launcher import channel as channel_module
from hvdtrain.launcher import protocol
from hvdtrain.launcher.channel import Channel
from hvdtrain.launcher.protocol import Connection, Message, connect, prove

TOKEN = "the job's"
LIMIT_S = 20.0
LOCALHOST = "127.0.0.1"
ROUND_S = 0.02

pytestmark = pytest.mark.timeout(60)


class Launcher:
    """A channel for 3 workers, and what has been received from them."""

    def __init__(self) -> None:
        self.channel = Channel(LOCALHOST, TOKEN)
        self.channel.workers = 3
        self.address = (LOCALHOST, self.channel.port)
        self.heard: list[tuple[int, Message]] = []
        self.lost: list[int] = []

    def poll_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, (self.heard, self.lost)
            self.poll()

    def poll(self) -> None:
        self.channel.poll(ROUND_S, lambda *heard: self.heard.append(heard), self.lost.append)

    def let_in(self, rank: int, **more: object) -> Connection:
        """An agent, connected from a thread of its own as the two sides wait for each other."""
        joined: list[Connection] = []
        introduction = {"rank": rank, **more}
        thread = threading.Thread(
            target=lambda: joined.append(connect(self.address, TOKEN, introduction))
        )
        thread.start()
        self.poll_until(lambda: not thread.is_alive())
        thread.join()
        return joined[0]

    def is_refused(self, stranger: socket.socket) -> bool:
        """Whether the launcher hangs up on it."""
        stranger.setblocking(False)
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            self.poll()
            try:
                if not stranger.recv(1 << 16):
                    return True
            except BlockingIOError:
                continue
            except ConnectionError:
                return True
        return False


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.channel.close()


def call(launcher: Launcher) -> socket.socket:
    return socket.create_connection(launcher.address, timeout=LIMIT_S)


def read_challenge(launcher: Launcher, stranger: socket.socket) -> str:
    stranger.settimeout(ROUND_S)
    deadline = time.monotonic() + LIMIT_S
    data = b""
    while not data.endswith(b"\n"):
        assert time.monotonic() < deadline
        launcher.poll()
        try:
            data += stranger.recv(1 << 16)
        except TimeoutError:
            continue
    return str(json.loads(data)["challenge"])


def introduce(challenge: str, rank: object, token: str = TOKEN) -> bytes:
    """What an agent answers to a challenge."""
    proof = prove(token, "agent", challenge)
    return json.dumps({"rank": rank, "proof": proof, "challenge": "c"}).encode() + b"\n"


def test_both_sides_speak(launcher: Launcher) -> None:
    """Fails when an agent is not let in, is taken for another rank, when a message of either side
    is lost, changed, or arrives out of order, or when one rank receives what is meant for another.
    """
    agents = [launcher.let_in(rank, host=f"h{rank}") for rank in (2, 0)]
    assert [(r, m["hello"]["host"]) for r, m in launcher.heard] == [(2, "h2"), (0, "h0")]
    assert launcher.channel.connected == [0, 2]
    launcher.heard.clear()
    said = [{"number": number, "text": "ä\udc80\n" * number} for number in range(50)]
    for message in said:
        agents[0].send(message)
    launcher.poll_until(lambda: len(launcher.heard) == len(said))
    assert launcher.heard == [(2, message) for message in said]
    launcher.channel.send({"to": "one"}, 0)
    launcher.channel.send({"to": "all"})
    launcher.channel.send({"to": "nobody"}, 1)
    for agent, expected in zip(agents, (["all"], ["one", "all"]), strict=True):
        heard: list[str] = []
        while len(heard) < len(expected):
            heard += [message["to"] for message in agent.receive() if "to" in message]
        assert heard == expected
        agent.close()


def test_greetings_come_in_pieces(launcher: Launcher) -> None:
    """Fails when a message must come in one piece, in the greeting or after it."""
    with call(launcher) as agent:
        parts = introduce(read_challenge(launcher, agent), 1)
        for part in (parts[:1], parts[1:40], parts[40:]):
            agent.sendall(part)
            for _ in range(3):
                launcher.poll()
        launcher.poll_until(lambda: launcher.channel.connected == [1])
        for part in (b'{"out', b'put": "a\\n"}\n{"x"', b": 1}\n"):
            agent.sendall(part)
            for _ in range(3):
                launcher.poll()
        launcher.poll_until(lambda: len(launcher.heard) == 3)
    assert [message for _, message in launcher.heard[1:]] == [{"output": "a\n"}, {"x": 1}]


@pytest.mark.parametrize(
    "spoken",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\xff\xfe\n",
        b"[]\n",
        b"17\n",
        b"[" * 100_000 + b"\n",
        b"{}\n",
        b'{"rank": 0, "proof": "\\ud800"}\n',
        b'{"rank": 0, "proof": "\xc3\xa4", "challenge": "\\ud800"}\n',
        b'{"rank": 1e999, "proof": "a"}\n',
        b"x" * (1 << 20),
    ],
    ids=range(10),  # not the bytes themselves
)
def test_garbage_is_refused(launcher: Launcher, spoken: bytes) -> None:
    """Fails when a stranger's first words (a port scan, a browser, or malice) are let in, or end
    the launcher in an exception, which would end the job.
    """
    with call(launcher) as stranger:
        threading.Thread(target=_send, args=(stranger, spoken)).start()
        assert launcher.is_refused(stranger)
    assert not launcher.heard and not launcher.lost


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError:
        return


@pytest.mark.parametrize("rank", [3, -1, "x", None, [0], 1e999, {"a": 1}])
def test_ranks_that_cannot_be_are_refused(launcher: Launcher, rank: object) -> None:
    """Fails when an agent that has the token, but claims a rank that the job has not, is let in,
    or ends the launcher.
    """
    with call(launcher) as agent:
        agent.sendall(introduce(read_challenge(launcher, agent), rank))
        assert launcher.is_refused(agent)
    assert not launcher.heard


def test_the_wrong_token_is_refused(launcher: Launcher) -> None:
    """Fails when another job's agent gets in: by its token, or by an answer that was recorded
    before.
    """
    with call(launcher) as other, call(launcher) as replaying:
        other.sendall(introduce(read_challenge(launcher, other), 0, token="another job's"))
        assert launcher.is_refused(other)
        read_challenge(launcher, replaying)
        replaying.sendall(introduce("an older challenge", 0))
        assert launcher.is_refused(replaying)
    assert not launcher.heard


def test_a_silent_stranger_is_disconnected(launcher: Launcher, monkeypatch) -> None:
    """Fails when connections that never answer are kept, or keep agents from being let in."""
    with call(launcher) as stranger:
        launcher.let_in(0).close()
        monkeypatch.setattr(channel_module, "HANDSHAKE_TIMEOUT_S", 0.3)
        assert launcher.is_refused(stranger)
    assert not [rank for rank, _ in launcher.heard if rank]


def test_a_rank_comes_once(launcher: Launcher) -> None:
    """Fails when a second agent of a rank displaces the first, or its end counts as the rank's."""
    first = launcher.let_in(1)
    with call(launcher) as second:
        second.sendall(introduce(read_challenge(launcher, second), 1))
        assert launcher.is_refused(second)
    assert not launcher.lost and len(launcher.heard) == 1
    first.send({"still": "here"})
    launcher.poll_until(lambda: launcher.heard[-1] == (1, {"still": "here"}))
    first.close()
    launcher.poll_until(lambda: launcher.lost == [1])
    launcher.let_in(1).close()


@pytest.mark.parametrize("last", [b"", b"no message\n", b"[]\n", b"x" * ((1 << 22) + 9)])
def test_an_agent_is_lost_once(launcher: Launcher, last: bytes) -> None:
    """Fails when an agent that hangs up, or sends what is no message, is not reported lost, or is
    reported twice.
    """
    with call(launcher) as agent:
        agent.sendall(introduce(read_challenge(launcher, agent), 2))
        launcher.poll_until(lambda: launcher.channel.connected == [2])
        sender = threading.Thread(target=_send, args=(agent, last))
        sender.start()
        if not last:
            agent.shutdown(socket.SHUT_WR)
        launcher.poll_until(lambda: launcher.lost == [2])
        sender.join(LIMIT_S)
    for _ in range(5):
        launcher.poll()
    assert launcher.lost == [2] and launcher.channel.connected == []
    launcher.channel.send({"leave": True})


def test_silence_is_loss(launcher: Launcher, monkeypatch) -> None:
    """Fails when a host whose network is cut (no word, no end of connection) is not noticed, when
    one that does speak is lost with it, or when an agent that was only suspended would find no
    order to end its worker: it would stay until the time to save is over.
    """
    silent, speaking = launcher.let_in(0), launcher.let_in(1)
    monkeypatch.setattr(protocol, "LOST_AFTER_S", 2.0)
    monkeypatch.setattr(protocol, "AWAY_S", 0.5)  # in proportion

    def one_is_lost() -> bool:
        speaking.send({"alive": {}})
        return bool(launcher.lost)

    launcher.poll_until(one_is_lost)
    assert launcher.lost == [0] and launcher.channel.connected == [1]
    kept: list[Message] = []
    while {"leave": True} not in kept:
        kept += silent.receive()
    assert kept[-2:] == [{"kill": True}, {"leave": True}]
    silent.close()
    speaking.close()


def test_agents_receive_signs_of_life_from_the_launcher(launcher: Launcher, monkeypatch) -> None:
    """Fails when the launcher is silent while it has nothing to say: agents would take it for dead
    and stop their workers.
    """
    monkeypatch.setattr(channel_module, "ALIVE_EVERY_S", 0.1)
    agent = launcher.let_in(0)
    done = threading.Event()
    heard: list[Message] = []

    def listen() -> None:
        while len(heard) < 5:
            heard.extend(agent.receive())
        done.set()

    threading.Thread(target=listen, daemon=True).start()
    launcher.poll_until(done.is_set)
    assert all(message == {"alive": True} for message in heard)
    agent.close()
