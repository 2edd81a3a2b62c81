"""Checkpoints: complete or absent, verified when read, written while training goes on.

A checkpoint is a folder: model.safetensors (what to evaluate and to take away), training_state.pt
(what a run needs to go on), and manifest.json with the size and SHA-256 of both. It is written
beside, synced to the disk and renamed, so it never stands there half-written; one of the same step
that is there already stays until the new one takes its place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hvdtrain.errors import HvdtrainError, TrainingError
from hvdtrain.files import replace_folder, set_aside, undo_replacing, write_new

MODEL_FILE = "model.safetensors"
STATE_FILE = "training_state.pt"
MANIFEST_FILE = "manifest.json"
NAME = re.compile(r"step-\d{8,}")


def name_of(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


class DamagedCheckpoint(HvdtrainError):
    """A checkpoint is not what was written."""


@dataclass(frozen=True)
class Snapshot:
    """Everything of a checkpoint, in memory of its own, so that training can go on."""

    step: int
    params_sha256: str
    weights: dict[str, torch.Tensor]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run. One writer: rank 0."""

    def __init__(self, folder: Path, keep: int) -> None:
        """`keep`: how many of the newest stay; the best one stays besides."""
        self.folder = folder
        self._keep = keep
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(
        self, snapshot: Snapshot, is_best: bool, takeaway: Mapping[str, Any] | None = None
    ) -> None:
        """Write in the background; waits only for the write before to end.

        `takeaway`: plain values for those who use the weights later. Raises TrainingError when
        the write before failed.
        """
        self.wait()
        self._writing = threading.Thread(
            target=self._write, args=(snapshot, is_best, takeaway or {}), name="checkpoint"
        )
        self._writing.start()

    def wait(self) -> None:
        """Until what was saved is on disk. Raises TrainingError when it could not be written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        self.check()

    def check(self) -> None:
        """Raise TrainingError if the last write has failed; never waits for one under way."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            kept = "The checkpoints before it are untouched"
            for aside in set_aside(self.folder):
                kept += f", but one is called {aside.name}: --resume auto puts it back"
            raise TrainingError(
                f"a checkpoint cannot be written to {self.folder}: {_reason(failure)}. {kept}"
            ) from failure

    def complete(self) -> list[Path]:
        """The checkpoints that are there, newest first."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.partition("-")[2]), reverse=True)

    def put_back(self) -> None:
        """Restore what a save that was killed had set aside, so that `complete` lists it."""
        undo_replacing(self.folder)

    def repair(self, resumed: str | None, best: str | None) -> None:
        """Put right what a kill has left, before a run goes on: `last` and `best`.

        `resumed`: the name of the checkpoint that the run goes on from; `best`: of the best one so
        far, as that checkpoint has it. A pointer to nothing is removed.
        """
        if not self.folder.is_dir():
            return
        for pointer, name in (("last", resumed), ("best", best)):
            place = self.folder / pointer
            if name is not None and (self.folder / name).is_dir():
                if _pointed(place) != name:
                    _point(place, name)
            elif not (self.folder / (_pointed(place) or "none")).is_dir():
                place.unlink(missing_ok=True)

    def _write(self, snapshot: Snapshot, is_best: bool, takeaway: Mapping[str, Any]) -> None:
        try:
            self._remove_leftovers()  # of a save that was killed
            final = _write_checkpoint(self.folder, snapshot, takeaway)
            _point(self.folder / "last", final.name)
            if is_best:
                _point(self.folder / "best", final.name)
            self._prune()
        except Exception as error:  # whatever it is, the training thread must hear of it
            self._failure = error
            with suppress(OSError):  # a full disk should not stay full of half a checkpoint
                self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        undo_replacing(self.folder)
        for leftover in self.folder.glob(".step-*"):
            if leftover.is_symlink():  # planted: what it leads to is not ours
                leftover.unlink()
            else:
                shutil.rmtree(leftover)

    def _prune(self) -> None:
        pointed = {_pointed(self.folder / name) for name in ("last", "best")}
        for path in self.complete()[self._keep :]:
            if path.name not in pointed:
                shutil.rmtree(_set_aside(path))


def load_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights and the training state of one checkpoint, verified.

    Raises DamagedCheckpoint, saying what is wrong, unless every file is the one that was written.
    Nothing in a file is ever executed: states are read without pickled code.
    """
    manifest = _read_manifest(path)
    for name in (MODEL_FILE, STATE_FILE):
        if manifest["files"][name] != _describe_or_nothing(path / name):
            raise DamagedCheckpoint(f"{path / name} is not what was written (size or SHA-256)")
    try:
        weights = load_file(path / MODEL_FILE)
        state = torch.load(path / STATE_FILE, map_location="cpu", weights_only=True)
    except Exception as error:  # a forged archive may trip over anything; nothing of it is run
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
    return weights, state


