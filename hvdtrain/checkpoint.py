"""Checkpoints: complete or absent. Each lists its files' sizes and SHA-256 in a manifest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_model

MODEL_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"


def save_checkpoint(folder: Path, step: int, model: torch.nn.Module, params_sha256: str) -> Path:
    """Write `folder`/step-00000120 and name it in `folder`/last. Returns its path.

    It is written beside, synced to the disk and renamed, so it never stands there half-written.
    """
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    save_model(model, str(partial / MODEL_FILE))
    manifest = {
        "step": step,
        "params_sha256": params_sha256,
        "files": {MODEL_FILE: _describe(partial / MODEL_FILE)},
    }
    (partial / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in (partial / MODEL_FILE, partial / MANIFEST_FILE, partial):
        _sync(path)
    partial.rename(final)
    _point(folder / "last", final.name)
    return final


def _describe(path: Path) -> dict[str, int | str]:
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _point(pointer: Path, name: str) -> None:
    """Make `pointer` (`last`, `best`) hold a checkpoint's name, in one move."""
    partial = pointer.with_name(f".{pointer.name}.partial")
    partial.write_text(name + "\n", encoding="utf-8")
    _sync(partial)
    partial.replace(pointer)
    _sync(pointer.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
