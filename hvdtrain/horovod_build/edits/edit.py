"""An edit of Horovod's published source, and how all of them are applied, with files of ours."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import HvdtrainError

HOROVOD_VERSION = "0.28.1"
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
BUILD = Path(__file__).parents[1]
# Files of ours that are added, and where.
ADDED = {
    "native/waiting.h": "horovod/common",
    "native/sleeping_mpi.h": "horovod/common",
    "native/shared_memory.h": "horovod/common",
    "native/gloo_by_host.h": "horovod/common",
    "native/canonical_sums.h": "horovod/torch",
    "runner/any_shell.py": "horovod/runner/util",
    "runner/host_connection.py": "horovod/runner/util",
    "runner/host_starter.py": "horovod/runner/util",
}


@dataclass(frozen=True)
class Edit:
    """A replacement of the one occurrence of `old` in `path`, relative to the source root."""

    path: str
    old: str
    new: str
    why: str


class SourceEditError(HvdtrainError):
    """Source other than the one for which the edits were written."""


def apply_edits(source_root: Path, edits: Sequence[Edit]) -> None:
    """Apply all edits under `source_root` and add `ADDED`, or do nothing.

    Raises SourceEditError, listing every edit whose expected text does not occur exactly once.
    """
    edited: dict[Path, str] = {}
    problems = []
    for edit in edits:
        path = source_root / edit.path
        text = edited.get(path) or (path.read_text("utf-8") if path.is_file() else "")
        count = text.count(edit.old)
        if count == 1:
            edited[path] = text.replace(edit.old, edit.new)
        else:
            problems.append(
                f"{edit.path}: expected this text once, found it {count} times: {edit.old!r}"
                f" (needed because {edit.why})"
            )
    if problems:
        raise SourceEditError(
            f"Horovod's source is not the {HOROVOD_VERSION} that these edits are for:\n"
            + "\n".join(problems)
        )
    for path, text in edited.items():
        path.write_text(text, "utf-8")
    for name, folder in ADDED.items():
        shutil.copy(BUILD / name, source_root / folder)
