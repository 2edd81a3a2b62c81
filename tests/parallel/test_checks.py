"""Each check of checks.py, on 2 to 4 real workers and both controllers; three jobs in all."""

from __future__ import annotations

import functools
import json
import re
import sys

import pytest

from tests.parallel.checks import CHECKS
from tests.parallel.launching import Finished, horovodrun


@functools.cache
def results(size: int, controller: str) -> tuple[dict[str, list[str | None]], Finished]:
    try:
        finished = horovodrun(size, controller, [sys.executable, "-m", "tests.parallel.checks"])
    except AssertionError as error:  # it hung: once is enough for all checks of this job
        finished = Finished(-1, str(error), 0)
    lines = re.findall(r'\{"check": .*\}', finished.output)
    return {line["check"]: line["problems"] for line in map(json.loads, lines)}, finished


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("size", "controller"), [(2, "mpi"), (3, "gloo"), (4, "mpi")])
def test_check(size: int, controller: str, check: object) -> None:
    """Fails if the check of this name raised on any rank, or was not reached."""
    name = check.__name__
    problems, finished = results(size, controller)
    assert finished.exit_code == 0, finished.output
    assert name in problems, finished.output
    assert problems[name] == [None] * size, "\n".join(map(str, problems[name]))
