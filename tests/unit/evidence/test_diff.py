"""Two recorded runs are compared, and what parts them is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.recorded import (
    FLIPPED,
    VIRTUAL,
    call,
    forge,
    records_of,
    train,
    write_records,
)

SAME_STEPS = "the runs agree bit for bit in 7 recorded steps and in the parameters after step 13"


def diff(one: Path, other: Path, *flags: str) -> tuple[int, str]:
    """Compare two runs; return the exit code and the output."""
    return call(other.parents[1], "diff", one, other, *flags)


def bisect(one: Path, other: Path, *flags: str) -> tuple[int, str]:
    return diff(one, other, "--bisect", "--trust-code", *flags)


def edit_summary(run: Path, **changes: object) -> None:
    path = run / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut_last(run: Path) -> None:
    """Remove the last record, and whatever names it."""
    for path in run.glob("checkpoints/step-00000013"):
        shutil.rmtree(path)
    write_records(run, records_of(run)[:-1])
    edit_summary(run, trace=None)


def install_torch(run: Path, version: str) -> None:
    """Let the run's summary say that it was made by another version of torch."""
    versions = json.loads((run / "summary.json").read_text())["versions"]
    edit_summary(run, versions=versions | {"torch": version})


def test_equal_runs(honest: Path, run: Path) -> None:
    """Fails if equal runs differ, or the number of workers or a version alone makes them differ."""
    edit_summary(run, world_size=3, controller="gloo")
    install_torch(run, "9.9")
    code, output = bisect(honest, run, "--json=found.json")
    assert (code, SAME_STEPS in output) == (0, True), output
    assert "world size: 1 and 3 (should not matter: --virtual-workers)" in output
    assert "and 9.9" in output
    found = json.loads((run.parents[1] / "found.json").read_text())
    assert found["same"] is True
    assert found["trace"]["agreed"] == 13
    assert found["circumstances"]["workers"]["world_size"] == [1, 3]


# The change of run B; what its files show, without its code; what --bisect adds.
PARTED = {
    "learning rate": (
        ["--lr=0.2"],
        ["--lr: 0.1 and 0.2", "the runs part in one of the steps 1 to 2"],
        ["they part at step 1: update: the learning rate: 0.1 and 0.2"],
    ),
    "schedule": (
        ["--sched=step", "--max-steps=12"],
        ["(step 4 agrees)", "differ in --max-steps: 13 and 12, --sched: constant and step"],
        [
            "A, steps 5 to 6, computed again from the checkpoint of step 4: as recorded",
            "they part at step 5: update: the learning rate",
        ],
    ),
    "seed": (
        ["--seed=1"],
        ["the runs part in one of the steps 1 to 2; at step 2 the first difference is in the data"],
        ["they part at step 1: data order", "the order differs first at place 0 of the global"],
    ),
    "virtual workers": (
        ["--virtual-workers=4"],
        ["data: 3 and 4 shares: other batches", "--virtual-workers: 3 and 4"],
        ["they part at step 1: data: 3 and 4 shares"],
    ),
    "label": (
        ["--data=mine:relabelled"],
        ["but with other names or labels; the first that differs is number 21", "their data"],
        [
            ": data: the batch of share",
            "samples that differ: number 21 of the data set, 1 of 20",
        ],
    ),
    "pixels": (
        ["--data=mine:brighter"],
        ["--data: mine:pictures and mine:brighter"],
        [
            ": data: the batch of share",
            "samples that differ: number 21 of the data set, 1 of 20",
        ],
    ),
    "random numbers": (
        ["--model=mine:other_drop"],
        ["--model: mine:Net and mine:other_drop"],
        ["they part at step 1: gradient", "of share 0: the output of drop (call 1)\n"],
    ),
    "backward pass, of parameters": (
        ["--model=mine:skewed_output"],
        ["--model: mine:Net and mine:skewed_output"],
        ["they part at step 1: gradient: first.weight (2 of 6", "the gradient of first.bias\n"],
    ),
    "backward pass, of inputs": (
        ["--model=mine:skewed_input"],
        ["gradient"],
        [
            "they part at step 1: gradient: first.weight (4 of 6 parameters)",
            "of share 0: the gradient of the output of drop (call 1), coming back from "
            "last (call 1)\n",
        ],
    ),
}


