"""What a data set is to training: a train split and a valid split that hand out batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.nn import functional

from hvdtrain.data.sampler import Indices

Batch = tuple[torch.Tensor, torch.Tensor]
Shape = tuple[int, int, int]


class Split(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def batch(self, indices: Indices, epoch: int = 0) -> Batch:
        """Inputs of shape (len(indices), channels, height, width) and int64 labels.

        `epoch`, counted from 0, matters only where samples are changed at random.
        """


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


class ResizedSplit:
    """Another split's samples at another image size (bilinear), made a batch at a time."""

    def __init__(self, split: Split, size: tuple[int, int]) -> None:
        self._split = split
        self._size = size

    def __len__(self) -> int:
        return len(self._split)

    def batch(self, indices: Indices, epoch: int = 0) -> Batch:
        inputs, labels = self._split.batch(indices, epoch)
        return _resize(inputs, self._size), labels


@dataclass(frozen=True)
class Dataset:
    """A data set for classification, ready to train on."""

    name: str
    shape: Shape
    classes: int
    train: Split
    valid: Split
    note: str = ""  # what was done to it, for the header


def resized(dataset: Dataset, size: tuple[int, int]) -> Dataset:
    """The data set with images of `size` (height, width): at once where it lies in memory."""
    channels, height, width = dataset.shape
    return replace(
        dataset,
        shape=(channels, *size),
        train=_resized_split(dataset.train, size),
        valid=_resized_split(dataset.valid, size),
        note=f"resized from {height}x{width} to {size[0]}x{size[1]}, bilinear",
    )


def _resized_split(split: Split, size: tuple[int, int]) -> Split:
    if isinstance(split, TensorSplit):
        return TensorSplit(_resize(split.inputs, size), split.labels)
    return ResizedSplit(split, size)


def _resize(inputs: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    if len(inputs) == 0:
        return inputs.new_empty((0, inputs.shape[1], *size))
    return functional.interpolate(inputs, size, mode="bilinear", align_corners=False)
