"""Synthetic images of any shape, for measurements and tests, without files and in little memory.

Sample i is the pattern of class i mod classes plus one of a pool of noise images. Classes are thus
learnable, and every sample is a pure function of the seed and its number. Images repeat after
pool x classes samples, so validation accuracy is meaningless.
"""

from __future__ import annotations

import re

import numpy as np
import torch

from hvdtrain.data.sampler import Indices
from hvdtrain.data.splits import Batch, Dataset, Shape
from hvdtrain.errors import UsageError

PREFIX = "synthetic:"
CLASSES = 10
TRAIN_SAMPLES = 65_536
VALID_SAMPLES = 4_096
POOL = 251  # noise images; prime, so that each is combined with every class
NOISE = 0.5
SYNTAX = re.compile(r"synthetic:(\d+)x(\d+)x(\d+)((?:,(?:classes|samples)=\d+)*)")


class SyntheticSplit:
    """Samples first .. first + samples - 1 of the synthetic data."""

    def __init__(
        self, patterns: torch.Tensor, noise: torch.Tensor, first: int, samples: int
    ) -> None:
        self._patterns = patterns
        self._noise = noise
        self._first = first
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Indices, epoch: int = 0) -> Batch:
        numbers = torch.from_numpy(indices) + self._first
        labels = numbers % len(self._patterns)
        return self._patterns[labels] + self._noise[numbers % len(self._noise)], labels


def read_spec(spec: str) -> tuple[Shape, int, int]:
    """Return shape, classes and training samples of synthetic:CxHxW[,classes=K][,samples=M].

    Raises UsageError if `spec` is malformed.
    """
    match = SYNTAX.fullmatch(spec)
    options = dict(part.split("=") for part in match.group(4).split(",")[1:]) if match else {}
    sizes = [int(text) for text in match.groups()[:3]] if match else []
    classes = int(options.get("classes", CLASSES))
    samples = int(options.get("samples", TRAIN_SAMPLES))
    repeated = match is not None and match.group(4).count("=") > len(options)
    if not match or repeated or min([*sizes, samples]) < 1 or classes < 2:
        raise UsageError(
            f"--data={spec}: expected synthetic:CHANNELSxHEIGHTxWIDTH[,classes=K][,samples=M], "
            "such as synthetic:1x28x28 (at least 1 each, and 2 classes)"
        )
    return (sizes[0], sizes[1], sizes[2]), classes, samples


def make_synthetic(spec: str, seed: int, dtype: torch.dtype) -> Dataset:
    """Return the data set of `spec` (see `read_spec`). Raises UsageError."""
    shape, classes, samples = read_spec(spec)
    generator = np.random.Generator(np.random.PCG64([seed, 0x5EED]))
    patterns = torch.as_tensor(generator.standard_normal((classes, *shape)), dtype=dtype)
    noise = torch.as_tensor(NOISE * generator.standard_normal((POOL, *shape)), dtype=dtype)
    return Dataset(
        spec,
        shape,
        classes,
        SyntheticSplit(patterns, noise, 0, samples),
        SyntheticSplit(patterns, noise, samples, VALID_SAMPLES),
    )
