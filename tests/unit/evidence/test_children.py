"""The end of commands that measurements start."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.evidence.children import CommandProcess

# As horovodrun: it shares a semaphore with processes of its own, whose tracker removes it.
SHARES = """
import multiprocessing, os, sys, time
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(semaphore._semlock.name, flush=True)
if "ends" in sys.argv:
    os._exit(0)
time.sleep(300)
"""
LIMIT_S = 30.0


@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", ["ends", "is ended"])
def test_a_command_leaves_no_semaphore(how: str, tmp_path: Path) -> None:
    """Fails if the tracker of a command's semaphores is killed before it has removed them."""
    log = tmp_path / "log"
    child = CommandProcess([sys.executable, "-c", SHARES, how], log, dict(os.environ))
    deadline = time.monotonic() + LIMIT_S
    while not log.read_text().endswith("\n") or (how == "ends" and child.exit_code() is None):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    semaphore = Path("/dev/shm", f"sem.{log.read_text().strip().removeprefix('/')}")
    child.end()
    assert child.exit_code() is not None and not child.processes()
    assert not semaphore.exists()
