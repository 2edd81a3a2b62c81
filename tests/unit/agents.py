"""Real agents for tests: started as horovodrun starts them, with a channel in the test's hands."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.launcher.channel import Channel
from hvdtrain.launcher.horovodrun import agent_argv
from hvdtrain.launcher.processes import descendants, start_of
from hvdtrain.launcher.protocol import Message, Orders, ticket_paths, write_ticket

TOKEN = "the token of this job"
JOB = "test-job"
LIMIT_S = 40.0
ROUND_S = 0.02


class Job:
    """One launcher with some agents, all on this machine."""

    def __init__(self, cache: Path, workers: int = 1) -> None:
        """`cache`: becomes XDG_CACHE_HOME."""
        self.channel = Channel("127.0.0.1", TOKEN)
        self.channel.workers = workers
        self.cache = cache
        self.workers = workers
        self.folder = cache
        self.hostname = socket.gethostname()  # of the machine where launch was called
        self.agents: list[subprocess.Popen[bytes]] = []
        self.heard: list[tuple[int, Message]] = []
        self.lost: list[int] = []

    def order(
        self, command: Sequence[str], login: Mapping[str, str] | None = None, **environment: str
    ) -> Path:
        """Leave the orders where agents look for them; returns the file."""
        orders = Orders(TOKEN, list(command), [str(self.folder)], self.hostname, environment)
        content = {
            "channel": ["127.0.0.1", self.channel.port],
            "job": JOB,
            "ticket": orders.as_text(),
        }
        content |= {} if login is None else {"login": dict(login)}
        return write_ticket(content, {"XDG_CACHE_HOME": str(self.cache)})

    def start(self, rank: int = 0, **environment: str) -> subprocess.Popen[bytes]:
        """An agent, with the variables that horovodrun gives."""
        placed = {
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(self.workers),
            "HOROVOD_LOCAL_RANK": str(rank),
            "HOROVOD_LOCAL_SIZE": str(self.workers),
            "HOROVOD_HOSTNAME": "alpha",
            "HVDTRAIN_MASTER_ADDR": "alpha",
            "HVDTRAIN_MASTER_PORT": "23456",
        }
        return self.start_bare(placed | environment)

    def start_bare(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """An agent that receives nothing else."""
        agent = subprocess.Popen(
            agent_argv(JOB),
            env=os.environ | {"XDG_CACHE_HOME": str(self.cache)} | environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.agents.append(agent)
        return agent

    def run_python(self, code: str, *arguments: str, **environment: str) -> None:
        """Order Python code and start its agents."""
        self.order([sys.executable, "-c", code, *arguments], PATH=os.environ["PATH"], **environment)
        for rank in range(self.workers):
            self.start(rank)

    def poll(self) -> None:
        self.channel.poll(ROUND_S, lambda *heard: self.heard.append(heard), self.lost.append)

    def poll_until(self, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, (self.heard[-5:], self.lost)
            self.poll()

    def agent(self, rank: int = 0) -> int:
        """The id of the agent itself: the process that was started is its guard."""
        return int(self.wait_for("hello", rank)["pid"])

    def worker(self, rank: int = 0) -> int:
        """The id of the command that an agent has started."""
        self.poll_until(lambda: descendants(self.agent(rank)))
        return descendants(self.agent(rank))[0]

    def hear_all(self, kind: str, rank: int = 0) -> list[Any]:
        """What has come of one kind of message."""
        return [
            message[kind] for number, message in self.heard if number == rank and kind in message
        ]

    def wait_for(self, kind: str, rank: int = 0) -> Any:
        self.poll_until(lambda: self.hear_all(kind, rank))
        return self.hear_all(kind, rank)[-1]

    def output(self, rank: int = 0) -> bytes:
        """All that the worker has written so far."""
        return "".join(self.hear_all("output", rank)).encode("utf-8", "surrogateescape")

    def wait_for_output(self, text: bytes, rank: int = 0) -> None:
        self.poll_until(lambda: text in self.output(rank))

    def leave(self, rank: int = 0) -> int:
        """Let an agent go; returns its exit code."""
        self.channel.send({"leave": True}, rank)
        return self.agents[rank].wait(LIMIT_S)

    def tickets(self) -> list[Path]:
        return [
            path for path in ticket_paths(JOB, {"XDG_CACHE_HOME": str(self.cache)}) if path.exists()
        ]

    def close(self) -> None:
        """End whatever is still there."""
        self.channel.close()
        for agent in self.agents:
            for pid in [agent.pid, *descendants(agent.pid)]:
                kill(pid)
            agent.wait()
            if agent.stdout is not None:
                agent.stdout.close()


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def is_alive(pid: int) -> bool:
    """Whether it runs: a zombie that its parent has not looked after yet does not."""
    return bool(start_of(pid))


def wait_until(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def hostname() -> str:
    return socket.gethostname()


def parse_environment(output: bytes) -> Mapping[str, str]:
    """Of a worker that prints its environment as JSON."""
    found: dict[str, str] = json.loads(output)
    return found
