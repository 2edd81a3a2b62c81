"""Supervision of many reports; the end of horovodrun, and of what it has started."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest

from hvdtrain.launcher import supervise
from hvdtrain.launcher.channel import Channel
from hvdtrain.launcher.logs import Logs
from hvdtrain.launcher.processes import descendants, start_of
from hvdtrain.launcher.protocol import Connection, ConnectionLost, connect
from hvdtrain.launcher.ranks import Limits, Rank
from hvdtrain.launcher.supervise import SHORTEST_TURN_S, Supervisor, Watch

# As horovodrun's ssh to a host that is gone: of another session, and deaf to its parent's end.
STARTS = "setsid sh -c 'trap \"\" TERM; echo started; while :; do sleep 1; done' & wait"


@pytest.mark.timeout(60)
def test_what_horovodrun_has_started_ends_with_it() -> None:
    """Fails if a process of another session, which horovodrun leaves behind, stays."""
    command = ["sh", "-c", STARTS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    with process:
        assert process.stdout and process.stdout.readline() == b"started\n"
        started = {pid: start_of(pid) for pid in descendants(process.pid)}
        assert started
        supervise._end(process, 0.0, 0.2)
        psutil.wait_procs([psutil.Process(pid) for pid in started if start_of(pid)], 5)
    assert not [pid for pid, start in started.items() if start and start_of(pid) == start]


TOKEN, REPORTS = "the token of this job", 400
REPORT = {"step": 1, "phase": "compute", "silent_s": 0.0, "busy_s": None, "speaks": False}


def report_often(port: int, rank: int, spans_s: list[float]) -> None:
    """Be an agent whose worker reports every 2 ms, and ends well."""
    about = {"rank": rank, "host": "alpha", "hostname": "alpha", "pid": 1}
    agent = connect(("127.0.0.1", port), TOKEN, about)
    began_s = time.monotonic()
    for number in range(REPORTS):
        agent.send({"alive": REPORT | {"step": number}})
        time.sleep(0.002)
    spans_s.append(time.monotonic() - began_s)
    agent.send({"ended": 0, "pulse": REPORT | {"step": REPORTS}})
    while not has_left(agent):
        pass
    agent.close()


def has_left(agent: Connection) -> bool:
    try:
        return any("leave" in message for message in agent.receive())
    except ConnectionLost:
        return True


@pytest.mark.timeout(60)
def test_reports_are_taken_together(tmp_path: Path) -> None:
    """Fails if each report of hundreds of workers makes the launcher look at all of them, or if a
    report is lost.
    """
    channel, spans_s, turns = Channel("127.0.0.1", TOKEN), list[float](), list[float]()
    channel.workers = 3
    watch = Watch([Rank(number) for number in range(3)])
    logs = Logs(tmp_path / "logs", lambda rank, line: None)

    def show(watch: Watch) -> None:
        if all(rank.state == "running" for rank in watch.ranks):
            turns.append(time.monotonic())

    agents = [
        threading.Thread(target=report_often, args=(channel.port, rank, spans_s))
        for rank in range(3)
    ]
    for agent in agents:
        agent.start()
    command, limits = ["sleep", "60"], Limits(30.0, 30.0)
    outcome = Supervisor(
        command, dict(os.environ), channel, logs, limits, watch, list, show, may_restart=True
    ).run()
    for agent in agents:
        agent.join()
    channel.close()
    logs.close()
    assert outcome.exit_code == 0, outcome.text
    assert [rank.step for rank in watch.ranks] == [REPORTS] * 3
    assert 0 < len(turns) < 1.5 * max(spans_s) / SHORTEST_TURN_S
