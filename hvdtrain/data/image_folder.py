"""Images in a folder for each class, read and changed one by one.

The transforms are torchvision's. What they draw depends on (seed, epoch, sample) alone, so neither
the rank that reads a sample nor the process matters.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from hvdtrain.data.options import ReadOptions
from hvdtrain.data.splits import Batch, Dataset, ImageFormat
from hvdtrain.data.streaming import BadSample, StreamedSplit
from hvdtrain.errors import UsageError
from hvdtrain.vision import import_torchvision, import_transforms

PREFIX = "imagefolder:"
IMAGE_SIZE = 224
CROP_SCALE = 0.08  # as torchvision's RandomResizedCrop, and its references for ImageNet
HFLIP = 0.5
CENTRE = 0.875  # of the shorter side, in validation: 224 of 256
# Of ImageNet's training images, by channel, as all of torchvision's weights are made for.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TRAIN_NAMES, VALID_NAMES = ("train",), ("valid", "val", "validation")
Labelled = list[tuple[str, int]]


def read_image(path: str | Path, channels: int) -> Image.Image:
    """The picture as a person sees it: turned as its EXIF data says, as grey or RGB.

    Raises BadSample, naming the file, where there is none to see.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the file's oddities; what matters raises
            with Image.open(path) as file:
                picture = _with_8_bits(ImageOps.exif_transpose(file))
                if "transparency" in picture.info:
                    picture = picture.convert("RGBA")
                return picture.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # decoders raise whatever their parsing stumbles over
        raise BadSample(f"{path} cannot be read as an image: {error}") from error


def _with_8_bits(picture: Image.Image) -> Image.Image:
    """Pillow would cut values off at 255. Of 32 bits, nobody has said what is white."""
    if picture.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise ValueError(f"its pixels have 32 bits (mode {picture.mode}); save it with 8 or 16")
    return picture


def centred(picture: Image.Image, form: ImageFormat) -> torch.Tensor:
    """As an uint8 tensor of the size that the network takes, without chance."""
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
    """From uint8, (..., channels, height, width), to what the network takes."""
    mean, std = (torch.tensor(v, dtype=dtype)[:, None, None] for v in (form.mean, form.std))
    return (pixels.to(dtype) / 255 - mean) / std


@dataclass(frozen=True)
class ImageSamples:
    """Samples by number: (uint8 image, label), which `finish` normalises a batch at a time."""

    files: Labelled
    form: ImageFormat
    dtype: torch.dtype
    seed: int
    hflip: float = 0.0
    crop_scale: float = 1.0  # 1: the centre, as in validation

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int, epoch: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        picture = read_image(path, self.form.channels)
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
        """Transforms are made again by the process that reads."""
        return {name: value for name, value in vars(self).items() if name != "_change"}


def load_image_folder(name: str, seed: int, dtype: torch.dtype, options: ReadOptions) -> Dataset:
    """`name`: imagefolder:DIR, with DIR/train/CLASS/* and DIR/valid/CLASS/*, or, if a part for
    validation is stated, DIR/CLASS/*. Raises UsageError with all that is wrong with the folder.
    """
    if options.crop_padding is not None:
        raise UsageError(
            f"--crop-padding={options.crop_padding}: has no meaning for image folders; "
            "see --crop-scale"
        )
    folder = Path(name.removeprefix(PREFIX)).expanduser()
    train, valid, classes = _find_files(name, folder, options.valid_split)
    size = options.image_size or IMAGE_SIZE
    form = ImageFormat(3, size, size, crop=True, mean=MEAN, std=STD)
    hflip = HFLIP if options.hflip is None else options.hflip
    crop_scale = CROP_SCALE if options.crop_scale is None else options.crop_scale
    to_train = ImageSamples(train, form, dtype, seed, hflip, crop_scale)
    return Dataset(
        name,
        (form.channels, size, size),
        len(classes),
        StreamedSplit(to_train, options.readers, options.skip_bad, stay=True),
        StreamedSplit(
            ImageSamples(valid, form, dtype, seed), options.readers, options.skip_bad, stay=False
        ),
        note=f"crops of {crop_scale:g} to 1 of an image, mirrored at {hflip:g}, "
        f"{options.readers} readers a worker",
        names=tuple(classes),
        images=form,
    )


