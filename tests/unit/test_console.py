"""What rank 0 prints: first and last lines of a run, and where there may be a live bar."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.exchange import SingleProcess
from hvdtrain.run.console import final_lines, header, is_live, way_on
from hvdtrain.train.schedules import make_schedule
from tests.unit.jobs import made_up_data, make_job
from tests.unit.threads import connect

SUMMARY: dict[str, Any] = {
    "epochs": 1,
    "steps": 1,
    "samples_seen": 2000,
    "samples_per_s": 1500.4,
    "valid_loss": 0.5,
    "valid_accuracy": 0.75,
    "valid_samples": 364,
    "best": {"step": 1200, "epoch": 3, "valid_accuracy": 0.875},
    "bad_samples": 1,
    "audit": {"checked": 1, "failed": 0, "worst_error_over_bound": 0.25},
    "compute_audit": {"checked": 1, "failed": 0},
    "trace": {"step": 10, "records": 2, "sha256": "cd"},
    "params_sha256": "ab",
}


def test_the_last_lines_of_a_run() -> None:
    """Fails when one is printed as many, the best checkpoint is not distinguished from the last, or
    what was left out several times is printed as so many samples.
    """
    assert final_lines(SUMMARY, "runs/one").splitlines() == [
        "finished: 1 epoch, 1 step, 2,000 samples, 1,500 samples/s; validation accuracy 0.7500 on "
        "364",
        "best: validation accuracy 0.8750 after step 1,200, epoch 3; evaluate, predict and export "
        "use its checkpoint",
        "samples that could not be read were left out 1 time, over all epochs",
        "audit: 1 step compared with the ring reference, 0 failed; worst error 0.25 of the "
        "rounding bound",
        "audit of the computation: gradients of 1 step computed by another rank as well, 0 failed",
        "trace: 2 records, to step 10; sha256 cd",
        "parameters sha256 ab",
        "written to runs/one",
    ]


@pytest.mark.parametrize("speed", [None, float("nan")])
def test_a_run_without_a_step_of_its_own(speed: float | None) -> None:
    """Fails when a resumed run that had only to be evaluated, or one of an older version, whose
    summary names no best step, cannot be printed.
    """
    newer = ("best", "bad_samples", "compute_audit", "trace")
    older = {name: value for name, value in SUMMARY.items() if name not in newer}
    first, second = final_lines(older | {"samples_per_s": speed}, "x").splitlines()[:2]
    assert "2,000 samples; validation" in first and second.startswith("audit: ")


def test_after_a_stop_the_way_to_resume_is_printed() -> None:
    """Fails when the step is not that of the newest checkpoint, or one is promised that is not."""
    newest_first = [Path("step-00001200"), Path("step-00000040")]
    reported = "saved at step 1,200: the same command with --resume auto continues from there"
    assert way_on(newest_first) == reported
    assert way_on([]) == "stopped before a checkpoint was saved"


@pytest.mark.parametrize(
    ("shape", "warmup_steps", "text"),
    [
        ("constant", 0, "learning rate 0.05"),
        ("constant", 2, "learning rate up to 0.05"),
        ("cosine", 0, "learning rate up to 0.05"),
        ("step", 0, "learning rate up to 0.05"),
    ],
)
def test_the_header_shows_the_learning_rate(shape: str, warmup_steps: int, text: str) -> None:
    """Fails when a constant rate is shown as a limit, or one that varies as constant."""
    job = make_job(made_up_data(12), 4, SingleProcess(), lr=0.05, total_steps=10)
    job = replace(job, schedule=make_schedule(shape, 0.05, 10, warmup_steps))
    (update,) = [
        line for line in header(job, SingleProcess(), "mlp").splitlines() if "update" in line
    ]
    assert update == f"  update   sgd, {text}"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_live_bar_needs_a_terminal_of_its_own() -> None:
    """Fails when `horovodrun -np 1`, which gives its worker a terminal, fills its log with bars."""
    assert is_live(SingleProcess(), Terminal())
    assert not is_live(SingleProcess(), io.StringIO())
    assert not is_live(connect(1)[0], Terminal())
