"""What a data set is to training: a train split and a valid split that hand out batches."""

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
    """Samples by number."""

    def __len__(self) -> int: ...

    def batch(self, indices: Indices, epoch: int = 0) -> Any:
        """The samples of `indices` (int64, of any length) together, as the task's `loss` takes
        them: tensors, or tuples, lists or dicts of them.

        In classification: inputs of shape (len(indices), channels, height, width), and int64
        labels. `epoch`, counted from 0, matters only where samples are changed at random.

        A split may also offer `fingerprint()`: one text for each sample, or one for all, by which
        a resumed run notices that its data are no longer the same (hvdtrain/data/fingerprint.py).
        """


def check_split(flag: str, name: str, part: str, split: Any) -> None:
    """Raises UsageError unless this, of the user's `flag`=`name`, is a Split with samples."""
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
    """The data of a task."""

    name: str
    train: Split
    valid: Split
    note: str = ""  # for the header


class TensorSplit:
    """Samples that are held in memory as one tensor."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """`inputs`: (samples, channels, height, width), floating point; `labels`: (samples,)."""
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
    """How an image file becomes an input: for data sets whose inputs are images."""

    channels: int  # 1 or 3
    height: int
    width: int
    crop: bool = False  # the shorter side is scaled and the centre cut out, else it is stretched
    mean: tuple[float, ...] = (0.0,)  # by channel, of pixels from 0 to 1
    std: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Dataset:
    """A data set for classification, ready to train on."""

    name: str
    shape: Shape
    classes: int
    train: Split
    valid: Split
    note: str = ""  # what was done to it, for the header
    names: tuple[str, ...] = ()  # of the classes; by default their numbers
    images: ImageFormat | None = None

    @property
    def class_names(self) -> tuple[str, ...]:
        """One for each class."""
        return self.names or tuple(str(number) for number in range(self.classes))
