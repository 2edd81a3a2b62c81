"""One real agent and its worker, under a channel in the test's hands.

Each wait has an end (LIMIT_S in tests/unit/agents.py), and nothing outlives a test.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.errors import EXIT_FAILED
from hvdtrain.launcher.protocol import Connection, Message
from tests.unit import agents
from tests.unit.agents import JOB, LIMIT_S, Job, hostname, is_alive, wait_until

pytestmark = pytest.mark.timeout(150)

# Prints its own number and those of a child in its group and of one in a session of its own.
FAMILY = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "300"])
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in sys.argv else signal.SIG_DFL)
print(os.getpid(), child.pid, flush=True)
if "ends" in sys.argv:
    sys.exit(5)
time.sleep(300)
"""
SAVES = """
import signal, sys, time
def save(number, frame):
    print("saved after", number, flush=True)
    sys.exit(128 + number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, save)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def family_of(job: Job) -> tuple[int, int]:
    """Worker and its child, once both are there."""
    job.wait_for_output(b"\n")
    worker, child = map(int, job.output().split())
    assert is_alive(child)
    return worker, child


def test_from_hello_to_leave(job: Job) -> None:
    """Fails when an agent does not say who it is, ends before it may, with another code than its
    worker's, prints anything itself, or leaves the file with its orders behind.
    """
    job.run_python("print('hello'); raise SystemExit(7)")
    hello = job.wait_for("hello")
    assert (hello["rank"], hello["host"], hello["hostname"]) == (0, "alpha", hostname())
    assert Path(f"/proc/{hello['pid']}/cmdline").read_text().split("\0")[-2] == JOB
    assert job.wait_for("ended") == 7
    for _ in range(60):  # horovodrun would end the other workers, which may still be saving
        job.poll()
    assert job.agents[0].poll() is None and not job.lost
    assert job.output() == b"hello\n" and job.tickets()
    assert job.leave() == 7
    assert job.agents[0].communicate()[0] == b"" and not job.tickets()
    job.poll_until(lambda: job.lost == [0])


def test_an_order_that_comes_with_the_greeting_is_followed_at_once(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if such an order waits for the launcher's next message: a host that is lost meanwhile
    would keep the file with its orders.
    """
    send = Connection.send

    def send_together(connection: Connection, message: Message) -> None:
        if "proof" in message:
            text = json.dumps(message) + "\n" + json.dumps({"all_here": True}) + "\n"
            connection._socket.sendall(text.encode())
        else:
            send(connection, message)

    monkeypatch.setattr(Connection, "send", send_together)
    job.channel._closed.set()  # it says no more
    job.run_python("import time; time.sleep(60)")
    job.wait_for("hello")
    job.poll_until(lambda: not job.tickets(), 3)


@pytest.mark.parametrize("end", [0, 1, 255, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM])
def test_ends_are_reported(job: Job, end: int) -> None:
    """Fails when an exit code or a signal is lost, or changed on the way to horovodrun."""
    code = f"os.kill(os.getpid(), {-end})" if end < 0 else f"os._exit({end})"
    job.run_python(f"import os; {code}")
    assert job.wait_for("ended") == end
    assert job.leave() == (end if end >= 0 else 128 - end)


def test_output_comes_byte_for_byte(job: Job, tmp_path: Path) -> None:
    """Fails when a byte is lost, changed or out of order: standard output and error together,
    invalid UTF-8, zeros, carriage returns, letters, a last line that does not end.
    """
    data = "ä€😀\r 10%\r 99%\n".encode() + random.Random(0).randbytes(3000) + b"\n\n\0no end"
    (tmp_path / "data").write_bytes(data)
    job.run_python(
        "import os, time\n"
        "data = open('data', 'rb').read()\n"
        "for start in range(0, len(data), 100):\n"
        "    os.write(1 + start // 100 % 2, data[start:start + 100])\n"
        "    time.sleep(0.002)\n"
    )
    job.wait_for("ended")
    assert job.output() == data


