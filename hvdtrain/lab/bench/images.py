"""Made-up 28x28 images that all contestants of a bench train on.

There are enough for any bench's steps to lie within one epoch, and few to evaluate with: a run of
`hvdtrain train` ends with an evaluation, which is not what is measured.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from hvdtrain.data import Dataset, TensorSplit
from hvdtrain.data.synthetic import make_synthetic

NAME = "hvdtrain.lab.bench.images:images"  # as --data takes it
SHAPE, CLASSES = (1, 28, 28), 10
SAMPLES = 1 << 22  # of which none takes memory of its own
VALID_SAMPLES = 64


def images() -> Dataset:
    """Float32, 10 classes."""
    made = make_synthetic(f"synthetic:1x28x28,samples={SAMPLES}", 0, torch.float32)
    inputs, labels = made.valid.batch(np.arange(VALID_SAMPLES))
    return replace(made, valid=TensorSplit(inputs, labels))
