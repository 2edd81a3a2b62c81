"""Plain horovodrun in a folder of files named as modules of the standard library."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.launching import CONTROLLERS, horovodrun, hvdtrain
from tests.unit.ground.test_interpreter import shadow


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_horovodrun_starts_workers_beside_the_users_files(controller: str, tmp_path: Path) -> None:
    """Fails if a process by which Horovod starts workers imports from the working folder."""
    train = hvdtrain("train", "--model=mlp", "--data=digits", "--max-steps=1")
    done = horovodrun(2, controller, train, cwd=shadow(tmp_path), timeout_s=240)
    assert done.exit_code == 0, done.output
    assert "parameters sha256 " in done.output
