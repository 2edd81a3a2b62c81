"""Data sets by name, and their distribution over ranks and steps.

builtin         digits, Fashion-MNIST and CIFAR-10; the import of torchvision
download        downloads of Fashion-MNIST and CIFAR-10
image_files     the image files and classes of a folder
image_folder    the data set of such a folder
plugin          a user's data set
synthetic       generated images
splits          the types of splits and data sets
options         reading options
transforms      augmentation and resizing
streaming       reader processes
sampler         the order of samples, and the share of each rank
feeding         batches of one rank; a host's own part of the samples
fingerprint     detection of changed data
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from hvdtrain.data.builtin import load_cifar10, load_digits, load_fashion_mnist
from hvdtrain.data.image_folder import PREFIX as FOLDER_PREFIX
from hvdtrain.data.image_folder import load_image_folder
from hvdtrain.data.plugin import load_plugin
from hvdtrain.data.sampler import GlobalBatchSampler, PlacedShares, Shares, SharesLike
from hvdtrain.data.splits import Dataset, ImageFormat, ReadOptions, Split, Splits, TensorSplit
from hvdtrain.data.synthetic import PREFIX, make_synthetic
from hvdtrain.data.transforms import AugmentedSplit
from hvdtrain.errors import UsageError
from hvdtrain.plugins import is_plugin

__all__ = [
    "AugmentedSplit",
    "Dataset",
    "GlobalBatchSampler",
    "ImageFormat",
    "PlacedShares",
    "ReadOptions",
    "Shares",
    "SharesLike",
    "Split",
    "Splits",
    "TensorSplit",
    "load_dataset",
]

NAMES = ("digits", "fashion-mnist", "cifar10", "imagefolder:DIR", "synthetic:SHAPE")
IN_MEMORY: dict[str, Callable[[Path, torch.dtype], Dataset]] = {
    "digits": lambda data_dir, dtype: load_digits(dtype),
    "fashion-mnist": load_fashion_mnist,
    "cifar10": load_cifar10,
}
USUAL_CHANGES = {"cifar10": (0.5, 4)}  # defaults of --hflip and --crop-padding


def load_dataset(
    name: str,
    data_dir: Path,
    seed: int,
    dtype: torch.dtype,
    options: ReadOptions | None = None,
) -> Dataset:
    """Return the data set that `--data` names, with inputs of type `dtype`. Raises UsageError."""
    options = options or ReadOptions()
    if name.startswith(FOLDER_PREFIX):
        return load_image_folder(name, seed, dtype, options)
    if name in IN_MEMORY:
        dataset = IN_MEMORY[name](data_dir, dtype)
    elif name.startswith(PREFIX):
        dataset = make_synthetic(name, seed, dtype)
    elif is_plugin(name):
        dataset = load_plugin(name, dtype, options)
    else:
        raise UsageError(
            f"--data={name}: unknown; choose from {', '.join(NAMES)}, or package.module:callable"
        )
    options.refuse_those_of_folders(name)
    hflip, crop_padding = USUAL_CHANGES.get(name, (0.0, 0))
    hflip = hflip if options.hflip is None else options.hflip
    crop_padding = crop_padding if options.crop_padding is None else options.crop_padding
    if not hflip and not crop_padding:
        return dataset
    train = AugmentedSplit(dataset.train, seed, hflip, crop_padding)
    note = f"crops out of {crop_padding} more pixels, mirrored at {hflip:g}"
    return replace(dataset, train=train, note=note)
