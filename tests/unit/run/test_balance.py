"""Weights of ranks from their speeds; tests/parallel/test_balance.py measures them."""

from __future__ import annotations

import pytest

from hvdtrain.run.balance import as_weights


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([100.0], (1.0,)),
        ([100.0, 95.0, 91.0], (1.0, 1.0, 1.0)),  # as a measurement of equal ones varies
        ([100.0, 50.0], (1.0, 0.5)),
        ([33.0, 100.0, 100.0], (0.33, 1.0, 1.0)),
        ([100.0, 0.01], (1.0, 0.01)),  # no rank is left out
        ([100.0, None, 50.0], (1.0, 0.75, 0.5)),
        ([None, None], (1.0, 1.0)),
    ],
)
def test_weights_are_in_proportion_to_speeds(
    speeds: list[float | None], expected: tuple[float, ...]
) -> None:
    """Fails if equal workers get unequal shares, or a slow one none."""
    assert as_weights(speeds) == expected
