"""Runs of several workers without virtual ones are computed again in one process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parallel.experiments import train
from tests.parallel.launching import TWO_HOSTS, hvdtrain, run
from tests.unit.recorded import forge

FLAGS = ["--model=tests.parallel.plugins:dropout_everywhere", "--opt=adamw", "--lr=0.01"]
FLAGS += ["--global-batch-size=100", "--max-steps=18", "--trace-every=3", "--grad-accum-steps=2"]
FLAGS += ["--checkpoint-interval=4", "--keep-checkpoints=9", "--clip-grad=0.5"]


def replay(folder: Path, *flags: str) -> tuple[int, str]:
    done = run(hvdtrain("replay", str(folder), "--trust-code", *flags), timeout_s=240)
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("size", "controller", "hosts", "flags"),
    [
        (3, "gloo", "", ["--rank-weights=1,2,3"]),
        (4, "gloo", TWO_HOSTS, ["--audit=exact", "--audit-every=3"]),
        (2, "mpi", "", []),
    ],
)
def test_sums_in_the_order_of_the_ranks(
    size: int, controller: str, hosts: str, flags: list[str], tmp_path: Path
) -> None:
    """Fails if a rank's samples, random numbers, running statistics or weight are lost in one
    process, or sums are made in another order than Horovod's; over 18 steps, the last ones of the
    next epoch. Or if the wrong share is named.
    """
    done = train([*FLAGS, *flags], tmp_path / "x", size, controller, hosts=hosts)
    assert done.exit_code == 0, done.output
    code, output = replay(tmp_path / "x")
    assert (code, "replay: 6 steps agreed bit for bit" in output) == (0, True), output
    assert f"({size} shares of " in output
    assert "from the checkpoint of step 16: 1 step (18) agreed" in output
    forge(tmp_path / "x", lambda it: it[2]["gradients"][size - 1].__setitem__(1, "0" * 16))
    code, output = replay(tmp_path / "x")
    assert (code, f"of share {size - 1} (1 of {size} shares), from" in output) == (17, True), output
    assert "step 9, computed from the checkpoint of step 8: gradient: " in output


# The change of the record of step 9; what is named.
FORGED: dict[str, tuple[Callable[[dict], None], str]] = {
    "local gradient": (
        lambda record: record["gradients"][0].__setitem__(0, "0" * 16),
        "gradient: ",
    ),
    "sum": (
        lambda record: record["sums"].__setitem__(3, record["sums"][3] + 1e-4),
        "reduction: ",
    ),
    "learning rate": (lambda record: record.__setitem__("lr", 0.02), "the learning rate: 0.02 and"),
}


def test_sums_in_an_unknown_order(tmp_path: Path) -> None:
    """Fails if sums of which the order is unknown are called wrong, or not compared at all; or if
    a step is computed again that does not follow a checkpoint.
    """
    folder = tmp_path / "x"
    fused = {"HOROVOD_FUSION_THRESHOLD": str(1 << 26)}
    refused = train([*FLAGS, "--audit-every=1", "--audit=exact"], folder, 3, "mpi", variables=fused)
    assert refused.exit_code == 2, refused.output
    assert "--audit=exact: with fusion the order of summation changes" in refused.output
    assert train(FLAGS, folder, 3, "mpi", variables=fused).exit_code == 0
    code, output = replay(folder)
    assert (code, "replay: 6 steps agreed bit for bit" in output) == (0, True), output
    assert "the sums of the gradients within the bound of rounding" in output
    for step in (1, 5, 9, 13, 16, 17):  # 15 steps an epoch
        assert f"1 step ({step}) agreed" in output
    code, output = replay(folder, "--steps=6-8")
    assert (code, "none of the chosen steps can be computed again" in output) == (2, True), output
    trace = (folder / "trace.jsonl").read_text()
    for name, (change, named) in FORGED.items():
        (folder / "trace.jsonl").write_text(trace)
        forge(folder, lambda records, change=change: change(step_9(records)))
        code, output = replay(folder)
        assert (code, named in output) == (17, True), (name, output)
    honest = shutil.copytree(folder, tmp_path / "honest")
    (honest / "trace.jsonl").write_text(trace)
    command = hvdtrain("diff", str(honest), str(folder), "--bisect", "--trust-code")
    done = run(command, timeout_s=240)
    text = "steps 7 to 9 cannot be computed again: the order is not known in which its workers were"
    assert (done.exit_code, text in done.output) == (2, True), done.output


def test_a_run_that_was_resumed_with_other_ranks(tmp_path: Path) -> None:
    """Fails if steps are computed with the number of ranks, or the weights, of another start."""
    folder = tmp_path / "x"
    assert train([*FLAGS, "--max-steps=8"], folder, 2, "gloo").exit_code == 0
    weighted = [*FLAGS, "--rank-weights=1,2,3", "--resume=auto", "--max-steps=12"]
    assert train(weighted, folder, 3, "gloo").exit_code == 0
    assert train([*FLAGS, "--resume=auto"], folder, 1, "gloo").exit_code == 0
    code, output = replay(folder)
    assert (code, "replay: 7 steps agreed bit for bit" in output) == (0, True), output


def step_9(records: list[dict]) -> dict:
    return next(record for record in records if record["step"] == 9)
