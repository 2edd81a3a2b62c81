"""Mixup and CutMix: training samples blended with others, or with a rectangle of others.

H. Zhang et al., "mixup: Beyond Empirical Risk Minimization" (ICLR 2018); S. Yun et al., "CutMix"
(ICCV 2019); parameters and rectangles as in timm (timm/data/mixup.py, mode "elem").

All that is drawn for a sample depends only on (seed, epoch, sample), its partner too. A partner is
any other sample of the data set, and is read as well: it need not be in the batch, or on this rank.
So a mixed run is the same for every number of workers, and after resuming.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.data.feeding import in_order
from hvdtrain.data.sampler import Indices
from hvdtrain.data.splits import Batch, Dataset
from hvdtrain.data.transforms import COLUMN, ChangedSplit, uniform
from hvdtrain.errors import UsageError

PARTNER, METHOD, RADIUS, ANGLE, CENTRE_ROW, CENTRE_COLUMN = range(COLUMN + 1, COLUMN + 7)


class Mixed(NamedTuple):
    """A batch of mixed samples, each of which has two labels."""

    inputs: torch.Tensor
    labels: torch.Tensor
    partner_labels: torch.Tensor
    shares: torch.Tensor  # of the samples' own labels, from 0 to 1


@dataclass(eq=False)
class MixedSplit(ChangedSplit):
    """The samples of another split, each mixed with a partner.

    `mixup`, `cutmix`: alpha of the distribution Beta(alpha, alpha) of the samples' shares; 0: do
    not mix so. If both are above 0, each sample is mixed in one of the two ways.
    """

    seed: int
    mixup: float
    cutmix: float

    def __post_init__(self) -> None:
        """Raise UsageError for a split of which single samples cannot be read."""
        if self.may_skip:  # of a batch it is not known which samples were skipped
            raise UsageError(
                "--mixup and --cutmix: these data skip unreadable samples, and a sample cannot be "
                "mixed with one that is skipped"
            )
        if in_order(self.split):
            raise UsageError(
                "--mixup and --cutmix: these data are only iterated, and the partner of a sample "
                "is read by its number"
            )

    def to_read(self, indices: Indices, epoch: int) -> Indices:
        """Return the samples to read: those of `indices`, then the partner of each."""
        drawn = uniform(self.seed, epoch, PARTNER, indices)
        steps = 1 + np.floor(drawn * (len(self) - 1)).astype(np.int64)
        return np.concatenate([indices, (indices + steps) % len(self)])

    def change(self, batch: Batch, indices: Indices, epoch: int) -> Mixed:
        """Mix the first half of a batch with the second."""
        inputs, others = batch[0].tensor_split(2)
        labels, partner_labels = batch[1].tensor_split(2)
        methods, radii, angles, down, right = (
            uniform(self.seed, epoch, purpose, indices)
            for purpose in (METHOD, RADIUS, ANGLE, CENTRE_ROW, CENTRE_COLUMN)
        )
        cuts = methods < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0))
        alphas = np.where(cuts, self.cutmix, self.mixup)
        drawn = zip(alphas.tolist(), radii.tolist(), angles.tolist(), strict=True)
        shares = np.array([symmetric_beta(*one) for one in drawn])
        height, width = inputs.shape[2:]
        from_partner = _rectangles(shares, height, width, down, right) & cuts[:, None, None]
        shares = np.where(cuts, 1 - from_partner.mean((1, 2)), shares)
        weights = torch.from_numpy(shares).to(inputs)[:, None, None, None]
        pixels = torch.where(
            torch.from_numpy(from_partner).to(inputs.device)[:, None], others, inputs
        )
        if self.mixup:
            # Not torch.lerp, whose rounding may depend on a sample's place in the batch.
            blended = inputs * weights + others * (1 - weights)
            is_cut = torch.from_numpy(cuts).to(inputs.device)[:, None, None, None]
            pixels = torch.where(is_cut, pixels, blended)
        return Mixed(pixels, labels, partner_labels, weights.reshape(-1))


def symmetric_beta(alpha: float, radius: float, angle: float) -> float:
    """Return a sample of Beta(alpha, alpha), from two independent uniform numbers in [0, 1).

    L. Devroye, "Random variate generation in one line of code" (WSC 1996): if T has Student's
    distribution with 2 alpha degrees of freedom, then 1/2 + T / (2 sqrt(2 alpha + T^2)) is it; T is
    drawn in polar form (Bailey 1994). Scalars, as vectorised functions may round an element
    according to its place.
    """
    small = (1 - radius) ** (1 / alpha)
    cosine = math.cos(2 * math.pi * angle)
    numerator = (1 - small) * cosine * cosine
    if numerator == 0:
        return 0.5
    return 0.5 + math.copysign(0.5, cosine) * math.sqrt(numerator / (small + numerator))


def _rectangles(
    shares: NDArray[np.float64],
    height: int,
    width: int,
    down: NDArray[np.float64],
    right: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Return which pixels come from the partner, of shape (samples, height, width).

    The rectangle covers 1 - share of the image, unless its edge cuts it off. `down`, `right`: the
    place of its centre, from 0 to 1.
    """
    ratios = np.sqrt(1 - shares)
    marked = np.ones((len(shares), height, width), dtype=np.bool_)
    for axis, length, places in ((1, height, down), (2, width, right)):
        centres = np.floor(places * length)
        halves = np.floor(np.floor(length * ratios) / 2)
        pixels = np.arange(length)
        inside = (pixels >= (centres - halves)[:, None]) & (pixels < (centres + halves)[:, None])
        marked &= np.expand_dims(inside, 3 - axis)
    return marked


def mixed(dataset: Dataset, seed: int, mixup: float, cutmix: float) -> Dataset:
    """Return the data set with mixed samples to train on; see `MixedSplit`."""
    if not mixup and not cutmix:
        return dataset
    alphas = {"mixup": mixup, "cutmix": cutmix}
    kinds = " or ".join(f"{name} {alpha:g}" for name, alpha in alphas.items() if alpha)
    return replace(
        dataset,
        train=MixedSplit(dataset.train, seed, mixup, cutmix),
        note=", ".join(filter(None, (dataset.note, kinds))),
    )
