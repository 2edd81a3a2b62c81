"""What rank 0 prints: first and last lines of a run, and where there may be a live bar."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hvdtrain.exchange import SingleProcess
from hvdtrain.records.console import Console, final_lines, gpu_figures, header, is_live, way_on
from hvdtrain.records.provenance import GpuMeter
from hvdtrain.train.metering import Totals
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
    """Fails when one is printed as many, the next command cannot be pasted into a shell, the best
    checkpoint is not distinguished from the last, or what was left out several times is printed as
    so many samples.
    """
    assert final_lines(SUMMARY, {"data": "digits"}, "runs/my one").splitlines() == [
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
        "written to runs/my one; next: hvdtrain evaluate 'runs/my one', or hvdtrain report "
        "'runs/my one'",
    ]
    named = final_lines(SUMMARY, {"data": "imagefolder:my own"}, "x").splitlines()[-1]
    assert "next: hvdtrain evaluate x --data 'imagefolder:my own', or hvdtrain report x" in named
    of_script = final_lines(SUMMARY, {"script": ["train.py"]}, "x").splitlines()[-1]
    assert "next: hvdtrain evaluate x --trust-code, or hvdtrain report x" in of_script


@pytest.mark.parametrize("speed", [None, float("nan")])
def test_a_run_without_a_step_of_its_own(speed: float | None) -> None:
    """Fails when a resumed run that had only to be evaluated, or one of an older version, whose
    summary names no best step, cannot be printed.
    """
    newer = ("best", "bad_samples", "compute_audit", "trace")
    older = {name: value for name, value in SUMMARY.items() if name not in newer}
    first, second = final_lines(older | {"samples_per_s": speed}, {}, "x").splitlines()[:2]
    assert "2,000 samples; validation" in first and second.startswith("audit: ")


GPU = torch.device("cuda", 1)
READINGS = [  # peak memory in bytes, utilisation or the error, figures, text
    (5 << 20, 87, {"memory_mib": 5, "utilisation_percent": 87}, "5 MiB 87%"),
    (3000 << 20, ModuleNotFoundError("pynvml"), {"memory_mib": 3000}, "3,000 MiB"),
    (2 << 20, 50, {"memory_mib": 2}, "2 MiB"),  # after a failure it is not tried again
]


def test_the_figures_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if another GPU is read, memory is the peak since the start instead of the interval, or
    a machine without the driver's library ends the training, or is asked at each interval.
    """
    calls: list[Any] = []
    meter = GpuMeter(GPU)
    for memory, utilisation, figures, text in READINGS:
        fault = isinstance(utilisation, Exception)
        mock = Mock(side_effect=utilisation) if fault else Mock(return_value=utilisation)
        monkeypatch.setattr(torch.cuda, "utilization", mock)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", {GPU: memory}.__getitem__)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", calls.append)
        assert meter.read() == figures
        assert gpu_figures(figures) == text
    assert calls == [GPU] * len(READINGS)


def test_without_a_gpu_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if CUDA is asked for the memory of a CPU, or an empty figure is shown."""
    monkeypatch.delattr(torch.cuda, "max_memory_allocated")
    assert GpuMeter(torch.device("cpu")).read() == {} and gpu_figures({}) == ""


@pytest.mark.parametrize(("gpu", "shown"), [({}, "lr 0.1  0:"), (READINGS[0][2], "GPU 5 MiB 87%")])
def test_a_line_of_progress(gpu: dict[str, float], shown: str, capsys) -> None:
    """Fails if the GPU's figures are missing where there is one, or shown where there is none."""
    totals = Totals(5, 1, 40, 40, 0.5, {"accuracy": 0.25}, 100.0, {"compute": 0.1})
    Console(10, live=False).interval_end(totals, 0.1, gpu)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 5/10 50%  epoch 1  loss 0.5000  accuracy 0.250  100 samples/s")
    assert shown in line and line.endswith(" left") and ("GPU" in line) is bool(gpu)


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
