"""The README's first command."""

from __future__ import annotations

from pathlib import Path

from tests.parallel.experiments import summary_and_weights
from tests.parallel.launching import CHECKOUT, run


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
