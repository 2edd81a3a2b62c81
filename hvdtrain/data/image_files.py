"""The image files of a folder and their classes, by their names alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.log import counted

# The types that Pillow reads and that are in use for pictures.
EXTENSIONS = (
    *(".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png"),
    *(".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp"),
)
TRAIN_NAMES, VALID_NAMES = ("train",), ("valid", "val", "validation")
Labelled = list[tuple[str, int]]


@dataclass(frozen=True)
class Found:
    """The image files of a data set, with class numbers."""

    train: Labelled
    valid: Labelled
    classes: list[str]
    others: list[str]  # files of other types


def images_under(folder: Path) -> tuple[list[str], list[str]]:
    """Return the images below a folder, and the files of other types, both sorted.

    Hidden files of other types are ignored.
    """
    files = sorted(_files_under(folder))
    images = [file for file in files if file.lower().endswith(EXTENSIONS)]
    known = set(images)
    return images, [f for f in files if f not in known and not Path(f).name.startswith(".")]


def _files_under(folder: Path) -> Iterator[str]:
    """Yield the files below `folder`; follow links to folders, except to enclosing ones."""
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
        yield from (str(place / name) for name in names)


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return device and inode of a folder, or None if it cannot be accessed."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def left_out(others: Sequence[str]) -> str:
    """Return a note such as '2 files of other types left out (such as a/notes.txt)'."""
    return f"{counted(len(others), 'file')} of other types left out (such as {others[0]})"


def find_files(name: str, folder: Path, valid_split: float | None) -> Found:
    """Return the images in train/ and valid/ of `folder` or, with `valid_split`, in its classes.

    `name` is the value of `--data`, for messages. Raises UsageError with all problems.
    """
    if not folder.is_dir():
        raise UsageError(f"--data={name}: {folder} is not a folder")
    inside = {path.name for path in _entries(name, folder)}
    train = next((part for part in TRAIN_NAMES if part in inside), None)
    valid = next((part for part in VALID_NAMES if part in inside), None)
    if train and valid:
        if valid_split is not None:
            raise UsageError(
                f"--valid-split={valid_split}: {folder} has train/ and {valid}/ already"
            )
        return _both_parts(name, folder / train, folder / valid)
    if train or valid:
        raise UsageError(
            f"--data={name}: {folder} has {train or valid}/, but no "
            f"{'valid/' if train else 'train/'}. Make both, or neither and give --valid-split"
        )
    if valid_split is None:
        raise UsageError(
            f"--data={name}: {folder} has no train/ and valid/. Make them, or state the part of "
            "its images that is for validation: --valid-split 0.2"
        )
    labelled, classes, others = _labelled(name, folder)
    train_files, valid_files = _cut(labelled, len(classes), valid_split)
    if not train_files or not valid_files:
        raise UsageError(
            f"--valid-split={valid_split}: of {len(labelled)} images in {folder} it leaves "
            f"{len(train_files)} to train on and {len(valid_files)} to validate with"
        )
    return Found(train_files, valid_files, classes, others)


def _both_parts(name: str, train: Path, valid: Path) -> Found:
    problems: list[str] = []
    found: list[tuple[Labelled, list[str], list[str]]] = []
    for folder in (train, valid):
        try:
            found.append(_labelled(name, folder))
        except UsageError as error:
            problems += error.problems
    if problems:
        raise UsageError(*problems)
    (train_files, classes, others), (valid_files, valid_classes, more_others) = found
    if classes != valid_classes:
        missing, more = set(classes) - set(valid_classes), set(valid_classes) - set(classes)
        raise UsageError(
            f"--data={name}: {train} and {valid} must have folders for the same classes; "
            f"only in the first: {sorted(missing)[:5]}, only in the second: {sorted(more)[:5]}"
        )
    return Found(train_files, valid_files, classes, others + more_others)


def _labelled(name: str, folder: Path) -> tuple[Labelled, list[str], list[str]]:
    """Return the labelled images in a folder of classes, the classes, and the other files."""
    classes = sorted(path.name for path in _entries(name, folder) if path.is_dir())
    if len(classes) < 2:
        raise UsageError(
            f"--data={name}: {folder} has {counted(len(classes), 'folder')} of classes "
            f"({', '.join(classes) or 'none'}): it needs 2 or more, with images in them"
        )
    labelled: Labelled = []
    others: list[str] = []
    problems = []
    for label, class_name in enumerate(classes):
        images, more = images_under(folder / class_name)
        if not images:
            problems.append(
                f"--data={name}: {folder / class_name} has no images ({', '.join(EXTENSIONS)})"
                + (f"; {left_out(more)}" if more else "")
            )
        labelled += [(file, label) for file in images]
        others += more
    if problems:
        raise UsageError(*problems)
    return labelled, classes, others


def _entries(name: str, folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise UsageError(f"--data={name}: {folder} cannot be read: {error.strerror}") from error


def _cut(labelled: Labelled, classes: int, valid_split: float) -> tuple[Labelled, Labelled]:
    """Split off the same fraction of each class, evenly spread over its sorted files."""
    train: Labelled = []
    valid: Labelled = []
    for label in range(classes):
        own = [item for item in labelled if item[1] == label]
        for place, item in enumerate(own):
            before, after = (int((place + step) * valid_split + 1e-9) for step in (0, 1))
            (valid if after > before else train).append(item)
    return train, valid
