"""Made-up image files for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("bright", "dark", "striped")


def write_images(folder: Path, train: int, valid: int, seed: int = 0) -> Path:
    """`train` and `valid` images of each class, of several sizes; returns `folder`."""
    generator = np.random.default_rng(seed)
    for part, count in (("train", train), ("valid", valid)):
        for name in CLASSES:
            place = folder / part / name
            place.mkdir(parents=True)
            for number in range(count):
                picture = _picture(name, generator)
                picture.save(place / f"{number:03d}.png")
    return folder


def _picture(name: str, generator: np.random.Generator) -> Image.Image:
    height, width = generator.integers(14, 30, 2)
    pixels = generator.integers(0, 90, (height, width, 3), dtype=np.uint8)
    if name == "bright":
        pixels += 150
    elif name == "striped":
        pixels[::2] += 150
    return Image.fromarray(pixels)
