"""Nodes of a job without SSH: who may join, and how commands run on them, over real sockets."""

from __future__ import annotations

import json
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import PreflightError
from hvdtrain.interpreter import module_argv
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.nodes import Rendezvous
from hvdtrain.launcher.nodes import hub as hub_module
from hvdtrain.launcher.nodes.hub import Hub
from hvdtrain.launcher.nodes.node import NodeCommand
from hvdtrain.launcher.protocol import (
    Connection,
    ConnectionLost,
    Message,
    Refused,
    Unproven,
    connect,
)
from hvdtrain.launcher.ssh import SshOptions, SshSetup, is_local

TOKEN = "a-secret-of-the-nodes"
LIMIT_S = 20.0
EVERY_BYTE = bytes(range(256))

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Node rank 0 of three."""
    monkeypatch.setattr(hub_module, "OVER_S", 0.0)
    with Hub(Rendezvous(3, 0, "127.0.0.1", 0, TOKEN, 2, ("train",)), None) as made:
        yield made


def join(hub: Hub, rank: int = 1, secret: str = TOKEN, **other: Any) -> Connection:
    """Join as a node of the same job; `other`: what differs."""
    job = Rendezvous(3, rank, "127.0.0.1", hub.port, secret, 2, ("train",))
    introduction = {"rank": rank, "hostname": f"host{rank}", "job": replace(job, **other).job}
    return connect(("127.0.0.1", hub.port), secret, introduction)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nodes_become_hosts_by_their_names_and_hear_the_end(hub: Hub) -> None:
    """Fails if nodes are not in the order of their ranks, do not have their slots, or do not hear
    how the job has ended.
    """
    with pytest.raises(PreflightError, match=r"have not joined .* within 0 s: 1, 2\. Start"):
        hub.wait_for_all(0.0, lambda line: None)
    nodes = [join(hub, rank) for rank in (2, 1)]
    hub.wait_for_all(LIMIT_S, lambda line: None)
    hosts = hub.hosts
    assert [(host.name, host.slots, host.node) for host in hosts[1:]] == [
        ("host1", 2, 1),
        ("host2", 2, 2),
    ]
    assert [is_local(host) for host in hosts] == [True, False, False]
    hub.ending = {"over": 7, "text": "why"}
    hub.send(hub.ending)
    for node in nodes:
        messages: list[Message] = []
        wait_until(lambda: messages.extend(node.receive()) or hub.ending in messages)  # noqa: B023
        node.close()


def test_nodes_of_one_name_have_others() -> None:
    """Fails if two machines of one name would be taken for one host."""
    hub = Hub.__new__(Hub)
    hub._job, hub.names = Rendezvous(3, 0, "a", 1, TOKEN, 1), {1: "twin", 2: "twin"}
    assert [host.name for host in hub.hosts[1:]] == ["node-rank-1", "node-rank-2"]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"nodes": 4}, "--nnodes: 4, and 3 on node rank 0"),
        ({"slots": 1}, r"\(--nproc-per-node\): 1, and 2 on node rank 0"),
        ({"command": ("bench",)}, r"command: 'bench', and 'train' on node rank 0"),
    ],
)
def test_a_node_of_another_job_is_refused_on_both_sides(
    hub: Hub, other: dict[str, Any], named: str
) -> None:
    """Fails if nodes with different commands are joined, or one side does not say why not."""
    with pytest.raises(Refused, match=named) as refused:
        join(hub, **other)
    assert not refused.value.may_retry
    with pytest.raises(PreflightError, match=named):
        hub.wait_for_all(LIMIT_S, lambda line: None)


def test_a_node_without_the_secret_learns_so_and_is_named(hub: Hub) -> None:
    """Fails if a node with another secret is admitted, or tries again for ever; or if node rank 0
    does not say whom it has turned away.
    """
    with pytest.raises(Unproven):
        join(hub, secret=TOKEN.upper())
    lines: list[str] = []
    with pytest.raises(PreflightError, match=r"for lack of the secret: 127\.0\.0\.1"):
        hub.wait_for_all(0.0, lines.append)
    assert lines[1] == "turned away, for lack of this node's secret: 127.0.0.1"


def test_a_rank_is_taken_until_its_connection_is_lost(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if two nodes get one rank, if one that is started again cannot take its place, or if
    two that both live go unnoticed.
    """
    first = join(hub)
    with pytest.raises(Refused, match="both host1 and host1 have node rank 1") as refused:
        join(hub)
    assert refused.value.may_retry
    first.close()
    wait_until(lambda: hub.missing == [1, 2])
    second = join(hub)
    monkeypatch.setattr(hub_module, "TWICE_S", 0.0)
    with pytest.raises(Refused) as refused:
        join(hub)
    assert not refused.value.may_retry
    with pytest.raises(PreflightError, match="give each one of its own"):
        hub.wait_for_all(LIMIT_S, lambda line: None)
    with pytest.raises(Refused, match="has node rank 0 too"):
        join(hub, 0)
    second.close()


