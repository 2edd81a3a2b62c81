"""Text, JSON and YAML of a run's folder, read without trusting them: anyone may have written them.

Only regular files are read, no links to them, up to the largest size of their kind. A document is
a mapping, nested DEEPEST deep at most, in which each field that FIELDS names has the type that a
run writes. Every problem is a ValueError whose text says what is wrong with the file.

Each kind of file has a number of its format. A reader refuses a newer format than its own, by name,
and reads all before it. A file without a number has format 0, that of hvdtrain 0.1.0. The number
grows when an earlier reader would misunderstand the file, not whenever a value is added to it.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.files import open_bytes, open_to_read

MIB = 1 << 20
# Per file. JSON takes up to 14 times its size in memory (an array of short texts).
LARGEST_BYTES = {
    "config.yaml": MIB // 4,
    "summary.json": 16 * MIB,
    "manifest.json": 16 * MIB,  # names every tensor and every class
    "evaluation.json": 40 * MIB,
}
SMALL_BYTES = MIB  # any other
# Per line. A trace names a digest for each tensor and share.
LONGEST_LINE_BYTES = {"trace.jsonl": 256 * MIB}
LONGEST_OTHER_BYTES = 16 * MIB  # an accuracy for each class
DEEPEST = 32
MOST_CONTAINERS = 2_000_000  # mappings and arrays, which take 50 times their text
# What Python's parsers raise for texts that were made to confuse them.
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)

FIELD = "format"
FORMATS = {  # what this version writes, by the file's name
    "manifest.json": 1,  # with the other files of its checkpoint
    "trace.jsonl": 1,  # each record: those of an earlier start of the run stay as they are
    "metrics.jsonl": 1,
    "audit.jsonl": 1,
    "summary.json": 1,
    "evaluation.json": 1,
}

# Names -> kinds, to be checked by `check`: a type (float: any number), a tuple
# of one kind (null as well), a list of one kind, or a mapping of names, in which "*" stands for all
# others. A field may be missing.
HEAD = {"step": int, "records": int, "sha256": str}
STRAGGLER = {"rank": int, "host": str, "phase": str, "ratio": float, "steps": int}
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
        **dict.fromkeys(("params_sha256", "end_reason"), (str,)),
        "best": ({"step": int, "epoch": int, "*": (float,)},),
        "audit": {"checked": int, "failed": int, "worst_error_over_bound": (float,)},
        "compute_audit": {"checked": int, "failed": int},
        "stragglers": [STRAGGLER],
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


def read_text(path: Path, follow: bool = False) -> str:
    """Return the text of a small file, with replacements for bytes that are not UTF-8; of one that
    a link leads to only if it is to `follow`.

    Raises OSError unless it is a regular file, and ValueError if it is too large.
    """
    most = LARGEST_BYTES.get(path.name, SMALL_BYTES)
    with open_bytes(path, follow) as stream:
        text = stream.read(most + 1).decode("utf-8", "replace")
    if len(text) > most:
        raise ValueError(f"is larger than the {most:,} bytes that a run writes at most")
    return text


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file, with fields of the right types.

    Raises OSError, ValueError, and UsageError for a file of a newer format.
    """
    content = parse_json(read_text(path))
    refuse_newer(path, content)
    check(content, FIELDS[path.name])
    return content


def parse_json(text: str) -> dict[str, Any]:
    """Return the mapping in a text of JSON. Raises ValueError."""
    opened = text.count("[") + text.count("{")
    if opened > MOST_CONTAINERS:
        raise ValueError(f"has more than {MOST_CONTAINERS:,} values that hold others")
    try:
        content = json.loads(text)
    except UNREADABLE as error:
        raise ValueError(f"is not JSON: {error or type(error).__name__}") from error
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__}, not named values")
    if opened > DEEPEST and _is_deep(content):
        raise ValueError(f"is nested more than {DEEPEST} deep")
    return content


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a file of records, the last one also if it is not complete.

    Raises OSError unless it is a regular file, and ValueError for a line that is too long.
    """
    most = LONGEST_LINE_BYTES.get(path.name, LONGEST_OTHER_BYTES)
    with open_to_read(path) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(most + 1), ""), start=1):
            if len(line) > most:
                raise ValueError(f"line {number} is longer than {most:,} bytes")
            yield line


def check(value: Any, kind: Any, name: str = "") -> None:
    """Raise ValueError unless a value is of a kind: see FIELDS."""
    match kind:
        case Mapping():
            _check_is(value, dict, name)
            for key, item in value.items():
                if (inner := kind.get(key, kind.get("*"))) is not None:
                    check(item, inner, f"{name}.{key}" if name else str(key))
        case list():
            _check_is(value, list, name)
            for item in value:
                check(item, kind[0], f"an item of {name}")
        case tuple():  # or null
            if value is not None:
                check(value, kind[0], name)
        case _:
            _check_is(value, kind, name)


def _check_is(value: Any, kind: type, name: str) -> None:
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or isinstance(value, bool) is not (kind is bool):
        words = {dict: "named values", list: "a list", str: "a text", int: "a whole number"}
        words |= {float: "a number", bool: "true or false"}
        raise ValueError(f"{name} is {str(value)[:40]!r}, not {words[kind]}")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        nodes = (node.values() if isinstance(node, dict) else node for node in level)
        level = [item for items in nodes for item in items if isinstance(item, dict | list)]
    return bool(level)
