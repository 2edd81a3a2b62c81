"""Fixtures for tests in containers: one image and one cluster for all, made by launch/cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.errors import PreflightError
from launch.containers.engine import Engine
from launch.containers.image import ensure_image
from tests.cluster.containers import ROOT, Containers, cluster_of_three


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Extend the timeouts, as the first test waits until the image is built."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def image() -> str:
    """Return the image of this checkout; skip the test, with the reason, without an engine."""
    engine = Engine("hvdtrain", ROOT / "docker" / "compose.yaml")
    try:
        engine.check()
    except PreflightError as error:
        pytest.skip(str(error))
    return ensure_image(engine, ROOT)


@pytest.fixture(scope="session")
def containers(image: str) -> Iterator[Containers]:
    """Yield one cluster for all tests."""
    with cluster_of_three(f"hvdtrain-test-{os.getpid()}", image) as containers:
        yield containers
