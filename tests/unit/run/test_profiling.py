"""--profile: traces of the chosen steps, and of no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hvdtrain.config.fields import step_range
from hvdtrain.errors import TrainingError
from hvdtrain.exchange import SingleProcess
from hvdtrain.run.hooks import StepProfiler


def run_steps(profiler: StepProfiler, steps: int) -> None:
    for step in range(1, steps + 1):
        profiler.begin(step)
        torch.ones(step, step) @ torch.ones(step, step)  # a product that identifies the step
        profiler.end(step)
    profiler.close()


@pytest.mark.parametrize(("chosen", "products"), [((2, 3), 2), ((1, 1), 1), ((4, 9), 2)])
def test_only_the_chosen_steps_are_in_the_trace(
    chosen: tuple[int, int], products: int, tmp_path: Path
) -> None:
    """Fails when another step is profiled, or a run that ends early loses its trace."""
    run_steps(StepProfiler(chosen, tmp_path / "p", SingleProcess()), 5)
    trace = json.loads((tmp_path / "p" / "rank-0.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("aten::mm") == products


@pytest.mark.parametrize("chosen", [None, (7, 9)])
def test_nothing_is_written_where_nothing_is_profiled(chosen, tmp_path: Path) -> None:
    """Fails when a run without --profile, or one that never comes so far, leaves a folder."""
    run_steps(StepProfiler(chosen, tmp_path / "p", SingleProcess()), 5)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    """Fails when a file in the way is a surprise."""
    (tmp_path / "p").write_text("")
    with pytest.raises(TrainingError, match="--profile: "):
        run_steps(StepProfiler((1, 2), tmp_path / "p", SingleProcess()), 2)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        *(("3-5", (3, 5)), ("1-1", (1, 1)), ("5-3", None), ("0-2", None), ("3", None)),
        *(("-3", None), ("3-", None), ("a-b", None), ("1-2-3", None), ("\u0663-4", None)),
    ],
)
def test_steps_are_read(text: str, steps: tuple[int, int] | None) -> None:
    """Fails when a range is misread, or nonsense taken for one."""
    assert step_range(text) == steps