@pytest.mark.parametrize("kind", ["lines", "one line", "bytes that are no text"])
def test_five_megabytes_at_once(job: Job, kind: str) -> None:
    """Fails when much output, at once, is cut, mixed up, or more than a message may hold: then the
    launcher would take the agent for a stranger, and end the job.
    """
    part = {
        "lines": b"%06d %s\n" % (7, b"x" * 72),
        "one line": b"xyz",
        "bytes that are no text": b"\xff",
    }
    data = part[kind] * (5_000_000 // len(part[kind]))
    job.run_python(
        f"import sys; sys.stdout.buffer.write({part[kind]!r} * {len(data) // len(part[kind])})"
    )
    job.poll_until(lambda: job.lost or job.hear_all("ended"))
    assert not job.lost
    assert hashlib.sha256(job.output()).digest() == hashlib.sha256(data).digest()


def test_a_line_is_not_kept_waiting(job: Job) -> None:
    """Fails when a prompt or a progress bar, which end no line, are held back."""
    job.run_python("import time; print('waiting ...', end='', flush=True); time.sleep(300)")
    job.wait_for_output(b"waiting ...")


BEATS = """
import os, time
pulse = int(os.environ["HVDTRAIN_PULSE_FD"])
os.write(pulse, b"?%d\\n" % os.getpid())
print("beats", flush=True)
step = 0
while True:
    step += 1
    os.write(pulse, b"+compute %d 1.0\\n" % step)
    time.sleep(0.001)
"""


def test_beats_do_not_wake_the_agent(job: Job) -> None:
    """Fails if an agent is woken by each beat of its worker, whose cores it uses, or reads none."""
    job.run_python(BEATS)
    job.wait_for_output(b"beats")
    before, began_s = times_woken(job.agent()), time.monotonic()
    time.sleep(2)
    woken = times_woken(job.agent()) - before
    job.poll_until(lambda: any(report["step"] > 300 for report in job.hear_all("alive")))
    assert woken < 40 * (time.monotonic() - began_s)


def times_woken(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_the_launcher_receives_the_state_of_the_worker(job: Job) -> None:
    """Fails when phase, step, figures or the state of the process do not come, or a stopped worker
    is not seen as stopped.
    """
    job.run_python(
        "import time; from hvdtrain.pulse import Pulse\n"
        "pulse = Pulse.from_environment(); pulse.step = 3; pulse.beat('load')\n"
        "pulse.show(loss=0.5)\n"
        "print('ready', flush=True); time.sleep(300)"
    )
    job.wait_for_output(b"ready")
    assert job.wait_for("figures") == {"loss": 0.5}
    count = len(job.hear_all("alive"))
    job.poll_until(lambda: len(job.hear_all("alive")) > count)
    report = job.wait_for("alive")
    assert (report["step"], report["phase"], report["speaks"]) == (3, "load", True)
    assert report["state"] in ("S", "R")
    os.kill(job.worker(), signal.SIGSTOP)
    job.poll_until(lambda: job.hear_all("alive")[-1]["state"] == "T")
    assert job.hear_all("alive")[-1]["silent_s"] > 0
    job.channel.send({"kill": True})  # also one that is stopped
    assert job.wait_for("ended") == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_lets_the_worker_save(job: Job, number: int) -> None:
    """Fails when a request to stop does not reach the worker, or reaches it as another signal."""
    job.run_python(SAVES)
    job.wait_for_output(b"ready\n")
    job.channel.send({"signal": int(number)})
    assert job.wait_for("ended") == 128 + number
    assert job.output() == f"ready\nsaved after {int(number)}\n".encode()
    assert job.leave() == 128 + number


@pytest.mark.parametrize("how", ["ends", "kill", "leave"])
def test_nothing_of_a_worker_is_left(job: Job, how: str) -> None:
    """Fails when what a worker has started outlives it: it may hold a GPU, a port or a lock."""
    job.run_python(FAMILY, *(["ends"] if how == "ends" else []))
    worker, child = family_of(job) if how != "ends" else (0, 0)
    if how == "ends":
        assert job.wait_for("ended") == 5
        worker, child = map(int, job.output().split())
    elif how == "kill":
        job.channel.send({"kill": True})
        assert job.wait_for("ended") == -signal.SIGKILL
    else:
        assert job.leave() == EXIT_FAILED
    wait_until(lambda: not is_alive(worker) and not is_alive(child))


def test_a_worker_saves_when_the_launcher_is_gone(job: Job) -> None:
    """Fails when workers run on, or are killed before they could save, once the launcher has been
    killed; when a stopped one is left; or when the agent stays, or leaves its orders behind.
    """
    job.run_python(f"open('pid', 'w').write(str(__import__('os').getpid()))\n{SAVES}")
    job.wait_for_output(b"ready\n")
    job.poll_until(lambda: job.hear_all("alive"))
    worker = int((job.folder / "pid").read_text())
    os.kill(worker, signal.SIGSTOP)
    job.channel.close()
    assert job.agents[0].wait(LIMIT_S) == 128 + signal.SIGTERM
    assert not is_alive(worker) and not job.tickets()


SAVES_LONG = """
import signal, sys, time
def save(number, frame):
    time.sleep(1.5)
    sys.exit(3)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""
HURRIED = """
from hvdtrain.launcher import agent
agent.ORPHAN_GRACE_S = 0.2
raise SystemExit(agent.run_guarded(agent.main))
"""


def test_an_orphan_has_the_time_to_save_that_the_job_has(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when a worker whose launcher is gone is killed before --stop-within-s is over."""
    monkeypatch.setattr(agents, "agent_argv", lambda name: [sys.executable, "-c", HURRIED, name])
    job.run_python(SAVES_LONG, HVDTRAIN_STOP_WITHIN_S="30")
    job.wait_for_output(b"ready\n")
    job.channel.close()
    assert job.agents[0].wait(LIMIT_S) == 3


def test_horovodrun_may_ask_but_the_launcher_decides(job: Job) -> None:
    """Fails when a signal of horovodrun's to the agent ends agent or worker by itself, or is not
    reported.
    """
    job.run_python(SAVES)
    job.wait_for_output(b"ready\n")
    job.agents[0].send_signal(signal.SIGHUP)
    job.agents[0].send_signal(signal.SIGTERM)
    assert job.wait_for("horovodrun_signal") == signal.SIGTERM
    assert job.agents[0].poll() is None and not job.hear_all("ended")


@pytest.mark.parametrize("speaks", [True, False])
def test_stacks_on_demand(job: Job, speaks: bool) -> None:
    """Fails when the stacks of a hanging worker cannot be had: one of ours goes on afterwards, and
    another script's, which handles no such signal, ends with them.
    """
    first = "from hvdtrain.pulse import Pulse; Pulse.from_environment()\n" if speaks else ""
    job.run_python(
        f"{first}import time\ndef hangs_here():\n    print('ready', flush=True); time.sleep(300)\n"
        "hangs_here()",
        PYTHONFAULTHANDLER="1",
    )
    job.wait_for_output(b"ready\n")
    job.channel.send({"stacks": True})
    job.wait_for_output(b"in hangs_here")
    if not speaks:
        assert job.wait_for("ended") == -signal.SIGABRT
    else:
        job.channel.send({"kill": True})
        assert job.wait_for("ended") == -signal.SIGKILL
