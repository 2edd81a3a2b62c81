"""The small runs of earlier releases, in tests/data: this version uses each as that release did.

Bits depend on the processor and on PyTorch. Where steps of PyTorch alone end with the bits that
they had where the run was made, all of the run's must be found again; elsewhere all but those.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

import hvdtrain
from tests.data.make import ARITHMETIC, CODE, INTERVAL, STEPS
from tests.data.small import Pictures, arithmetic
from tests.unit.commands import run as run_command

DATA = Path(__file__).parents[2] / "data"
RELEASES = sorted(path.parent.name for path in DATA.glob("*/config.yaml"))
COMPUTED = ("gradient", "reduction", "update", "loss")  # kinds of differences with other bits
ROUNDING = 1e-4  # of a mean loss in float32, on another processor


def read_records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()]


def read_summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


@pytest.fixture(params=RELEASES)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the run of a release."""
    return Path(shutil.copytree(DATA / request.param, tmp_path / "runs" / "small"))


def has_its_bits(run: Path) -> bool:
    return (run / ARITHMETIC).read_text().strip() == arithmetic()


def call(run: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_command(run.parents[1], *arguments)


def test_this_version_has_its_run() -> None:
    """Fails when a release is made without `python -m tests.data.make`."""
    assert RELEASES[0] == "0.1.0" and hvdtrain.__version__ in RELEASES


def test_a_killed_run_is_resumed(run: Path) -> None:
    """Fails when the state of a checkpoint, or the chain of a trace, cannot be continued; or, with
    equal arithmetic, if the end is another one than that of the release.
    """
    before, records = read_summary(run), read_records(run)
    (run / "summary.json").unlink()
    for path in run.glob("checkpoints/step-*"):
        if path.name != f"step-{INTERVAL:08d}":
            shutil.rmtree(path)
    done = call(run, "train", "--config", run / "config.yaml", "--resume", "auto")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resume: continuing from runs/small/checkpoints/step-{INTERVAL:08d}" in done.stdout
    now, found = read_summary(run), read_records(run)
    assert (now["status"], now["steps"], now["resumed_from"]) == ("finished", STEPS, INTERVAL)
    assert [it["step"] for it in found] == [it["step"] for it in records]
    assert [it["samples"] for it in found] == [it["samples"] for it in records]
    assert [it["batches"] for it in found] == [it["batches"] for it in records]
    if has_its_bits(run):
        assert now["params_sha256"] == before["params_sha256"]
        assert [it["parameters"] for it in found] == [it["parameters"] for it in records]
    # The steps after the checkpoint were computed here.
    again = call(run, "replay", run, *CODE, "--steps", f"{INTERVAL + 1}-{STEPS}")
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"{len(records)} records, to step {STEPS}: an unbroken chain" in again.stdout


def test_a_finished_run_is_only_reported(run: Path) -> None:
    """Fails when a summary is not understood, so that a finished run is trained once more."""
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = call(run, "train", "--config", run / "config.yaml", "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert read_summary(run)["params_sha256"] in done.stdout
    assert {path: path.read_bytes() for path in kept} == kept


def test_its_steps_are_computed_again(run: Path) -> None:
    """Fails when the chain, the checkpoints or the data are not those of the release; or, with
    equal arithmetic, if any bit differs.
    """
    done = call(run, "replay", run, *CODE)
    assert f"to step {STEPS}: an unbroken chain" in done.stdout, done.stdout + done.stderr
    if has_its_bits(run):
        assert done.returncode == 0, done.stdout
    else:
        kinds = re.findall(r"^replay: step \d+, .*?: ([a-z ]+): ", done.stdout, re.M)
        agreed = done.returncode == 0 and not kinds
        assert agreed or (done.returncode == 17 and kinds[0] in COMPUTED), done.stdout


def test_its_figures_are_found_again(run: Path, tmp_path: Path) -> None:
    """Fails when the weights, the data or the sums of an evaluation are not those of the run."""
    done = call(run, "evaluate", run, *CODE, "--json", tmp_path / "figures.json")
    assert done.returncode == 0, done.stderr
    found, expected = json.loads((tmp_path / "figures.json").read_text()), read_summary(run)
    assert found["loss"] == pytest.approx(expected["valid_loss"], rel=ROUNDING)
    assert found["metrics"]["accuracy"] == expected["valid_accuracy"]
    assert found["samples"] == expected["valid_samples"]


def test_it_predicts(run: Path, tmp_path: Path) -> None:
    """Fails when classes, or the format of images, are not those of the run."""
    pictures = Pictures(8, 1000)
    for number in range(8):
        image = (pictures[number][0][0].numpy() * 256).astype(np.uint8)
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    files = [tmp_path / f"{number}.png" for number in range(8)]
    done = call(run, "predict", run, *files, CODE[0], "--top", 1)
    assert done.returncode == 0, done.stderr
    named = [line.split(": ")[1].split()[0] for line in done.stdout.splitlines()]
    assert named == [Pictures.classes[pictures[number][1]] for number in range(8)]


def test_its_weights_are_exported(run: Path, tmp_path: Path) -> None:
    """Fails when the weights are others than those of the best checkpoint."""
    done = call(run, "export", run, tmp_path / "out.safetensors")
    assert done.returncode == 0, done.stderr
    best = run / "checkpoints" / (run / "checkpoints" / "best").read_text().strip()
    one, other = load_file(tmp_path / "out.safetensors"), load_file(best / "model.safetensors")
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def test_it_is_reported(run: Path) -> None:
    """Fails when a file is not understood, which the page then notes, or has no steps."""
    done = call(run, "report", run)
    assert (done.returncode, done.stderr) == (0, "")
    page = (run / "report" / "index.html").read_text()
    assert "damaged" not in page and "missing" not in page and "cut short" not in page
    assert read_summary(run)["params_sha256"][:8] in page


def test_runs_of_releases_are_compared(tmp_path: Path) -> None:
    """Fails when runs of two releases cannot be compared, or a bit of what was recorded differs
    where the arithmetic was the same.
    """
    for one, other in itertools.combinations_with_replacement(RELEASES, 2):
        runs = [DATA / one, DATA / other]
        done = run_command(tmp_path, "diff", *runs)
        texts = {(path / ARITHMETIC).read_text() for path in runs}
        assert done.returncode == 0 or (len(texts) == 2 and done.returncode == 17), done.stdout
        assert "configuration" not in done.stdout.split("the same")[0]
