"""Checkpoints: complete or absent, verified when read, written while training continues.

A checkpoint is a folder: model.safetensors (the weights, to evaluate and to export),
training_state.pt (the state to resume from), and manifest.json with the size and SHA-256 of both.
It is written under a temporary name, synced and renamed, so it is never visible half written. One
of the same step is set aside meanwhile; if that is interrupted, `put_back` restores it.
"""

import errno
import hashlib
import json
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hvdtrain.documents import FIELDS, check, parse_json, read_text, refuse_newer, stamped
from hvdtrain.errors import HvdtrainError, TrainingError, UsageError
from hvdtrain.files import obey_umask, open_bytes, replace_file, sha256_of, sync, system_text
from hvdtrain.train.bounded import most_bytes, read_safetensors, read_torch
from hvdtrain.train.portable import as_stored, from_stored, native, refuse_unreadable_file

MODEL_FILE = "model.safetensors"
STATE_FILE = "training_state.pt"
MANIFEST_FILE = "manifest.json"
FILES = (MODEL_FILE, STATE_FILE, MANIFEST_FILE)
NAME = re.compile(r"step-[0-9]{8,}")
REPLACED, PARTIAL = ".replaced", ".partial"


def name_of(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """Return the step of a checkpoint of that name."""
    return int(name.partition("-")[2])


class DamagedCheckpoint(HvdtrainError):
    """A checkpoint whose content differs from what was written."""


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint, copied to separate memory so that training can continue."""

    step: int
    params_sha256: str
    weights: dict[str, torch.Tensor]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run; only rank 0 writes them.

    The folder may be a link, to a larger disk, say, where other runs have theirs. So only what this
    run has written is removed or replaced.
    """

    def __init__(self, folder: Path, keep: int, run: str = "") -> None:
        """`keep`: number of newest checkpoints to keep; the best one is always kept. `run`: the id
        of the run, by which it knows its own.
        """
        self.folder = folder
        self._keep, self._run = keep, run
        # Called with the name of each complete checkpoint, in the thread that writes.
        self.written: list[Callable[[str], object]] = []
        self.held: Callable[[], Collection[str]] = tuple  # names of those not to remove now
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._abandoned: threading.Event | None = None

    def save(
        self, snapshot: Snapshot, is_best: bool, takeaway: Mapping[str, Any] | None = None
    ) -> None:
        """Write a checkpoint in the background. Raises TrainingError if the previous one failed.

        `takeaway`: plain values for users of the weights.
        """
        self.wait()
        arguments = snapshot, is_best, takeaway or {}
        self._writing = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        self._writing.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Raises TrainingError if the write failed."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        self.check()

    def check(self) -> None:
        """Raise TrainingError if the last write has failed; never wait for a write in progress."""
        if self._failure is not None:  # which the thread that writes may set at any time
            failure, self._failure = self._failure, None
            kept = "The checkpoints before it are untouched"
            for aside in self.folder.glob(f".*{REPLACED}"):
                kept += f", but one is called {aside.name}: --resume auto restores it"
            raise TrainingError(
                f"a checkpoint cannot be written to {self.folder}: {system_text(failure)}. {kept}"
            ) from failure

    def abandon(self) -> list[Path]:
        """Remove the checkpoint that is being written, if any; return the others, newest first.

        For a process that ends now: `wait` may not return any more.
        """
        self._abandoned = threading.Event()
        if self._writing is not None and self._writing.is_alive():
            for partial in self.folder.glob(f".step-*{PARTIAL}"):
                # Renamed first: one that the thread completes at this moment stays whole.
                with suppress(OSError):
                    partial.rename(partial.with_suffix(".abandoned"))
            with suppress(OSError):
                self.remove_leftovers()
        return self.complete()

    def complete(self) -> list[Path]:
        """Return the folders of the existing checkpoints, newest first."""
        inside = self.folder.iterdir() if self.folder.is_dir() else ()
        named = (path for path in inside if NAME.fullmatch(path.name))
        folders = [path for path in named if path.is_dir() and not path.is_symlink()]
        return sorted(folders, key=lambda path: step_of(path.name), reverse=True)

    def last_step(self) -> int | None:
        """Return the step of the checkpoint that `last` names; None without such a pointer."""
        name = _pointed(self.folder / "last") or ""
        return step_of(name) if NAME.fullmatch(name) else None

    def put_back(self) -> None:
        """Restore a checkpoint that a killed save has set aside, so that `complete` lists it."""
        for aside in sorted(self.folder.glob(f".step-*{REPLACED}")):
            final = self.folder / aside.name.removeprefix(".").removesuffix(REPLACED)
            if final.exists() or aside.is_symlink():
                _remove(aside)
            else:
                aside.rename(final)

    def repair(self, resumed: str | None, best: str | None) -> None:
        """Correct the pointers `last` and `best` before a killed run is resumed.

        `resumed`: name of the checkpoint to resume from. `best`: name of the best one so far, as
        recorded in that checkpoint. A pointer to a missing checkpoint is removed. Raises UsageError
        for one that cannot be replaced, such as a folder of that name.
        """
        for pointer, name in (("last", resumed), ("best", best)):
            path = self.folder / pointer
            try:
                if name is not None and (self.folder / name).is_dir():
                    if _pointed(path) != name:
                        replace_file(path, [name, "\n"])
                elif not (self.folder / (_pointed(path) or "none")).is_dir():
                    path.unlink(missing_ok=True)
            except OSError as error:
                raise UsageError(f"{path}: {system_text(error)}; remove it") from error

    def _write(self, snapshot: Snapshot, is_best: bool, takeaway: Mapping[str, Any]) -> None:
        try:
            self.remove_leftovers()  # from a killed save
            final = self.folder / name_of(snapshot.step)
            if final.exists() and not self._is_own(final):
                raise FileExistsError(errno.EEXIST, f"{final} is not of this run; remove it")
            _write_checkpoint(final, snapshot, takeaway, self._run)
            for pointer in ("last", "best") if is_best else ("last",):
                replace_file(self.folder / pointer, [final.name, "\n"])
            for follow_up in self.written:
                follow_up(final.name)
            self._prune()
        except Exception as error:  # any error must reach the training thread
            with suppress(OSError):  # a partial checkpoint must not keep a full disk full
                self.remove_leftovers()
            if self._abandoned is not None:
                self._abandoned.wait()  # for the end of the process
            self._failure = error

    def remove_leftovers(self) -> None:
        """Remove what a save that was killed has left."""
        self.put_back()
        for leftover in self.folder.glob(".step-*"):
            _remove(leftover)

    def _prune(self) -> None:
        pointed = {*self.held(), *(_pointed(self.folder / name) for name in ("last", "best"))}
        existing = self.complete()  # whose manifests take time to read
        checkpoints = existing[self._keep :] and [path for path in existing if self._is_own(path)]
        for path in checkpoints[self._keep :]:
            if path.name not in pointed:
                # Renamed first, so that a partial removal does not look like a checkpoint.
                _remove(path.rename(path.with_name(f".{path.name}.old")))

    def _is_own(self, path: Path) -> bool:
        """Return whether a folder is a checkpoint of this run, or what is left of one."""
        if path.is_symlink() or any(inner.name not in FILES for inner in path.iterdir()):
            return False
        try:
            run = read_manifest(path).get("run")
        except (DamagedCheckpoint, UsageError):
            return True
        # Earlier versions did not record the run.
        return bool(run == self._run or (run is None and not self.folder.is_symlink()))


def load_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the verified weights and training state of a checkpoint.

    Raises DamagedCheckpoint, naming the problem, unless every file matches the manifest. No code in
    a file is ever executed: the state is loaded with `weights_only=True`.
    """
    weights, _ = load_weights(path, verify=(MODEL_FILE, STATE_FILE))
    return weights, _read_state(path)


def load_state(path: Path, manifest: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the verified training state of a checkpoint.

    `manifest`: as `load_weights` has returned it, so that only the state is verified. Raises
    DamagedCheckpoint as `load_checkpoint` does.
    """
    if manifest is None:
        _verify(path, (MODEL_FILE, STATE_FILE), read_manifest(path))
    else:
        _verify(path, (STATE_FILE,), manifest)
    return _read_state(path)


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = native(read_torch(path / STATE_FILE))
        return state
    except Exception as error:  # a forged archive can cause any exception
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error


def load_weights(
    path: Path, verify: Sequence[str] = (MODEL_FILE,)
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the weights of a checkpoint and its manifest, with the takeaway for their users.

    Raises DamagedCheckpoint unless the files to verify match the manifest; others may be missing.
    """
    manifest = read_manifest(path)
    _verify(path, verify, manifest)
    try:
        weights = read_safetensors(path / MODEL_FILE)
        most = most_bytes(manifest["files"][MODEL_FILE]["bytes"])
        return from_stored(weights, manifest.get("forms", {}), most), manifest
    except Exception as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error


def _verify(path: Path, names: Sequence[str], manifest: Mapping[str, Any]) -> None:
    """Raise DamagedCheckpoint unless these files match the manifest."""
    for name in names:
        with suppress(OSError):
            if manifest["files"][name] == _describe(path / name):
                continue
        raise DamagedCheckpoint(f"{path / name} is not what was written (size or SHA-256)")


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the verified manifest of a checkpoint. Raises DamagedCheckpoint, and UsageError for a
    newer format: its own digest is made alike in all formats.
    """
    manifest_path = path / MANIFEST_FILE
    try:
        manifest = parse_json(read_text(manifest_path, follow=True))
        if manifest.pop("manifest_sha256") != _digest_of(manifest):
            raise DamagedCheckpoint(f"{manifest_path} is not what was written")
        refuse_newer(manifest_path, manifest)
        check(manifest, FIELDS[MANIFEST_FILE])
        manifest["files"][MODEL_FILE], manifest["files"][STATE_FILE]
    except KeyError as error:
        raise DamagedCheckpoint(f"{manifest_path} lacks {error}") from error
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{manifest_path} cannot be read: {error}") from error
    return manifest


def _remove(path: Path) -> None:
    """Remove a checkpoint's folder, which must hold nothing else, or a link in its place."""
    if path.is_symlink():
        path.unlink()
        return
    for inner in path.iterdir():
        if not any(name in inner.name for name in FILES):
            raise OSError(errno.ENOTEMPTY, f"{inner} is not of a checkpoint; remove it")
        inner.unlink()
    path.rmdir()


def _write_checkpoint(
    final: Path, snapshot: Snapshot, takeaway: Mapping[str, Any], run: str
) -> None:
    folder = final.parent
    partial = folder / f".{final.name}{PARTIAL}"
    partial.mkdir(parents=True)
    weights, forms = as_stored(snapshot.weights)
    save_file(weights, partial / MODEL_FILE)
    obey_umask(partial / MODEL_FILE)
    with (partial / STATE_FILE).open("wb") as stream:  # given a path, torch hides a full disk
        torch.save(snapshot.state, stream)
    refuse_unreadable_file(partial / STATE_FILE, snapshot.state)
    manifest = stamped(
        MANIFEST_FILE,
        {
            "step": snapshot.step,
            "run": run,
            "params_sha256": snapshot.params_sha256,
            "takeaway": dict(takeaway),
            "forms": forms,
            "files": {name: _describe(partial / name) for name in (MODEL_FILE, STATE_FILE)},
        },
    )
    manifest["manifest_sha256"] = _digest_of(manifest)
    (partial / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for name in (*FILES, "."):
        sync(partial / name)
    aside = folder / f".{final.name}{REPLACED}"
    if final.exists():  # a step that a resumed run saves again
        final.rename(aside)
    partial.rename(final)
    sync(folder)
    if aside.exists():
        _remove(aside)


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _describe(path: Path) -> dict[str, int | str]:
    """Return size and SHA-256 of a file. Raises OSError."""
    with open_bytes(path) as stream:
        digest = sha256_of(stream)
    return {"bytes": path.stat().st_size, "sha256": digest}


def _pointed(pointer: Path) -> str | None:
    """Return the name in `last` or `best`; None if the file is missing or damaged."""
    with suppress(OSError, ValueError):
        return read_text(pointer).strip()
    return None
