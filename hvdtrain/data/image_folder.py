"""Images in one folder per class: found by their names, read and transformed one by one.

The transforms are torchvision's. Their random numbers depend only on (seed, epoch, sample), not on
the rank or process that reads a sample.
"""

import itertools
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from hvdtrain.data.builtin import import_torchvision
from hvdtrain.data.image_files import (
    EXTENSIONS,
    hidden_images,
    images_under_each,
    is_folder,
    is_hidden,
    left_out,
)
from hvdtrain.data.reading import BadSample, StreamedSplit
from hvdtrain.data.splits import MAX_PIXELS, Batch, Dataset, ImageFormat, ReadOptions
from hvdtrain.data.transforms import normalised
from hvdtrain.errors import UsageError, attempt, refuse
from hvdtrain.files import open_bytes
from hvdtrain.log import counted

IMAGE_FOLDER = "imagefolder:"
IMAGE_SIZE = 224
CROP_SCALE = 0.08  # as torchvision's RandomResizedCrop, and its references for ImageNet
HFLIP = 0.5
CENTRE = 0.875  # of the shorter side, in validation: 224 of 256
# Of ImageNet's training images, by channel; all weights of torchvision expect them.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SKIPPING = "Repair or remove it, or give --skip-bad-samples to skip unreadable images"

Labelled = list[tuple[str, int]]  # files with class numbers
Changes = Callable[[Image.Image], torch.Tensor]


@dataclass(frozen=True)
class Found:
    """The images in the folders of all classes."""

    files: Labelled
    classes: list[str]
    others: list[str]  # files that are left out


def _find(name: str, folder: Path, valid_split: float | None) -> tuple[Found, Found]:
    """Return the images to train on and to validate with: those in train/ and valid/ of `folder`
    or, with `valid_split`, in its classes. `name`: the value of `--data`, for messages.
    """
    if not folder.is_dir():
        raise UsageError(f"--data={name}: {folder} is not a folder")
    inside = {entry.name for entry in _entries(name, folder)}
    valid = next((part for part in ("valid", "val", "validation") if part in inside), None)
    if "train" in inside and valid:
        if valid_split is not None:
            raise UsageError(
                f"--valid-split={valid_split}: {folder} has train/ and {valid}/ already"
            )
        return _both_parts(name, folder / "train", folder / valid)
    if "train" in inside or valid:
        raise UsageError(
            f"--data={name}: {folder} has {valid or 'train'}/, but no "
            f"{'train/' if valid else 'valid/'}. Make both, or neither and give --valid-split"
        )
    if valid_split is None:
        raise UsageError(
            f"--data={name}: {folder} has no train/ and valid/. Make them, or state the part of "
            "its images that is for validation: --valid-split 0.2"
        )
    images = _classes_in(name, folder)
    train_files, valid_files = _cut(images.files, valid_split)
    if not train_files or not valid_files:
        raise UsageError(
            f"--valid-split={valid_split}: of {counted(len(images.files), 'image')} in {folder} it "
            f"leaves {len(train_files)} to train on and {len(valid_files)} to validate with"
        )
    return replace(images, files=train_files), Found(valid_files, images.classes, [])


def _both_parts(name: str, *folders: Path) -> tuple[Found, Found]:
    problems: list[str] = []
    parts = [attempt(problems, partial(_classes_in, name, folder)) for folder in folders]
    refuse(problems)
    train, valid = filter(None, parts)
    if train.classes != valid.classes:
        first, second = set(train.classes), set(valid.classes)
        raise UsageError(
            f"--data={name}: {folders[0]} and {folders[1]} must have folders for the same classes; "
            f"only in the first: {sorted(first - second)[:5]}, "
            f"only in the second: {sorted(second - first)[:5]}"
        )
    return train, valid


def _classes_in(name: str, folder: Path) -> Found:
    """Return the images in a folder of classes. Raises UsageError with all classes without any."""
    folders = sorted(entry.name for entry in _entries(name, folder) if is_folder(entry))
    classes = [subfolder for subfolder in folders if not is_hidden(subfolder)]
    if len(classes) < 2:
        raise UsageError(
            f"--data={name}: {folder} has {counted(len(classes), 'folder')} of classes "
            f"({', '.join(classes) or 'none'}): it needs 2 or more, with images in them"
        )
    parts = list(images_under_each(folder, classes))
    refuse(
        f"--data={name}: {folder / classes[label]} has no images ({', '.join(EXTENSIONS)})"
        + (f"; {left_out(others)}" if others else "")
        for label, (files, others) in enumerate(parts)
        if not files
    )
    hidden = (hidden_images(folder / subfolder) for subfolder in folders if is_hidden(subfolder))
    others_by_folder = itertools.chain(hidden, (others for _, others in parts))
    return Found(
        [(file, label) for label, (files, _) in enumerate(parts) for file in files],
        classes,
        [*itertools.chain.from_iterable(others_by_folder)],
    )


