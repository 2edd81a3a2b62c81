"""What several files of unit tests start from."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.data import _utils as loading

loading.MP_STATUS_CHECK_INTERVAL = 0.5  # seconds that torch waits for a stuck reader, in place of 5


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder
