"""Training by plain horovodrun: audited, on 2 to 4 workers, and the same as on one."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from tests.campaigns.agreement import CASES, differences
from tests.parallel.experiments import largest_difference, summary_and_weights
from tests.parallel.launching import CHECKOUT, horovodrun, hvdtrain, run

# 1,433 samples in batches of 100: an epoch ends with a short batch of 33.
EXPERIMENT = ["--dtype=float64", "--global-batch-size=100", "--max-steps=30", "--lr=0.1"]
EXPERIMENT += ["--weight-decay=1e-3", "--warmup-epochs=1", "--sched=cosine", "--seed=5"]
STEPS_AND_SAMPLES = (30, 2 * 1433)


@functools.cache
def on_one_worker(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    command = hvdtrain("train", *EXPERIMENT, "--output", str(folder), "--experiment=one")
    finished = run(command)
    assert finished.exit_code == 0, finished.output
    return summary_and_weights(folder / "one")


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict[str, torch.Tensor]]:
    return on_one_worker(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(("size", "controller"), [(2, "gloo"), (2, "mpi"), (3, "gloo"), (4, "mpi")])
def test_n_workers_learn_what_one_does(size: int, controller: str, alone, tmp_path: Path) -> None:
    """Fails if an audit fails or is left out, a sample is lost, or N changes the result."""
    command = hvdtrain("train", *EXPERIMENT, "--audit-every=3", "--output", str(tmp_path))
    finished = horovodrun(size, controller, [*command, "--experiment=n"])
    assert finished.exit_code == 0, finished.output
    summary, weights = summary_and_weights(tmp_path / "n")
    assert summary["status"] == "finished"
    assert (summary["world_size"], summary["controller"]) == (size, controller)
    assert (summary["steps"], summary["samples_seen"]) == STEPS_AND_SAMPLES
    assert summary["valid_samples"] == 364
    assert (summary["audit"]["checked"], summary["audit"]["failed"]) == (10, 0)
    worst = summary["audit"]["worst_error_over_bound"]
    assert worst == 0 if size == 2 else 0 < worst <= 1  # two float64 terms have one order only
    assert "10 steps compared with the ring reference, 0 failed" in finished.output
    expected_summary, expected = alone
    assert summary["train_loss"] == pytest.approx(expected_summary["train_loss"], rel=1e-9)
    assert summary["valid_accuracy"] == expected_summary["valid_accuracy"]
    assert largest_difference(weights, expected) <= 1e-9


@pytest.mark.parametrize(
    ("case", "size", "controller"),
    [
        ("lenet batch 100 accumulation 3", 3, "mpi"),
        ("lenet rank weights, one of them 0", 3, "gloo"),
        ("lenet adamw, clipping, average of weights", 2, "mpi"),
    ],
)
def test_features_do_not_depend_on_n(case: str, size: int, controller: str, tmp_path: Path) -> None:
    """Fails if accumulation, weights, clipping or averages make N matter.

    A few of the campaign's cases; `python -m tests.campaigns.agreement` runs them all. (Batch norm
    over ranks is in `checks.py`.)
    """
    short = ["--max-steps=40"]  # three epochs; the campaign's are longer
    assert differences(case, size, controller, tmp_path, short) <= CASES[case][1]


PRECISIONS = {
    "fp16 compression": ["--compression=fp16"],
    "bf16": ["--amp=bf16"],
    "fp16": ["--amp=fp16", "--clip-grad=1"],
}


@pytest.mark.parametrize("flags", PRECISIONS.values(), ids=PRECISIONS)
def test_lower_precisions_are_audited(flags: list[str], tmp_path: Path) -> None:
    """Fails if their own bound raises a false alarm, or nothing is learned any more."""
    command = ["train", "--epochs=4", "--global-batch-size=64", "--lr=0.1", "--audit-every=5"]
    command += [*flags, "--output", str(tmp_path), "--experiment=x"]
    # Without hardware for it, float16 is slow, most of all in convolutions.
    finished = horovodrun(2, "gloo", hvdtrain(*command), timeout_s=280)
    assert finished.exit_code == 0, finished.output
    summary, _ = summary_and_weights(tmp_path / "x")
    assert (summary["audit"]["checked"], summary["audit"]["failed"]) == (18, 0)
    assert summary["valid_accuracy"] > 0.8


def test_alone_needs_no_horovod(alone, tmp_path: Path) -> None:
    """Fails if a single process imports horovod or mpi4py."""
    program = (
        "import sys; sys.modules['horovod'] = sys.modules['mpi4py'] = None\n"
        "from hvdtrain.cli import main\nsys.exit(main())"
    )
    python = str(Path(hvdtrain()[0]).parent / "python")
    flags = [*EXPERIMENT, "--audit-every=3", "--output", str(tmp_path), "--experiment=one"]
    finished = run([python, "-c", program, "train", *flags])
    assert finished.exit_code == 0, finished.output
    summary, _ = summary_and_weights(tmp_path / "one")
    assert summary["params_sha256"] == alone[0]["params_sha256"]
    assert summary["audit"]["checked"] == 0


def test_quickstart(tmp_path: Path) -> None:
    """Fails if the README's first command does not end with a good model and a clean audit."""
    command = [str(CHECKOUT / "launch" / "quickstart"), "--output", str(tmp_path)]
    finished = run(command, timeout_s=280)
    assert finished.exit_code == 0, finished.output
    (folder,) = tmp_path.iterdir()
    summary, _ = summary_and_weights(folder)
    assert summary["world_size"] == 2
    assert summary["valid_accuracy"] >= 0.95
    assert summary["audit"]["checked"] >= 10
    assert summary["audit"]["failed"] == 0
