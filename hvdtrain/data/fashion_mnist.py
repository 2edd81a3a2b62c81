"""Fashion-MNIST from its IDX files, read by torchvision.

Source: H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST", arXiv:1708.07747.
"""

from __future__ import annotations

from pathlib import Path

import torch

from hvdtrain.data.splits import Dataset, ImageFormat, TensorSplit
from hvdtrain.data.vision import import_torchvision
from hvdtrain.errors import UsageError

FOLDER = Path("FashionMNIST", "raw")
SHAPE = (1, 28, 28)
CLASSES = 10
NAMES = (
    *("t-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
FILES = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)


def load_fashion_mnist(data_dir: Path, dtype: torch.dtype) -> Dataset:
    """60,000 training and 10,000 validation images of 28x28, pixels from 0 to 1.

    Raises UsageError naming the files that are missing or damaged, and where they belong.
    """
    folder = data_dir / FOLDER
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise UsageError(
            f"--data=fashion-mnist: {len(missing)} of its {len(FILES)} files are not in {folder}: "
            f"{', '.join(missing)}. Put the unpacked IDX files there, or name the folder that "
            "holds FashionMNIST/raw with --data-dir"
        )
    datasets = import_torchvision().datasets
    splits: list[TensorSplit] = []
    for train in (True, False):
        try:
            read = datasets.FashionMNIST(str(data_dir), train=train)
        except Exception as error:  # the reader raises whatever its parsing stumbles over
            part = "train" if train else "t10k"
            raise UsageError(
                f"--data=fashion-mnist: the {part}-* files in {folder} cannot be read "
                f"({type(error).__name__}: {error}). Are they the unpacked originals?"
            ) from error
        inputs = read.data.to(dtype).div_(255).unsqueeze(1)
        if len(inputs) != len(read.targets) or len(inputs) == 0:
            raise UsageError(
                f"--data=fashion-mnist: {len(inputs)} images and {len(read.targets)} labels in "
                f"{folder}: the files do not belong together"
            )
        if inputs.shape[1:] != SHAPE or not set(read.targets.tolist()) <= set(range(CLASSES)):
            raise UsageError(
                f"--data=fashion-mnist: images of another size than 28x28, or labels beyond "
                f"{CLASSES - 1}, in {folder}: these are files of another data set"
            )
        splits.append(TensorSplit(inputs, read.targets.to(torch.int64)))
    train_split, valid_split = splits
    return Dataset(
        *("fashion-mnist", SHAPE, CLASSES, train_split, valid_split),
        names=NAMES,
        images=ImageFormat(*SHAPE),
    )
