"""The audit in training loops that are not ours."""

from __future__ import annotations

import re
from pathlib import Path

from tests.parallel.launching import BIN, CHECKOUT, horovodrun, hvdtrain, run

PYTHON = str(BIN / "python")
STEPS = 2 * 15  # 899 samples a rank in batches of 64, two epochs
WRONG = "audit: reduced gradients are wrong at step 10"


def added_lines(script: str) -> int:
    path = CHECKOUT / "tests" / "parallel" / "scripts" / f"{script}.py"
    return path.read_text().count("# added")


def test_a_loop_in_the_style_of_horovod(tmp_path: Path) -> None:
    """Fails on a false alarm, a step that is not audited, or more than four lines to add."""
    command = [PYTHON, "-m", "tests.parallel.scripts.horovod_loop", "--clip"]
    finished = horovodrun(2, "mpi", command, cwd=tmp_path)
    assert finished.exit_code == 0, finished.output
    for rank in (0, 1):
        assert f"rank {rank}: {STEPS // 2} checked, worst 0." in finished.output, finished.output
    assert added_lines("horovod_loop") <= 4


def test_a_fault_in_a_loop_of_horovod(tmp_path: Path) -> None:
    """Fails if a wrong element in somebody else's loop is not found at its step, and named."""
    command = [PYTHON, "-m", "tests.parallel.scripts.horovod_loop", "--fault"]
    finished = horovodrun(2, "gloo", command, cwd=tmp_path)
    assert finished.exit_code != 0
    assert WRONG in finished.output, finished.output
    assert "rank 1: parameter 2.weight, index [3, 4]: reduced" in finished.output
    assert "Rank 1: the copy there differs from that of rank 0" in finished.output


def test_a_loop_that_clips_too_early(tmp_path: Path) -> None:
    """Fails if gradients that code has changed on their way are put down to the reduction."""
    command = [PYTHON, "-m", "tests.parallel.scripts.horovod_loop", "--clip-too-early"]
    finished = horovodrun(2, "gloo", command, cwd=tmp_path)
    assert finished.exit_code != 0
    suspicion = "wrong at step 2\nRanks 0, 1: code changed parameter 0.weight's .grad between"
    for rank in (0, 1):  # right below the headline; lines of the two may come between one another's
        mark = f"[{rank}]<stderr>:"
        lines = [line for line in finished.output.splitlines() if line.startswith(mark)]
        assert suspicion in "\n".join(line.removeprefix(mark) for line in lines), finished.output
    assert "the reduction is at fault" not in finished.output


def test_a_loop_in_the_style_of_ddp(tmp_path: Path) -> None:
    """Fails on a false alarm in torch's own data parallelism (which divides before it adds)."""
    finished = torchrun(3, tmp_path, ["--accumulate"])
    assert finished.exit_code == 0, finished.output
    checked = re.findall(r"rank \d: (\d+) checked, worst 0\.\d+", finished.output)
    assert checked == ["10"] * 3, finished.output  # 600 samples a rank
    assert added_lines("ddp_loop") <= 4


def test_a_fault_in_a_loop_of_ddp(tmp_path: Path) -> None:
    """Fails if all ranks agree on a wrong value and it is not reported."""
    finished = torchrun(2, tmp_path, ["--fault"])
    assert finished.exit_code != 0
    assert WRONG in finished.output, finished.output
    assert "All ranks hold the same wrong values" in finished.output
    assert len(list((tmp_path / "audit" / "step-00000010").iterdir())) == 2


def test_an_mpi_that_is_not_horovods(tmp_path: Path) -> None:
    """Fails if a process that an mpirun has started as one of two trains by itself, because
    Horovod, here one that does not use MPI, finds no other process.
    """
    names = {"SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    variables = {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}
    variables |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    finished = run(hvdtrain("train", "--max-steps=1"), cwd=tmp_path, variables=variables)
    assert finished.exit_code == 2, finished.output
    assert "OMPI_COMM_WORLD_SIZE=2: an mpirun of another MPI" in finished.output
    assert "`horovodrun -np 2 ...`" in finished.output
    assert not (tmp_path / "runs").exists()


def torchrun(size: int, folder: Path, flags: list[str]):
    launcher = [PYTHON, "-m", "torch.distributed.run", f"--nproc-per-node={size}", "--standalone"]
    return run([*launcher, "-m", "tests.parallel.scripts.ddp_loop", *flags], cwd=folder)
