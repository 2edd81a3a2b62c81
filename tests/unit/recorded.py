"""Recorded runs to compute again and to compare: small ones that train with --trace-every."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

from hvdtrain.records.trace_file import digest_of
from hvdtrain.train import checkpoint
from tests.unit import commands

MINE = """
import os
import torch
import hvdtrain

class Net(torch.nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.first = torch.nn.Linear(16, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.3)
        self.last = torch.nn.Linear(8, classes)

    def forward(self, images):
        return self.last(self.drop(torch.relu(self.norm(self.first(images.flatten(1))))))

class Skew(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.001

class SkewedInput(torch.nn.Linear):
    def forward(self, inputs):
        return super().forward(Skew.apply(inputs))

class SkewedOutput(torch.nn.Linear):
    def forward(self, inputs):
        return Skew.apply(super().forward(inputs))

class OtherDrop(torch.nn.Dropout):
    def forward(self, inputs):
        torch.rand(1)
        return super().forward(inputs)

class Rare(hvdtrain.Task):
    # Counts tokens, of which some steps have none.
    counts_samples = False

    def build_data(self):
        x = torch.linspace(-1, 1, 24)[:, None]
        split = hvdtrain.TensorSplit(x, (torch.arange(24) % 6 == 0).float()[:, None])
        return hvdtrain.Splits("rare", train=split, valid=split)

    def build_model(self):
        return torch.nn.Linear(1, 1)

    def loss(self, model, batch):
        x, counted = batch
        return hvdtrain.Sums(((model(x) - x).square() * counted).sum(), int(counted.sum()))

def net_with(name, kind):
    def build(shape, classes):
        net = Net(shape, classes)
        getattr(net, name).__class__ = kind
        return net
    return build

skewed_input = net_with("last", SkewedInput)
skewed_output = net_with("first", SkewedOutput)
other_drop = net_with("drop", OtherDrop)

def pictures(relabel=os.environ.get("RELABEL"), brighter=os.environ.get("BRIGHTER")):
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.rand(60, 1, 4, 4, generator=generator), torch.arange(60) % 4
    if relabel:
        labels[int(relabel)] = 0
    if brighter:
        inputs[int(brighter)] += 0.1
    split = hvdtrain.TensorSplit(inputs, labels)
    return hvdtrain.Dataset("pictures", (1, 4, 4), 4, split, split)

relabelled = lambda: pictures(relabel=21)
brighter = lambda: pictures(brighter=21)
"""
FLAGS = ["--data=mine:pictures", "--model=mine:Net", "--global-batch-size=20", "--lr=0.1"]
FLAGS += ["--max-steps=13", "--experiment=run", "--opt=adamw", "--checkpoint-interval=4"]
FLAGS += ["--keep-checkpoints=9", "--eval-interval=9", "--trace-every=2"]
VIRTUAL = [*FLAGS, "--virtual-workers=3"]
# Code that runs between PyTorch and hvdtrain, before `hvdtrain train` does.
FLIPPED = """
import torch
calls = 0
class Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.view_as(values)
    @staticmethod
    def backward(ctx, gradient):
        global calls
        calls += 1
        if calls == 3 * 7 + 3:  # step 8, share 2
            gradient = gradient.clone()
            gradient.view(-1).view(torch.int32)[3] ^= 1 << 20
        return gradient
import mine
honest = mine.Net.forward
mine.Net.forward = lambda self, images: Flip.apply(honest(self, images))
"""


def train(folder: Path, *flags: str, patch: str = "", ends: int = 0) -> Path:
    """Train in `folder`, with code that changes what happens; return the run's folder."""
    (folder / "mine.py").write_text(MINE)
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{patch}\n{commands.CALL}"
    done = commands.run_code(code, folder, "train", *flags)
    assert done.returncode == ends, done.stdout + done.stderr
    return folder / "runs" / "run"


def call(
    folder: Path, *arguments: object, variables: dict[str, str] | None = None
) -> tuple[int, str]:
    """Call hvdtrain in `folder`, where the runs' code is; return the exit code and the output."""
    (folder / "mine.py").write_text(MINE)
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{commands.CALL}"
    done = commands.run_code(code, folder, *arguments, variables=variables)
    return done.returncode, done.stdout + done.stderr


def records_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()]


def write_records(run: Path, records: list[dict]) -> None:
    (run / "trace.jsonl").write_text("".join(json.dumps(it) + "\n" for it in records))


def forge(run: Path, change: Callable[[list[dict]], None]) -> None:
    """Change records, and then everything that would show it but for the computation."""
    records = records_of(run)
    change(records)
    for before, record in itertools.pairwise(records):
        record["previous"] = digest_of(before)
    write_records(run, records)

    def head_at(step: int) -> dict:
        own = [it for it in records if it["step"] <= step]
        return {"step": own[-1]["step"], "records": len(own), "sha256": digest_of(own[-1])}

    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"trace": head_at(records[-1]["step"])}))
    for path in run.glob("checkpoints/step-*"):
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["takeaway"]["trace"] = head_at(manifest["step"])
        sign(path, manifest)


def sign(path: Path, manifest: dict) -> None:
    """Write a manifest that fits the files."""
    manifest.pop("manifest_sha256")
    manifest["files"] = {name: checkpoint._describe(path / name) for name in manifest["files"]}
    manifest["manifest_sha256"] = checkpoint._digest_of(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