def _entries(name: str, folder: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError as error:
        raise UsageError(f"--data={name}: {folder} cannot be read: {error.strerror}") from error


def _cut(files: Labelled, valid_split: float) -> tuple[Labelled, Labelled]:
    """Split off the same fraction of each class, evenly spread over its sorted files."""
    parts: tuple[Labelled, Labelled] = [], []
    seen: Counter[int] = Counter()
    for file, label in files:
        before, after = (int((seen[label] + step) * valid_split + 1e-9) for step in (0, 1))
        parts[after > before].append((file, label))
        seen[label] += 1
    return parts


def read_image(path: str | Path, channels: int, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return the picture in grey or RGB, rotated according to its EXIF data.

    Raises BadSample, with the file name, if it cannot be decoded or has more than `max_pixels`: a
    small file may unpack to gigabytes.
    """
    # Pillow compares the stated size: above its limit it warns, above twice the limit it raises.
    usual, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about oddities of the file; errors raise
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with open_bytes(Path(path)) as stream, Image.open(stream) as file:
                picture = _with_8_bits(ImageOps.exif_transpose(file))
                if "transparency" in picture.info:
                    picture = picture.convert("RGBA")
                return picture.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # decoders raise errors of many types
        raise BadSample(
            f"{path} cannot be read as an image: {_reason(error, max_pixels)}"
        ) from error
    finally:
        Image.MAX_IMAGE_PIXELS = usual


def _reason(error: Exception, max_pixels: int) -> str:
    if isinstance(error, Image.DecompressionBombWarning | Image.DecompressionBombError):
        pixels = int(re.findall(r"\d+", str(error))[0])
        return f"it has {pixels:,} pixels, and --max-image-pixels={max_pixels} is the limit"
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
    import_torchvision()
    from torchvision.transforms.v2 import functional

    size = [form.height, form.width]
    if form.crop:
        shorter = round(min(size) / CENTRE)
        picture = functional.center_crop(functional.resize(picture, [shorter]), size)
    else:
        picture = functional.resize(picture, size)
    tensor: torch.Tensor = functional.pil_to_tensor(picture)
    return tensor


@cache
def _changes(form: ImageFormat, hflip: float, crop_scale: float) -> Changes:
    """Return the transforms from a picture to uint8 pixels, made once per process."""
    import_torchvision()
    from torchvision.transforms import v2

    flip = v2.RandomHorizontalFlip(hflip)
    if crop_scale == 1:
        return lambda picture: flip(centred(picture, form))
    crop = v2.RandomResizedCrop((form.height, form.width), scale=(crop_scale, 1.0))
    changes: Changes = v2.Compose([crop, flip, v2.PILToTensor()])
    return changes


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
        ends = [Path(self.files[end][0]).parent for end in (0, -1)]
        start = len(os.path.commonpath(ends)) + 1
        return [f"{path[start:]} (class {label})" for path, label in self.files]

    def read(self, index: int, epoch: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        picture = read_image(path, self.form.channels, self.max_pixels)
        with torch.random.fork_rng(devices=[]):
            (seed,) = np.random.SeedSequence([self.seed, epoch, index]).generate_state(1, np.uint64)
            torch.default_generator.manual_seed(int(seed >> np.uint64(1)))
            pixels = _changes(self.form, self.hflip, self.crop_scale)(picture)
        return pixels, label

    def empty_batch(self) -> Batch:
        form = self.form
        pixels = torch.empty((0, form.channels, form.height, form.width), dtype=torch.uint8)
        return pixels, torch.empty(0, dtype=torch.int64)

    def finish(self, batch: Batch) -> Batch:
        pixels, labels = batch
        return normalised(pixels, self.form, self.dtype), labels


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
    folder = Path(name.removeprefix(IMAGE_FOLDER)).expanduser()
    train, valid = _find(name, folder, options.valid_split)
    size = options.image_size or IMAGE_SIZE
    form = ImageFormat(3, size, size, crop=True, mean=MEAN, std=STD)
    hflip = HFLIP if options.hflip is None else options.hflip
    crop_scale = CROP_SCALE if options.crop_scale is None else options.crop_scale
    largest = options.max_pixels or MAX_PIXELS
    note = (
        f"crops of {crop_scale:g} to 1 of an image, mirrored at {hflip:g}, "
        f"{counted(options.readers, 'reader')} a worker"
    )
    others = train.others + valid.others
    split = partial(
        StreamedSplit,
        readers=options.readers,
        may_skip=options.skip_bad,
        advice=SKIPPING,
        imports=("hvdtrain.data.reader_imports",),
    )
    return Dataset(
        name,
        (form.channels, size, size),
        len(train.classes),
        split(ImageSamples(train.files, form, dtype, seed, hflip, crop_scale, largest), stay=True),
        split(ImageSamples(valid.files, form, dtype, seed, max_pixels=largest), stay=False),
        note=f"{note}; {left_out(others)}" if others else note,
        names=tuple(train.classes),
        images=form,
    )
