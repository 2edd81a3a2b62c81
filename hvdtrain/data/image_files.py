"""Image files below a folder, by their names, without what is no user's own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdtrain.log import counted

# The types that Pillow reads and that are in use for pictures.
EXTENSIONS = (
    *(".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png"),
    *(".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp"),
)
# Folders that systems put beside a user's own: of macOS' archives, of network storage, of disks.
SYSTEM_FOLDERS = (
    *("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found"),
)


def images_under(folder: Path) -> tuple[list[str], list[str]]:
    """Return the images below a folder, and what is left out, both sorted: files of other types,
    and images that are hidden or in folders of a system. Other hidden files are ignored.
    """
    images: list[str] = []
    others: list[str] = []
    for file, is_hidden in sorted(_files_under(folder)):
        if file.lower().endswith(EXTENSIONS):
            (others if is_hidden else images).append(file)
        elif not is_hidden:
            others.append(file)
    return images, others


def hidden_images(folder: Path) -> list[str]:
    """Return the images below a hidden folder."""
    return sorted(it for it, _ in _files_under(folder) if it.lower().endswith(EXTENSIONS))


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name is no user's: a copy, a thumbnail, metadata."""
    return name.startswith(".") or name in SYSTEM_FOLDERS


def _files_under(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield the files below `folder`, and whether they or a folder in between are hidden.

    Links to folders are followed, except to enclosing ones.
    """
    real = folder.resolve()
    named = real if ".." in folder.parts else folder.absolute()
    around = frozenset(map(_identity, [*real.parents, *named.parents]))
    if _identity(folder) in around:
        return
    within = {folder: around}
    for root, folders, names in os.walk(folder, followlinks=True):
        place = Path(root)
        own = within.pop(place) | {_identity(place)}
        folders[:] = [name for name in folders if _identity(place / name) not in own]
        within |= {place / name: own for name in folders}
        all_hidden = any(map(is_hidden, place.relative_to(folder).parts))
        yield from ((str(place / name), all_hidden or is_hidden(name)) for name in names)


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return device and inode of a folder, or None if it cannot be accessed."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def left_out(others: Sequence[str]) -> str:
    """Return a note such as '2 files of other types left out (such as a/notes.txt)'."""
    has_hidden = any(it.lower().endswith(EXTENSIONS) for it in others)
    kind = "that are hidden or of other types" if has_hidden else "of other types"
    return f"{counted(len(others), 'file')} {kind} left out (such as {others[0]})"
