"""Small files in the form of Fashion-MNIST's."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np


def idx_bytes(values: np.ndarray, kind: int = 8) -> bytes:
    """IDX: two zeros, the type (8: unsigned byte), the dimensions, their lengths, the data."""
    header = struct.pack(f">HBB{values.ndim}I", 0, kind, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def write_fashion_mnist(folder: Path, train: int, valid: int) -> None:
    """Write compressed files with so many images, as Debian's package has them."""
    folder.mkdir()
    generator = np.random.default_rng(2)
    for part, samples in (("train", train), ("t10k", valid)):
        labels = generator.integers(0, 10, samples)
        pixels = generator.integers(0, 128, (samples, 28, 28)) + 12 * labels[:, None, None]
        for kind, values in (("images-idx3", pixels), ("labels-idx1", labels)):
            file = folder / f"{part}-{kind}-ubyte.gz"
            file.write_bytes(gzip.compress(idx_bytes(values)))
