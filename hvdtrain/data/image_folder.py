"""Images in one folder per class, read and transformed one by one.

The transforms are torchvision's. Their random numbers depend only on (seed, epoch, sample), not on
the rank or process that reads a sample.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from hvdtrain.data.builtin import import_transforms
from hvdtrain.data.image_files import Labelled, find_files, left_out
from hvdtrain.data.splits import Batch, Dataset, ImageFormat, ReadOptions
from hvdtrain.data.streaming import BadSample, StreamedSplit
from hvdtrain.errors import UsageError
from hvdtrain.log import counted

PREFIX = "imagefolder:"
IMAGE_SIZE = 224
CROP_SCALE = 0.08  # as torchvision's RandomResizedCrop, and its references for ImageNet
HFLIP = 0.5
CENTRE = 0.875  # of the shorter side, in validation: 224 of 256
# Of ImageNet's training images, by channel; all weights of torchvision expect them.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Pillow's default. Rotating and converting an image may take 7 bytes per pixel.
MAX_PIXELS = 89_478_485
SKIPPING = "Repair or remove it, or give --skip-bad-samples to skip unreadable images"


def read_image(path: str | Path, channels: int, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return the picture in grey or RGB, rotated according to its EXIF data.

    Raises BadSample, with the file name, if it cannot be decoded or has more than `max_pixels`: a
    small file may unpack to gigabytes.
    """
    try:
        with warnings.catch_warnings(), _pillow_limit(max_pixels):
            warnings.simplefilter("ignore")  # about oddities of the file; errors raise
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as file:
                picture = _with_8_bits(ImageOps.exif_transpose(file))
                if "transparency" in picture.info:
                    picture = picture.convert("RGBA")
                return picture.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # decoders raise errors of many types
        reason = _reason(error, max_pixels)
        raise BadSample(f"{path} cannot be read as an image: {reason}") from error


@contextmanager
def _pillow_limit(max_pixels: int) -> Iterator[None]:
    """Set Pillow's limit of the stated size of an image: above it warns, above twice it raises."""
    usual, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = usual


def _reason(error: Exception, max_pixels: int) -> str:
    if isinstance(error, Image.DecompressionBombWarning | Image.DecompressionBombError):
        size = re.search(r"\d+", str(error))
        pixels = f"{int(size[0]):,} pixels" if size else "too many pixels"
        return f"it has {pixels}, and --max-image-pixels={max_pixels} is the limit"
    if isinstance(error, UnidentifiedImageError):
        return "it is damaged, or of a type that Pillow does not support"
    return getattr(error, "strerror", None) or str(error)


def _with_8_bits(picture: Image.Image) -> Image.Image:
    """Scale 16-bit pixels, which Pillow would clip at 255. Raises ValueError for 32 bits."""
    if picture.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise ValueError(f"its pixels have 32 bits (mode {picture.mode}); save it with 8 or 16")
    return picture


def centred(picture: Image.Image, form: ImageFormat) -> torch.Tensor:
    """Return the resized, centre-cropped picture as a uint8 tensor (channels, height, width)."""
    functional = import_transforms().functional
    size = [form.height, form.width]
    if form.crop:
        shorter = round(min(size) / CENTRE)
        picture = functional.center_crop(functional.resize(picture, [shorter]), size)
    else:
        picture = functional.resize(picture, size)
    tensor: torch.Tensor = functional.pil_to_tensor(picture)
    return tensor


def normalised(pixels: torch.Tensor, form: ImageFormat, dtype: torch.dtype) -> torch.Tensor:
    """Normalise uint8 pixels (..., channels, height, width) to the network's input in `dtype`."""
    mean, std = (torch.tensor(v, dtype=dtype)[:, None, None] for v in (form.mean, form.std))
    return (pixels.to(dtype) / 255 - mean) / std


@dataclass(frozen=True)
class ImageSamples:
    """Samples (uint8 image, label) by number; `finish` normalises whole batches."""

    files: Labelled
    form: ImageFormat
    dtype: torch.dtype
    seed: int
    hflip: float = 0.0
    crop_scale: float = 1.0  # 1: the centre crop of validation
    max_pixels: int = MAX_PIXELS

    def __len__(self) -> int:
        return len(self.files)

    def fingerprint(self) -> list[str]:
        """Return each file's path below their common folder, and its class."""
        ends = (self.files[0][0], self.files[-1][0])
        start = len(os.path.commonpath([Path(path).parent for path in ends])) + 1
        return [f"{path[start:]} (class {label})" for path, label in self.files]

    def read(self, index: int, epoch: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        picture = read_image(path, self.form.channels, self.max_pixels)
        with torch.random.fork_rng(devices=[]):
            (own,) = np.random.SeedSequence([self.seed, epoch, index]).generate_state(1, np.uint64)
            torch.manual_seed(int(own >> np.uint64(1)))
            pixels = self._change(picture)
        return pixels, label

    def empty(self) -> Batch:
        shape = (0, self.form.channels, self.form.height, self.form.width)
        return torch.empty(shape, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)

    def finish(self, batch: Batch) -> Batch:
        pixels, labels = batch
        return normalised(pixels, self.form, self.dtype), labels

    @cached_property
    def _change(self) -> Callable[[Image.Image], torch.Tensor]:
        transforms = import_transforms()
        flip = transforms.RandomHorizontalFlip(self.hflip)
        if self.crop_scale == 1:
            return lambda picture: flip(centred(picture, self.form))
        size = (self.form.height, self.form.width)
        crop = transforms.RandomResizedCrop(size, scale=(self.crop_scale, 1.0))
        changes: Callable[[Image.Image], torch.Tensor] = transforms.Compose(
            [crop, flip, transforms.PILToTensor()]
        )
        return changes

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the transforms, which each reading process makes itself."""
        return {name: value for name, value in vars(self).items() if name != "_change"}


def load_image_folder(name: str, seed: int, dtype: torch.dtype, options: ReadOptions) -> Dataset:
    """Return the data set of `name`, imagefolder:DIR.

    The images are DIR/train/CLASS/* and DIR/valid/CLASS/* or, with `options.valid_split`,
    DIR/CLASS/*. Raises UsageError with all problems of the folder.
    """
    if options.crop_padding is not None:
        raise UsageError(
            f"--crop-padding={options.crop_padding}: has no meaning for image folders; "
            "see --crop-scale"
        )
    folder = Path(name.removeprefix(PREFIX)).expanduser()
    found = find_files(name, folder, options.valid_split)
    size = options.image_size or IMAGE_SIZE
    form = ImageFormat(3, size, size, crop=True, mean=MEAN, std=STD)
    hflip = HFLIP if options.hflip is None else options.hflip
    crop_scale = CROP_SCALE if options.crop_scale is None else options.crop_scale
    largest = options.max_pixels or MAX_PIXELS
    train, valid = (
        StreamedSplit(samples, options.readers, options.skip_bad, stay, SKIPPING)
        for samples, stay in (
            (ImageSamples(found.train, form, dtype, seed, hflip, crop_scale, largest), True),
            (ImageSamples(found.valid, form, dtype, seed, max_pixels=largest), False),
        )
    )
    note = f"crops of {crop_scale:g} to 1 of an image, mirrored at {hflip:g}, "
    note += f"{counted(options.readers, 'reader')} a worker"
    return Dataset(
        name,
        (form.channels, size, size),
        len(found.classes),
        train,
        valid,
        note=f"{note}; {left_out(found.others)}" if found.others else note,
        names=tuple(found.classes),
        images=form,
    )
