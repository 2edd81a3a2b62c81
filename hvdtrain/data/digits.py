"""Handwritten digits: 1,797 real images of 8x8 pixels that come with scikit-learn.

Source: E. Alpaydin and C. Kaynak, UCI ML Repository, "Optical Recognition of Handwritten Digits".
"""

from __future__ import annotations

import numpy as np
import torch

from hvdtrain.data.splits import Dataset, TensorSplit

LARGEST_PIXEL = 16
VALID_EVERY = 5  # of each class, every fifth image is for validation


def load_digits(dtype: torch.dtype) -> Dataset:
    """Pixels from 0 to 1. The split is fixed, and holds each class in the same proportion."""
    from sklearn.datasets import load_digits as read

    pixels, labels = read(return_X_y=True)
    inputs = torch.as_tensor(pixels / LARGEST_PIXEL, dtype=dtype).reshape(-1, 1, 8, 8)
    targets = torch.as_tensor(labels, dtype=torch.int64)
    is_valid = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        is_valid[np.flatnonzero(labels == label)[::VALID_EVERY]] = True
    train, valid = (
        TensorSplit(inputs[torch.from_numpy(mask)], targets[torch.from_numpy(mask)])
        for mask in (~is_valid, is_valid)
    )
    return Dataset("digits", (1, 8, 8), 10, train, valid)
