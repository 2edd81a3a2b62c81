"""Normalisation, augmentation and resizing of batches of images.

Random numbers depend only on (seed, epoch, sample), not on the rank, the batch, or earlier numbers:
an augmented run is the same for every number of workers, and after resuming.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from hvdtrain.data.feeding import Loaded, may_skip, stream
from hvdtrain.data.permutation import MULTIPLIERS, Indices
from hvdtrain.data.splits import Batch, Dataset, ImageFormat, Split, TensorSplit, texts_of

# Of SplitMix64, whose n-th number can be computed without those before.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))

FLIP, ROW, COLUMN = range(3)  # purposes of random numbers


def uniform(seed: int, epoch: int, purpose: int, indices: Indices) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each sample of `indices`, a pure function of all arguments."""
    (start,) = np.random.SeedSequence([seed, epoch, purpose]).generate_state(1, np.uint64)
    with np.errstate(over="ignore"):  # modulo 2^64 is intended
        numbers = start + (indices.astype(np.uint64) + np.uint64(1)) * _STEP
        for shift, multiplier in zip(_SHIFTS, MULTIPLIERS, strict=False):
            numbers = (numbers ^ (numbers >> shift)) * multiplier
    numbers ^= numbers >> _SHIFTS[-1]
    result: NDArray[np.float64] = (numbers >> np.uint64(11)) * 2.0**-53
    return result


def normalised(pixels: torch.Tensor, form: ImageFormat, dtype: torch.dtype) -> torch.Tensor:
    """Normalise uint8 pixels (..., channels, height, width) to the network's input in `dtype`, on
    their device.
    """
    white, mean, std = _constants(tuple(form.mean), tuple(form.std), dtype, pixels.device)
    return (pixels.to(dtype) / white - mean) / std


@cache
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> Sequence[torch.Tensor]:
    """Return white, mean and deviation as tensors on the device, copied to it once.

    White is a tensor too: by a number CUDA divides as it multiplies by the rounded inverse, so that
    the bits would not be those of the CPU.
    """
    shapes = {0: (), 1: (-1, 1, 1)}
    made = (torch.tensor(values, dtype=dtype, device=device) for values in (255, mean, std))
    return [values.reshape(shapes[values.dim()]) for values in made]


@dataclass(eq=False)
class ChangedSplit:
    """Base class of a split that changes the batches of another, reading ahead if that does."""

    split: Split

    @property
    def may_skip(self) -> bool:
        return may_skip(self.split)

    def __len__(self) -> int:
        return len(self.split)

    def fingerprint(self) -> Iterable[str] | None:
        return texts_of(self.split)

    def to_read(self, indices: Indices, epoch: int) -> Indices:
        """Return the samples that a batch of `indices` is made of."""
        return indices

    def change(self, batch: Batch, indices: Indices, epoch: int) -> Any:
        raise NotImplementedError

    def batch(self, indices: Indices, epoch: int = 0) -> Any:
        read = self.split.batch(self.to_read(indices, epoch), epoch)
        return self.change(read, indices, epoch)

    def stream(self, batches: Iterable[Indices], epoch: int) -> Iterator[Loaded]:
        ahead, now = itertools.tee(batches)
        read = stream(self.split, (self.to_read(indices, epoch) for indices in ahead), epoch)
        # In this order: the batch that has just come is then in `now` without being computed again.
        for one, indices in zip(read, now, strict=True):
            yield Loaded(self.change(one.on(), indices, epoch), len(indices) - one.bad, one.bad)


@dataclass(eq=False)
class AugmentedSplit(ChangedSplit):
    """The samples of another split, mirrored and shifted at random.

    `hflip`: probability of mirroring. `crop_padding`: pixels of zeros added around an image before
    a window of its original size is cut out at random.
    """

    seed: int
    hflip: float
    crop_padding: int

    def change(self, batch: Batch, indices: Indices, epoch: int) -> Batch:
        inputs, labels = batch

        def draw(purpose: int) -> torch.Tensor:
            return torch.from_numpy(uniform(self.seed, epoch, purpose, indices)).to(inputs.device)

        if self.hflip > 0:
            mirrored = draw(FLIP) < self.hflip
            inputs = torch.where(mirrored[:, None, None, None], inputs.flip(3), inputs)
        if self.crop_padding > 0:
            places = 2 * self.crop_padding + 1
            tops, lefts = ((draw(purpose) * places).long() for purpose in (ROW, COLUMN))
            padded = functional.pad(inputs, (self.crop_padding,) * 4)
            inputs = _windows(padded, inputs.shape, tops, lefts)
        return inputs, labels


def _windows(
    padded: torch.Tensor, shape: torch.Size, tops: torch.Tensor, lefts: torch.Tensor
) -> torch.Tensor:
    """Cut out of each padded image a window with the given corner: together of `shape`."""
    samples, channels, rows, columns = (
        torch.arange(length, device=padded.device) for length in shape
    )
    return padded[
        samples[:, None, None, None],
        channels[:, None, None],
        (tops[:, None] + rows)[:, None, :, None],
        (lefts[:, None] + columns)[:, None, None, :],
    ]


@dataclass(eq=False)
class ResizedSplit(ChangedSplit):
    """The samples of another split, resized to `size` (height, width)."""

    size: tuple[int, int]

    def change(self, batch: Batch, indices: Indices, epoch: int) -> Batch:
        return resize(batch[0], self.size), batch[1]


def resized(dataset: Dataset, size: tuple[int, int]) -> Dataset:
    """Return the data set with images of `size` (height, width); data in memory is resized once."""
    channels, height, width = dataset.shape
    train, valid = (
        TensorSplit(resize(split.inputs, size), split.labels)
        if isinstance(split, TensorSplit)
        else ResizedSplit(split, size)
        for split in (dataset.train, dataset.valid)
    )
    change = f"resized from {height}x{width} to {size[0]}x{size[1]}, bilinear"
    return replace(
        dataset,
        shape=(channels, *size),
        train=train,
        valid=valid,
        note=", ".join(filter(None, (dataset.note, change))),
    )


def resize(inputs: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resize (samples, channels, height, width) to `size` (height, width), bilinearly."""
    if inputs.shape[2:] == size:
        return inputs
    if len(inputs) == 0:
        return inputs.new_empty((0, inputs.shape[1], *size))
    return functional.interpolate(inputs, size, mode="bilinear", align_corners=False)
