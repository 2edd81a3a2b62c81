"""evaluate and predict: what was trained, on one device, without Horovod and MPI."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

from hvdtrain.errors import UsageError
from hvdtrain.run.prediction import _format_of
from tests.unit.commands import ROOT
from tests.unit.commands import run as run_command
from tests.unit.folders import make_class, make_folder, pixels

NETWORK = ("--model", "tests.unit.jobs:with_batch_norm")  # of the run `cats`


def hvdtrain(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run it as where it is installed without Horovod: importing either is an ImportError."""
    return run_command(Path.cwd(), *arguments, absent=("horovod", "mpi4py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pictures/, and runs/cats on them; runs/digits."""
    folder = tmp_path_factory.mktemp("trained")
    make_folder(folder / "pictures", 12, 5)
    common = ["--output", folder / "runs", "--workers", 0]
    data = ["--data", f"imagefolder:{folder}/pictures", "--image-size", 16, "--crop-scale", 1]
    length = ["--epochs", 12, "--global-batch-size", 8, "--lr", 0.01]
    cats = [*NETWORK, *data, *length, "--experiment", "cats"]
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
def test_evaluate_reports_what_training_found(name: str, folder: Path) -> None:
    """Fails when the best checkpoint is not the one that is read, or its figures are others."""
    run = folder / "runs" / name
    named = ("--data", f"imagefolder:{folder}/pictures")  # as it is not read on a checkpoint's word
    known = (*NETWORK, *named) if name == "cats" else ()
    done = hvdtrain("evaluate", run, *known, "--json", folder / "figures.json")
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads((folder / "figures.json").read_text())
    expected = best_figures(run)
    assert figures["loss"] == pytest.approx(expected["valid_loss"], rel=1e-6)
    assert figures["metrics"]["accuracy"] == expected["valid_accuracy"]
    assert figures["samples"] == expected["valid_samples"]
    assert f"accuracy {expected['valid_accuracy']:.4f}" in done.stdout
    last = run / "checkpoints" / (run / "checkpoints" / "last").read_text().strip()
    assert hvdtrain("evaluate", last, *known).returncode == 0


def test_predict_agrees_with_evaluate(folder: Path) -> None:
    """Fails when images are read otherwise than in training, or classes are mixed up."""
    run, valid = folder / "runs" / "cats", folder / "pictures" / "valid"
    done = hvdtrain(
        "predict", run, valid / "cat", valid / "dog", *NETWORK, "--json", folder / "p.json"
    )
    assert (done.returncode, done.stderr) == (0, "")
    predictions = json.loads((folder / "p.json").read_text())
    assert len(predictions) == len(done.stdout.splitlines()) == 10
    right = sum(
        max(one["scores"], key=one["scores"].get) == Path(one["image"]).parent.name
        for one in predictions
    )
    assert right / 10 == best_figures(run)["valid_accuracy"] > 0.5
    assert all(sum(one["scores"].values()) == pytest.approx(1, abs=1e-5) for one in predictions)


def test_predict_scales_to_what_the_data_was(folder: Path) -> None:
    """Fails when a photo of any size or colour cannot be given to a model of grey 8x8 digits."""
    Image.fromarray(pixels(3)).save(folder / "photo.jpg")
    done = hvdtrain("predict", folder / "runs" / "digits", folder / "photo.jpg", "--top", 2)
    assert (done.returncode, done.stderr) == (0, "")
    name, _, scores = done.stdout.strip().partition(": ")
    assert name == str(folder / "photo.jpg") and len(scores.split(", ")) == 2


@pytest.fixture
def partly_broken(folder: Path, tmp_path: Path) -> Path:
    """A copy of the pictures; one to validate with is no image, and one file is of another type."""
    copy = shutil.copytree(folder / "pictures", tmp_path / "pictures")
    (copy / "valid" / "cat" / "100.png").write_text("no picture")
    (copy / "valid" / "cat" / "notes.txt").write_text("no picture either")
    return copy


def test_a_bad_image_does_not_hide_the_others(folder: Path, partly_broken: Path) -> None:
    """Fails when predict does not descend into folders of classes, prints nothing of the good
    images, does not name the bad one, or takes it for a success without the flag.
    """
    run, valid, out = folder / "runs" / "cats", partly_broken / "valid", partly_broken / "p.json"
    strict = hvdtrain("predict", run, valid, *NETWORK, "--json", out)
    assert strict.returncode == 1
    assert len(strict.stdout.splitlines()) == len(json.loads(out.read_text())) == 9
    left, skipped, done = strict.stderr.splitlines()
    assert "1 file of other types left out (such as" in left and "notes.txt" in left
    assert skipped.startswith(f"skipped: {valid}/cat/100.png cannot be read as an image: it is")
    assert done.startswith("hvdtrain: error: 1 of 10 images could not be read. With --skip-bad")
    out.unlink()
    lenient = hvdtrain("predict", run, valid, *NETWORK, "--json", out, "--skip-bad-samples")
    assert (lenient.returncode, lenient.stdout) == (0, strict.stdout)
    assert lenient.stderr.splitlines() == [left, skipped] and len(json.loads(out.read_text())) == 9
    none = hvdtrain("predict", run, valid / "cat" / "100.png", "--trust-code", "--skip-bad-samples")
    assert none.returncode == 1 and "1 of 1 image could not be read" in none.stderr


def test_evaluate_leaves_out_what_cannot_be_read(folder: Path, partly_broken: Path) -> None:
    """Fails when the flag is not named where it would help, does not help, or what is left out is
    not counted.
    """
    given = ("evaluate", folder / "runs" / "cats", "--trust-code")
    given += ("--data", f"imagefolder:{partly_broken}")
    strict = hvdtrain(*given)
    assert strict.returncode == 1 and "give --skip-bad-samples to skip" in strict.stderr
    lenient = hvdtrain(*given, "--skip-bad-samples")
    assert lenient.returncode == 0 and lenient.stderr.startswith("skipped: ")
    assert ", 9 samples; 1 more could not be read, and were left out" in lenient.stdout
    for file in (partly_broken / "valid").rglob("*.png"):
        file.write_text("no picture")
    none = hvdtrain(*given, "--skip-bad-samples")
    assert none.returncode == 1 and "none of the 10 samples of" in none.stderr


PLUG_IN = """
import torch
import hvdtrain

class Grey(torch.utils.data.Dataset):
    classes = ["dark", "light"]
    image_format = hvdtrain.ImageFormat(1, 4, 4)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((1, 4, 4), float(index % 2)), index % 2

def make():
    return Grey(), Grey()
"""


def test_predict_on_data_of_ones_own(tmp_path: Path, monkeypatch) -> None:
    """Fails when data that declares how images are read is ignored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Image.new("L", (30, 20), 255).save("light.png")
    Path("plug_grey.py").write_text(PLUG_IN)
    flags = ("--model", "mlp", "--data", "plug_grey:make", "--global-batch-size", 8, "-j", 0)
    trained = hvdtrain("train", *flags, "--experiment", "grey", "--lr", 0.1)
    assert trained.returncode == 0, trained.stderr
    done = hvdtrain("predict", "runs/grey", "light.png", "--top", 1)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("light.png: light ")


@pytest.mark.parametrize(
    ("takeaway", "expected"),
    [
        ({"data": "plug:make"}, "`image_format = hvdtrain.ImageFormat(1, 28, 28)`"),
        (
            {"data": "plug:make"},
            "--data=plug:make, which does not define how an image file becomes",
        ),
        ({"data": "synthetic:1x28x28"}, "an input; or take its weights into a script"),
        ({"task": None}, "was trained by a --task, not as a classifier; take its weights"),
    ],
)
def test_the_true_reason_why_predict_cannot(takeaway: dict, expected: str) -> None:
    """Fails when the reason is another one than that nothing is known of image files."""
    known = {"task": "classification", "shape": [1, 28, 28], "images": None} | takeaway
    with pytest.raises(UsageError) as caught:
        _format_of(Path("runs/one"), known)
    assert str(caught.value).startswith("runs/one: ") and expected in str(caught.value)


def test_unusable_sources_are_reported(folder: Path) -> None:
    """Fails on a traceback, another exit code, or when only the first missing file is named."""
    run = folder / "runs" / "cats"
    weights = run / "checkpoints" / "last"
    model = weights.parent / weights.read_text().strip() / "model.safetensors"
    assert load_file(model)
    (folder / "bad0.png").write_text("no picture")
    (folder / "empty").mkdir()
    make_class(folder / "others" / "train" / "cat", 2)
    make_class(folder / "others" / "train" / "wolf", 2)
    make_class(folder / "others" / "valid" / "cat", 2)
    make_class(folder / "others" / "valid" / "wolf", 2)
    cases = {
        ("predict", run, folder / "nowhere.png", folder / "empty", *NETWORK): [
            "nowhere.png: no such file or folder",
            "empty: no image is in this folder (.avif, ",
        ],
        ("predict", model, folder / "bad0.png"): ["not weights alone"],
        ("evaluate", folder / "nowhere"): ["nowhere: no such file or folder"],
        ("evaluate", run, "--data", f"imagefolder:{folder}/others", "--trust-code"): [
            "its 2 classes are not the 2 of the model: number 1 is 'wolf', in the model 'dog'",
        ],
        ("evaluate", run, "--bogus"): ["--bogus"],
        ("predict", run, folder / "bad0.png", "--top", 0): ["--top=0"],
        ("predict", run, folder / "bad0.png", *NETWORK, "--max-image-pixels", 0): [
            "--max-image-pixels=0: must be above 0"
        ],
    }
    for arguments, expected in cases.items():
        done = hvdtrain(*arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert "Traceback" not in done.stderr
        assert all(text in done.stderr for text in expected), done.stderr
