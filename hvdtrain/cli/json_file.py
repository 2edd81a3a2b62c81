"""Files of --json: looked at before the work, written after it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.run.directory import json_ready


def json_problems(name: str | Path | None, flag: str = "--json") -> list[str]:
    """Why it could not be written in the end, as far as that can be seen now."""
    if name is None:
        return []
    path = Path(name).absolute()
    if path.is_dir():
        reason = "it is a folder; give a file"
    elif not path.parent.is_dir():
        reason = "there is no such folder; make it first"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "permission denied"
    else:
        return []
    return [f"{flag}={name}: cannot be written: {reason}"]


def check_json(name: str | None) -> None:
    """Raises UsageError where it could not be written."""
    if problems := json_problems(name):
        raise UsageError(*problems)


def write_json(name: str | Path | None, content: Any, flag: str = "--json") -> None:
    """Nothing without a name; numbers that are not finite become null.

    Raises UsageError where it cannot be written.
    """
    if name is None:
        return
    text = json.dumps(json_ready(content), indent=2, allow_nan=False) + "\n"
    try:
        Path(name).write_text(text, "utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{flag}={name}: cannot be written: {reason}") from error
