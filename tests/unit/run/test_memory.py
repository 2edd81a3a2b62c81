"""Memory that is kept between steps."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from hvdtrain.run.process import CHOSEN_BY_USER, quick_imports

PAGES_OF_A_BLOCK = 64 * 2**20 // os.sysconf("SC_PAGE_SIZE")
PROGRAM = """
import resource, sys
import torch
from hvdtrain.run.process import keep_freed_memory
if "keep" in sys.argv:
    print(keep_freed_memory())
def step():
    for size in (64, 24, 3):
        torch.ones(size * 2**20, dtype=torch.uint8)
for _ in range(20):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


def faults_of_a_step(*arguments: str, **variables: str) -> list[str]:
    environment = {k: v for k, v in os.environ.items() if k not in CHOSEN_BY_USER} | variables
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_next_step_finds_the_memory_of_the_last() -> None:
    """Fails when memory is given back between steps, so that the kernel maps every page again."""
    kept, faults = faults_of_a_step("keep")
    assert kept == "True"
    assert float(faults) < PAGES_OF_A_BLOCK / 20
    (faults,) = faults_of_a_step()
    if float(faults) < PAGES_OF_A_BLOCK / 2:
        pytest.fail("without it memory is kept too: this test shows nothing here")


def test_what_the_user_has_chosen_stays() -> None:
    """Fails when glibc's own variables are overruled."""
    kept, _ = faults_of_a_step("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "False"


def test_garbage_is_collected_as_usual_after_imports() -> None:
    """Fails when training keeps the thresholds that imports had, or collects what was imported."""
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    try:
        with quick_imports():
            made = [[] for _ in range(1000)]
            assert gc.get_threshold() > usual
        assert gc.get_threshold() == usual and gc.get_freeze_count() >= frozen + len(made)
    finally:
        gc.unfreeze()
