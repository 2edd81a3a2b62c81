"""The process that serves metrics: what reaches it, and that it neither delays nor survives."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launcher.metrics import Endpoint, MetricsServer
from hvdtrain.launcher.processes import process_state
from hvdtrain.launcher.ranks import Rank
from hvdtrain.launcher.supervise import Watch
from hvdtrain.launcher.view import make_view

TOKEN = "a-token-of-24-characters"
LIMIT_S = 20.0
pytestmark = pytest.mark.timeout(90)


@contextmanager
def serving(token: str | None = None) -> Iterator[MetricsServer]:
    server = MetricsServer(Endpoint("127.0.0.1", 0, token), "hvdtrain launch")
    server.start()
    try:
        yield server
    finally:
        server.close()
        assert server._process.poll() is not None


def get(url: str, token: str = "") -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urlopen(Request(url, headers=headers), timeout=LIMIT_S) as answer:
        text: str = answer.read().decode()
    return text


def watch_of(step: int, begun: int = 0, restarts: int = 0, phase: str = "compute") -> Watch:
    rank = Rank(0, "alpha", "running", step=step, phase=phase, speaks=True)
    before = {"steps": begun, "audit_checked": begun}
    return Watch([rank], {"before": before, "audit_checked": begun + 2}, restarts=restarts)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_state_reaches_who_asks() -> None:
    """Fails when the figures of the job do not arrive, or what a restart repeats is not counted
    again: a counter must never fall.
    """
    with serving() as server:
        assert "<h1>starting</h1>" in get(server.url)
        watch = watch_of(step=8)
        assert server.update(watch)
        watch.ranks[0].step, watch.ranks[0].phase = 9, "evaluate"  # done
        restarted = watch_of(step=7, begun=5, restarts=1)

        def arrived(line: str, current: Watch) -> bool:
            return server.update(current) and line in get(f"{server.url}metrics").splitlines()

        until(lambda: arrived("hvdtrain_steps_total 9.0", watch))
        until(lambda: arrived("hvdtrain_restarts_total 1.0", restarted))
        lines = get(f"{server.url}metrics").splitlines()
        assert "hvdtrain_steps_total 10.0" in lines, "one more: step 6; 7 is under way"
        assert 'hvdtrain_audits_total{kind="exchange"} 4.0' in lines
        server.notice("restart 1 of 3")
        until(lambda: server.update(restarted) and "restart 1 of 3" in get(server.url))


def test_a_token_is_demanded() -> None:
    """Fails when strangers are answered, or the token can be read from the command line."""
    with serving(TOKEN) as server:
        with pytest.raises(HTTPError, match="401"):
            get(server.url)
        assert "<h1>starting</h1>" in get(server.url, TOKEN)
        for name in ("cmdline", "environ"):
            assert TOKEN.encode() not in Path(f"/proc/{server._process.pid}/{name}").read_bytes()


def test_a_process_that_does_not_read_delays_nothing() -> None:
    """Fails when the launcher waits for it, or leaves it behind."""
    with serving() as server:
        get(server.url)
        os.kill(server._process.pid, signal.SIGSTOP)
        until(lambda: process_state(server._process.pid) == "T")
        began_s, watch = time.monotonic(), watch_of(step=8)
        for number in range(200):
            server.notice(f"{number} {'x' * 5000}")
            assert server.update(watch)
        assert time.monotonic() - began_s < LIMIT_S / 4
        assert process_state(server._process.pid) == "T"


def test_a_process_that_has_ended_is_noticed(tmp_path: Path) -> None:
    """Fails when the launcher fails with it, or the user does not learn of it."""
    server = MetricsServer(Endpoint("127.0.0.1", 0), "hvdtrain launch")
    with (tmp_path / "output").open("w") as stream:
        view = make_view(1, stream, tmp_path, metrics=server)
        server._process.kill()
        server._process.wait()
        view.notice("restart 1 of 3")
        view.update(watch_of(step=8))
        view.close()
    lines = (tmp_path / "output").read_text().splitlines()
    assert lines == [
        f"hvdtrain launch: status page: {server.url}, metrics: {server.url}metrics",
        "hvdtrain launch: restart 1 of 3",
        "hvdtrain launch: metrics and status page have ended; the job continues without them",
    ]


LAUNCHER = """
import sys, time
from hvdtrain.launcher.metrics import Endpoint, MetricsServer
server = MetricsServer(Endpoint("127.0.0.1", 0), "")
server.start()
print(server.url, server._process.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("is_suspended", [False, True])
def test_it_ends_with_a_launcher_that_is_killed(is_suspended: bool) -> None:
    """Fails when it outlives the launcher, also while it is suspended itself."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    url, pid = launcher.stdout.readline().split()
    try:
        get(url)
        if is_suspended:
            os.kill(int(pid), signal.SIGSTOP)
        launcher.kill()
        launcher.communicate()
        until(lambda: process_state(int(pid)) in ("", "Z"))
    finally:
        launcher.kill()
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def test_a_port_that_is_taken() -> None:
    """Fails when the message does not say which port, and what to do."""
    with serving() as server:
        (port,) = re.findall(r":(\d+)/", server.url)
        with pytest.raises(UsageError, match=rf"--metrics-port={port}: .*is taken; choose another"):
            MetricsServer(Endpoint("127.0.0.1", int(port)), "")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("0.0.0.0", False), ("::", False)],
)
def test_what_is_loopback(host: str, expected: bool) -> None:
    """Fails when an address that others reach counts as this machine's alone, or the reverse."""
    assert Endpoint(host, 0).is_loopback == expected