@pytest.mark.parametrize("change", PARTED)
def test_what_parts_two_runs_is_named(change: str, honest: Path, tmp_path: Path) -> None:
    """Fails if the files show another difference, or another step, sample or tensor is named."""
    flags, shown, found = PARTED[change]
    other = train(tmp_path, *VIRTUAL, *flags)
    code, output = bisect(honest, other, "--json=found.json")
    assert code == 17, output
    report = json.loads((tmp_path / "found.json").read_text())
    assert f"part at step {report['bisect']['step']}: {report['bisect']['what']}" in output
    assert [text for text in [*shown, *found] if text not in output] == [], output
    assert output.count("as recorded") == 2


def test_files_alone_run_no_code(honest: Path, run: Path) -> None:
    """Fails if the code of a run is imported without leave, or needed to compare files."""
    forge(run, lambda records: records[3]["gradients"][2].__setitem__(1, "0" * 16))
    install_torch(run, "9.9")
    for flags in ([], ["--trust-code"]):
        code, output = diff(honest, run, *flags)
        assert code == 17, output
        assert "step 8 differs first (step 6 agrees): gradient: first.bias" in output
        assert "of share 2 (1 of 3 shares), from equal data" in output
        assert "the gradient; their versions differ in torch: " in output
    code, output = diff(honest, run, "--bisect")
    assert (code, "names code to run, mine:Net" in output) == (2, True), output


def test_a_run_that_was_computed_wrongly_is_named(honest: Path, tmp_path: Path) -> None:
    """Fails if one flipped bit is blamed on the honest run, or on both."""
    wrong = train(tmp_path, *VIRTUAL, patch=FLIPPED)
    code, output = bisect(honest, wrong)
    assert code == 17, output
    assert "part in one of the steps 7 to 8; at step 8 the first difference is in the" in output
    assert "nothing that was recorded explains it" in output
    assert "A, steps 7 to 8, computed again from the checkpoint of step 4: as recorded" in output
    assert "its trace is not what this gives: step 8: gradient: first.weight" in output
    assert "So B: computed wrongly, or with other code, or with a changed trace" in output


def test_a_difference_after_the_last_record(honest: Path, run: Path) -> None:
    """Fails if other final parameters count as equal, or a run is blamed without a wrong record."""
    edit_summary(run, params_sha256="0" * 64)
    code, output = bisect(honest, run)
    assert (code, "agree, to the last, step 13, but the final" in output) == (17, True), output
    cut_last(run)
    code, output = bisect(honest, run)
    assert (code, "part after step 12, the last that both recorded" in output) == (17, True), output
    assert "B, step 13, computed again from the checkpoint of step 12: as recorded" in output
    assert "So the final parameters of one run are not those that it computed" in output


def test_a_changed_trace_is_named(honest: Path, run: Path) -> None:
    """Fails if a broken chain goes unnoticed where the digests themselves are equal."""
    records = records_of(run)
    records[2]["previous"] = "0" * 64
    write_records(run, records)
    code, output = diff(honest, run)
    assert (code, "trace.jsonl:2: is not the record that line 3" in output) == (17, True), output


def test_runs_without_a_common_step(honest: Path, run: Path, tmp_path: Path) -> None:
    """Fails if a step is named that nobody recorded, or nothing to compare counts as equal."""
    (run / "trace.jsonl").unlink()
    edit_summary(run, trace=None)
    for path in run.glob("checkpoints/step-*"):
        shutil.rmtree(path)
    code, output = diff(honest, run)
    agree = "the runs agree bit for bit in the parameters after step 13"
    assert (code, agree in output) == (0, True), output
    edit_summary(run, params_sha256="0" * 64)
    code, output = diff(honest, run)
    assert (code, "the step cannot be named" in output) == (17, True), output
    code, output = bisect(honest, run)
    assert (code, "--bisect: the runs recorded no common step" in output) == (2, True), output
    edit_summary(run, steps=7)
    code, output = diff(honest, run)
    assert (code, "there is nothing to compare" in output) == (2, True), output
    for folder in (tmp_path, tmp_path / "absent"):
        code, output = diff(folder, run)
        assert (code, "is this the folder of a run?" in output) == (2, True), output
