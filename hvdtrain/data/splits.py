"""Types of splits and data sets, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hvdtrain import plugins
from hvdtrain.data.sampler import Indices
from hvdtrain.errors import UsageError

Batch = tuple[torch.Tensor, torch.Tensor]
Shape = tuple[int, int, int]


class Split(Protocol):
    """Samples that are read by number, in batches.

    A split may also offer `fingerprint()`: one text for each sample, or one for all, by which a
    resumed run detects that its data have changed (hvdtrain/data/fingerprint.py).
    """

    def __len__(self) -> int: ...

    def batch(self, indices: Indices, epoch: int = 0) -> Any:
        """Return the samples of `indices` (int64, any length) as one batch for the task's `loss`.

        A batch consists of tensors, or tuples, lists or dicts of them; in classification it is
        (inputs of shape (len(indices), channels, height, width), int64 labels). `epoch`, counted
        from 0, matters only for random augmentation.
        """


def check_split(flag: str, name: str, part: str, split: Any) -> None:
    """Raise UsageError unless `split`, from the user's `flag`=`name`, is a Split with samples."""
    lacking = [method for method in ("__len__", "batch") if not hasattr(split, method)]
    if lacking:
        raise UsageError(
            f"{flag}={name}: its {part} split, a {type(split).__name__}, has no "
            f"{' and no '.join(lacking)} (see hvdtrain.Split)"
        )
    if plugins.call(flag, name, split.__len__) < 1:
        raise UsageError(f"{flag}={name}: its {part} split has no samples")


@dataclass(frozen=True)
class Splits:
    """The data of a task.

    `name`: of the data, in the header and summary. `train`, `valid`: the samples to train on and to
    validate with. `note`: a description for the header.
    """

    name: str
    train: Split
    valid: Split
    note: str = ""


class TensorSplit:
    """Samples held in memory: a tensor of inputs, and one of labels."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """`inputs`: (samples, channels, height, width), floating point; `labels`: int64."""
        self.inputs = inputs
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Indices, epoch: int = 0) -> Batch:
        chosen = torch.from_numpy(indices)
        return self.inputs[chosen], self.labels[chosen]

    def fingerprint(self) -> list[str]:
        """Return each sample's label and shape (hvdtrain/data/fingerprint.py)."""
        shape = list(self.inputs.shape[1:])
        return [f"label {label} of shape {shape}" for label in self.labels.tolist()]


@dataclass(frozen=True)
class ImageFormat:
    """The conversion of an image file to an input of shape (channels, height, width).

    `channels`: 1 (grey) or 3 (RGB). `crop`: whether the shorter side is scaled and the centre cut
    out, otherwise the image is stretched. `mean`, `std`: for normalisation by channel, of pixels
    from 0 to 1.
    """

    channels: int
    height: int
    width: int
    crop: bool = False
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Dataset:
    """A data set for classification.

    `name`: as `--data` gives it. `shape`: of an input, (channels, height, width). `classes`: the
    number of classes. `train`, `valid`: the splits to train on and to validate with. `note`: the
    preprocessing, for the header. `names`: of the classes; by default their numbers. `images`: the
    conversion of image files to inputs, for `hvdtrain predict`; None if there is none.
    """

    name: str
    shape: Shape
    classes: int
    train: Split
    valid: Split
    note: str = ""
    names: tuple[str, ...] = ()
    images: ImageFormat | None = None

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return a name for each class."""
        return self.names or tuple(str(number) for number in range(self.classes))


@dataclass(frozen=True)
class ReadOptions:
    """Reading options chosen by the user; None: the default of the data set."""

    image_size: int | None = None
    valid_split: float | None = None
    hflip: float | None = None
    crop_padding: int | None = None
    crop_scale: float | None = None
    max_pixels: int | None = None
    readers: int = 0
    skip_bad: bool = False

    def refuse_those_of_folders(self, data: str) -> None:
        """Raise UsageError for options that do not apply to data sets in memory."""
        chosen = {
            "--crop-scale": self.crop_scale,
            "--max-image-pixels": self.max_pixels,
            "--valid-split": self.valid_split,
            "--skip-bad-samples": self.skip_bad or None,
        }
        problems = [
            f"{flag}={value}: has no meaning for --data={data}, only for image folders"
            for flag, value in chosen.items()
            if value is not None
        ]
        if problems:
            raise UsageError(*problems)
