"""A wrong backward pass is found by another rank, and the right rank is named."""

from __future__ import annotations

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
