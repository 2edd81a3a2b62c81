"""Folders of small images, and of text files, made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SIZE = (20, 14)  # width, height


def pixels(number: int) -> np.ndarray:
    """An upright picture, different for each number: (height, width, 3), uint8."""
    rows, columns = np.mgrid[: SIZE[1], : SIZE[0]]
    red, green = (rows * 17 + number * 29) % 256, (columns * 12 + number * 7) % 256
    return np.stack([red, green, (red + green) // 2], axis=2).astype(np.uint8)


def make_class(folder: Path, count: int, first: int = 0) -> None:
    folder.mkdir(parents=True)
    for number in range(first, first + count):
        Image.fromarray(pixels(number)).save(folder / f"{number:03}.png")


def make_folder(folder: Path, train: int = 6, valid: int = 3) -> Path:
    """train/ and valid/ with so many images in each of the classes cat and dog."""
    for part, count, first in (("train", train, 0), ("valid", valid, 100)):
        make_class(folder / part / "cat", count, first)
        make_class(folder / part / "dog", count, first + 50)
    return folder


def write(root: Path, files: dict[str, str]) -> Path:
    """Write each text to its path below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
