"""The headers that are added to Horovod: their sums between threads, under ThreadSanitizer; a model
of the agreement before a sum; and the constants that Python repeats.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from hvdtrain.ring import orders
from tests.native import build
from tests.native.build import NATIVE, compile_protocols

LIMIT_S = 100
MODEL = Path(build.__file__).with_name("agreement.pml")


@pytest.fixture(scope="module")
def protocols(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_protocols(tmp_path_factory.mktemp("protocols"), {})


@pytest.mark.parametrize(
    ("what", "rounds", "stall_limit_s"),
    [
        *(("mpi", 400, 30), ("mpi-ends", 1, 3), ("gloo", 150, 0), ("gloo-ends", 1, 0)),
        ("pause", 500, 0),
    ],
)
def test_sums_between_threads(
    protocols: Path, what: str, rounds: int, stall_limit_s: int, tmp_path: Path
) -> None:
    """Fails on a race, or an element with another bit than the documented order gives, at any
    length, number of ranks or delay; if ranks wait for ever for one that has ended, name another
    one, or do not wait for one that pauses; if a file stays in memory; or if the pause before a
    cycle goes on though a result is asked for.
    """
    limits = {"CHECK": "1", "SHUTDOWN": str(stall_limit_s)}
    variables = {f"HOROVOD_STALL_{name}_TIME_SECONDS": value for name, value in limits.items()}
    files = set(Path("/dev/shm").glob("horovod*"))
    done = subprocess.run(
        [protocols, what, str(rounds)],
        env=os.environ | variables | {"TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr[-4000:]
    assert set(Path("/dev/shm").glob("horovod*")) == files


@pytest.mark.parametrize(
    ("mutation", "found"),
    [
        (None, "errors: 0"),
        ("NO_RECV_NOTE", "invalid end state"),
        ("EARLY_HANDOUT", "assertion violated"),
    ],
)
def test_the_agreement_and_the_sum_come_to_no_stand(
    mutation: str | None, found: str, tmp_path: Path
) -> None:
    """Fails if three ranks can come to a stand in Gloo's agreement or in a sum in shared memory, or
    take a message or a piece of another one; or if the model would not show it.
    """
    options = ["-DSTEPS=2", *([f"-D{mutation}"] if mutation else [])]  # of 4, minutes of states
    for command in (
        ["spin", *options, "-a", str(MODEL)],
        ["cc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"],
        ["./pan", "-m100000"],
    ):
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
    assert found in done.stdout, done.stdout
    assert "max search depth too small" not in done.stdout


@pytest.mark.parametrize(
    ("header", "name", "repeated"),
    [
        ("gloo_by_host.h", "kPieceBytes", orders.BY_HOST_PIECE_BYTES),
        ("sleeping_mpi.h", "kFewBytes", orders.MPI_RING.few_bytes),
    ],
)
def test_constants_that_python_repeats(header: str, name: str, repeated: int) -> None:
    """Fails when a header, or the reproduction of its sums in Python, is changed alone."""
    found = re.findall(rf"\b{name} = (\d+)(?: << (\d+))?[,;]", (NATIVE / header).read_text())
    assert [int(base) << int(shift or 0) for base, shift in found] == [repeated]
