"""Text, JSON and YAML of a run's folder, read without trusting them: anyone may have written them.

Only regular files are read, no links to them, up to the largest size of their kind. A document is
a mapping, nested DEEPEST deep at most, in which each field that `hvdtrain.formats` knows has the
type that a run writes. Every problem is a ValueError whose text says what is wrong with the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.files import open_bytes, open_to_read
from hvdtrain.formats import FIELDS, refuse_newer

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
    """Raise ValueError unless a value is of a kind: see `hvdtrain.formats.FIELDS`."""
    if isinstance(kind, Mapping):
        _check_is(value, dict, name)
        for key, item in value.items():
            if (inner := kind.get(key, kind.get("*"))) is not None:
                check(item, inner, f"{name}.{key}" if name else str(key))
    elif isinstance(kind, list):
        _check_is(value, list, name)
        for item in value:
            check(item, kind[0], f"an item of {name}")
    elif isinstance(kind, tuple):  # or null
        if value is not None:
            check(value, kind[0], name)
    else:
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
        items = (
            item for node in level for item in (node.values() if isinstance(node, dict) else node)
        )
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True
