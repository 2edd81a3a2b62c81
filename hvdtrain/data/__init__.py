"""Data sets by name, and their distribution over ranks and steps.

builtin         digits, Fashion-MNIST and CIFAR-10, with downloads; generated images
image_folder    images in one folder per class
image_files     image files below a folder
plugin          a user's data set
splits          the types of splits and data sets; detection of changed data
transforms      augmentation and resizing
mixing          mixup and CutMix
adapters        splits made of a DataLoader, of torch and Hugging Face data sets, of iterables
map_samples     batches of a data set that is read by number
drawing         random numbers that belong to a sample or a batch
sketch          a few samples, to compare the data of ranks and starts
permutation     orders of samples that are computed, not stored
sampler         the order of samples, and the share of each rank
loader_order    the order that a DataLoader's own sampler gives
feeding         batches of one rank, step by step; a host's own part of the samples
reading         samples that are read one by one, ahead of their step by processes
reader_process  these processes
reader_imports  what processes that read images find imported
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hvdtrain.config.plugins import is_plugin
from hvdtrain.data.adapters import IterableSplit, MapSplit, split_of
from hvdtrain.data.builtin import (
    SYNTHETIC,
    load_cifar10,
    load_digits,
    load_fashion_mnist,
    make_synthetic,
)
from hvdtrain.data.image_folder import IMAGE_FOLDER, load_image_folder
from hvdtrain.data.plugin import load_plugin
from hvdtrain.data.sampler import (
    BatchShares,
    GlobalBatchSampler,
    PlacedShares,
    Shares,
    SharesLike,
    VirtualShares,
)
from hvdtrain.data.splits import Dataset, ImageFormat, ReadOptions, Split, Splits, TensorSplit
from hvdtrain.data.token_batches import TokenBatches
from hvdtrain.data.transforms import AugmentedSplit
from hvdtrain.errors import UsageError, refuse

__all__ = [
    "AugmentedSplit",
    "BatchShares",
    "Dataset",
    "GlobalBatchSampler",
    "ImageFormat",
    "IterableSplit",
    "MapSplit",
    "PlacedShares",
    "ReadOptions",
    "Shares",
    "SharesLike",
    "Split",
    "Splits",
    "TensorSplit",
    "TokenBatches",
    "VirtualShares",
    "load_dataset",
    "split_of",
]

NAMES = ("digits", "fashion-mnist", "cifar10", "imagefolder:DIR", "synthetic:SHAPE")


def load_dataset(
    name: str, data_dir: Path, seed: int, dtype: torch.dtype, options: ReadOptions | None = None
) -> Dataset:
    """Return the data set that `--data` names, with inputs of type `dtype`. Raises UsageError."""
    options = options or ReadOptions()
    if name.startswith(IMAGE_FOLDER):
        return load_image_folder(name, seed, dtype, options)
    built_in: dict[str, Callable[[torch.dtype], Dataset]] = {
        "digits": load_digits,
        "fashion-mnist": partial(load_fashion_mnist, data_dir),
        "cifar10": partial(load_cifar10, data_dir),
    }
    if name in built_in:
        dataset = built_in[name](dtype)
    elif name.startswith(SYNTHETIC):
        dataset = make_synthetic(name, seed, dtype)
    elif is_plugin(name):
        dataset = load_plugin(name, dtype, options)
    else:
        raise UsageError(
            f"--data={name}: unknown; choose from {', '.join(NAMES)}, or package.module:callable"
        )
    _refuse_options_of_folders(name, options)
    usual = (0.5, 4) if name == "cifar10" else (0.0, 0)
    hflip = usual[0] if options.hflip is None else options.hflip
    crop_padding = usual[1] if options.crop_padding is None else options.crop_padding
    if not hflip and not crop_padding:
        return dataset
    return replace(
        dataset,
        train=AugmentedSplit(dataset.train, seed, hflip, crop_padding),
        note=f"crops out of {crop_padding} more pixels, mirrored at {hflip:g}",
    )


def _refuse_options_of_folders(name: str, options: ReadOptions) -> None:
    folder_options = {
        "--crop-scale": options.crop_scale,
        "--max-image-pixels": options.max_pixels,
        "--valid-split": options.valid_split,
        "--skip-bad-samples": options.skip_bad or None,
    }
    refuse(
        f"{flag}={value}: has no meaning for --data={name}, only for image folders"
        for flag, value in folder_options.items()
        if value is not None
    )
