"""Workers behind a shell, under one real agent: who gets a signal, and what is left in the end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.launcher.processes import descendants
from tests.unit.agents import LIMIT_S, Job, is_alive, wait_until

pytestmark = pytest.mark.timeout(150)
SAVED = 40  # the exit code of a worker that could save
# As train does it: the first signal is a request to save, a second one means: at once.
SCRIPT = """
import os, signal, sys, time
def save(number, frame):
    signal.signal(number, signal.SIG_DFL)
    time.sleep(0.5)
    print("saved after", number, flush=True)
    os._exit(40)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, save)
if "speaks" in sys.argv:
    from hvdtrain.pulse import Pulse
    Pulse.from_environment()
print("ready", os.getpid(), flush=True)
open("ready", "w").close()
while True:
    time.sleep(0.05)
"""
IN_FRONT = '"$@"; code=$?; exit $code'
SHELLS = {
    "waits": IN_FRONT,
    "in a session of its own": 'setsid --wait "$@"; code=$?; exit $code',
    "a shell in a shell": 'bash -c \'"$@"; code=$?; exit $code\' bash "$@"; code=$?; exit $code',
    "passes signals on": (
        'trap \'kill -TERM "$child"\' TERM; "$@" & child=$!\n'
        'wait "$child"; wait "$child"; code=$?; exit $code'
    ),
    "does not wait": '"$@" & until [ -e ready ]; do sleep 0.05; done; exit 0',
}
BOTH = pytest.mark.parametrize("speaks", [True, False], ids=["speaks", "does not speak"])


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def start(job: Job, shell: str, *arguments: str) -> int:
    """The script behind a shell; returns its id."""
    python = [sys.executable, "-c", SCRIPT, *arguments]
    job.order(["bash", "-c", shell, "bash", *python], PATH=os.environ["PATH"])
    job.start()
    job.wait_for_output(b"ready ")
    job.poll_until(lambda: job.output().endswith(b"\n"))
    return int(job.output().split()[-1])


def is_heard(job: Job, speaks: bool) -> bool:
    """Whether the agent has received by now if the worker reports."""
    job.heard = [heard for heard in job.heard if "alive" not in heard[1]]
    return job.wait_for("alive")["speaks"] is speaks


@pytest.mark.parametrize("shell", SHELLS)
def test_a_signal_gets_to_the_process_that_saves(job: Job, shell: str) -> None:
    """Fails when a request to stop ends the shell and then what it has started, when it comes to
    the process that reports twice, or when the exit code is another one's.
    """
    script = start(job, SHELLS[shell], "speaks")
    assert is_heard(job, True)
    job.channel.send({"signal": int(signal.SIGTERM)})
    assert job.wait_for("ended") == SAVED
    assert job.output() == f"ready {script}\nsaved after 15\n".encode()
    assert job.leave() == SAVED


def test_scripts_that_report_nothing_save_too(job: Job) -> None:
    """Fails when what a shell has started is killed as soon as the signal has ended the shell."""
    start(job, IN_FRONT)
    job.channel.send({"signal": int(signal.SIGTERM)})
    assert job.wait_for("ended") == -signal.SIGTERM
    assert job.output().endswith(b"\nsaved after 15\n")


def test_a_shell_does_not_go_on_after_a_stop(job: Job) -> None:
    """Fails when a shell whose worker has saved keeps the job from ending, by its next command."""
    start(job, '"$@"; sleep 300', "speaks")
    assert is_heard(job, True)
    job.channel.send({"signal": int(signal.SIGINT)})
    job.wait_for_output(b"saved after 2\n")
    assert job.wait_for("ended") == -signal.SIGTERM


@BOTH
def test_what_a_shell_leaves_may_save(job: Job, speaks: bool) -> None:
    """Fails when a worker that reports is not waited for once its shell was killed, or another one
    is killed before it could save.
    """
    script = start(job, IN_FRONT, *(["speaks"] if speaks else []))
    assert is_heard(job, speaks)
    shell = job.worker()
    assert shell != script
    os.kill(shell, signal.SIGKILL)
    if speaks:
        wait_until(lambda: not is_alive(shell))
        assert is_heard(job, True) and is_alive(script)
        job.channel.send({"signal": int(signal.SIGTERM)})
    assert job.wait_for("ended") == (SAVED if speaks else -signal.SIGKILL)
    assert job.output().endswith(b"\nsaved after 15\n")


@pytest.mark.parametrize("how", ["kill", "leave"])
@pytest.mark.parametrize("shell", ["waits", "in a session of its own", "does not wait"])
def test_nothing_is_left_behind_a_shell(job: Job, shell: str, how: str) -> None:
    """Fails when what a shell has started outlives the job."""
    script = start(job, SHELLS[shell], "speaks")
    assert is_heard(job, True)
    job.channel.send({how: True})
    if how == "kill":
        assert job.wait_for("ended") == -signal.SIGKILL
    else:
        job.agents[0].wait(LIMIT_S)
    assert not is_alive(script)


def test_nothing_is_left_of_a_script_that_ends_well(job: Job) -> None:
    """Fails when a process that does not speak, left in the background, keeps the job from ending,
    or is killed before it could save.
    """
    script = start(job, SHELLS["does not wait"])
    assert job.wait_for("ended") == 0
    assert job.output().endswith(b"\nsaved after 15\n") and not is_alive(script)


@BOTH
@pytest.mark.parametrize("shell", ["waits", "in a session of its own"])
@pytest.mark.parametrize("killed", ["the agent", "its guard", "its guard, and it is stopped"])
def test_all_die_with_the_agent(job: Job, killed: str, shell: str, speaks: bool) -> None:
    """Fails when SIGKILL to an agent or to its guard (by horovodrun, or for want of memory) leaves
    a process behind: the shell, what it has started, or the other one of the two.
    """
    script = start(job, SHELLS[shell], *(["speaks"] if speaks else []))
    guard, agent = job.agents[0], job.agent()
    family = [agent, *descendants(agent)]
    assert script in family and len(family) >= 3
    if killed == "the agent":
        os.kill(agent, signal.SIGKILL)
    elif killed == "its guard":
        guard.kill()
    else:
        os.kill(agent, signal.SIGSTOP)
        guard.kill()
    wait_until(lambda: not any(map(is_alive, family)))
    assert guard.wait(LIMIT_S) in (128 + signal.SIGKILL, -signal.SIGKILL)
    job.poll_until(lambda: job.lost == [0])


def test_the_launcher_receives_the_state_of_the_process_that_reports(job: Job) -> None:
    """Fails when a worker that was stopped behind a shell is not seen as stopped, or gives no
    stacks.
    """
    script = start(job, IN_FRONT, "speaks")
    assert is_heard(job, True)
    job.channel.send({"stacks": True})
    job.wait_for_output(b"most recent call first")
    os.kill(script, signal.SIGSTOP)
    job.poll_until(lambda: job.hear_all("alive")[-1]["state"] == "T")
    job.channel.close()  # it is woken up, and saves
    assert job.agents[0].wait(LIMIT_S) == SAVED
    assert not is_alive(script)
