"""What several files of unit tests start from."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import _utils as loading

from hvdtrain import exchange
from hvdtrain.run import script as script_loops
from tests.unit import recorded

loading.MP_STATUS_CHECK_INTERVAL = 0.5  # seconds that torch waits for a stuck reader, in place of 5


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture(scope="session")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a trace, that was trained without a fault."""
    return recorded.train(tmp_path_factory.mktemp("honest"), *recorded.VIRTUAL)


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    """A copy of the honest run, to change."""
    copy = tmp_path / "runs" / "run"
    shutil.copytree(honest, copy)
    return copy


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A script of its own in an empty folder."""
    monkeypatch.setattr(exchange, "_joined", None)
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    monkeypatch.setattr(script_loops, "loops", script_loops.Loops())
    monkeypatch.chdir(tmp_path)
    gc.unfreeze()  # tests of commands freeze what is there, which the search for schedules misses
    hook = sys.excepthook
    yield
    sys.excepthook = hook
