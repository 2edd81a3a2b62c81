"""Damaged and hostile checkpoints: refused with a message, and nothing in them is executed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.exchange import SingleProcess
from hvdtrain.train.checkpoint import Checkpoints, DamagedCheckpoint, _digest_of, load_checkpoint
from tests.unit.jobs import equal, made_up_data, make_job, run_job, with_dropout

FILES = ("model.safetensors", "training_state.pt", "manifest.json")
FAULTS = 200


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real checkpoint: of a network with batch norm, momentum, an average and a loss scale."""
    folder = tmp_path_factory.mktemp("checkpoints")
    exchange = SingleProcess()
    job = make_job(
        *(made_up_data(20), 8, exchange),
        build=with_dropout,
        total_steps=4,
        ema_decay=0.9,
        amp="bf16",
    )
    snapshot = run_job(job, exchange).snapshot
    assert snapshot is not None
    checkpoints = Checkpoints(folder, 1)
    checkpoints.save(snapshot, is_best=True)
    checkpoints.wait()
    return folder / "step-00000004"


@pytest.fixture
def copied(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / original.name))


def damaged(content: bytes, randomness: random.Random) -> bytes:
    """Cut short, or with one to three bits flipped."""
    if randomness.random() < 0.4:
        return content[: randomness.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(randomness.randint(1, 3)):
        changed[randomness.randrange(len(changed))] ^= 1 << randomness.randrange(8)
    return bytes(changed)


def test_any_damage_is_found_or_harmless(original: Path, copied: Path) -> None:
    """Fails when one of 200 faults loads as something else, or ends in another error."""
    randomness = random.Random(20240607)
    good = load_checkpoint(original)
    found = 0
    for number in range(FAULTS):
        name = FILES[number % len(FILES)]
        content = (original / name).read_bytes()
        (copied / name).write_bytes(damaged(content, randomness))
        try:
            loaded = load_checkpoint(copied)
        except DamagedCheckpoint as error:
            assert str(copied) in str(error)
            found += 1
        else:
            assert equal(loaded, good), (number, name)
        (copied / name).write_bytes(content)
    assert found > 0.95 * FAULTS  # only the end of the manifest's last line can be spared
    assert equal(load_checkpoint(copied), good)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_foreign_file_is_damage(copied: Path, name: str) -> None:
    """Fails when a file that is not there, is a folder, or is another's ends in another error."""
    (copied / name).unlink()
    with pytest.raises(DamagedCheckpoint, match=name):
        load_checkpoint(copied)
    (copied / name).mkdir()
    with pytest.raises(DamagedCheckpoint, match=name):
        load_checkpoint(copied)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", "null", "3", '"files"', '{"files": 3}', '{"manifest_sha256": "x"}'),
        *('{"manifest_sha256": "x", "files": {"model.safetensors": {}}}', "\0", "[" * 100_000),
    ],
    ids=lambda text: text[:20],
)
def test_a_manifest_of_another_form_is_damage(copied: Path, text: str) -> None:
    """Fails when JSON that is no manifest ends in another error."""
    (copied / "manifest.json").write_text(text)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
        load_checkpoint(copied)


def test_a_place_without_a_checkpoint_is_damage(tmp_path: Path) -> None:
    """Fails when a path that is no folder, or an empty one, ends in another error."""
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(DamagedCheckpoint, match=str(path)):
            load_checkpoint(path)


def fit_manifest(folder: Path) -> None:
    """As somebody does who forges a checkpoint: the manifest describes what is there."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("manifest_sha256")
    for name in FILES[:2]:
        content = (folder / name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        manifest["files"][name] = {"bytes": len(content), "sha256": digest}
    manifest["manifest_sha256"] = _digest_of(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


class Evil:
    """Pickled, it runs a command when it is read carelessly."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self._mark}'",)


def pickles(mark: Path) -> dict[str, bytes]:
    saved = io.BytesIO()
    torch.save({"step": 1, "model": Evil(mark)}, saved)
    old = io.BytesIO()
    torch.save({"model": Evil(mark)}, old, _use_new_zipfile_serialization=False)
    return {"pickle": pickle.dumps(Evil(mark), 2), "torch": saved.getvalue(), "old": old.getvalue()}


@pytest.mark.parametrize("kind", ["pickle", "torch", "old"])
@pytest.mark.parametrize("name", FILES[:2])
def test_a_pickle_that_runs_code_is_refused(copied: Path, kind: str, name: str) -> None:
    """Fails when a forged file with a fitting manifest is executed, or ends in another error."""
    mark = copied.parent / "executed"
    content = pickles(mark)[kind]
    (copied / name).write_bytes(content)
    fit_manifest(copied)
    with pytest.raises(DamagedCheckpoint, match="cannot be read"):
        load_checkpoint(copied)
    assert not mark.exists()
    if kind == "pickle":
        pickle.loads(content)
        assert mark.exists()  # else the test could not fail


@pytest.mark.parametrize("name", FILES[:2])
def test_files_that_were_forged_end_in_no_other_error(
    original: Path, copied: Path, name: str
) -> None:
    """Fails when content that was damaged before its manifest was made ends in a surprise."""
    randomness = random.Random(7)
    content = (original / name).read_bytes()
    cases = [b"", b"\0" * 8, b"not a checkpoint", content[:100], content * 2, pickle.dumps({}, 0)]
    cases += [damaged(content, randomness) for _ in range(60)]
    for number, case in enumerate(cases):
        (copied / name).write_bytes(case)
        fit_manifest(copied)
        try:
            load_checkpoint(copied)
        except DamagedCheckpoint as error:
            assert str(copied) in str(error)
        except Exception as error:
            raise AssertionError(f"case {number}: {type(error).__name__}: {error}") from error


def test_a_forged_state_inside_the_archive_ends_in_no_other_error(copied: Path) -> None:
    """Fails when a damaged pickle in a sound archive ends in a surprise."""
    place = copied / "training_state.pt"
    with zipfile.ZipFile(place) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in members if name.endswith("data.pkl"))
    randomness = random.Random(9)
    surprises = set()
    for _ in range(60):
        with zipfile.ZipFile(place, "w", zipfile.ZIP_STORED) as archive:
            for name, content in members.items():
                changed = damaged(content, randomness) if name == pickled else content
                archive.writestr(name, changed)
        fit_manifest(copied)
        try:
            load_checkpoint(copied)
        except DamagedCheckpoint:
            pass
        except Exception as error:
            surprises.add(f"{type(error).__name__}: {error}"[:80])
    assert surprises == set()
