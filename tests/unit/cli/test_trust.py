"""Code that a file names: somebody else's run is looked at without running any of it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from hvdtrain.cli import main

# Whoever imports it leaves a trace.
THEIRS = """
import pathlib
import torch
import hvdtrain

with pathlib.Path({trace!r}).open("a") as trace:
    trace.write("run ")
Net = lambda shape, classes: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, classes))

def pictures():
    split = hvdtrain.TensorSplit(torch.rand(8, 1, 4, 4), torch.arange(8) % 2)
    return hvdtrain.Dataset("pictures", (1, 4, 4), 2, split, split, images=form)

form = hvdtrain.ImageFormat(1, 4, 4)

class Whole(hvdtrain.Task):
    def build_data(self):
        data = pictures()
        return hvdtrain.Splits("whole", data.train, data.valid)

    def build_model(self):
        return Net(None, 2)

    def loss(self, model, batch):
        inputs, labels = batch
        loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
        return hvdtrain.Sums(loss, len(labels))
"""
CLASSIFIES = ("--model", "runs.theirs.code:Net", "--data", "runs.theirs.code:pictures")
WHOLE = ("--task", "runs.theirs.code:Whole")


class Place:
    """A working directory with somebody else's run in runs/theirs, its code beside it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        monkeypatch.chdir(folder)
        self._trace = folder / "trace"
        code = folder / "runs" / "theirs" / "code.py"
        code.parent.mkdir(parents=True)
        code.write_text(THEIRS.format(trace=str(self._trace)))

    def train(self, *flags: str) -> None:
        self.call("train", *flags, "--max-steps", "1", "--global-batch-size", "8", "-j", "0")
        (made,) = (path for path in Path("runs").iterdir() if path.name != "theirs")
        shutil.copytree(made, "runs/theirs", dirs_exist_ok=True)
        shutil.rmtree(made)

    def call(self, *arguments: str) -> tuple[int, int]:
        """Exit code, and how often their code was run, in a process that has not seen it yet."""
        for name in [name for name in sys.modules if name.split(".")[0] == "runs"]:
            del sys.modules[name]
        self._patch.setattr(sys, "path", [part for part in sys.path if part != str(Path.cwd())])
        self._patch.setattr(sys, "argv", ["hvdtrain", *arguments])
        self._trace.write_text("")
        code = main()
        return code, self._trace.read_text().count("run")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def test_what_a_file_names_is_not_run(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    """Fails when looking at a run, or taking its weights, runs code on the word of a file in it,
    makes the working directory importable for it, or is not shown how to allow it.
    """
    place.train(*CLASSIFIES)
    Image.new("L", (4, 4)).save("one.png")
    run = "runs/theirs"
    refused = {
        ("evaluate", run): CLASSIFIES,
        ("evaluate", run, *CLASSIFIES[2:]): CLASSIFIES[:2],
        ("evaluate", run, "--data", "digits"): CLASSIFIES[:2],
        ("evaluate", run, *CLASSIFIES[:2]): CLASSIFIES[2:],
        ("predict", run, "one.png"): CLASSIFIES[:2],
    }
    capfd.readouterr()
    for arguments, names in refused.items():
        assert place.call(*arguments) == (2, 0), arguments
        assert str(Path.cwd()) not in sys.path
        reported = capfd.readouterr().err
        assert f"give {' '.join(names)}, or --trust-code" in reported and names[1] in reported
    flags = ("--model", "lenet", "--data", "digits", "--max-steps", "1")
    harmless = {
        ("export", run, "out.safetensors"): 0,
        ("report", run): 0,
        ("train", *flags, "--pretrained", run, "--experiment", "own"): 2,  # another architecture
        ("train", *flags, "--experiment", "theirs", "--resume", "auto"): 2,  # another experiment
    }
    for arguments, code in harmless.items():
        assert place.call(*arguments) == (code, 0), arguments
    assert "weights of another architecture" in capfd.readouterr().err


def test_what_the_user_names_is_run(place: Place) -> None:
    """Fails when the user's own word is not enough: the flag, or the names."""
    place.train(*CLASSIFIES)
    Image.new("L", (4, 4)).save("one.png")
    for trusting in (("--trust-code",), CLASSIFIES):
        assert place.call("evaluate", "runs/theirs", *trusting) == (0, 1)
    for trusting in (("--trust-code",), CLASSIFIES[:2]):
        assert place.call("predict", "runs/theirs", "one.png", *trusting) == (0, 1)
    again = ("train", "--config", "runs/theirs/config.yaml", "--experiment", "again")
    assert place.call(*again) == (0, 1)


def test_a_task_is_code_too(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    """Fails when the task that a checkpoint names is run unasked, or cannot be allowed."""
    place.train(*WHOLE)
    assert place.call("evaluate", "runs/theirs") == (2, 0)
    assert f"give {' '.join(WHOLE)}, or --trust-code" in capfd.readouterr().err
    assert place.call("evaluate", "runs/theirs", *WHOLE) == (0, 1)
