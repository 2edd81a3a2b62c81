"""Names in object storage, which one run has, and copies here that cannot be used."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hvdtrain.config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.records.storage import Storage
from hvdtrain.records.storage_start import claim_name, name_of_job, open_storage
from hvdtrain.records.stored_files import StorageFailure
from tests.unit.records.test_storage import names, nothing, save, upload


def test_another_run_of_the_name_is_not_mixed_in(tmp_path: Path) -> None:
    """Fails if checkpoints of another run are added to those of the run here, or theirs are
    overwritten or removed: with a lock or without one, also if the storage has nothing newer.
    """
    storage, theirs, folder = Storage(f"file://{tmp_path}/far"), tmp_path / "a/x", tmp_path / "b/x"
    save(theirs, 1, 2)
    upload(theirs, 2, output=storage.output)
    before = sorted(Path(f"{tmp_path}/far").rglob("*"))
    save(folder, 3, run="s" * 32)
    with pytest.raises(UsageError, match="is another run than"):
        storage.fetch(folder, nothing)
    (folder / ".lock").write_text("t" * 32)
    with pytest.raises(UsageError, match="is another run than"):
        storage.fetch(folder, nothing)
    with pytest.raises(StorageFailure, match="another run has the name x"):
        upload(folder, 3, keep=1, output=storage.output)
    assert sorted(Path(f"{tmp_path}/far").rglob("*")) == before
    added = tmp_path / "far/x/checkpoints/step-00000003"
    shutil.copytree(folder / "checkpoints/step-00000003", added)
    storage.fetch(tmp_path / "c/x", nothing)
    assert names(tmp_path / "c/x") == ["step-00000002"]
    assert not (tmp_path / "c/x/.lock").exists()


def test_a_name_is_claimed_before_the_first_step(tmp_path: Path) -> None:
    """Fails if two runs can have a name, unless the later one resumes one without a checkpoint; or
    if a restart does not find the run of its job before the first upload.
    """
    options = RunConfig(output=f"file://{tmp_path}/far")
    claim_name(options, "x", "r" * 32, "job-7")
    assert name_of_job(options.output, Path("x"), "job-7") == "x"
    claim_name(options, "x", "r" * 32, None)
    with pytest.raises(UsageError, match="another run has the name x"):
        claim_name(options, "x", "s" * 32, None)
    resuming = RunConfig(output=options.output, resume="auto")
    claim_name(resuming, "x", "s" * 32, None)
    assert name_of_job(options.output, Path("x"), "job-7") is None
    save(tmp_path / "x", 1, run="s" * 32)
    upload(tmp_path / "x", 1, output=options.output)
    with pytest.raises(UsageError, match="another run has the name x"):
        claim_name(resuming, "x", "r" * 32, None)


def test_a_damaged_checkpoint_here_is_replaced(tmp_path: Path) -> None:
    """Fails if the good one in storage is not taken for it, or a summary of the end stays where the
    last checkpoint cannot be read.
    """
    storage, folder = Storage(f"file://{tmp_path}/far"), tmp_path / "x"
    save(folder, 1, 2)
    upload(folder, 2, 1, output=storage.output)
    damaged = folder / "checkpoints/step-00000002/model.safetensors"
    good = damaged.read_bytes()
    damaged.write_bytes(b"damaged")
    storage.fetch(folder, nothing)
    assert damaged.read_bytes() == good and (folder / "summary.json").exists()
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        *("step-00000001", "step-00000002", "last", "best"),
    }
    (tmp_path / "far/x/checkpoints/step-00000002/manifest.json").unlink()
    storage.fetch(tmp_path / "other/x", nothing)
    assert names(tmp_path / "other/x") == ["step-00000001"]
    assert not (tmp_path / "other/x/summary.json").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Fails if that is a traceback, or does not name the folder."""
    output = f"file://{tmp_path}/far"
    save(tmp_path / "x", 1)
    upload(tmp_path / "x", 1, output=output)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file/x, the copy here, cannot be written"):
        open_storage(output, tmp_path / "file/x", "auto", nothing)
