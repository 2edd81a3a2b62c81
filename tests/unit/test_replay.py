"""A recorded run is computed again; what was changed, in its files or while it ran, is named."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from hvdtrain.run.trace_file import digest_of
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

def pictures():
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.rand(60, 1, 4, 4, generator=generator), torch.arange(60) % 4
    if "RELABEL" in os.environ:
        labels[int(os.environ["RELABEL"])] = 0
    if "BRIGHTER" in os.environ:
        inputs[int(os.environ["BRIGHTER"])] += 0.1
    split = hvdtrain.TensorSplit(inputs, labels)
    return hvdtrain.Dataset("pictures", (1, 4, 4), 4, split, split)
"""
FLAGS = ["--data=mine:pictures", "--model=mine:Net", "--global-batch-size=20", "--lr=0.1"]
FLAGS += ["--max-steps=13", "--experiment=run", "--opt=adamw", "--checkpoint-interval=4"]
FLAGS += ["--keep-checkpoints=9", "--eval-interval=9", "--trace-every=2"]
VIRTUAL = [*FLAGS, "--virtual-workers=3"]
RECORDED = [2, 4, 6, 8, 10, 12]
# Code that runs between PyTorch and hvdtrain, before `hvdtrain train` does.
SWAPPED = """
from hvdtrain.data.sampler import GlobalBatchSampler
honest = GlobalBatchSampler.order
def order(self, epoch):
    numbers = honest(self, epoch)
    if epoch == 1:
        numbers[[2, 7]] = numbers[[7, 2]]
    return numbers
GlobalBatchSampler.order = order
"""
OTHER_RATE = """
from hvdtrain.run import prepare
honest = prepare.make_schedule
prepare.make_schedule = lambda *them: lambda step: honest(*them)(step) * (1.5 if step == 5 else 1)
"""
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
        if calls == 3 * 7 + 2:  # step 8, share 1
            gradient = gradient.clone()
            gradient.view(-1).view(torch.int32)[3] ^= 1 << 20
        return gradient
import mine
honest = mine.Net.forward
mine.Net.forward = lambda self, images: Flip.apply(honest(self, images))
"""


def train(folder: Path, *flags: str, patch: str = "") -> Path:
    """Train in `folder`, with code that changes what happens; return the run's folder."""
    (folder / "mine.py").write_text(MINE)
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{patch}\n{commands.CALL}"
    done = commands.run_code(code, folder, "train", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "run"


def replay(run: Path, *flags: str, variables: dict[str, str] | None = None) -> tuple[int, str]:
    """Replay a run; return the exit code and the output."""
    folder = run.parents[1]
    (folder / "mine.py").write_text(MINE)
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{commands.CALL}"
    arguments = ["replay", str(run), "--trust-code", *flags]
    done = commands.run_code(code, folder, *arguments, variables=variables)
    return done.returncode, done.stdout + done.stderr


def records_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()]


def write_records(run: Path, records: list[dict]) -> None:
    (run / "trace.jsonl").write_text("".join(json.dumps(it) + "\n" for it in records))


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("honest"), *VIRTUAL)


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    """A copy of the honest run, to tamper with."""
    copy = tmp_path / "runs" / "run"
    shutil.copytree(honest, copy)
    return copy


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ([], RECORDED),
        (["--steps=5-9"], [6, 8]),
        (["--steps=12"], [12]),
        (["--sample=2", "--seed=1"], None),
    ],
)
def test_honest_steps_agree(run: Path, flags: list[str], steps: list[int] | None) -> None:
    """Fails if a step is computed from another state than the run's, or others than chosen are."""
    code, output = replay(run, *flags, "--json=found.json")
    assert code == 0, output
    found = json.loads((run.parents[1] / "found.json").read_text())
    assert found["difference"] is None
    assert found["steps"] == steps or (steps is None and len(found["steps"]) == 2)
    assert "agreed bit for bit" in output


def test_one_worker_without_virtual_ones(tmp_path: Path) -> None:
    """Fails if dropout or running statistics of a plain run are not restored."""
    code, output = replay(train(tmp_path, *FLAGS))
    assert code == 0, output
    assert "6 steps agreed bit for bit" in output


def test_a_resumed_run_has_the_trace_of_the_uninterrupted_one(honest: Path, tmp_path: Path) -> None:
    """Fails if a resume breaks the chain, repeats a record, or drops one."""
    resumed = train(tmp_path, *VIRTUAL[:-1], "--virtual-workers=3", "--max-steps=7")
    train(tmp_path, *VIRTUAL, "--resume=auto")
    assert records_of(resumed) == records_of(honest)
    heads = [json.loads((run / "summary.json").read_text())["trace"] for run in (resumed, honest)]
    assert heads[0] == heads[1] == {**heads[0], "step": 12, "records": 6}


