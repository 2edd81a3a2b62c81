"""A wrong backward pass is found by another rank, and the right rank is named."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from tests.campaigns.compute_faults import CHECKED, fault_problem
from tests.parallel.launching import horovodrun

LENET = ["--model=lenet", "--max-steps=20", "--global-batch-size=60", *CHECKED]
VIRTUAL = "--virtual-workers=7"
# The experiments of one start: flags, and the fault (see `tests.campaigns.compute_trials`).
FAULTS: dict[tuple[int, str], dict[str, tuple[list[str], dict[str, object]]]] = {
    (2, "mpi"): {
        "once": ([], {"rank": 1, "when": "owner", "layer": 1, "bits_down": 0}),
        "always": ([], {"rank": 0, "when": "always", "layer": 1, "bits_down": 18}),
    },
    (3, "gloo"): {
        "virtual": (
            [VIRTUAL, "--clip-grad=1"],
            {"rank": 2, "when": "owner", "layer": 1, "bits_down": 3},
        ),
        "checker": (
            ["--grad-accum-steps=2"],
            {"rank": 0, "when": "checker", "layer": 0, "bits_down": 14},
        ),
        "always": ([VIRTUAL], {"rank": 1, "when": "always", "layer": 2, "bits_down": 10}),
    },
}


@pytest.mark.parametrize(("size", "controller"), FAULTS)
def test_the_wrong_rank_is_named(size: int, controller: str, tmp_path: Path) -> None:
    """Fails if a wrong gradient is used, another rank is blamed, or a fault that repeats is taken
    for one that does not.
    """
    cases = FAULTS[size, controller]
    flags = {name: [*LENET, *own] for name, (own, _) in cases.items()}
    faults = {name: fault for name, (_, fault) in cases.items()}
    (tmp_path / "experiments.json").write_text(json.dumps(flags))
    (tmp_path / "faults.json").write_text(json.dumps(faults))
    command = [sys.executable, "-m", "tests.campaigns.compute_trials", str(tmp_path)]
    done = horovodrun(size, controller, command, timeout_s=240)
    assert done.exit_code == 0, done.output
    for name, fault in faults.items():
        assert fault_problem(tmp_path, name, fault, size) is None
        error = (tmp_path / f"{name}.rank-0").read_text()
        assert "computed different gradients of share" in error
        assert f"Rank {fault['rank']} on {socket.gethostname()} is wrong" in error, error
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["status"] == "audit_failed"


# What rank 0 ends with; nothing: the run.
STYLES = {
    "Pictures": "",
    "DecodedPictures": "",
    "Caching": "",
    "Annealed": "no rank computes the same gradients twice from the same parameters, buffers,",
    "WrongCaching": "its loss cannot be computed in float64",
}
SHARED = "from tests.parallel.shared import main; main()"


def test_models_and_batches_of_other_styles(tmp_path: Path) -> None:
    """Fails if a layout of memory, a named tuple or tensors kept by a model raise an alarm or end
    the run; if a rank is blamed for a model that does not repeat; or if a fault is lost where no
    slope can be computed.
    """
    flags = ["--global-batch-size=14", "--max-steps=4", "--audit-compute=1"]
    experiments = {it: [f"--task=tests.parallel.tasks:{it}", *flags] for it in STYLES}
    (tmp_path / "experiments.json").write_text(json.dumps(experiments))
    done = horovodrun(2, "gloo", [sys.executable, "-c", SHARED, str(tmp_path)], timeout_s=240)
    assert done.exit_code == 0, done.output
    for name, expected in STYLES.items():
        error = (tmp_path / f"{name}.rank-0").read_text()
        assert expected in error and bool(expected) == bool(error), (name, error)
        assert "is wrong: " not in error
    assert (tmp_path / "Annealed.rank-0").read_text().startswith("exit code 1: --audit-compute: ")
    assert "exit code 17" in (tmp_path / "WrongCaching.rank-0").read_text()
    summary = json.loads((tmp_path / "DecodedPictures" / "summary.json").read_text())
    assert summary["compute_audit"] == {"checked": 4, "failed": 0}
