"""The examples on several workers: what they learn is what one learns."""

from __future__ import annotations

import runpy
from pathlib import Path

from safetensors.torch import load_file

from tests.parallel.experiments import (
    largest_difference,
)
from tests.parallel.launching import BIN, CHECKOUT, horovodrun

TOLERANCE = 1e-9  # of each tensor's largest weight, in float64: the promise of the README
STEPS_CHECKED = 5  # every tenth of 3 epochs of 18 steps


def test_your_script(tmp_path: Path) -> None:
    """Fails if a rank's parameters are not those of the ordinary script, as they are not where
    shares of 33, 33 and 34 samples weigh the same, or if the audit does not run.
    """
    command = [str(BIN / "python"), "-m", "tests.parallel.scripts.example", str(tmp_path)]
    finished = horovodrun(3, "gloo", command)
    assert finished.exit_code == 0, finished.output
    assert finished.output.count("final loss") == 1, finished.output
    expected = runpy.run_path(str(CHECKOUT / "examples" / "your_script.py"))["model"].state_dict()
    for rank in range(3):
        weights = load_file(tmp_path / f"rank-{rank}.safetensors")
        assert largest_difference(weights, expected) < TOLERANCE
        assert f"rank {rank}: {STEPS_CHECKED} steps checked" in finished.output
