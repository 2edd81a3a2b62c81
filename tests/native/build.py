"""Compilation of `protocols.cpp` with the headers that are added to Horovod."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from hvdtrain import horovod_build

NATIVE = Path(horovod_build.__file__).with_name("native")

HERE = Path(__file__).parent
# Pieces of 64 bytes, so that a short sum has as many as a long one has in a job.
SHORT = {
    "kLongestPieceBytes = 1 << 18": "kLongestPieceBytes = 64",
    "kShortestPieceBytes = 1 << 12": "kShortestPieceBytes = 64",
    "kFewBytes = 4096, kPieceBytes = 1 << 18": "kFewBytes = 32, kPieceBytes = 64",
    "kLongestMessageBytes = 1 << 24": "kLongestMessageBytes = 128",
    "kPieceBytes = 4 << 20": "kPieceBytes = 64",
}
REPLACED = ("allreduce.h", "context.h", "math.h", "types.h", "transport/unbound_buffer.h")


def compile_protocols(folder: Path, changes: Mapping[str, str]) -> Path:
    """Return the program, compiled in `folder` from headers with these changes.

    Raises ValueError unless each text to change is there exactly once.
    """
    headers = {path.name: path.read_text() for path in NATIVE.glob("*.h")}
    for old, new in (SHORT | dict(changes)).items():
        holders = [name for name, text in headers.items() if text.count(old) == 1]
        if len(holders) != 1 or sum(text.count(old) for text in headers.values()) != 1:
            raise ValueError(f"{old!r} is not exactly once in {NATIVE}")
        headers[holders[0]] = headers[holders[0]].replace(old, new)
    include = '#include "gloo.h"\n'
    headers |= {f"gloo/{name}": include for name in REPLACED} | {"controller.h": include}
    for name, text in headers.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    program = folder / "protocols"
    command = ["g++", "-std=c++17", "-O1", "-g", "-fsanitize=thread", "-DFEW_BYTES=32"]
    command += ["-DPIECE_BYTES=64", f"-I{folder}", f"-I{HERE}", "-o", str(program)]
    subprocess.run([*command, str(HERE / "protocols.cpp")], check=True)
    return program