def _read_manifest(path: Path) -> dict[str, Any]:
    place = path / MANIFEST_FILE
    try:
        manifest = json.loads(place.read_text("utf-8"))
        digest = manifest.pop("manifest_sha256")
        described = all(
            isinstance(manifest["files"][name], dict) for name in (MODEL_FILE, STATE_FILE)
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{place} cannot be read: {type(error).__name__}") from error
    if not described or digest != _digest_of(manifest):
        raise DamagedCheckpoint(f"{place} is not what was written")
    result: dict[str, Any] = manifest
    return result


def load_weights(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights of one checkpoint, verified, and what it tells those who use them.

    Raises DamagedCheckpoint. The training state is not looked at, and may be gone.
    """
    manifest = _read_manifest(path)
    if manifest["files"][MODEL_FILE] != _describe_or_nothing(path / MODEL_FILE):
        raise DamagedCheckpoint(f"{path / MODEL_FILE} is not what was written (size or SHA-256)")
    try:
        return load_file(path / MODEL_FILE), manifest.get("takeaway", {})
    except Exception as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error


def _write_checkpoint(folder: Path, snapshot: Snapshot, takeaway: Mapping[str, Any]) -> Path:
    final = folder / name_of(snapshot.step)
    partial = folder / f".{final.name}.partial"
    partial.mkdir(parents=True)
    save_file(snapshot.weights, partial / MODEL_FILE)
    with (partial / STATE_FILE).open("wb") as stream:  # by its name, torch hides a full disk
        torch.save(snapshot.state, stream)
    manifest: dict[str, Any] = {
        "step": snapshot.step,
        "params_sha256": snapshot.params_sha256,
        "takeaway": dict(takeaway),
        "files": {name: _describe(partial / name) for name in (MODEL_FILE, STATE_FILE)},
    }
    manifest["manifest_sha256"] = _digest_of(manifest)
    (partial / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for name in (MODEL_FILE, STATE_FILE, MANIFEST_FILE, "."):
        _sync(partial / name)
    repeated = replace_folder(partial, final) if final.exists() else None
    if repeated is None:
        partial.rename(final)
    _sync(folder)
    if repeated:
        shutil.rmtree(repeated)
    return final


def _reason(error: BaseException) -> str:
    """What the system said, where a library has wrapped it; else the error's own words."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error)


def _set_aside(path: Path) -> Path:
    """From here on the checkpoint counts as absent."""
    doomed = path.with_name(f".{path.name}.old")
    path.rename(doomed)
    return doomed


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _describe(path: Path) -> dict[str, int | str]:
    """Size and SHA-256 of a file. Raises OSError."""
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _describe_or_nothing(path: Path) -> dict[str, int | str] | None:
    """Size and SHA-256 of a file, or None where it cannot be read."""
    try:
        return _describe(path)
    except OSError:
        return None


def _point(pointer: Path, name: str) -> None:
    """Make `pointer` (`last`, `best`) hold a checkpoint's name, in one move."""
    partial = pointer.with_name(f".{pointer.name}.partial")
    write_new(partial, name + "\n")
    _sync(partial)
    partial.replace(pointer)
    _sync(pointer.parent)


def _pointed(pointer: Path) -> str | None:
    return pointer.read_text("utf-8").strip() if pointer.is_file() else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
