"""`hvdtrain.launch` with one worker, which needs no Horovod: calls, results, output, failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hvdtrain
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.run import script


def test_a_call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if arguments or the environment do not arrive, this process itself calls the function,
    a progress bar is printed as it is redrawn, or the last line is lost.
    """
    monkeypatch.setenv("OF_THE_USER", "yes")

    def function(number: int, *, name: str) -> tuple[int, int, str, str]:
        print("step 1%\rstep 2%\rstep 100%\nßend", end="")
        return os.getpid(), number, name, os.environ["OF_THE_USER"]

    ((pid, *rest),) = hvdtrain.launch(function, (3,), {"name": "x"}, np=1)
    assert pid != os.getpid() and rest == [3, "x", "yes"]
    assert capfd.readouterr().out == "step 100%\nßend\n"


def test_lines_are_printed_while_the_function_runs(tmp_path: Path) -> None:
    """Fails if output is kept until the end, where a notebook would seem to stand still."""
    gate = tmp_path / "gate"

    class Opened:
        def write(self, text: str) -> None:
            gate.touch()

        def flush(self) -> None: ...

    def function() -> bool:
        print("first line")
        deadline = time.monotonic() + 60
        while not gate.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return gate.exists()

    before, sys.stdout = sys.stdout, Opened()  # type: ignore[assignment]
    try:
        assert hvdtrain.launch(function, np=1) == [True]
    finally:
        sys.stdout = before


ROOT = Path(hvdtrain.__file__).parents[1]


def end_alone() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise KeyError("of the user")


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (fail, ["rank 0 failed", 'test_notebook.py", line', 'raise KeyError("of the', "'of the u"]),
        (lambda: sys.exit(3), ["rank 0 failed", "SystemExit: 3"]),
        (end_alone, ["the worker has ended without a result, with exit code -9"]),
        (lambda: os._exit(0), ["rank 0: the worker has ended without a result", "code 0"]),
        (lambda: (n for n in "ab"), ["rank 0 failed", "the result, of type generator, cannot be"]),
        (lambda: hvdtrain.launch(print), ["rank 0 failed", "this process is a worker itself"]),
    ],
)
def test_a_failure(function: Callable[[], Any], parts: list[str]) -> None:
    """Fails if a failure of a worker is not raised, or its cause is not in the text."""
    with pytest.raises(TrainingError) as failure:
        hvdtrain.launch(function, np=1)
    assert [part for part in parts if part not in str(failure.value)] == []
    assert 'hvdtrain/notebook.py", line' not in str(failure.value)  # no frames of ours


def test_a_time_limit() -> None:
    """Fails if a function that does not end holds this process for longer than it is to."""
    with pytest.raises(TrainingError, match=r"no end after 1\.5 s \(timeout_s\)"):
        hvdtrain.launch(time.sleep, (1000,), np=1, timeout_s=1.5)


def test_bad_arguments() -> None:
    """Fails if a problem of the arguments is reported after others, or once workers run."""
    with pytest.raises(UsageError) as refusal:
        hvdtrain.launch(5, "ab", [1], np=0, controller="tcp", timeout_s=-1)  # type: ignore[arg-type]
    assert [problem.partition(": must")[0] for problem in refusal.value.problems] == [
        "hvdtrain.launch: function=5",
        "hvdtrain.launch: args='ab'",
        "hvdtrain.launch: kwargs=[1]",
        "hvdtrain.launch: np=0",
        "hvdtrain.launch: controller='tcp': choose from auto, gloo, mpi",
        "hvdtrain.launch: timeout_s=-1",
    ]


def test_a_function_that_cannot_be_sent() -> None:
    """Fails if the reason is not said before any work, with what to do."""
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"cannot pickle '_thread\.lock'.*within the function"):
        hvdtrain.launch(lambda: lock, np=1)


def test_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if each of several workers would start workers of its own."""
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "1")
    with pytest.raises(UsageError, match="this process is a worker itself"):
        hvdtrain.launch(print, np=1)


def test_a_script_that_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if `replay` of a run, which directs the loop of its script, finds no loop because the
    script starts workers.
    """
    monkeypatch.setattr(script, "loops", script.Loops(direction=lambda _: iter(())))
    assert hvdtrain.launch(os.getpid, np=3) == [os.getpid()]


HELPER = """
from dataclasses import dataclass

@dataclass
class Point:
    x: int
    y: int
"""
SCRIPT = """
import sys
import hvdtrain
from helper import Point

def function(x):
    return Point(x, OFFSET), sys.argv, hvdtrain.init().size

OFFSET = 7
(point, argv, size), = hvdtrain.launch(function, [1], np=1)
assert type(point) is Point and (point.x, point.y) == (1, 7) and size == 1, point
print(argv)
"""


@pytest.mark.parametrize("is_file", [True, False])
def test_a_main_script(is_file: bool, tmp_path: Path) -> None:
    """Fails if a function of __main__, or of a module beside the script, does not reach the worker,
    the script itself is run again, as it has no `if __name__ == "__main__"`, or a run would not be
    named for the script, or for the function where there is no script.
    """
    (tmp_path / "helper.py").write_text(HELPER)
    path = tmp_path / "main.py"
    path.write_text(SCRIPT)
    command = [str(path), "--flag"] if is_file else ["-c", SCRIPT]
    done = subprocess.run(
        [sys.executable, *command],
        cwd="/" if is_file else tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{command if is_file else ['function']}\n", done.stderr
