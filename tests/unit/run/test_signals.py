"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.cli.train import run
from hvdtrain.errors import Stopped
from hvdtrain.pulse import STOP_SIGNALS
from hvdtrain.run import stop as signals
from hvdtrain.run.stop import StopSignals
from hvdtrain.topology import Topology
from tests.unit.commands import run_code


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stop-signals"]


def test_a_run_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    """Fails when a run in a process of another's, a notebook or an editor, leaves its handlers of
    signals behind, or its watcher, which would end that process after a later SIGTERM.
    """
    ours = lambda number, frame: None  # noqa: E731
    for number in STOP_SIGNALS:
        signal.signal(number, ours)
    flags = {"data": "synthetic:1x28x28,samples=8", "global_batch_size": 4, "max_steps": 1}
    flags |= {"output": str(tmp_path), "model": "lenet", "print_config": False}
    assert run(flags, [], Topology()) == 0
    assert {signal.getsignal(number) for number in STOP_SIGNALS} == {ours}
    assert signal.set_wakeup_fd(-1) == -1
    assert watchers() == []


def test_before_training_a_signal_ends_the_run() -> None:
    """Fails when a signal while data is read is only noted."""
    with pytest.raises(Stopped) as stopped, StopSignals():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert stopped.value.exit_code == 143
    assert watchers() == []


def test_a_main_thread_that_is_stuck_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a signal in training is not noted soon, or a run that makes no more steps goes on
    for ever, or one that makes steps is given up, or one is given up twice.
    """
    monkeypatch.setattr(signals, "NOTE_AFTER_S", 0.02)
    monkeypatch.setattr(signals, "STUCK_AFTER_S", 1.5)
    reported: list[str] = []
    with StopSignals() as stop:
        stop.training_starts(
            note=lambda error: reported.append(f"note {error.exit_code}"),
            give_up=lambda error: reported.append(f"give up {error.exit_code}"),
        )
        os.kill(os.getpid(), signal.SIGUSR1)
        code = 128 + signal.SIGUSR1
        for _ in range(100):
            stop.alive()
            time.sleep(0.02)
        assert stop.requested == signal.SIGUSR1
        assert reported == [f"note {code}"]
        deadline = time.monotonic() + 20
        while watchers() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert reported[1:] == [f"give up {code}"]


@pytest.mark.parametrize("within_s", [None, 3.0])
def test_a_save_has_the_time_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch, within_s: float | None
) -> None:
    """Fails when a long save is given up because no step ends, though there is time; when the
    process is still there at its deadline; or when it is not said why it left.
    """
    monkeypatch.setattr(signals, "NOTE_AFTER_S", 0.02)
    monkeypatch.setattr(signals, "STUCK_AFTER_S", 0.2)
    reported: list[tuple[str, float]] = []
    with StopSignals(within_s) as stop:
        began_s = time.monotonic()
        stop.training_starts(
            note=lambda error: None,
            give_up=lambda error: reported.append((str(error), time.monotonic() - began_s)),
        )
        stop.saving()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
        assert reported == []
        while within_s and watchers() and time.monotonic() - began_s < 20:
            time.sleep(0.02)
    if within_s:
        ((text, left_s),) = reported
        assert text == "stopped by SIGTERM: the time to save is over (HVDTRAIN_STOP_WITHIN_S=3)"
        assert 2.2 < left_s < 3


TWICE = """
import os, signal, sys, time
from hvdtrain.run import stop as signals
signals.TOGETHER_S = float(sys.argv[1])
with signals.StopSignals() as stop:
    stop.training_starts(note=lambda error: None, give_up=lambda error: None)
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(3):
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
    print(f"saves after {signal.Signals(stop.requested).name}", flush=True)
    signal.sigtimedwait([signal.SIGUSR2], float(sys.argv[2]))  # stuck in native code
sys.exit(5)
"""


@pytest.mark.parametrize(("together_s", "code"), [(60.0, 5), (0.15, 143)])
def test_signals_that_come_together_are_one(together_s: float, code: int) -> None:
    """Fails when a worker that Slurm and its launcher signal at the same time dies of the second
    signal instead of saving, or when one that comes later does not end the process at once.
    """
    stuck_s = 0.5 if code == 5 else 60.0
    done = run_code(TWICE, Path.cwd(), together_s, stuck_s)
    assert done.returncode == code, done.stderr
    assert code == 143 or done.stdout == "saves after SIGTERM\n"


AT_THE_END = """
import os, signal, sys, threading, time
from hvdtrain.cli.train import run
from hvdtrain.records.ledger import RunLedger
from hvdtrain.run import stop as signals
from hvdtrain.topology import Topology
from hvdtrain.train.checkpoint import Checkpoints
signals.NOTE_AFTER_S, signals.STUCK_AFTER_S = 0.1, 0.5
how, output = sys.argv[1:]
write, close, give_up = Checkpoints._write, RunLedger.close, RunLedger.give_up
def write_slowly(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(2)
    write(*arguments)
def close_slowly(ledger):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(2)
    close(ledger)
def hang(ledger, error):
    print("gives up", flush=True)
    time.sleep(60)
if how == "writer":
    Checkpoints._write = write_slowly
elif how == "close":
    RunLedger.close = close_slowly
else:
    Checkpoints.save = lambda *_: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60))
    RunLedger.give_up = hang
    os.environ["HVDTRAIN_STOP_WITHIN_S"] = "2"
flags = {"data": "synthetic:1x28x28,samples=8", "global_batch_size": 4, "max_steps": 1}
flags |= {"output": output, "experiment": "x", "model": "lenet", "print_config": False}
sys.exit(run(flags, [], Topology()))
"""


@pytest.mark.parametrize("how", ["writer", "close"])
def test_the_end_of_a_run_is_saved_in_spite_of_a_signal(tmp_path: Path, how: str) -> None:
    """Fails when a signal while the last checkpoint is written, or the records are closed, without
    a deadline, ends the process as one that is stuck, so that the checkpoint is lost.
    """
    done = run_code(AT_THE_END, Path.cwd(), how, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "x/checkpoints/last").read_text() == "step-00000001\n"
    assert (tmp_path / "x/checkpoints/step-00000001/manifest.json").is_file()


def test_a_disk_that_hangs_does_not_keep_a_process_that_is_given_up(tmp_path: Path) -> None:
    """Fails when what a process writes last, before it leaves, can keep it for ever."""
    began_s = time.monotonic()
    done = run_code(AT_THE_END, Path.cwd(), "disk", tmp_path)
    assert done.returncode == 143, done.stderr
    assert done.stdout.endswith("gives up\n")
    assert time.monotonic() - began_s < 40
