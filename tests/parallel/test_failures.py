"""What goes wrong ends soon, with one readable message and the right exit code, leaving nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel.launching import CONTROLLERS, Finished, check_exit_code, horovodrun, hvdtrain

LIMIT_S = 60  # far below what a hang takes, far above what a busy machine needs
PLUGINS = "tests.parallel.plugins"


def train(controller: str, *flags: str, output: Path, size: int = 2, **options: object) -> Finished:
    command = hvdtrain("train", "--output", str(output), "--experiment", "x", *flags)
    return horovodrun(size, controller, command, timeout_s=90, **options)


def check_exit(finished: Finished, controller: str, exit_code: int) -> None:
    """In time, too."""
    assert finished.seconds < LIMIT_S, finished.output
    check_exit_code(finished, controller, exit_code)


BAD_INPUT = {
    "wrong flags": (
        ["--bogus=3", "--lr=-1", "--epochs=0"],
        ["--bogus: no such flag", "--lr=-1.0: must be at least 0", "--epochs=0: must be above 0"],
    ),
    "missing data": (
        ["--data=cifar10", "--data-dir=/nowhere"],
        ["rank 0: --data=cifar10: its files are not in /nowhere, and cannot be downloaded"],
    ),
}


@pytest.mark.parametrize(("name", "controller"), list(zip(BAD_INPUT, CONTROLLERS, strict=True)))
def test_bad_input(name: str, controller: str, tmp_path: Path) -> None:
    """Fails on a traceback, a repeated or missing message, a wrong code, or a folder made."""
    flags, expected = BAD_INPUT[name]
    finished = train(controller, *flags, output=tmp_path / "runs")
    check_exit(finished, controller, 2)
    for text in expected:
        assert finished.output.count(text) == 1, finished.output
    assert finished.output.count("hvdtrain: error") == 1, finished.output
    assert "/hvdtrain/cli/" not in finished.output  # no traceback through our code
    assert not (tmp_path / "runs").exists()


def test_output_that_is_a_file(tmp_path: Path) -> None:
    """Fails if a folder that cannot be made ends in a traceback, or changes the file."""
    (tmp_path / "runs").write_text("precious")
    finished = train("mpi", output=tmp_path / "runs")
    check_exit(finished, "mpi", 2)
    assert finished.output.count("cannot be written: Not a directory") == 1, finished.output
    assert (tmp_path / "runs").read_text() == "precious"


def summary_of(output: Path) -> dict:
    return json.loads((output / "x" / "summary.json").read_text())


@pytest.mark.parametrize(
    ("controller", "model", "said", "cause"),
    [
        ("mpi", "raises", "failed on rank 1 on {}: {}", "ValueError: a worker's own mistake"),
        (
            "gloo",
            "leaves",
            "error on rank 1 on {}: ended by",
            "TrainingError: ended by sys.exit(0)",
        ),
    ],
)
def test_a_worker_that_raises(
    controller: str, model: str, said: str, cause: str, tmp_path: Path
) -> None:
    """Fails if the others hang, the rank is not named, or rank 0's summary lacks the cause."""
    finished = train(controller, f"--model={PLUGINS}:{model}", output=tmp_path, size=3)
    check_exit(finished, controller, 1)
    assert finished.output.count(said.format(hostname(), cause)) == 1, finished.output
    summary = summary_of(tmp_path)
    assert summary["status"] == "failed"
    assert summary["error"].startswith(f"rank 1: {cause}")
    assert not (tmp_path / "x" / ".failed").exists()


def test_a_worker_that_is_stopped(tmp_path: Path) -> None:
    """Fails if a job waits for ever for a worker that stands still, or rank 0 does not name it."""
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7"}
    flags = [f"--model={PLUGINS}:is_stopped"]
    finished = train("mpi", *flags, output=tmp_path, variables=limits)
    check_exit(finished, "mpi", 1)
    summary = summary_of(tmp_path)
    assert summary["status"] == "failed"
    assert summary["error"].startswith("PeerFailure: a collective broke off")
    assert "waited 7 s for rank 1, which has stopped" in summary["error"]


def test_a_model_that_cannot_be_built(tmp_path: Path) -> None:
    """Fails if all ranks print the same error, or a folder is made for a run that never was."""
    finished = train("gloo", f"--model={PLUGINS}:raises_when_built", output=tmp_path / "runs")
    check_exit(finished, "gloo", 2)
    assert finished.output.count("KeyError: 'no such layer'") == 1, finished.output
    assert (
        "plugins.py:" in finished.output
        and "Traceback (most" not in finished.output.partition("Process 0 exit")[0]
    )
    assert not (tmp_path / "runs").exists()


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    """Fails if the others wait for ever for a worker that vanished without a word."""
    finished = train("mpi", f"--model={PLUGINS}:is_killed", output=tmp_path, size=3)
    assert finished.seconds < LIMIT_S, finished.output
    assert finished.exit_code != 0
    assert summary_of(tmp_path)["status"] in ("failed", "stopped")


def test_a_wrong_exchange_ends_with_exit_code_17(tmp_path: Path) -> None:
    """Fails if the live audit misses a wrong element, or names the wrong step, rank or place."""
    flags = [f"--model={PLUGINS}:wrong_exchange", "--audit-every=3", "--max-steps=20"]
    finished = train("gloo", *flags, output=tmp_path)
    check_exit(finished, "gloo", 17)
    assert finished.output.count("reduced gradients are wrong at step 6") == 1, finished.output
    assert finished.output.count("rank 1: parameter conv1.weight, index [3, 0, 1, 2]: reduced") == 1
    summary = summary_of(tmp_path)
    assert summary["status"] == "audit_failed"
    assert summary["audit"]["checked"] == 2
    assert summary["audit"]["failed"] == 1
    assert not (tmp_path / "x" / "checkpoints").exists()


def hostname() -> str:
    import socket

    return socket.gethostname()
