"""The checks on the device notice what they are for; the campaign `devices` takes all places."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.campaigns.devices import mutants
from tests.device.jobs import alone
from tests.parallel.launching import CHECKOUT, run

# A mutant, the check that must find it, and its message.
FOUND = {
    "run/prepare.py: build_model(source.task, config).to(device)": ("plain", "on the same device"),
    "train/devices.py: beside.synchronize()": ("plain", "AssertionError"),
    "run/prepare.py: move_state(optimizer)": ("own_loop", "on the same device"),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_missing_device_is_found(name: str, tmp_path: Path) -> None:
    """Fails if the check passes although the model or an optimizer's state stays on the CPU, or
    a copy is read before it has arrived.
    """
    (mutant,) = (it for it in mutants() if it.name == name)
    check, message = FOUND[name]
    package, runs = tmp_path / "package", tmp_path / "runs"
    mutant.write(package)
    path = f"{package}{os.pathsep}{CHECKOUT}"
    ended = run(alone(runs, check), cwd=package, variables={"PYTHONPATH": path})
    assert ended.exit_code == 1, ended.output
    assert message in (runs / "afterwards.json").read_text()
