"""Programs that stand in for those of a machine."""

from __future__ import annotations

from pathlib import Path


def put(folder: Path, name: str, script: str) -> None:
    """A program of this name, of these lines of shell."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
