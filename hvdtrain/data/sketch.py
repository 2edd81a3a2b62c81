"""Sketches of a few samples, which show that two processes, or two starts, have other data.

Whole numbers and texts are compared exactly. Other numbers are compared by a few random sums, with
a tolerance: image decoders and processors round differently, whereas other samples differ by far.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hvdtrain.data.drawing import drawing
from hvdtrain.data.feeding import in_order, stream
from hvdtrain.data.splits import Split
from hvdtrain.tensors import bytes_of, items_of

SKETCH = "sketch"  # the name of a split's sketch in its fingerprint
SAMPLES = 8
FIRST_SAMPLES = 2  # of those that can only be iterated
SUMS = 8  # of each tensor
# A part of the tensor's norm. Of another tensor each sum is off by some 1 / sqrt(SUMS) of it.
TOLERANCE = 0.01
DEEPEST = 8  # structures within structures

Sketch = list[list[Any]]  # for each part of a batch its place with what is exact, and its sums


def sketch_of(split: Split) -> Sketch:
    """Return the sketch of a few samples, spread over a split; plain values, for checkpoints.

    An error of reading them is part of it, as they may never be trained on.
    """
    count = len(split)
    numbers = np.unique(np.linspace(0, count - 1, min(SAMPLES, count)).astype(np.int64))
    if in_order(split):
        numbers = np.arange(min(FIRST_SAMPLES, count))
    if not len(numbers):
        return []
    try:
        with drawing(0, 0, 0):  # a split of the user's may draw
            (loaded,) = stream(split, [numbers], 0)
            return [*_parts("", loaded.batch, DEEPEST)]
    except Exception as error:  # of the user's code
        return [[f"{type(error).__name__}: {error}", []]]


def alike(one: Sketch, two: Sketch) -> bool:
    """Return whether two sketches may be those of the same samples."""
    return len(one) == len(two) and all(map(_are_alike, one, two))


def _are_alike(one: list[Any], two: list[Any]) -> bool:
    (text, sums), (other_text, other_sums) = one, two
    if text != other_text or len(sums) != len(other_sums):
        return False
    norm = max(sums[:1] + other_sums[:1], default=0.0)
    return all(abs(a - b) <= TOLERANCE * norm for a, b in zip(sums, other_sums, strict=True))


def _parts(path: str, item: Any, depth: int) -> Iterator[list[Any]]:
    """Yield the parts of a batch, each with its place in it."""
    if isinstance(item, np.ndarray | np.generic) and np.asarray(item).dtype.kind in "biufc":
        item = torch.from_numpy(np.ascontiguousarray(item))
    if isinstance(item, float):
        item = torch.tensor(item, dtype=torch.float64)
    if isinstance(item, torch.Tensor):
        yield _of_tensor(path, item.detach().cpu())
        return
    inner = dict(items_of(item) or {})
    if not inner and not isinstance(item, str | bytes | int | None) and hasattr(item, "__dict__"):
        inner = vars(item)
    if inner and depth:
        for key, value in inner.items():
            yield from _parts(f"{path}/{key}", value, depth - 1)
    elif isinstance(item, str | bytes | int | None):
        yield [f"{path}: {item!r}", []]
    else:
        yield [f"{path}: {type(item).__qualname__}", []]


def _of_tensor(path: str, values: torch.Tensor) -> list[Any]:
    text = f"{path}: {values.dtype} {list(values.shape)}"
    if values.layout is not torch.strided:
        return [f"{text} {values.layout}", []]
    values = values.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if values.is_complex():
        values = torch.view_as_real(values).reshape(-1)
    # Bytes are pixels more often than numbers of classes.
    if not values.is_floating_point() and values.dtype is not torch.uint8:
        return [f"{text} {hashlib.sha256(bytes_of(values).data).hexdigest()}", []]
    numbers = torch.nan_to_num(values.double(), posinf=1e30, neginf=-1e30)
    signs = torch.randint(2, numbers.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    sums = torch.zeros(SUMS, dtype=torch.float64)
    sums.index_add_(0, torch.arange(len(numbers)) % SUMS, numbers * signs)
    return [text, [float(numbers.norm()), *sums.tolist()]]
