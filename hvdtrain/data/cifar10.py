"""CIFAR-10 from its Python batches, read (and verified by their checksums) by torchvision.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

from __future__ import annotations

from pathlib import Path

import torch

from hvdtrain.data.splits import Dataset, ImageFormat, TensorSplit
from hvdtrain.data.vision import import_torchvision
from hvdtrain.errors import UsageError

FOLDER = Path("cifar-10-batches-py")
SHAPE = (3, 32, 32)


def load_cifar10(data_dir: Path, dtype: torch.dtype) -> Dataset:
    """50,000 training and 10,000 validation images of 32x32, pixels from 0 to 1.

    Raises UsageError where its files are missing, or not the original ones.
    """
    splits = []
    for train in (True, False):
        try:
            read = import_torchvision().datasets.CIFAR10(str(data_dir), train=train)
        except Exception as error:  # checked against checksums before anything is unpickled
            raise UsageError(
                f"--data=cifar10: the files in {data_dir / FOLDER} are missing, or not the "
                f"original ones ({error})"
            ) from error
        inputs = torch.from_numpy(read.data).permute(0, 3, 1, 2).to(dtype).div_(255)
        splits.append(TensorSplit(inputs.contiguous(), torch.tensor(read.targets)))
    train_split, valid_split = splits
    return Dataset(
        *("cifar10", SHAPE, 10, train_split, valid_split),
        names=tuple(read.classes),
        images=ImageFormat(*SHAPE),
    )
