"""Fashion-MNIST from its IDX files, read by torchvision.

Source: H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST", arXiv:1708.07747.
"""

from __future__ import annotations

import importlib
import importlib.util
import types
from pathlib import Path

import numpy as np
import torch

from hvdtrain.data.splits import Dataset, ImageFormat, TensorSplit
from hvdtrain.errors import UsageError

FASHION_FOLDER = Path("FashionMNIST", "raw")
FASHION_SHAPE = (1, 28, 28)
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
    folder = data_dir / FASHION_FOLDER
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
        if inputs.shape[1:] != FASHION_SHAPE or not set(read.targets.tolist()) <= set(
            range(CLASSES)
        ):
            raise UsageError(
                f"--data=fashion-mnist: images of another size than 28x28, or labels beyond "
                f"{CLASSES - 1}, in {folder}: these are files of another data set"
            )
        splits.append(TensorSplit(inputs, read.targets.to(torch.int64)))
    train_split, valid_split = splits
    return Dataset(
        *("fashion-mnist", FASHION_SHAPE, CLASSES, train_split, valid_split),
        names=NAMES,
        images=ImageFormat(*FASHION_SHAPE),
    )


CIFAR10_FOLDER = Path("cifar-10-batches-py")
CIFAR10_SHAPE = (3, 32, 32)


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
                f"--data=cifar10: the files in {data_dir / CIFAR10_FOLDER} are missing, or not the "
                f"original ones ({error})"
            ) from error
        inputs = torch.from_numpy(read.data).permute(0, 3, 1, 2).to(dtype).div_(255)
        splits.append(TensorSplit(inputs.contiguous(), torch.tensor(read.targets)))
    train_split, valid_split = splits
    return Dataset(
        *("cifar10", CIFAR10_SHAPE, 10, train_split, valid_split),
        names=tuple(read.classes),
        images=ImageFormat(*CIFAR10_SHAPE),
    )


FILE = Path("datasets", "data", "digits.csv.gz")  # in scikit-learn's package: 64 pixels, label
DIGITS_SHAPE = (1, 8, 8)
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
    return Dataset("digits", DIGITS_SHAPE, 10, train, valid, images=ImageFormat(*DIGITS_SHAPE))


def _file() -> Path:
    """Found without importing scikit-learn, which would take each worker a second or two."""
    package = importlib.util.find_spec("sklearn")
    path = Path(package.origin).parent / FILE if package and package.origin else None
    if path is None or not path.is_file():
        raise UsageError(
            "--data=digits: its file comes with scikit-learn: pip install scikit-learn"
        )
    return path


_SCHEMAS = tuple(
    f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")
)
_library: torch.library.Library | None = None  # definitions live as long as this object


def import_torchvision() -> types.ModuleType:
    """Import torchvision, first declaring the operators that it asks for if they are absent."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    global _library
    _library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        _library.define(schema)
    return importlib.import_module("torchvision")


def import_transforms() -> types.ModuleType:
    """torchvision.transforms.v2."""
    import_torchvision()
    return importlib.import_module("torchvision.transforms.v2")
