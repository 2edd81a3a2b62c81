"""`hvdtrain verify` on real workers: this installation is right, and every fault is noticed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.parallel.cpu_as_gpu import write_gpus
from tests.parallel.launching import CHECKOUT, Finished, check_exit_code, horovodrun, hvdtrain, run

SMALL = ("--sizes", "0,4,4100")


def verify(size: int, controller: str, *flags: str) -> Finished:
    return horovodrun(size, controller, hvdtrain("verify", *flags), timeout_s=240)


def check_exit(finished: Finished, controller: str, exit_code: int) -> None:
    check_exit_code(finished, controller, exit_code)
    assert "cli/verify.py" not in finished.output  # no traceback through our code


@pytest.mark.parametrize(("size", "controller"), [(2, "mpi"), (3, "gloo")])
def test_the_installation_is_right(size: int, controller: str, tmp_path: Path) -> None:
    """Fails if a collective of this Horovod is wrong, or a row, case or the verdict is missing."""
    finished = verify(size, controller, *SMALL, "--json", str(tmp_path / "verify.json"))
    assert finished.exit_code == 0, finished.output
    content = json.loads((tmp_path / "verify.json").read_text())
    assert (content["workers"], content["controller"]) == (size, controller)
    cases = content["cases"]
    assert f"verify: {len(cases)} cases on {size} workers ({controller}): all right" in (
        finished.output
    )
    assert len({(case["operation"], case["dtype"]) for case in cases}) == 40
    assert finished.output.count("  right") == 40
    assert all(case["ok"] and case["explanation"] is None for case in cases)
    assert {case["submission"] for case in cases} == {"alone", "together", "grouped"}
    largest = max(case["bytes"] for case in cases if case["submission"] == "alone")
    assert largest == 4100 + 4


def test_a_fault_is_noticed() -> None:
    """Fails if a spoiled result passes, ends with another code, or is explained wrongly.

    The unit tests have every fault.
    """
    flags = ["--ops", "allreduce-average", "--dtypes", "float32", *SMALL]
    finished = verify(3, "mpi", *flags, "--inject", "bitflip")
    check_exit(finished, "mpi", 17)
    assert finished.output.count("verify: wrong result: allreduce-average float32, ") == 1
    explained = "rank {} differs from the others: suspect delivery"
    assert any(explained.format(rank) in finished.output for rank in range(3)), finished.output
    assert "bitflip was injected in " in finished.output


ONE_ROW = ("--ops", "allreduce-sum", "--dtypes", "float32", "--sizes", "4,4100")


def test_tensors_on_gpus_are_verified(tmp_path: Path) -> None:
    """Fails if the cases are not run on the ranks' GPUs as well, or the output does not say so.
    (The CPU stands for them.)
    """
    write_gpus(tmp_path)
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{CHECKOUT}"}
    file = str(tmp_path / "verify.json")
    command = hvdtrain("verify", *ONE_ROW, "--json", file)
    finished = horovodrun(2, "gloo", command, timeout_s=240, variables=variables)
    assert finished.exit_code == 0, finished.output
    content = json.loads(Path(file).read_text())
    assert (content["gpu"], content["nccl"], content["gpu_not_verified"]) == ("cpu", True, None)
    alone = [it for it in content["cases"] if it["submission"] == "alone" and it["bytes"] == 4100]
    assert len(alone) == 2
    assert "verify: now tensors on GPUs (by NCCL)" in finished.output
    assert finished.output.count("  right") == 2


def test_the_sums_of_set_up_are_checked_on_gpus(tmp_path: Path) -> None:
    """Fails if the check of a new Horovod with NCCL leaves out the ranks' GPUs, or fails there."""
    write_gpus(tmp_path)
    lines = (tmp_path / "sitecustomize.py").read_text() + NOTING
    (tmp_path / "sitecustomize.py").write_text(lines)
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{CHECKOUT}", "NOTED": str(tmp_path)}
    command = [sys.executable, "-m", "hvdtrain.exchange.prove"]
    finished = horovodrun(2, "gloo", command, timeout_s=120, variables=variables)
    assert finished.exit_code == 0, finished.output
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-0", "rank-1"]
    assert {path.read_text() for path in tmp_path.glob("rank-*")} == {"22"}


# Counts the sums that each rank begins.
NOTING = """
import os, sys
if "hvdtrain.exchange.prove" in sys.orig_argv and "horovodrun" not in " ".join(sys.orig_argv):
    import horovod.torch as hvd
    honest = hvd.allreduce_async
    def noting(values, *given, **named):
        if "prove" in named["name"]:
            with open(f"{os.environ['NOTED']}/rank-{hvd.rank()}", "a") as file:
                file.write("2")
        return honest(values, *given, **named)
    hvd.allreduce_async = noting
"""


def test_a_fault_that_changes_nothing() -> None:
    """Fails if an injection that never happened counts as found, or as an installation in order."""
    finished = verify(2, "mpi", "--ops", "broadcast", *SMALL, "--inject", "sum-for-mean")
    check_exit(finished, "mpi", 1)
    assert finished.output.count("sum-for-mean was not injected: it changes nothing") == 1


def test_bad_input() -> None:
    """Fails if not every problem is reported at once, before any work, by rank 0 alone."""
    flags = ["--ops=sum", "--dtypes=bfloat16", "--sizes=4X", "--inject=fire", "--seed=-1", "--ful"]
    finished = verify(2, "mpi", *flags)
    check_exit(finished, "mpi", 2)
    for text in (
        "--ful: no such flag; did you mean --full?",
        "--ops=sum: unknown; choose from allreduce-sum, ",
        "--dtypes=bfloat16: unknown; choose from float16, ",
        "--sizes=4X: expected bytes from 0 to 1G",
        "--inject=fire: unknown; choose from bitflip, ",
        "--seed=-1: must be from 0 to 2^63 - 1",
    ):
        assert finished.output.count(text) == 1, finished.output
    assert finished.output.count("hvdtrain: error") == 1, finished.output


def test_a_json_file_that_cannot_be_written(tmp_path: Path) -> None:
    """Fails if that is noticed only after the work."""
    finished = verify(2, "mpi", "--json", str(tmp_path / "nowhere" / "x.json"))
    check_exit(finished, "mpi", 2)
    assert "x.json: cannot be written" in finished.output
    assert "allreduce-sum" not in finished.output


def test_alone() -> None:
    """Fails if a single process does anything but say how to start several."""
    finished = run(hvdtrain("verify"))
    assert finished.exit_code == 2
    assert "start two or more with `hvdtrain launch -np 2 -- verify`" in finished.output
    assert len(finished.output.splitlines()) == 1