def test_a_resume_refuses_a_trace_that_was_cut(tmp_path: Path) -> None:
    """Fails if a chain goes on after records that are missing."""
    run = train(tmp_path, *VIRTUAL, "--max-steps=7")
    write_records(run, records_of(run)[:2])
    done = commands.run(tmp_path, "train", *VIRTUAL, "--resume=auto")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "trace.jsonl does not end with the record of step 6" in done.stderr
    assert len(records_of(run)) == 2


def edit_record(run: Path) -> None:
    records = records_of(run)
    records[2]["gradients"][1][0] = "0" * 16
    write_records(run, records)


def edit_last_record(run: Path) -> None:
    records = records_of(run)
    records[-1]["loss"] += 1e-6
    write_records(run, records)


def cut(run: Path) -> None:
    write_records(run, records_of(run)[:-1])


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
    (run / "summary.json").write_text(json.dumps(summary | {"trace": head_at(13)}))
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


def forge_gradient(run: Path) -> None:
    forge(run, lambda records: records[3]["gradients"][2].__setitem__(1, "0" * 16))


def forge_loss(run: Path) -> None:
    forge(run, lambda records: records[1].update(loss=0.5))


def damage_checkpoint(run: Path) -> None:
    path = run / "checkpoints/step-00000008/training_state.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def forge_checkpoint(run: Path) -> None:
    path = run / "checkpoints/step-00000008"
    state = torch.load(path / "training_state.pt", weights_only=True)
    state["model"]["last.bias"][1] += 1e-3
    torch.save(state, path / "training_state.pt")
    sign(path, json.loads((path / "manifest.json").read_text()))


def forge_optimizer(run: Path) -> None:
    path = run / "checkpoints/step-00000008"
    state = torch.load(path / "training_state.pt", weights_only=True)
    state["optimizer"]["state"][0]["exp_avg"] *= 1.01
    torch.save(state, path / "training_state.pt")
    sign(path, json.loads((path / "manifest.json").read_text()))


def edit_manifest(run: Path) -> None:
    path = run / "checkpoints/step-00000012/manifest.json"
    path.write_text(path.read_text().replace('"step": 12', '"step": 11', 1))


def edit_config(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"lr": 0.2}))


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (edit_record, "trace.jsonl:3: is not the record that line 4 refers to"),
        (edit_last_record, "trace.jsonl:6: is not the record of step 12 that"),
        (cut, "was cut: it has 5 records, but"),
        (forge_gradient, "step 8, computed from the checkpoint of step 4: gradient: first.bias"),
        (forge_loss, "step 4, computed from the beginning: loss: "),
        (damage_checkpoint, "training_state.pt is not what was written"),
        (
            forge_checkpoint,
            "step-00000008: last.bias (1 of 6 parameters) is not that of the record",
        ),
        (forge_optimizer, "step 10, computed from the checkpoint of step 8: gradient"),
        (edit_manifest, "manifest.json is not what was written"),
        (edit_config, "the trace began with another configuration, or with other data"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_tampering_is_named(run: Path, tamper: Callable[[Path], None], expected: str) -> None:
    """Fails if a file that was changed after the run is not found, or something else is named."""
    tamper(run)
    code, output = replay(run)
    assert code == 17, output
    assert expected in output


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        (SWAPPED, "step 4, computed from the beginning: data order"),
        (OTHER_RATE, "step 6, computed from the checkpoint of step 4: update: the learning rate"),
        (FLIPPED, "step 8, computed from the checkpoint of step 4: gradient: first.weight"),
    ],
    ids=["swapped samples", "learning rate", "flipped bit"],
)
def test_what_went_wrong_while_it_ran_is_named(patch: str, expected: str, tmp_path: Path) -> None:
    """Fails if a step that was not computed as configured agrees, or something else is blamed."""
    code, output = replay(train(tmp_path, *VIRTUAL, patch=patch))
    assert code == 17, output
    assert expected in output
    if patch is FLIPPED:
        assert "of share 1 (1 of 3 shares), from equal data" in output


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("RELABEL", "with other names or labels; the first that differs is number 21"),
        ("BRIGHTER", "step 2, computed from the beginning: data: the batch of share"),
    ],
)
def test_changed_data_are_named(change: str, expected: str, run: Path) -> None:
    """Fails if the labels or the pixels of today are taken for those of the run."""
    code, output = replay(run, variables={change: "21"})
    assert code == 17, output
    assert expected in output, output


def test_runs_that_cannot_be_replayed(tmp_path: Path) -> None:
    """Fails if a run without a trace, or a choice of no step, ends in anything but one message."""
    run = train(tmp_path, *VIRTUAL[:-2], "--virtual-workers=3", "--max-steps=1")
    code, output = replay(run)
    assert (code, "has no trace: train with --trace-every" in output) == (2, True), output
    for flags, expected in (
        (["--steps=9-4"], "--steps=9-4: give one step, or the first and the last"),
        (["--sample=0"], "--sample=0: must be at least 1"),
    ):
        code, output = replay(run, *flags)
        assert (code, expected in output) == (2, True), output
