"""Checkpoints on the disk: complete or absent, the newest and the best, failures reported."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model

from hvdtrain import files
from hvdtrain.cli.train import run
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.exchange import SingleProcess
from hvdtrain.models import build_model
from hvdtrain.tensors import params_sha256
from hvdtrain.topology import Topology
from hvdtrain.train import checkpoint
from hvdtrain.train.checkpoint import Checkpoints, Snapshot, load_checkpoint, name_of
from hvdtrain.train.metering import Meter
from hvdtrain.train.progress import State
from hvdtrain.train.state import capture
from tests.unit.jobs import equal, made_up_data, make_job

FILES = {"model.safetensors", "training_state.pt", "manifest.json"}


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 4, dtype=torch.float64), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)
    )


def small(step: int, **state: Any) -> Snapshot:
    weights = {"w": torch.full((3,), float(step))}
    return Snapshot(step, f"hash of {step}", weights, {"step": step} | state)


def save(folder: Path, *snapshots: Snapshot, keep: int = 3, best: int | None = None) -> None:
    checkpoints = Checkpoints(folder, keep)
    for snapshot in snapshots:
        checkpoints.save(snapshot, is_best=snapshot.step == best)
    checkpoints.wait()


def of_model(step: int, model: torch.nn.Module) -> Snapshot:
    """What a job with this model keeps."""
    job = make_job(made_up_data(4), 4, SingleProcess(), build=lambda: model)
    job.model.to(torch.float64)
    exchange = SingleProcess()
    snapshot = capture(job, State(Meter(exchange, 4), step), exchange, {"note": 1})
    assert snapshot is not None
    return snapshot


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_checkpoint_loads_back_bit_equal(tmp_path: Path, model: torch.nn.Module) -> None:
    """Fails when a tensor changes on its way, or the manifest does not describe the files."""
    snapshot = of_model(120, model)
    save(tmp_path / "checkpoints", snapshot)
    folder = tmp_path / "checkpoints" / "step-00000120"
    assert names(folder) == FILES
    expected = model.state_dict()
    for loaded in (load_file(folder / "model.safetensors"), load_checkpoint(folder)[0]):
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert equal(load_checkpoint(folder)[1], snapshot.state)
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in FILES - {"manifest.json"}:
        content = (folder / name).read_bytes()
        described = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        assert manifest["files"].pop(name) == described
    assert manifest["files"] == {}
    assert (manifest["step"], manifest["params_sha256"]) == (120, params_sha256(model))
    assert (tmp_path / "checkpoints" / "last").read_text() == "step-00000120\n"


def test_the_umask_decides_who_may_read_a_checkpoint(tmp_path: Path) -> None:
    """Fails if one of its files is for its owner alone, or for all, whatever the umask is."""
    for step, umask, mode in ((1, 0o022, 0o644), (2, 0o027, 0o640)):
        before = os.umask(umask)
        try:
            save(tmp_path, small(step))
        finally:
            os.umask(before)
        files = [*(tmp_path / name_of(step)).iterdir()]
        assert [it.stat().st_mode & 0o777 for it in files] == [mode] * 3, files


def test_a_snapshot_is_a_copy(model: torch.nn.Module) -> None:
    """Fails when training on, while the disk is slow, changes what is being written."""
    snapshot = of_model(1, model)
    before = params_sha256(model)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    for kept in (snapshot.weights, snapshot.state["model"]):
        model.load_state_dict(kept)
        assert params_sha256(model) == before == snapshot.params_sha256


def test_tied_weights_are_saved(tmp_path: Path, model: torch.nn.Module) -> None:
    """Fails when parameters that share memory cannot be saved, or load back apart."""
    model[2].weight = torch.nn.Parameter(torch.eye(4))
    model.append(torch.nn.Linear(4, 4, bias=False))
    model[3].weight = model[2].weight
    model.double()
    save(tmp_path, of_model(1, model))
    before = params_sha256(model)
    with torch.no_grad():
        model[3].weight.add_(1)
    model.load_state_dict(load_checkpoint(tmp_path / "step-00000001")[0])
    assert params_sha256(model) == before and model[3].weight is model[2].weight


def test_lenet_survives_the_disk(tmp_path: Path) -> None:
    """Fails when a fresh network with the saved weights does not hash the same."""
    trained, fresh = (build_model("lenet", (1, 28, 28), 10, torch.float64) for _ in range(2))
    assert params_sha256(trained) != params_sha256(fresh)
    save(tmp_path, of_model(0, trained))
    folder = tmp_path / "step-00000000"
    load_model(fresh, folder / "model.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert params_sha256(fresh) == manifest["params_sha256"]


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    """Fails when more than K and the best are kept, either is lost, or a pointer is wrong."""
    save(tmp_path, *map(small, (10, 20, 30, 40, 50)), keep=2, best=20)
    kept = {"step-00000020", "step-00000040", "step-00000050"}
    assert names(tmp_path) == kept | {"last", "best"}
    assert (tmp_path / "last").read_text() == "step-00000050\n"
    assert (tmp_path / "best").read_text() == "step-00000020\n"
    save(tmp_path, small(60), keep=2, best=60)
    assert names(tmp_path) == {"step-00000050", "step-00000060", "last", "best"}
    assert (tmp_path / "best").read_text() == "step-00000060\n"


def test_the_newest_comes_first(tmp_path: Path) -> None:
    """Fails when step 100,000,000 stands behind 99,999,999, or something else is listed."""
    steps = (5, 99_999_999, 100_000_000)
    save(tmp_path, *map(small, steps), keep=5)
    for other in (".step-00000007.partial", "step-7", "step-00000007.old", "other"):
        (tmp_path / other).mkdir()
    found = [load_checkpoint(path)[1]["step"] for path in Checkpoints(tmp_path, 1).complete()]
    assert found == sorted(steps, reverse=True)
    assert Checkpoints(tmp_path / "none", 1).complete() == []


def test_what_a_killed_save_left_does_not_hurt(tmp_path: Path) -> None:
    """Fails when a half-written folder stops the next save, or gets into it."""
    leftover = tmp_path / ".step-00000003.partial"
    leftover.mkdir()
    (leftover / ".model.safetensors.mode").write_text("")
    (tmp_path / ".last.partial").write_text("half")
    save(tmp_path, small(3))
    assert names(tmp_path / "step-00000003") == FILES
    assert names(tmp_path) == {"step-00000003", "last"}


def test_what_a_killed_save_left_is_cleared_away(tmp_path: Path) -> None:
    """Fails when each SIGKILL inside a save or a removal costs a checkpoint of disk for good."""
    for name in (".step-00000003.partial", ".step-00000001.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    save(tmp_path, small(5))
    assert names(tmp_path) == {"step-00000005", "last"}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("reached", ["model.safetensors", "."])
def test_a_save_that_is_abandoned_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached: str, again: bool
) -> None:
    """Fails when a checkpoint that is being written as the time is over is left half written or
    appears later, or when the one before it, also of the same step, is lost.
    """
    save(tmp_path, small(2), small(3))
    waits, goes_on = threading.Event(), threading.Event()

    def sync(path: Path) -> None:
        if path.name == reached or (reached == "." and ".step" in path.name):
            waits.set()
            goes_on.wait(20)

    monkeypatch.setattr(checkpoint, "sync", sync)
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save(small(3 if again else 4), is_best=False)
    assert waits.wait(20)
    left = checkpoints.abandon()
    assert [path.name for path in left] == ["step-00000003", "step-00000002"]
    goes_on.set()
    time.sleep(0.3)
    assert names(tmp_path) == {"step-00000002", "step-00000003", "last"}
    assert load_checkpoint(left[0])[1]["step"] == 3
    assert checkpoints._abandoned is not None
    checkpoints._abandoned.set()  # the thread ends


def test_a_removal_that_was_killed_can_be_repeated(tmp_path: Path) -> None:
    """Fails when the rest of an old removal makes every later save fail."""
    leftover = tmp_path / ".step-00000001.old"
    leftover.mkdir()
    (leftover / "model.safetensors").write_text("half")
    save(tmp_path, small(1), small(2), small(3), keep=1)
    assert {"step-00000003", "last"} <= names(tmp_path)


def fail_sync(monkeypatch: pytest.MonkeyPatch, fails_at: str, error: Exception) -> None:
    def sync(path: Path) -> None:
        if path.name == fails_at:
            raise error

    for module in (checkpoint, files):
        monkeypatch.setattr(module, "sync", sync)


@pytest.mark.parametrize("fails_at", ["model.safetensors", "manifest.json", ".last.partial"])
def test_a_save_that_fails_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    """Fails when a checkpoint stands there unsynced, `last` names none, or no error is raised."""
    save(tmp_path, small(1))
    full = OSError(28, "No space left on device")
    fail_sync(monkeypatch, fails_at, full)
    checkpoints = Checkpoints(tmp_path, 3)
    checkpoints.save(small(2), is_best=True)
    with pytest.raises(TrainingError, match=r"No space left on device\. The checkpoints before"):
        checkpoints.wait()
    checkpoints.wait()  # raised once
    assert (tmp_path / "last").read_text() == "step-00000001\n"
    assert (tmp_path / "step-00000002").exists() == (fails_at == ".last.partial")
    assert load_checkpoint(tmp_path / "step-00000001")[1]["step"] == 1
    monkeypatch.undo()
    checkpoints.save(small(3), is_best=False)
    checkpoints.wait()
    assert (tmp_path / "last").read_text() == "step-00000003\n"


def test_a_failed_save_is_raised_by_the_next(tmp_path: Path, monkeypatch) -> None:
    """Fails when training goes on for hours without a checkpoint."""
    full = OSError(28, "No space left on device")
    fail_sync(monkeypatch, "model.safetensors", full)
    checkpoints = Checkpoints(tmp_path, 3)
    checkpoints.save(small(1), is_best=False)
    with pytest.raises(TrainingError):
        checkpoints.save(small(2), is_best=False)


def test_a_failed_save_is_raised_before_the_next(tmp_path: Path) -> None:
    """Fails when asking waits for a write that is under way, or ignores one that failed;
    here the folder is a file.
    """
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints", 3)
    checkpoints.check()
    (tmp_path / "file").write_text("")
    checkpoints.save(small(1), is_best=False)
    with pytest.raises(TrainingError, match=r"cannot be written to .*: Not a directory"):
        while True:
            checkpoints.check()
            time.sleep(0.01)
    checkpoints.check()  # raised once


def test_a_failed_save_ends_the_run_at_once(tmp_path: Path, monkeypatch) -> None:
    """Fails when a run goes on to the next save, hours later, though the last one has failed."""
    full = OSError(28, "No space left on device")
    fail_sync(monkeypatch, "model.safetensors", full)
    flags = {"model": "lenet", "data": "synthetic:1x28x28,samples=4096", "global_batch_size": 1}
    flags |= {"max_steps": 600, "checkpoint_interval": 300, "log_interval": 10}
    flags |= {"output": str(tmp_path), "experiment": "x", "print_config": False}
    with pytest.raises(TrainingError, match="No space left on device"):
        run(flags, [], Topology())
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert "No space left on device" in summary["error"]
    assert 300 <= summary["steps"] < 600


@pytest.mark.parametrize("error", [ValueError("x"), TypeError("x"), MemoryError("x")], ids=repr)
def test_no_failure_of_the_writer_is_lost(tmp_path: Path, monkeypatch, error: Exception) -> None:
    """Fails when the writing thread dies of something unforeseen and wait() raises nothing."""
    fail_sync(monkeypatch, "training_state.pt", error)
    with pytest.raises(TrainingError, match="cannot be written"):
        save(tmp_path, small(1))


def test_a_save_that_repeats_a_step_and_fails_leaves_the_first(tmp_path: Path, monkeypatch) -> None:
    """Fails when the good checkpoint of a step is gone before the new one is on the disk."""
    save(tmp_path, small(1))
    full = OSError(28, "No space left on device")
    fail_sync(monkeypatch, "training_state.pt", full)
    with pytest.raises(TrainingError):
        save(tmp_path, small(1, again=True))
    assert load_checkpoint(tmp_path / "step-00000001")[1] == {"step": 1}


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    """Fails when a run that comes to a step once more keeps the old state, or both."""
    save(tmp_path, small(1), small(1, again=True))
    assert load_checkpoint(tmp_path / "step-00000001")[1]["again"] is True
    assert names(tmp_path) == {"step-00000001", "last"}


CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")  # audited


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a process of its own; its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def disturb(folder: Path, number: int, action: Callable[[], None]) -> None:
    """Call `action` before the `number`-th change that this process makes below `folder`."""
    left = [number]

    def hook(event: str, given: tuple) -> None:
        reads = event == "open" and not given[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES and str(folder) in str(given[0]) and not reads:
            left[0] -= 1
            if left[0] == 0:
                action()

    sys.addaudithook(hook)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("action", [kill, fill_disk], ids=["kill", "failure"])
def test_a_step_saved_again_is_never_lost(tmp_path: Path, action) -> None:
    """Fails if a kill, or a full disk, before any change of the disk that such a save makes leaves
    neither the old nor the new checkpoint for a resume, or `best` pointing to nothing.
    """
    number, code = 0, 1
    while code != 0:
        number += 1
        folder = tmp_path / str(number)
        save(folder, small(1), small(2), keep=1, best=2)

        def again(folder: Path = folder, number: int = number) -> None:
            disturb(folder, number, action)
            save(folder, small(2, again=True), keep=1, best=2)

        code = in_child(again)
        assert action is kill or (folder / "step-00000002").is_dir(), number
        checkpoints = Checkpoints(folder, keep=1)
        checkpoints.put_back()
        (found,) = checkpoints.complete()
        assert load_checkpoint(found)[1]["step"] == 2, number
        checkpoints.repair(found.name, found.name)
        for pointer in ("last", "best"):
            assert (folder / pointer).read_text() == "step-00000002\n", number
        save(folder, small(3), keep=1, best=3)
        assert names(folder) == {"step-00000003", "last", "best"}, number
        shutil.rmtree(folder)
    assert number > 15  # the last one was not disturbed


def test_a_checkpoint_that_cannot_be_put_back_is_named(tmp_path: Path, monkeypatch) -> None:
    """Fails if both renames fail and the error claims that nothing has changed."""
    save(tmp_path, small(1))
    honest = Path.rename

    def once(self: Path, target: Path) -> Path:
        if str(target).endswith(checkpoint.REPLACED):
            return honest(self, target)
        return fill_disk()

    monkeypatch.setattr(Path, "rename", once)
    with pytest.raises(TrainingError, match=r"one is called \.step-00000001\.replaced: --resume"):
        save(tmp_path, small(1, again=True))
    monkeypatch.undo()
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.put_back()
    assert load_checkpoint(tmp_path / "step-00000001")[1] == {"step": 1}


@pytest.mark.parametrize(
    ("best", "resumed", "stored", "expected"),
    [
        (None, "step-00000002", "step-00000002", "step-00000002"),  # killed before it was written
        ("step-00000009", "step-00000002", "step-00000001", "step-00000001"),  # it names nothing
        ("step-00000009", "step-00000002", None, None),
        ("step-00000001", "step-00000002", None, "step-00000001"),
        ("step-00000001", "step-00000002", "step-00000009", "step-00000001"),
    ],
)
def test_pointers_are_repaired(tmp_path: Path, best, resumed, stored, expected) -> None:
    """Fails if `best` or `last` points to nothing, or to another than the state of the run has."""
    save(tmp_path, small(1), small(2))
    (tmp_path / "last").write_text("step-00000007\n")
    if best:
        (tmp_path / "best").write_text(f"{best}\n")
    Checkpoints(tmp_path, 3).repair(resumed, stored)
    assert (tmp_path / "last").read_text() == f"{resumed}\n"
    assert checkpoint._pointed(tmp_path / "best") == expected


@pytest.mark.parametrize("stored", ["step-00000001", None])
def test_a_folder_in_the_place_of_a_pointer_is_named(tmp_path: Path, stored: str | None) -> None:
    """Fails if it ends in a traceback, or does not name the folder, which may be anyone's."""
    save(tmp_path, small(1))
    (tmp_path / "best").unlink(missing_ok=True)
    (tmp_path / "best").mkdir()
    with pytest.raises(UsageError, match=r"/best: Is a directory; remove it"):
        Checkpoints(tmp_path, 3).repair("step-00000001", stored)
