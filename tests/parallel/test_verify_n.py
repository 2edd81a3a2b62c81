"""verify-n with real runs: a configuration that passes, and each way to depend on N."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel.launching import Finished, hvdtrain, run

PLUGINS = "tests.parallel.plugins"
DATA = "--data=synthetic:1x4x4,samples=125"
LR = "--lr=0.1"


def verify_n(counts: str, file: Path, *flags: str) -> tuple[Finished, dict]:
    """Run verify-n; return also what it wrote."""
    command = hvdtrain("verify-n", "-np", counts, f"--json={file}", "--", "train", LR, *flags)
    finished = run(command, timeout_s=240)
    return finished, json.loads(file.read_text()) if file.exists() else {}


def test_a_plain_model_learns_the_same(tmp_path: Path) -> None:
    """Fails if uneven shares (25 + 25, 16 + 17 + 17, and those of 25) learn something else, or if
    float32, which was asked for, is used and drifts apart.
    """
    flags = [f"--model={PLUGINS}:small_plain", DATA, "--global-batch-size=50", "--max-steps=6"]
    finished, found = verify_n("3,1,2", tmp_path / "found.json", *flags, "--dtype=float32")
    assert finished.exit_code == 0, finished.output
    assert "in float64" in finished.output
    assert "verdict: the same is learned on 1, 2 and 3 workers" in finished.output
    assert found["same"] and [run["workers"] for run in found["runs"]] == [1, 2, 3]
    hashes = {run["params_sha256"] for run in found["runs"]}
    assert all(digest in finished.output for digest in hashes)
    assert 0 < found["runs"][2]["gap"]["relative"] < 1e-12


def test_virtual_workers_end_with_the_same_bits(tmp_path: Path) -> None:
    """Fails if float64 is used in place of the bits that virtual workers promise."""
    flags = [f"--model={PLUGINS}:small_dropout_and_batch_norm", DATA, "--virtual-workers=3"]
    finished, found = verify_n("1,2", tmp_path / "found.json", *flags, "--max-steps=4", BATCH)
    assert finished.exit_code == 0, finished.output
    assert "every N must end with the same bits" in finished.output
    assert len({run["params_sha256"] for run in found["runs"]}) == 1


BATCH = "--global-batch-size=25"
SHORT = ["--global-batch-size=24", "--max-steps=3"]
# The step, how the parameter's name may begin, causes with their modules, and advice for each.
DIFFERENT = {
    "dropout and batch norm": (
        [f"--model={PLUGINS}:small_dropout_and_batch_norm", DATA, *SHORT],
        (1, ("1.", "3.", "5."), [("dropout", ["2"]), ("batch norm", ["3"])]),
        ("--virtual-workers", "--sync-bn"),
    ),
    "mean loss": (
        [f"--task={PLUGINS}:MeanLoss", *SHORT],
        (1, ("1.", "3."), [("mean loss", [])]),
        ("sum over the samples",),
    ),
    # 6 steps an epoch; checkpoints every 3 steps must be narrowed to single steps.
    "data": (
        [f"--model={PLUGINS}:small_plain", f"--data={PLUGINS}:unseeded", "--max-steps=20"]
        + ["--global-batch-size=8"],
        (7, ("1.", "3."), [("data", [])]),
        ("the epoch and the sample's number",),
    ),
}


@pytest.mark.parametrize(("flags", "expected", "advice"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_depends_on_n_is_found(flags, expected, advice, tmp_path: Path) -> None:
    """Fails if a difference is missed, or if another step, an unknown parameter or another cause is
    named than the one that the model, the task or the data was given.
    """
    step, tensors, causes = expected
    finished, found = verify_n("1,2", tmp_path / "found.json", *flags)
    assert finished.exit_code == 17, finished.output
    assert f"first difference: step {step}, parameter " in finished.output, finished.output
    assert "verdict: what is learned DEPENDS ON N" in finished.output, finished.output
    assert all(text in finished.output for text in advice), finished.output
    difference = found["difference"]
    assert (difference["step"], difference["last_equal"]) == (step, step - 1)
    assert difference["gap"]["tensor"].startswith(tensors)
    assert difference["gap"]["relative"] > 1e-6
    assert [(it["kind"], it["modules"]) for it in found["causes"]] == causes


def test_a_refusal_on_some_n_is_passed_on() -> None:
    """Fails if a configuration that only some N refuse is a failure, or its message is lost."""
    flags = [
        f"--model={PLUGINS}:small_dropout_and_batch_norm",
        DATA,
        "--global-batch-size=3",
        "--max-steps=1",
    ]
    command = hvdtrain("verify-n", "-np=1,2", "--", "train", *flags)
    finished = run(command, timeout_s=240)
    assert finished.exit_code == 2, finished.output
    assert "on 2 workers: --global-batch-size=3: the model normalises" in finished.output
