"""Handwritten digits: 1,797 real images of 8x8 pixels that come with scikit-learn.

Source: E. Alpaydin and C. Kaynak, UCI ML Repository, "Optical Recognition of Handwritten Digits".
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from hvdtrain.data.splits import Dataset, ImageFormat, TensorSplit
from hvdtrain.errors import UsageError

FILE = Path("datasets", "data", "digits.csv.gz")  # in scikit-learn's package: 64 pixels, label
SHAPE = (1, 8, 8)
LARGEST_PIXEL = 16
VALID_EVERY = 5  # of each class, every fifth image is for validation


def load_digits(dtype: torch.dtype) -> Dataset:
    """Pixels from 0 to 1. The split is fixed, and holds each class in the same proportion.

    Raises UsageError when scikit-learn is not installed.
    """
    table = np.loadtxt(_file(), delimiter=",")
    labels = table[:, -1].astype(np.int64)
    inputs = torch.as_tensor(table[:, :-1] / LARGEST_PIXEL, dtype=dtype).reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(labels)
    is_valid = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        is_valid[np.flatnonzero(labels == label)[::VALID_EVERY]] = True
    train, valid = (
        TensorSplit(inputs[torch.from_numpy(mask)], targets[torch.from_numpy(mask)])
        for mask in (~is_valid, is_valid)
    )
    return Dataset("digits", SHAPE, 10, train, valid, images=ImageFormat(*SHAPE))


def _file() -> Path:
    """Found without importing scikit-learn, which would take each worker a second or two."""
    package = importlib.util.find_spec("sklearn")
    path = Path(package.origin).parent / FILE if package and package.origin else None
    if path is None or not path.is_file():
        raise UsageError(
            "--data=digits: its file comes with scikit-learn: pip install scikit-learn"
        )
    return path