def _find_files(
    name: str, folder: Path, valid_split: float | None
) -> tuple[Labelled, Labelled, list[str]]:
    if not folder.is_dir():
        raise UsageError(f"--data={name}: {folder} is not a folder")
    inside = {path.name for path in _entries(name, folder)}
    train = next((part for part in TRAIN_NAMES if part in inside), None)
    valid = next((part for part in VALID_NAMES if part in inside), None)
    if train and valid:
        if valid_split is not None:
            raise UsageError(
                f"--valid-split={valid_split}: {folder} has train/ and {valid}/ already"
            )
        return _both_parts(name, folder / train, folder / valid)
    if train or valid:
        raise UsageError(
            f"--data={name}: {folder} has {train or valid}/, but no "
            f"{'valid/' if train else 'train/'}. Make both, or neither and give --valid-split"
        )
    if valid_split is None:
        raise UsageError(
            f"--data={name}: {folder} has no train/ and valid/. Make them, or state the part of "
            "its images that is for validation: --valid-split 0.2"
        )
    labelled, classes = _labelled(name, folder)
    train_files, valid_files = _cut(labelled, len(classes), valid_split)
    if not train_files or not valid_files:
        raise UsageError(
            f"--valid-split={valid_split}: of {len(labelled)} images in {folder} it leaves "
            f"{len(train_files)} to train on and {len(valid_files)} to validate with"
        )
    return train_files, valid_files, classes


def _both_parts(name: str, train: Path, valid: Path) -> tuple[Labelled, Labelled, list[str]]:
    problems: list[str] = []
    found: list[tuple[Labelled, list[str]]] = []
    for folder in (train, valid):
        try:
            found.append(_labelled(name, folder))
        except UsageError as error:
            problems += error.problems
    if problems:
        raise UsageError(*problems)
    (train_files, classes), (valid_files, valid_classes) = found
    if classes != valid_classes:
        missing, more = set(classes) - set(valid_classes), set(valid_classes) - set(classes)
        raise UsageError(
            f"--data={name}: {train} and {valid} must have folders for the same classes; "
            f"only in the first: {sorted(missing)[:5]}, only in the second: {sorted(more)[:5]}"
        )
    return train_files, valid_files, classes


def _labelled(name: str, folder: Path) -> tuple[Labelled, list[str]]:
    """Every image under a folder of classes, with the class's number; sorted."""
    classes = sorted(path.name for path in _entries(name, folder) if path.is_dir())
    if len(classes) < 2:
        raise UsageError(
            f"--data={name}: {folder} has {len(classes)} folders of classes "
            f"({', '.join(classes) or 'none'}): it needs 2 or more, with images in them"
        )
    extensions = import_torchvision().datasets.folder.IMG_EXTENSIONS
    labelled: Labelled = []
    problems = []
    for label, class_name in enumerate(classes):
        files = sorted(
            str(Path(root, file))
            for root, _, names in os.walk(folder / class_name, followlinks=True)
            for file in names
            if file.lower().endswith(extensions)
        )
        if not files:
            problems.append(
                f"--data={name}: {folder / class_name} has no images that can be read "
                f"({', '.join(extensions)})"
            )
        labelled += [(file, label) for file in files]
    if problems:
        raise UsageError(*problems)
    return labelled, classes


def _entries(name: str, folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise UsageError(f"--data={name}: {folder} cannot be read: {error.strerror}") from error


def _cut(labelled: Labelled, classes: int, valid_split: float) -> tuple[Labelled, Labelled]:
    """The same part of each class for validation, evenly spread over its sorted files."""
    train: Labelled = []
    valid: Labelled = []
    for label in range(classes):
        own = [item for item in labelled if item[1] == label]
        for place, item in enumerate(own):
            before, after = (int((place + step) * valid_split + 1e-9) for step in (0, 1))
            (valid if after > before else train).append(item)
    return train, valid
