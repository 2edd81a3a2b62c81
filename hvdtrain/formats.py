"""The formats of a run's files: one version number for each kind, and the types of their fields.

A reader refuses a newer format than its own, by name, and reads all before it. A file without a
number has format 0, that of hvdtrain 0.1.0. The number grows when an earlier reader would
misunderstand the file, not whenever a value is added to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError

FIELD = "format"
FORMATS = {  # what this version writes, by the file's name
    "manifest.json": 1,  # with the other files of its checkpoint
    "trace.jsonl": 1,  # each record: those of an earlier start of the run stay as they are
    "metrics.jsonl": 1,
    "audit.jsonl": 1,
    "summary.json": 1,
    "evaluation.json": 1,
}

# Names -> kinds, to be checked by `hvdtrain.documents.check`: a type (float: any number), a tuple
# of one kind (null as well), a list of one kind, or a mapping of names, in which "*" stands for all
# others. A field may be missing.
HEAD = {"step": int, "records": int, "sha256": str}
FIELDS: dict[str, dict[str, Any]] = {
    "manifest.json": {
        "step": int,
        "run": str,
        "params_sha256": str,
        "takeaway": {"config": {}, "trace": (HEAD,)},
        "forms": {"*": str},
        "files": {"*": {"bytes": int, "sha256": str}},
    },
    "evaluation.json": {"step": int, "classes": list},
    "summary.json": {
        **dict.fromkeys(("status", "controller", "error"), str),
        **dict.fromkeys(("world_size", "epochs", "steps", "samples_seen", "bad_samples"), int),
        **dict.fromkeys(("virtual_workers", "resumed_from", "valid_samples"), (int,)),
        **dict.fromkeys(("peak_memory_mib", "peak_gpu_mib"), (int,)),
        **dict.fromkeys(("train_loss", "valid_loss", "valid_accuracy"), (float,)),
        **dict.fromkeys(("samples_per_s", "wall_s"), (float,)),
        "params_sha256": (str,),
        "best": ({"step": int, "epoch": int, "*": (float,)},),
        "audit": {"checked": int, "failed": int, "worst_error_over_bound": (float,)},
        "compute_audit": {"checked": int, "failed": int},
        "trace": (HEAD,),
        "machine": {},
        "versions": {},
    },
}


def stamped(name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file, or of a line of one, with the number of its format in front."""
    return {FIELD: FORMATS[name], **content}


def refuse_newer(path: Path, content: Any, line: int | None = None) -> None:
    """Raise UsageError if a file, or a line of it, is of a newer format than this version reads.

    Raises ValueError if the number is none. What is not an object is left to the reader.
    """
    version = content.get(FIELD, 0) if isinstance(content, dict) else 0
    if type(version) is not int or version < 0:
        raise ValueError(f"{FIELD} {version!r} is not a version")
    if version > FORMATS[path.name]:
        location = path if line is None else f"{path}:{line}"
        raise UsageError(
            f"{location}: was written by a newer hvdtrain (format {version}; this one reads up to "
            f"{FORMATS[path.name]}): upgrade hvdtrain"
        )
