"""Data sets of Hugging Face's `datasets` and shards of `litdata`, as splits of a run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvdtrain import MapSplit, split_of
from hvdtrain.data.feeding import stream
from hvdtrain.data.splits import difference, fingerprint
from tests.unit import commands

SAMPLES = 60
BATCHES = [np.array(numbers, dtype=np.int64) for numbers in ([5, 3, 59], [], [0], [39, 38, 1])]
TASK = """
import os, sys, torch, hvdtrain
from tests.unit.data.test_data_libraries import OPEN, iterate

class Line(hvdtrain.Task):
    def build_data(self):
        kind, readers = os.environ["KIND"], int(os.environ["READERS"])
        opened = OPEN[kind.removesuffix(", iterated")](sys.path[0])
        seed = self.settings.seed
        if kind.endswith("iterated"):
            split = hvdtrain.IterableSplit(iterate(opened), len(opened), seed=seed)
        else:
            split = hvdtrain.MapSplit(opened, readers=readers, seed=seed)
        return hvdtrain.Splits(kind, split, split)

    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2))

    def loss(self, model, batch):
        x = batch["x"].float()
        return hvdtrain.Sums((model(x / 60).sum(1) - batch["label"]).square().sum(), len(x))
"""


def sample(number: int, shift: int = 0) -> dict[str, Any]:
    return {"x": np.full(3, number + shift, np.float32), "label": number % 5}


def make_hugging_face(folder: Path, shift: int = 0) -> None:
    import datasets

    datasets.disable_progress_bars()
    rows = [sample(number, shift) for number in range(SAMPLES)]
    table = {"x": [row["x"].tolist() for row in rows], "label": [row["label"] for row in rows]}
    datasets.Dataset.from_dict(table).save_to_disk(str(folder / "datasets"))


def make_litdata(folder: Path, shift: int = 0) -> None:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder / "litdata"), chunk_size=7 + bool(shift))
    for number in range(SAMPLES):
        writer[number] = sample(number, shift)
    writer.done()
    writer.merge()


def open_hugging_face(folder: str) -> Any:
    import datasets

    return datasets.load_from_disk(os.path.join(folder, "datasets")).with_format("torch")  # noqa: PTH118


def open_litdata(folder: str) -> Any:
    import litdata

    return litdata.StreamingDataset(os.path.join(folder, "litdata"))  # noqa: PTH118


def iterate(dataset: Any) -> Any:
    """Return an object that iterates over a data set, and has no other method."""

    class Iterated:
        def __iter__(self) -> Any:
            return (dataset[number] for number in range(len(dataset)))

    return Iterated()


MAKE = {"datasets": make_hugging_face, "litdata": make_litdata}
OPEN = {"datasets": open_hugging_face, "litdata": open_litdata}


@pytest.fixture(params=list(MAKE))
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a data set of this library in a folder of the test."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    MAKE[request.param](tmp_path)
    return str(request.param)


@pytest.mark.parametrize("readers", [0, 2])
def test_samples_are_read_by_number(kind: str, readers: int, tmp_path: Path) -> None:
    """Fails if batches have other samples, in any process; or where there are none, something else
    than one that stands in for them.
    """
    split = MapSplit(OPEN[kind](str(tmp_path)), readers=readers)
    assert len(split) == SAMPLES
    for loaded, numbers in zip(stream(split, BATCHES, 0), BATCHES, strict=True):
        x, labels = loaded.batch["x"], loaded.batch["label"]
        assert loaded.samples == len(numbers)
        numbers = numbers if len(numbers) else np.arange(1)
        assert x.shape == (len(numbers), 3) and x.dtype == torch.float32
        assert x[:, 0].tolist() == numbers.tolist()
        assert labels.tolist() == (numbers % 5).tolist() and labels.dtype == torch.int64


def test_changed_contents_are_noticed(kind: str, tmp_path: Path) -> None:
    """Fails if the same files have another fingerprint when read again, or others the same."""
    known, again = (fingerprint(split_of(OPEN[kind](str(tmp_path)))) for _ in range(2))
    assert known["texts"] > 0 and difference(known, again, None) is None
    shutil.rmtree(tmp_path / kind)
    MAKE[kind](tmp_path, shift=1)
    now = fingerprint(split_of(OPEN[kind](str(tmp_path))))
    assert difference(known, now, None) == "60 samples as before, but with other names or labels"


@pytest.mark.parametrize(("ending", "readers"), [("", 0), ("", 1), (", iterated", 0)])
def test_a_run_goes_on_within_an_epoch(
    kind: str, ending: str, readers: int, tmp_path: Path
) -> None:
    """Fails if a run that is resumed within an epoch, with other readers, ends with other bits."""
    (tmp_path / "mine.py").write_text(TASK)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{commands.CALL}"

    def train(name: str, *flags: str, readers: int) -> str:
        variables = {"KIND": kind + ending, "READERS": str(readers)}
        given = ["--task=mine:Line", "--global-batch-size=16", f"--experiment={name}", "--lr=0.01"]
        given += ["--sched=constant", *flags]
        done = commands.run_code(code, tmp_path, "train", *given, variables=variables)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        return str(summary["params_sha256"])

    whole = train("whole", "--max-steps=6", readers=0)
    train("cut", "--max-steps=2", readers=readers)
    assert train("cut", "--max-steps=6", "--resume=auto", readers=readers) == whole
