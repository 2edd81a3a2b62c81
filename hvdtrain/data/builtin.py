"""Digits of scikit-learn, Fashion-MNIST and CIFAR-10, and the import of torchvision.

Sources: H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST", arXiv:1708.07747; A. Krizhevsky, "Learning
multiple layers of features from tiny images", 2009. torchvision reads the files of both.
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
    """Return 60,000 training and 10,000 validation images of 28x28, pixels from 0 to 1.

    Raises UsageError, with the missing or damaged files and their folder.
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
        except Exception as error:  # the parser raises errors of many types
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
    return Dataset(
        name="fashion-mnist",
        shape=FASHION_SHAPE,
        classes=CLASSES,
        train=splits[0],
        valid=splits[1],
        names=NAMES,
        images=ImageFormat(*FASHION_SHAPE),
    )


CIFAR10_FOLDER = Path("cifar-10-batches-py")
CIFAR10_SHAPE = (3, 32, 32)


def load_cifar10(data_dir: Path, dtype: torch.dtype) -> Dataset:
    """Return 50,000 training and 10,000 validation images of 32x32, pixels from 0 to 1.

    Raises UsageError if the files are missing, or not the original ones.
    """
    splits = []
    for train in (True, False):
        try:
            read = import_torchvision().datasets.CIFAR10(str(data_dir), train=train)
        except Exception as error:  # checksums are checked before unpickling
            raise UsageError(
                f"--data=cifar10: the files in {data_dir / CIFAR10_FOLDER} are missing, or not the "
                f"original ones ({error})"
            ) from error
        inputs = torch.from_numpy(read.data).permute(0, 3, 1, 2).to(dtype).div_(255)
        splits.append(TensorSplit(inputs.contiguous(), torch.tensor(read.targets)))
    return Dataset(
        name="cifar10",
        shape=CIFAR10_SHAPE,
        classes=CLASSES,
        train=splits[0],
        valid=splits[1],
        names=tuple(read.classes),
        images=ImageFormat(*CIFAR10_SHAPE),
    )


FILE = Path("datasets", "data", "digits.csv.gz")  # in scikit-learn's package: 64 pixels, label
DIGITS_SHAPE = (1, 8, 8)
LARGEST_PIXEL = 16
VALID_EVERY = 5  # every fifth image of each class is for validation


def load_digits(dtype: torch.dtype) -> Dataset:
    """Return 1,797 images of 8x8, pixels from 0 to 1, in a fixed split stratified by class.

    Raises UsageError if scikit-learn is not installed.
    """
    table = np.loadtxt(_digits_file(), delimiter=",")
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
    return Dataset("digits", DIGITS_SHAPE, CLASSES, train, valid, images=ImageFormat(*DIGITS_SHAPE))


def _digits_file() -> Path:
    """Find the file without importing scikit-learn, which takes a second or two per worker."""
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
_library: torch.library.Library | None = None  # keeps the definitions alive


def import_torchvision() -> types.ModuleType:
    """Import torchvision, declaring the operators that it requires if they are absent."""
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
    """Import torchvision.transforms.v2."""
    import_torchvision()
    return importlib.import_module("torchvision.transforms.v2")
