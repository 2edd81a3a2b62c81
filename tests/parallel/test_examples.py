"""The examples on several workers: what they learn is what one learns."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.parallel.experiments import (
    Weights,
    largest_difference,
    summary_and_weights,
    train,
)
from tests.parallel.launching import BIN, CHECKOUT, horovodrun

TOLERANCE = 1e-9  # of each tensor's largest weight, in float64: the promise of the README
# 53 samples a step: uneven on 2. Plain SGD, as Adam would magnify the rounding of gradients that
# are zero but for it (those of attention's key biases).
LANGUAGE = ["--global-batch-size", "53", "--max-steps", "8", "--lr", "0.1"]
REGRESSION = ["--global-batch-size", "33", "--epochs", "3", "--lr", "0.05"]
STEPS_CHECKED = 5  # every tenth of 3 epochs of 18 steps


def flags(task: str, others: list[str]) -> list[str]:
    return ["--task", f"examples.{task}", "--dtype", "float64", *others]


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Weights]:
    folder = tmp_path_factory.mktemp("language") / "one"
    finished = train(flags("language_model:BatchFirst", LANGUAGE), folder, 1, "none")
    assert finished.exit_code == 0, finished.output
    return summary_and_weights(folder)


@pytest.mark.parametrize(
    ("task", "size", "controller"),
    [("BatchFirst", 2, "mpi"), ("BatchSecond", 2, "gloo")],
)
def test_the_language_model(
    task: str, size: int, controller: str, one_worker: tuple[dict, Weights], tmp_path: Path
) -> None:
    """Fails if the number of workers, or the place of the batch among the dimensions, matters."""
    checks = ["--audit-every", "4"]
    folder = tmp_path / "run"
    finished = train(flags(f"language_model:{task}", LANGUAGE + checks), folder, size, controller)
    assert finished.exit_code == 0, finished.output
    summary, weights = summary_and_weights(folder)
    expected_summary, expected = one_worker
    assert largest_difference(weights, expected) < TOLERANCE
    for figure in ("train_loss", "valid_loss", "valid_accuracy"):
        assert summary[figure] == pytest.approx(expected_summary[figure], rel=1e-9), figure
    assert summary["audit"]["checked"] == (2 if size > 1 else 0)
    assert summary["audit"]["failed"] == 0


def test_the_regression(tmp_path: Path) -> None:
    """Fails if uneven shares change what is learned, the metric, or which checkpoint is best."""
    runs = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        finished = train(flags("regression:Diabetes", REGRESSION), folder, size, "gloo")
        assert finished.exit_code == 0, finished.output
        best = (folder / "checkpoints" / "best").read_text()
        runs.append((*summary_and_weights(folder), best))
    (one, expected, best), (two, weights, best_of_two) = runs
    assert largest_difference(weights, expected) < TOLERANCE
    assert two["valid_abs_error"] == pytest.approx(one["valid_abs_error"], rel=1e-9)
    assert one["valid_abs_error"] < 60  # of about 66 for the mean
    assert best_of_two == best


@pytest.mark.parametrize(("size", "controller"), [(3, "gloo"), (2, "mpi")])
def test_your_script(size: int, controller: str, tmp_path: Path) -> None:
    """Fails if a rank's parameters are not those of the ordinary script, as they are not where
    shares of 33, 33 and 34 samples weigh the same, or if the audit does not run.
    """
    command = [str(BIN / "python"), "-m", "tests.parallel.scripts.example", str(tmp_path)]
    finished = horovodrun(size, controller, command)
    assert finished.exit_code == 0, finished.output
    assert finished.output.count("final loss") == 1, finished.output
    expected = runpy.run_path(str(CHECKOUT / "examples" / "your_script.py"))["model"].state_dict()
    for rank in range(size):
        weights = load_file(tmp_path / f"rank-{rank}.safetensors")
        assert largest_difference(weights, expected) < TOLERANCE
        assert f"rank {rank}: {STEPS_CHECKED} steps checked" in finished.output
