"""A slice of the fault campaign: wrong exchanges in ordinary training are found and named."""

from __future__ import annotations

import pytest

from tests.campaigns.faults import run_job
from tests.parallel.experiments import summary_and_weights, train
from tests.parallel.launching import CONTROLLERS


@pytest.mark.parametrize(("size", "controller"), [(2, "mpi"), (3, "gloo")])
def test_a_slice_of_the_campaign(size: int, controller: str) -> None:
    """Fails if an injected fault passes or is put elsewhere, or an honest step raises an alarm."""
    tally, problems = run_job(size, controller, trials=18, honest_steps=2, seed=size)
    assert problems == []
    assert tally["faults found"] == tally["faults to be found"] >= 9
    assert tally["audited parameter-steps"] >= 6 * 2 * 10


def test_exact_audits_of_training(tmp_path) -> None:
    """Fails if Gloo's order of summation is not reproduced to the bit in live training."""
    flags = ["--max-steps=20", "--global-batch-size=50", "--audit-every=1", "--audit=exact"]
    finished = train(flags, tmp_path / "x", 3, "gloo")
    assert finished.exit_code == 0, finished.output
    summary, _ = summary_and_weights(tmp_path / "x")
    assert summary["audit"] == {"checked": 20, "failed": 0, "worst_error_over_bound": 0.0}


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_lowest_bit_is_found_by_an_exact_audit(controller: str, tmp_path) -> None:
    """Fails if one bit of one element, within every bound, passes."""
    flags = ["--model=tests.parallel.plugins:flips_a_bit", "--audit-every=1", "--audit=exact"]
    finished = train([*flags, "--max-steps=9"], tmp_path / "x", 2, controller)
    assert finished.exit_code == (17 if controller == "mpi" else 1), finished.output
    assert "audit: reduced gradients are wrong at step 4" in finished.output, finished.output
    assert "parameter conv1.weight, index [3, 0, 1, 2]: reduced" in finished.output
    assert "and not a bit may differ" in finished.output
    assert "All ranks hold the same wrong values" in finished.output
    assert len(list((tmp_path / "x" / "audit" / "step-00000004").iterdir())) == 2


def test_an_unknown_order_is_refused(tmp_path) -> None:
    """Fails if bits are promised to be equal where Open MPI chooses the order of summation."""
    flags = ["--audit-every=1", "--audit=exact", "--max-steps=2"]
    finished = train(flags, tmp_path / "x", 3, "mpi")
    assert finished.exit_code == 2, finished.output
    assert finished.output.count("--audit=exact: Open MPI chooses how it sums: set") == 1
    assert not (tmp_path / "x").exists()