def test_who_has_the_secret_alone_runs_nothing(hub: Hub) -> None:
    """Fails if a node could start commands on other nodes, as shells do."""
    node = join(hub)
    with pytest.raises(Refused, match="there is no node rank 9"):
        connect(("127.0.0.1", hub.port), TOKEN, {"rank": 9, "node": 1, "key": "guess"})
    other = join(hub, 2)
    wait_until(lambda: not hub.missing)
    node.send({"hello": 5})
    node.send({"to": 2, "start": 2, "command": "true"})
    node.send({"to": 2, "over": 0})
    hub.send(expected := {"over": 7}, 2)  # by the hub itself
    messages: list[Message] = []
    wait_until(lambda: messages.extend(other.receive()) or expected in messages)
    assert [message for message in messages if "alive" not in message] == [expected]
    for connection in (node, other):
        connection.close()


def test_a_long_command_is_compared_as_a_whole(hub: Hub) -> None:
    """Fails if a greeting with it is too long, or a difference behind what is shown is not seen."""
    names = tuple(f"image-{number}.jpg" for number in range(20_000))
    assert join_with(("predict", *names)) == join_with(("predict", *names))
    assert join_with(("predict", *names)) != join_with(("predict", *names[:-1], "other.jpg"))
    with pytest.raises(Refused, match=r"command: 'predict image-0.jpg .*\.\.\. \(sha256 "):
        join(hub, command=("predict", *names))


def join_with(command: tuple[str, ...]) -> Message:
    return Rendezvous(3, 1, "a", 1, TOKEN, 2, command).job


def serve(node: Connection) -> None:
    """Run what a node is sent, until it is disconnected."""
    commands: dict[int, NodeCommand] = {}
    while True:
        try:
            node.send({"alive": True})
            messages = node.receive() if select.select([node], [], [], 1.0)[0] else []
        except ConnectionLost:
            node.close()
            return
        for message in messages:
            match message:
                case {"start": shell, "command": command}:

                    def send(to: int = shell, **answer: Any) -> None:
                        node.send({"to": to, **answer})

                    commands[shell] = NodeCommand(command, {"PATH": "/usr/bin:/bin"}, send)
                case {"input": text, "of": shell}:
                    commands[shell].write(text.encode("latin-1"))


def run_shell(hub: Hub, tmp_path: Path, command: str, data: bytes) -> tuple[int, bytes, bytes]:
    """Run a command on host1 by the program that stands for ssh."""
    settings = {**hub.address._asdict(), "port": hub.port, "ranks": {"host1": 1}}
    (tmp_path / "hub").write_text(json.dumps(settings))
    argv = [*module_argv("hvdtrain.launcher.nodes.shell"), str(tmp_path / "hub")]
    done = subprocess.run(
        [*argv, "-o", "X=y", "host1", command], input=data, capture_output=True, timeout=LIMIT_S
    )
    return done.returncode, done.stdout, done.stderr


def test_a_command_runs_as_over_ssh(hub: Hub, tmp_path: Path) -> None:
    """Fails if a byte of input or output, or the exit code, is lost or changed on the way; or if a
    command on a node that is not connected does not end as ssh's does.
    """
    code, _, errors = run_shell(hub, tmp_path, "true", b"")
    assert (code, errors) == (255, b"hvdtrain: node rank 1 is not connected\n")
    threading.Thread(target=serve, args=(join(hub),), daemon=True).start()
    data = EVERY_BYTE * 4000
    command = "cat; printf '\\377' >&2; exit 3"
    assert run_shell(hub, tmp_path, command, data) == (3, data, b"\xff")
    assert run_shell(hub, tmp_path, "kill -9 $$", b"")[0] == 128 + 9


def test_the_program_named_ssh_is_the_shell(hub: Hub) -> None:
    """Fails if horovodrun would start a node's workers by ssh, or the first one's elsewhere."""
    hosts = [Host("no-such-name", node=0), Host("no-other-name", node=1), Host("127.0.0.1", node=2)]
    with SshSetup(hosts, SshOptions(hub=hub.address)) as setup:
        assert [setup.name_of(host) for host in hosts] == [
            "localhost",
            "no-other-name",
            "hvdtrain-host-3",
        ]
        assert "hvdtrain.launcher.nodes.shell" in (setup.path / "ssh").read_text()
        settings = json.loads((setup.path / "hub").read_text())
    assert settings["ranks"] == {"localhost": 0, "no-other-name": 1, "hvdtrain-host-3": 2}
