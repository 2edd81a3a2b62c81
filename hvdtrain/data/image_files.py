"""Image files below a folder, by their names, without what is no user's own."""

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


Images = tuple[list[str], list[str]]  # files that are images, and what is left out
Identity = tuple[int, int] | None  # device and inode of a folder; None if it cannot be accessed
Around = frozenset[Identity]  # the folders that enclose one


def images_under(folder: Path) -> Images:
    """Return the images below a folder, and what is left out, both sorted: files of other types,
    and images that are hidden or in folders of a system. Other hidden files are ignored.
    """
    return _images_of(folder, _around(folder))


def images_under_each(folder: Path, names: Sequence[str]) -> Iterator[Images]:
    """Yield the images below each of these folders in `folder`, and what is left out."""
    around = _around(folder) | {_identity(folder)}
    for path in (folder / name for name in names):
        yield _images_of(path, _around(path) if path.is_symlink() else around)


def _images_of(folder: Path, around: Around) -> Images:
    files = [
        (file, hidden, _is_image(file)) for file, hidden in sorted(_files_under(folder, around))
    ]
    images = [file for file, hidden, is_image in files if is_image and not hidden]
    # Hidden images, and visible files of other types.
    others = [file for file, hidden, is_image in files if is_image == hidden]
    return images, others


def hidden_images(folder: Path) -> list[str]:
    """Return the images below a hidden folder."""
    return sorted(file for file, _ in _files_under(folder, _around(folder)) if _is_image(file))


def _is_image(file: str) -> bool:
    return file.lower().endswith(EXTENSIONS)


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name is no user's: a copy, a thumbnail, metadata."""
    return name.startswith(".") or name in SYSTEM_FOLDERS


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether this is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # such as a link to itself
        return False


def _around(folder: Path) -> Around:
    """Return the folders that enclose one, by its real path and by the one that is named."""
    real = folder.resolve()
    named = real if ".." in folder.parts else folder.absolute()
    return frozenset(map(_identity, [*real.parents, *named.parents]))


def _files_under(folder: Path, around: Around) -> Iterator[tuple[str, bool]]:
    """Yield the files below `folder`, and whether they or a folder in between are hidden.

    Links to folders are followed, except to enclosing ones. A folder that cannot be read is empty.
    """
    waiting: list[tuple[Path | os.DirEntry[str], Around, bool]] = [(folder, around, False)]
    while waiting:
        current_folder, outer, in_hidden = waiting.pop()
        identity = _identity(current_folder)
        if identity in outer:
            continue
        try:
            entries = list(os.scandir(current_folder))
        except OSError:
            continue
        for entry in entries:
            hidden = in_hidden or is_hidden(entry.name)
            if is_folder(entry):
                waiting.append((entry, outer | {identity}, hidden))
            else:
                yield entry.path.removeprefix("./"), hidden  # below the folder "."


def _identity(folder: Path | os.DirEntry[str]) -> Identity:
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def left_out(others: Sequence[str]) -> str:
    """Return a note such as '2 files of other types left out (such as a/notes.txt)'."""
    kind = f"{'that are hidden or ' if any(map(_is_image, others)) else ''}of other types"
    return f"{counted(len(others), 'file')} {kind} left out (such as {others[0]})"
