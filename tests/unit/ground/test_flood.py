"""Floods of connections: strangers in any number do not keep out those who belong to the job.

The process under attack has few file descriptors; the strangers, which connect and say nothing, are
held by the test, which has many.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain import network as listener_module
from hvdtrain.launcher.protocol import connect
from hvdtrain.network import GuardedListener
from hvdtrain.ring.transports.tcp import TcpTransport, listen
from tests.rings import TOKEN

ROOT = Path(__file__).parents[3]
LOCALHOST = "127.0.0.1"
MOST_BUSY = 0.5  # of the time, for the process under attack
HELD_S = 1.5  # for which the flood goes on before a friend comes

pytestmark = pytest.mark.timeout(120)

PREAMBLE = """
import resource, sys, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
def busy():
    while True:
        cpu, wall = time.process_time(), time.monotonic()
        sys.stdin.readline()
        share = (time.process_time() - cpu) / (time.monotonic() - wall)
        print("busy", share, flush=True)
threading.Thread(target=busy, daemon=True).start()
"""
LAUNCHER = """
from hvdtrain.launcher.channel import Channel
channel = Channel("127.0.0.1", "token")
channel.workers = 3
print("port", channel.port, flush=True)
def hear(rank, message):
    if "hello" in message:
        print("agent", rank, flush=True)
        opened = open("/dev/null")  # there are descriptors left for other work
while True:
    channel.poll(0.1, hear, print)
"""
RANK = """
from hvdtrain.ring.transports.tcp import TcpTransport, listen
door = listen("127.0.0.1")
print("port", door.getsockname()[1], flush=True)
neighbour = ("127.0.0.1", int(sys.argv[2]))
ring = TcpTransport(0, door, [door.getsockname(), neighbour], bytes.fromhex(sys.argv[3]), 60)
print("agent", 1, flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def attacked(program: str, descriptors: int, *more: object) -> Iterator[subprocess.Popen[str]]:
    """The program, with so many file descriptors."""
    process = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + program, *map(str, (descriptors, *more))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read(process: subprocess.Popen[str], kind: str) -> float:
    """The next number that it prints under this name."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"{kind} "):
            return float(line.split()[1])
    raise AssertionError(f"it has ended, with {process.wait()}")


@contextlib.contextmanager
def flood(port: int, strangers: int) -> Iterator[None]:
    """So many connections at once, all of which are held, and say nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * strangers)), hard))
    with contextlib.ExitStack() as stack:
        for _ in range(strangers):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            assert stranger.connect_ex((LOCALHOST, port)) in (0, errno.EINPROGRESS)
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def hold(process: subprocess.Popen[str]) -> None:
    """Let the flood go on for a while, in which the process must not be busy."""
    assert process.stdin is not None
    process.stdin.write("from here\n")
    process.stdin.flush()
    read(process, "busy")
    time.sleep(HELD_S)  # the time over which its work is measured
    process.stdin.write("to here\n")
    process.stdin.flush()
    assert read(process, "busy") < MOST_BUSY


@pytest.mark.parametrize(("descriptors", "strangers"), [(64, 200), (256, 600)])
def test_agents_get_in_through_a_flood(descriptors: int, strangers: int) -> None:
    """Fails when strangers take all of the launcher's descriptors, so that it spins, or lets no
    agent in: each would be lost, and the job with it.
    """
    with attacked(LAUNCHER, descriptors) as launcher:
        port = int(read(launcher, "port"))
        with flood(port, strangers):
            hold(launcher)
            agents = []
            for rank in (2, 0, 1):
                agents.append(connect((LOCALHOST, port), "token", {"rank": rank}))
                assert read(launcher, "agent") == rank
            hold(launcher)
        for agent in agents:
            agent.close()


def test_a_ring_closes_in_a_flood() -> None:
    """Fails when strangers take all of a rank's descriptors or threads, so that its door is shut
    for good, or its neighbour is not let in.
    """
    own = listen(LOCALHOST)
    with attacked(RANK, 64, own.getsockname()[1], TOKEN.hex()) as rank:
        address = (LOCALHOST, int(read(rank, "port")))
        with flood(address[1], 120):
            hold(rank)
            ring = TcpTransport(1, own, [address, own.getsockname()], TOKEN, 60)
            assert read(rank, "agent") == 1
            ring.close()


def test_those_who_answer_are_never_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when one who has not had its time makes room, or the newest does instead of the oldest,
    or when nobody does once all had theirs.
    """
    now, turned_away = 100.0, list[str]()
    monkeypatch.setattr(listener_module, "time", SimpleNamespace(monotonic=lambda: now))
    with socket.create_server((LOCALHOST, 0)) as listener:
        listener.setblocking(False)
        door: GuardedListener[str] = GuardedListener(listener, turned_away.append, patience_s=2)
        assert door.accept(2) is None and not door.rest_s  # nobody knocks
        for name in ("first", "second"):
            door.enter(name)
        with socket.create_connection(listener.getsockname()):
            assert door.accept(2) is None and door.rest_s == 2
            door.leave("second")
            now += 2
            assert not door.rest_s
            door.enter("third")
            link = door.accept(2)
            assert link is not None and turned_away == ["first"]
            link.close()


def test_an_error_of_accepting_does_not_shut_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when one connection that breaks off before it is accepted, as the system may report,
    ends the waiting for the neighbour.
    """
    accept, broken = socket.socket.accept, threading.Event()

    def break_once(listener: socket.socket) -> object:
        if not broken.is_set():
            broken.set()
            raise OSError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", break_once)
    doors = [listen(LOCALHOST) for _ in range(2)]
    addresses = [door.getsockname() for door in doors]
    rings: list[TcpTransport] = []
    other = threading.Thread(
        target=lambda: rings.append(TcpTransport(1, doors[1], addresses, TOKEN, 20))
    )
    other.start()
    rings.append(TcpTransport(0, doors[0], addresses, TOKEN, 20))
    other.join()
    assert broken.is_set() and len(rings) == 2
    for ring in rings:
        ring.close()
