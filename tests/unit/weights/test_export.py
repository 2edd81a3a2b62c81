"""`hvdtrain export`: what it writes, that any script can load it, and what it refuses."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from hvdtrain.data.builtin import import_torchvision
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.train.checkpoint import Checkpoints, Snapshot
from hvdtrain.weights.export import export
from tests.unit.commands import run as run_command


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `hvdtrain export` as on a machine without Horovod and MPI."""
    return run_command(folder, "export", *arguments, absent=("horovod", "mpi4py"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save(nn.DataParallel(nn.Linear(3, 2)).state_dict(), tmp_path / "source.pth")
    return tmp_path / "source.pth"


def test_a_run_without_horovod_and_mpi(tmp_path: Path) -> None:
    """Fails when exporting needs either library, or prints other figures than it wrote."""
    weights = nn.Linear(1000, 3).state_dict() | {"count": torch.tensor(7)}
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=1)
    checkpoints.save(Snapshot(12, "", weights, {}), is_best=True)
    checkpoints.wait()
    done = run(tmp_path, "run", "out.safetensors")
    assert (done.returncode, done.stderr) == (0, "")
    digest = hashlib.sha256((tmp_path / "out.safetensors").read_bytes()).hexdigest()
    assert done.stdout.splitlines() == [
        "run/checkpoints/step-00000012 -> out.safetensors",
        "  3 tensors, 3,004 values in parameters and buffers, float32 and int64",
        f"  sha256 {digest}",
    ]
    written = load_file(tmp_path / "out.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    again = run(tmp_path, "run", "out.safetensors")
    assert again.returncode == 2 and again.stdout == ""
    assert again.stderr == (
        "hvdtrain: error: out.safetensors: already exists; --force replaces it\n"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["missing", "out.safetensors"], "missing: no such file or folder"),
        (["missing"], "OUT.safetensors"),
        (["missing", "out.safetensors", "--froce"], "--froce: no such flag; did you mean --force?"),
    ],
)
def test_bad_usage_is_reported_in_a_line(
    arguments: list[str], expected: str, tmp_path: Path
) -> None:
    """Fails when the exit code is not 2, a traceback shows, or a file is left."""
    done = run(tmp_path, *arguments)
    assert done.returncode == 2 and expected in done.stderr
    assert len(done.stderr.splitlines()) == 1 and list(tmp_path.iterdir()) == []


def test_wrappers_leave_no_trace(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails when a script without the training's code cannot load the file."""
    assert export(source, tmp_path / "out.safetensors") == 0
    nn.Linear(3, 2).load_state_dict(load_file(tmp_path / "out.safetensors"))
    assert "  removed from names: module. (2 times)\n" in capsys.readouterr().out
    with safe_open(tmp_path / "out.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_names_can_be_kept(source: Path, tmp_path: Path) -> None:
    """Fails when a model whose own attribute is called `module` cannot be exported for itself."""
    export(source, tmp_path / "out.safetensors", keep_names=True)
    assert set(load_file(tmp_path / "out.safetensors")) == {"module.weight", "module.bias"}
    clash = {"a._orig_mod.w": torch.zeros(1), "a.w": torch.ones(1)}
    save_file(clash, tmp_path / "clash.safetensors")
    with pytest.raises(UsageError, match=r"clash.safetensors: the names .* --keep-names leaves"):
        export(tmp_path / "clash.safetensors", tmp_path / "other.safetensors")
    assert not (tmp_path / "other.safetensors").exists()


def test_a_whole_network_round_trip(tmp_path: Path) -> None:
    """Fails when a real network's weights, saved wrapped, do not come back bit for bit."""
    build = import_torchvision().models.resnet18
    model = build(num_classes=10)
    torch.save({"model": nn.DataParallel(model).state_dict(), "epoch": 3}, tmp_path / "x.pt")
    export(tmp_path / "x.pt", tmp_path / "out.safetensors")
    other = build(num_classes=10)
    other.load_state_dict(load_file(tmp_path / "out.safetensors"))
    own = model.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in other.state_dict().items())


def test_tensors_that_share_memory_are_written_apart(tmp_path: Path) -> None:
    """Fails when tied weights, views or other strides make the file unwritable, or change."""
    whole = torch.arange(12.0).reshape(3, 4)
    weights = {"a": whole, "b": whole, "row": whole[1], "turned": whole.T, "empty": whole[:0]}
    torch.save(weights, tmp_path / "x.pt")
    export(tmp_path / "x.pt", tmp_path / "out.safetensors")
    written = load_file(tmp_path / "out.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)


def test_the_same_weights_give_the_same_file(source: Path, tmp_path: Path) -> None:
    """Fails when the hash that is printed could not be compared with another machine's."""
    files = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for file in files:
        export(source, file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_umask_decides_who_may_read_the_file(source: Path, tmp_path: Path) -> None:
    """Fails when what was written to be passed on is for its owner's eyes only, or for all."""
    for umask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(umask)
        try:
            export(source, tmp_path / "out.safetensors", force=True)
        finally:
            os.umask(before)
        assert (tmp_path / "out.safetensors").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ("out.pth", "the name must end in .safetensors"),
        ("nowhere/out.safetensors", "there is no folder"),
        ("folder.safetensors", "is a folder"),
        ("old.safetensors", "already exists; --force replaces it"),
    ],
)
def test_unfit_places_are_refused(out: str, expected: str, source: Path, tmp_path: Path) -> None:
    """Fails when one is written to, or what stood there is touched."""
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "old.safetensors").write_text("precious")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match=expected):
        export(source, tmp_path / out)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "old.safetensors").read_text() == "precious"


def test_force_replaces(source: Path, tmp_path: Path) -> None:
    """Fails when --force does not replace, also the very file that is read."""
    out = tmp_path / "out.safetensors"
    out.write_text("old")
    export(source, out, force=True)
    before = out.read_bytes()
    export(out, out, force=True)
    assert out.read_bytes() == before


def test_a_write_that_fails_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when half a file stays, the old one is lost, or the reason is not given."""

    def full_disk(weights: object, path: Path, metadata: object) -> None:
        path.write_text("half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hvdtrain.weights.export.save_file", full_disk)
    out = tmp_path / "out.safetensors"
    out.write_text("old")
    with pytest.raises(HvdtrainError, match=r"cannot be written: .*No space left"):
        export(source, out, force=True)
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "source.pth"]
