"""hvdtrain on a device that is not the CPU: the bits of the CPU, and no tensor on the wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.device.alone import AFTERWARDS, CHECKS
from tests.device.jobs import alone, of_two_workers, problem_of
from tests.device.together import EXPERIMENTS, MESSAGES
from tests.parallel.launching import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs, once all jobs have ended."""
    place = tmp_path_factory.mktemp("device")
    commands = [alone(place), *of_two_workers(place), alone(place, *AFTERWARDS)]
    printed = [run(command, timeout_s=200).output for command in commands]
    (place / "printed").write_text("\n".join(printed))
    return place


@pytest.mark.parametrize("check", CHECKS)
def test_a_check(check: str, folder: Path) -> None:
    """Fails if the check of this name in `alone.py` has raised, or was not reached."""
    file = folder / ("afterwards.json" if check in AFTERWARDS else "alone.json")
    assert file.exists(), (folder / "printed").read_text()[-5000:]
    error = json.loads(file.read_text()).get(check, "was not reached")
    assert error is None, error


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_of_two_workers(name: str, folder: Path) -> None:
    """Fails if it ends with an error, or one that must be refused ends otherwise than with its
    message on both ranks.
    """
    problem = problem_of(name, folder, MESSAGES)
    assert problem is None, f"{problem}\n{(folder / 'printed').read_text()[-5000:]}"
