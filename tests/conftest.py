"""Rules for all tests: under CI a skipped test is a failure, as a skip can hide a fault; what a
test makes of signals ends with it; and of two processes that share the tests, one gets all of a
file, and one all that share a cluster.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

SHARED = "tests/cluster/"  # one image and one set of containers for all of these
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Sharing(LoadFileScheduling):
    """What each process gets at a time: a file, or all that share a cluster."""

    def _split_scope(self, nodeid: str) -> str:
        return SHARED if nodeid.startswith(SHARED) else super()._split_scope(nodeid)


def pytest_configure() -> None:
    """Shells have what they start in the background ignore SIGINT, which tests send."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Sharing:
    """Whatever `--dist` is."""
    return Sharing(config, log)


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
