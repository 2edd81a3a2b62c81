"""Stopped and resumed runs end as undisturbed ones do, and lose no sample."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.parallel.experiments import largest_difference, summary_and_weights, train
from tests.parallel.launching import hvdtrain, run
from tests.parallel.plugins import TRAIN_SAMPLES

LOGGING = "--model=tests.parallel.plugins:logs_samples"
SHORT = [LOGGING, "--epochs=2", "--global-batch-size=100", "--lr=0.1", "--resume=auto"]
SHORT += ["--dtype=float64"]
SAME_IN_FLOAT64 = 1e-9  # of each tensor's largest weight, for any number of workers


def test_cut_at_random_moments() -> None:
    """Fails if a run that workers were killed or stopped in ends with other parameters."""
    cuts = 2
    command = hvdtrain("verify-resume", "-np", "3", "--controller", "mpi")
    flags = ["--max-steps=100", "--global-batch-size=64", "--lr=0.1", "--checkpoint-interval=5"]
    finished = run([*command, f"--cuts={cuts}", "--", "train", *flags], timeout_s=280)
    assert finished.exit_code == 0, finished.output
    assert "every run ended with the same parameters" in finished.output
    assert finished.output.count("cut: SIG") >= cuts, finished.output


@pytest.mark.parametrize(
    ("number", "before", "after", "controller"),
    [(signal.SIGTERM, 3, 2, "gloo"), (signal.SIGUSR1, 2, 3, "mpi")],
)
def test_stopped_and_resumed_at_another_n(
    number: signal.Signals, before: int, after: int, controller: str, tmp_path: Path
) -> None:
    """Fails if ranks stop at different steps, a sample is repeated or lost over the cut, what is
    learned differs from an undisturbed run of one process, or it is not said what of the random
    numbers is.
    """
    variables = {"HVDTRAIN_TEST_LOG": str(tmp_path / "log")}
    stopping = variables | {"HVDTRAIN_TEST_SIGNAL": str(int(number))}
    stopped = train(SHORT, tmp_path / "x", before, controller, variables=stopping)
    assert stopped.exit_code == (128 + number if controller == "mpi" else 1), stopped.output
    assert f"stopped by {number.name}" in stopped.output
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert summary["status"] == "stopped"
    resumed = train(SHORT, tmp_path / "x", after, controller, variables=variables)
    assert resumed.exit_code == 0, resumed.output
    lost = {(3, 2): "rank 2 are dropped", (2, 3): "rank 2 start at the seed"}[before, after]
    reported = f"instead of {before}: the random numbers of {lost}"
    assert resumed.output.count(reported) == 1, resumed.output
    summary, weights = summary_and_weights(tmp_path / "x")
    assert 4 <= summary["resumed_from"] <= 6  # asked in the fourth step, agreed one or two later
    assert (summary["world_size"], summary["samples_seen"]) == (after, 2 * TRAIN_SAMPLES)
    seen = Counter(map(int, (tmp_path / "log").read_text().split()))
    assert seen == dict.fromkeys(range(TRAIN_SAMPLES), 2)
    alone = train(SHORT, tmp_path / "alone", 1, "none", variables=variables)
    assert alone.exit_code == 0, alone.output
    assert largest_difference(weights, summary_and_weights(tmp_path / "alone")[1]) < SAME_IN_FLOAT64


def test_what_a_finished_run_is_resumed_with(tmp_path: Path) -> None:
    """Fails if resuming a finished run trains, changes it, or ends otherwise; or if it is resumed
    with settings that change what is learned.
    """
    flags = ["--max-steps=3", "--global-batch-size=100", "--resume=auto"]
    first = train(flags, tmp_path / "x", 2, "gloo")
    before = {path: path.read_bytes() for path in (tmp_path / "x").glob("*.*")}
    second = train(flags, tmp_path / "x", 2, "gloo")
    assert first.exit_code == second.exit_code == 0, second.output
    third = train([*flags, "--lr=7", "--seed=8"], tmp_path / "x", 2, "mpi")
    assert third.exit_code == 2, third.output
    for text in ("--lr=7.0: the run in", "--seed=8: the run in"):
        assert third.output.count(text) == 1, third.output
    assert {path: path.read_bytes() for path in (tmp_path / "x").glob("*.*")} == before
