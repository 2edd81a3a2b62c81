"""Another split's images at another size (bilinear)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from hvdtrain.data.changed import ChangedSplit
from hvdtrain.data.sampler import Indices
from hvdtrain.data.splits import Batch, Dataset, Split, TensorSplit


class ResizedSplit(ChangedSplit):
    """Made a batch at a time."""

    def __init__(self, split: Split, size: tuple[int, int]) -> None:
        super().__init__(split)
        self._size = size

    def change(self, batch: Batch, indices: Indices, epoch: int) -> Batch:
        inputs, labels = batch
        return resize(inputs, self._size), labels


def resized(dataset: Dataset, size: tuple[int, int]) -> Dataset:
    """The data set with images of `size` (height, width): at once where it lies in memory."""
    channels, height, width = dataset.shape
    note = f"resized from {height}x{width} to {size[0]}x{size[1]}, bilinear"
    return replace(
        dataset,
        shape=(channels, *size),
        train=_resized_split(dataset.train, size),
        valid=_resized_split(dataset.valid, size),
        note=f"{dataset.note}, {note}" if dataset.note else note,
    )


def _resized_split(split: Split, size: tuple[int, int]) -> Split:
    if isinstance(split, TensorSplit):
        return TensorSplit(resize(split.inputs, size), split.labels)
    return ResizedSplit(split, size)


def resize(inputs: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """(samples, channels, height, width) to `size`."""
    if inputs.shape[2:] == size:
        return inputs
    if len(inputs) == 0:
        return inputs.new_empty((0, inputs.shape[1], *size))
    return functional.interpolate(inputs, size, mode="bilinear", align_corners=False)
