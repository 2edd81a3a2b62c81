"""docs/planning.md: its tables are what the code makes of what it cites and has measured."""

from __future__ import annotations

import json

import pytest

from tests.campaigns.planning import MEASURED, POINTS, measured_table, published_table
from tests.parallel.launching import CHECKOUT

PAGE = (CHECKOUT / "docs" / "planning.md").read_text("utf-8")


def test_published_points_are_on_the_page() -> None:
    """Fails when code and page differ in a prediction, a published figure, or a residual."""
    assert "\n".join(published_table()) in PAGE


def test_our_own_measurements_are_on_the_page() -> None:
    """Fails when the page is not what is predicted from, and beside, the measurements kept."""
    assert "\n".join(measured_table(json.loads(MEASURED.read_text()))) in PAGE


@pytest.mark.parametrize(
    ("model", "workers", "efficiency"),
    [
        ("inception_v3", 512, 0.90),
        ("resnet101", 512, 0.90),
        ("vgg16", 512, 0.68),
        ("resnet50", 256, 0.90),
        ("vgg16", 16, 13.65 / 16),
    ],
)
def test_published_figures(model: str, workers: int, efficiency: float) -> None:
    """Fails when a published figure is mistyped: the README's own factors are beside its images."""
    found = [p.efficiency for p in POINTS if (p.model, p.workers) == (model, workers)]
    assert found and found == pytest.approx([efficiency] * len(found), abs=5e-4)
