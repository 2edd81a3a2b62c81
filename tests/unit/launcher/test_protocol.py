"""The agent's side of the channel: it trusts nobody but its own launcher, and waits for nobody.

Every wait has an end, after which the test fails.
"""

from __future__ import annotations

import json
import socket
import threading

import pytest

from hvdtrain.launcher import protocol
from hvdtrain.launcher.protocol import Connection, ConnectionLost, connect, prove

TOKEN = "the job's"
LIMIT_S = 20.0
LOCALHOST = "127.0.0.1"

pytestmark = pytest.mark.timeout(60)


def test_words_behind_the_greeting_are_kept() -> None:
    """Fails when an agent gives up, or loses a message, because the launcher's first messages came
    in one piece with its greeting: then a whole job would end now and then as it starts.
    """
    server = socket.create_server((LOCALHOST, 0))

    def greet() -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(b'{"challenge": "a"}\n')
            introduction = json.loads(sock.recv(1 << 16))
            proof = prove(TOKEN, "launcher", introduction["challenge"])
            sock.sendall(json.dumps({"proof": proof}).encode() + b'\n{"alive": true}\n{"x": 1}\n')
            sock.recv(1)

    thread = threading.Thread(target=greet)
    thread.start()
    agent = connect(server.getsockname()[:2], TOKEN, {"rank": 0})
    assert agent.receive() == [{"alive": True}, {"x": 1}]
    agent.close()
    thread.join(LIMIT_S)
    server.close()


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([b""], "closed"),
        ([b"220 smtp.example ESMTP\r\n"], "not a message"),
        ([b'{"challenge": "a"}\n', b'{"proof": "b"}\n'], "does not hold this job's token"),
        ([b'{"challenge": "a"}\n', b'{"proof": "\xc3\xa4"}\n'], "does not hold this job's token"),
        ([b'{"challenge": "\\ud800"}\n', b'{"proof": null}\n'], "does not hold this job's token"),
        ([b'{"challenge": "a"}\n', b""], "closed"),
        ([b"x" * (1 << 15)], "unterminated line"),
    ],
)
def test_an_agent_trusts_its_own_launcher_only(answers: list[bytes], text: str) -> None:
    """Fails when an agent takes orders from whoever has got the launcher's port since, or ends in
    another exception than the one that its caller explains.
    """
    server = socket.create_server((LOCALHOST, 0))

    def answer() -> None:
        sock, _ = server.accept()
        with sock:
            for number, part in enumerate(answers):
                if number:
                    sock.recv(1 << 16)
                sock.sendall(part)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(ConnectionLost, match=text):
        connect(server.getsockname()[:2], TOKEN, {"rank": 0})
    thread.join(LIMIT_S)
    server.close()


def test_nobody_listens() -> None:
    """Fails when an agent whose launcher has gone waits, or does not say whom it has tried."""
    with socket.create_server((LOCALHOST, 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionLost, match=f"{LOCALHOST} port {port}: .*refused"):
        connect((LOCALHOST, port), TOKEN, {"rank": 0})


def test_a_silent_launcher_is_given_up(monkeypatch) -> None:
    """Fails when an agent waits for ever for the greeting of one who never greets."""
    monkeypatch.setattr(protocol, "LOST_AFTER_S", 0.2)
    server = socket.create_server((LOCALHOST, 0))
    with pytest.raises(ConnectionLost, match="time"):
        connect(server.getsockname()[:2], TOKEN, {"rank": 0})
    server.close()


def test_one_who_does_not_read_is_given_up(monkeypatch) -> None:
    """Fails when a message to one who never reads blocks its sender for ever."""
    monkeypatch.setattr(protocol, "LOST_AFTER_S", 0.2)
    one, other = socket.socketpair()
    monkeypatch.setattr(socket.socket, "setsockopt", lambda *_: None)  # no TCP here
    with one, other:
        connection = Connection(one)
        with pytest.raises(ConnectionLost, match="time"):
            connection.send({"text": "x" * (1 << 24)})
