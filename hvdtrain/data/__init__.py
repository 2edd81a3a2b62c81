"""Data sets by name, and the sampler that shares them out."""

from __future__ import annotations

from pathlib import Path

import torch

from hvdtrain.data.augment import AugmentedSplit
from hvdtrain.data.digits import load_digits
from hvdtrain.data.fashion_mnist import load_fashion_mnist
from hvdtrain.data.sampler import GlobalBatchSampler, Shares
from hvdtrain.data.splits import Dataset, Split, TensorSplit
from hvdtrain.data.synthetic import PREFIX, make_synthetic
from hvdtrain.errors import UsageError

__all__ = [
    "AugmentedSplit",
    "Dataset",
    "GlobalBatchSampler",
    "Shares",
    "Split",
    "TensorSplit",
    "load_dataset",
]

NAMES = ("digits", "fashion-mnist", "synthetic:SHAPE")


def load_dataset(name: str, data_dir: Path, seed: int, dtype: torch.dtype) -> Dataset:
    """The data set that `--data` names, in floating-point type `dtype`. Raises UsageError."""
    if name == "digits":
        return load_digits(dtype)
    if name == "fashion-mnist":
        return load_fashion_mnist(data_dir, dtype)
    if name.startswith(PREFIX):
        return make_synthetic(name, seed, dtype)
    raise UsageError(f"--data={name}: unknown; choose from {', '.join(NAMES)}")
