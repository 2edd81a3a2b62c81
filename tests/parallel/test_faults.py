"""A slice of the fault campaign: wrong exchanges in ordinary training are found and named."""

from __future__ import annotations

from tests.campaigns.faults import run_job


def test_a_slice_of_the_campaign() -> None:
    """Fails if an injected fault passes or is put elsewhere, or an honest step raises an alarm."""
    tally, problems = run_job(3, "gloo", trials=18, honest_steps=2, seed=3)
    assert problems == []
    assert tally["faults found"] == tally["faults to be found"] >= 9
    assert tally["audited parameter-steps"] >= 6 * 2 * 10
