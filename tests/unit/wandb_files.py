"""Reading of the files that wandb writes in offline mode: a log of records, in blocks of 32 KiB."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FILE_HEADER, BLOCK, HEADER = 7, 1 << 15, struct.Struct("<IHB")  # checksum, length, type
FULL, FIRST, MIDDLE, LAST = range(1, 5)


class OfflineRun(NamedTuple):
    run_id: str
    project: str
    name: str
    config: dict[str, Any]
    points: list[tuple[int, dict[str, Any]]]  # step and scalars
    summary: dict[str, Any]
    exit_code: int | None  # None: it did not end


def read_offline(file: Path) -> OfflineRun:
    """Return the content of a file run-ID.wandb."""
    from wandb.proto.wandb_internal_pb2 import Record

    run, points, config, summary, exit_code = None, [], {}, {}, None
    for data in _records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run" and run is None:
            run = record.run
            config |= {it.key: json.loads(it.value_json) for it in run.config.update}
        elif kind == "config":
            config |= {it.key: json.loads(it.value_json) for it in record.config.update}
        elif kind == "history":
            values = {
                "/".join(it.nested_key) or it.key: json.loads(it.value_json)
                for it in record.history.item
            }
            step = values.pop("_step", record.history.step.num)
            points.append((step, {n: v for n, v in values.items() if n[0] != "_"}))
        elif kind == "summary":
            summary |= {it.key: json.loads(it.value_json) for it in record.summary.update}
        elif kind == "exit":
            exit_code = record.exit.exit_code
    assert run is not None
    return OfflineRun(run.run_id, run.project, run.display_name, config, points, summary, exit_code)


def _records(content: bytes) -> Iterator[bytes]:
    at, parts = FILE_HEADER, b""
    while at + HEADER.size <= len(content):
        if BLOCK - at % BLOCK < HEADER.size:  # the rest of a block is too short for a header
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(content, at)
        at += HEADER.size
        parts = (
            content[at : at + length]
            if kind in (FULL, FIRST)
            else parts + content[at : at + length]
        )
        at += length
        if kind in (FULL, LAST):
            yield parts
