"""evaluate and predict: what was trained, on one device, without Horovod and MPI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

from tests.unit.folders import make_class, make_folder, pixels

# As where hvdtrain is installed without Horovod: importing either is an ImportError.
WITHOUT_HOROVOD = (
    "import sys; sys.modules['horovod'] = sys.modules['mpi4py'] = None; "
    "from hvdtrain.cli import main; sys.exit(main())"
)


def hvdtrain(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", WITHOUT_HOROVOD, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pictures/, and runs/cats on them; runs/digits."""
    folder = tmp_path_factory.mktemp("trained")
    make_folder(folder / "pictures", 12, 5)
    common = ["--output", folder / "runs", "--workers", 0]
    data = ["--data", f"imagefolder:{folder}/pictures", "--image-size", 16, "--crop-scale", 1]
    length = ["--epochs", 12, "--global-batch-size", 8, "--lr", 0.01]
    cats = ["--model", "tests.unit.jobs:with_batch_norm", *data, *length, "--experiment", "cats"]
    digits = ["--model", "lenet", "--max-steps", 4, "--experiment", "digits"]
    for flags in (cats, digits):
        trained = hvdtrain("train", *flags, *common)
        assert trained.returncode == 0, trained.stderr
    return folder


def best_figures(run: Path) -> dict:
    """Those of the epoch whose checkpoint is the best."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    step = int((run / "checkpoints" / "best").read_text().strip().removeprefix("step-"))
    return next(r for r in records if r["kind"] == "epoch" and r["step"] == step)


@pytest.mark.parametrize("name", ["cats", "digits"])
def test_evaluate_tells_what_training_found(name: str, folder: Path) -> None:
    """Fails when the best checkpoint is not the one that is read, or its figures are others."""
    run = folder / "runs" / name
    told = hvdtrain("evaluate", run, "--json", folder / "figures.json")
    assert (told.returncode, told.stderr) == (0, "")
    figures = json.loads((folder / "figures.json").read_text())
    expected = best_figures(run)
    assert figures["loss"] == pytest.approx(expected["valid_loss"], rel=1e-6)
    assert figures["metrics"]["accuracy"] == expected["valid_accuracy"]
    assert figures["samples"] == expected["valid_samples"]
    assert f"accuracy {expected['valid_accuracy']:.4f}" in told.stdout
    last = run / "checkpoints" / (run / "checkpoints" / "last").read_text().strip()
    assert hvdtrain("evaluate", last).returncode == 0


def test_predict_agrees_with_evaluate(folder: Path) -> None:
    """Fails when images are read otherwise than in training, or classes are mixed up."""
    run, valid = folder / "runs" / "cats", folder / "pictures" / "valid"
    told = hvdtrain("predict", run, valid / "cat", valid / "dog", "--json", folder / "p.json")
    assert (told.returncode, told.stderr) == (0, "")
    predictions = json.loads((folder / "p.json").read_text())
    assert len(predictions) == len(told.stdout.splitlines()) == 10
    right = sum(
        max(one["scores"], key=one["scores"].get) == Path(one["image"]).parent.name
        for one in predictions
    )
    assert right / 10 == best_figures(run)["valid_accuracy"] > 0.5
    assert all(sum(one["scores"].values()) == pytest.approx(1, abs=1e-5) for one in predictions)


def test_predict_scales_to_what_the_data_was(folder: Path) -> None:
    """Fails when a photo of any size or colour cannot be given to a model of grey 8x8 digits."""
    Image.fromarray(pixels(3)).save(folder / "photo.jpg")
    told = hvdtrain("predict", folder / "runs" / "digits", folder / "photo.jpg", "--top", 2)
    assert (told.returncode, told.stderr) == (0, "")
    name, _, scores = told.stdout.strip().partition(": ")
    assert name == str(folder / "photo.jpg") and len(scores.split(", ")) == 2


def test_what_cannot_be_used_is_told(folder: Path) -> None:
    """Fails on a traceback, or when only the first of several bad images is named."""
    run = folder / "runs" / "cats"
    weights = run / "checkpoints" / "last"
    model = weights.parent / weights.read_text().strip() / "model.safetensors"
    assert load_file(model)
    for number in range(2):
        (folder / f"bad{number}.png").write_text("no picture")
    make_class(folder / "others" / "train" / "cat", 2)
    make_class(folder / "others" / "train" / "wolf", 2)
    make_class(folder / "others" / "valid" / "cat", 2)
    make_class(folder / "others" / "valid" / "wolf", 2)
    cases = {
        ("predict", run, folder / "bad0.png", folder / "bad1.png"): ["bad0.png", "bad1.png"],
        ("predict", run, folder / "nowhere.png"): ["nowhere.png cannot be read as an image"],
        ("predict", model, folder / "bad0.png"): ["not weights alone"],
        ("evaluate", folder / "nowhere"): ["nowhere: no such file or folder"],
        ("evaluate", run, "--data", f"imagefolder:{folder}/others"): ["cat', 'wolf", "cat', 'dog"],
        ("evaluate", run, "--bogus"): ["--bogus"],
        ("predict", run, folder / "bad0.png", "--top", 0): ["--top=0"],
    }
    for arguments, expected in cases.items():
        told = hvdtrain(*arguments)
        assert told.returncode == 2, (arguments, told.stderr)
        assert "Traceback" not in told.stderr
        assert all(text in told.stderr for text in expected), told.stderr
