"""A wrong backward pass is found by another rank, and the right rank is named."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from tests.parallel.launching import check_exit_code, horovodrun

SCRIPT = Path(__file__).parent / "scripts" / "wrong_backward.py"
RUN = ["train", "--model=lenet", "--max-steps=20", "--global-batch-size=60", "--audit-compute=1"]
VIRTUAL = "--virtual-workers=7"


@pytest.mark.parametrize(
    ("size", "controller", "rank", "bit", "when", "flags"),
    [
        (2, "mpi", 1, 30, "owner", []),
        (2, "gloo", 0, 12, "always", []),
        (2, "gloo", 1, 22, "always", [VIRTUAL]),
        (3, "gloo", 2, 31, "owner", [VIRTUAL, "--clip-grad=1"]),
        (3, "gloo", 0, 16, "checker", ["--grad-accum-steps=2"]),
        (4, "mpi", 3, 20, "always", []),
    ],
)
def test_the_wrong_rank_is_named(
    size: int,
    controller: str,
    rank: int,
    bit: int,
    when: str,
    flags: list[str],
    tmp_path: Path,
) -> None:
    """Fails if a wrong gradient is used, another rank is blamed, or a fault that repeats is taken
    for one that does not.
    """
    command = [sys.executable, str(SCRIPT), str(rank), str(bit), when, *RUN, *flags]
    done = horovodrun(size, controller, [*command, f"--output={tmp_path}"], timeout_s=120)
    check_exit_code(done, controller, 17)
    assert "computed different gradients of share" in done.output
    assert f"Rank {rank} on {socket.gethostname()} is wrong" in done.output, done.output
    assert f"the fault is {'repeatable' if when == 'always' else 'transient'}" in done.output
    summary = (tmp_path / "lenet-digits" / "summary.json").read_text()
    assert '"status": "audit_failed"' in summary


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
    done = horovodrun(2, "gloo", [sys.executable, "-c", SHARED, str(tmp_path)], timeout_s=120)
    assert done.exit_code == 0, done.output
    for name, expected in STYLES.items():
        error = (tmp_path / f"{name}.rank-0").read_text()
        assert expected in error and bool(expected) == bool(error), (name, error)
        assert "is wrong: " not in error
    assert (tmp_path / "Annealed.rank-0").read_text().startswith("exit code 1: --audit-compute: ")
    assert "exit code 17" in (tmp_path / "WrongCaching.rank-0").read_text()
    summary = json.loads((tmp_path / "DecodedPictures" / "summary.json").read_text())
    assert summary["compute_audit"] == {"checked": 4, "failed": 0}
