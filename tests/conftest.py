"""Rules for all tests: under CI a skipped test is a failure, as a skip can hide a fault; what a
test makes of signals ends with it; and of two processes that share the tests, one gets all of a
file, and one all that share a cluster.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = Path(__file__).parent / "cluster"  # one image and one set of containers for all of these
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for `pytest --dist loadgroup`."""
    for item in items:
        group = SHARED if SHARED in item.path.parents else item.path
        item.add_marker(pytest.mark.xdist_group(str(group)))


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """Puts the handlers of signals back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """Turn skips into failures where CI=true."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = f"skipped under CI: {report.longrepr}"
