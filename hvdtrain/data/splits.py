"""Types of splits and data sets, their checks, and fingerprints that detect changed samples."""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hvdtrain.config import plugins
from hvdtrain.data.sampler import Indices
from hvdtrain.errors import UsageError
from hvdtrain.log import counted

Batch = tuple[torch.Tensor, torch.Tensor]
Shape = tuple[int, int, int]
# Pillow's default. Rotating and converting an image may take 7 bytes per pixel.
MAX_PIXELS = 89_478_485
MOST_INPUT_PIXELS = 1 << 24  # 4096 x 4096, in float32 and of 3 channels 200 MB


class Split(Protocol):
    """Samples that are read by number, in batches.

    A split may also offer `fingerprint()`, by which a resumed run detects that its data have
    changed: one text for each sample, in order, such as its name and label, or a single text that
    changes whenever its samples do. Otherwise only the number of samples is compared. With an
    attribute `in_order` that is true, samples are trained on in the order of their numbers.
    """

    def __len__(self) -> int: ...

    def batch(self, indices: Indices, epoch: int = 0) -> Any:
        """Return the samples of `indices` (int64, any length) as one batch for the task's `loss`.

        A batch consists of tensors, or tuples, lists or dicts of them; in classification it is
        (inputs of shape (len(indices), channels, height, width), int64 labels). `epoch`, counted
        from 0, matters only for random augmentation.
        """


def is_endless(split: Split) -> bool:
    """Return whether the number of samples of this split is not known."""
    return bool(getattr(split, "is_endless", False))


def check_split(flag: str, name: str, part: str, split: Any) -> None:
    """Raise UsageError unless `split`, from the user's `flag`=`name`, is a Split with samples."""
    if lacking := [method for method in ("__len__", "batch") if not hasattr(split, method)]:
        raise UsageError(
            f"{flag}={name}: its {part} split, a {type(split).__name__}, has no "
            f"{' and no '.join(lacking)} (see hvdtrain.Split)"
        )
    if part == "valid" and (order := getattr(split, "order", None)):
        raise UsageError(f"{flag}={name}: {order.refusal}")
    if part == "valid" and is_endless(split):
        raise UsageError(
            f"{flag}={name}: its valid split has no length, and each sample is evaluated once: "
            "give hvdtrain.IterableSplit(dataset, length)"
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


@dataclass(eq=False)
class TensorSplit:
    """Samples held in memory.

    `inputs`: (samples, channels, height, width), floating point; `labels`: int64.
    """

    inputs: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Indices, epoch: int = 0) -> Batch:
        chosen = torch.from_numpy(indices)
        return self.inputs[chosen], self.labels[chosen]

    def fingerprint(self) -> Iterator[str]:
        shape = list(self.inputs.shape[1:])
        return (f"label {label} of shape {shape}" for label in self.labels.tolist())


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

    def __post_init__(self) -> None:
        """Raise ValueError for sizes and statistics that no image can have."""
        if self.channels not in (1, 3) or min(self.height, self.width) < 1:
            raise ValueError(f"{self.channels} channels, {self.height} x {self.width} pixels")
        if self.height * self.width > MOST_INPUT_PIXELS:
            raise ValueError(
                f"{self.height} x {self.width} pixels are more than {MOST_INPUT_PIXELS:,}"
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels) or not all(map(math.isfinite, values)):
                raise ValueError(f"{name}={values}: a number, or one for each channel")
        if 0 in self.std:
            raise ValueError(f"std={self.std}: must not be 0")


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
        return self.names or tuple(map(str, range(self.classes)))


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


MOST_MARKS = 512
Fingerprint = dict[str, Any]  # plain values, for checkpoints


def texts_of(holder: object) -> Iterable[str] | None:
    """Return the texts of `holder.fingerprint()`, or None if it has none."""
    offered = getattr(holder, "fingerprint", None)
    texts = offered() if offered else None
    return [texts] if isinstance(texts, str) else None if texts is None else map(str, texts)


def fingerprint(split: Split) -> Fingerprint:
    """Return the number of samples, and cumulative digests of the texts at equally spaced marks.

    The spacing is a power of two, so that the marks of two fingerprints can be compared. No sample
    is read, and texts are taken one by one.
    """
    distance, count = 1, 0
    digest = hashlib.sha256()
    marks: list[str] = []
    for count, text in enumerate(texts_of(split) or (), start=1):
        if count > distance * MOST_MARKS:
            distance, marks = 2 * distance, marks[1::2]
        digest.update(f"{len(text)}:{text}".encode())
        if count % distance == 0:
            marks.append(digest.hexdigest()[:16])
    return {
        "samples": len(split),
        "texts": count,
        "distance": distance,
        "marks": marks,
        "digest": digest.hexdigest(),
    }


def difference(old: Fingerprint, new: Fingerprint, split: Split | None) -> str | None:
    """Return a description of the change from `old` to `new`, or None.

    `split`: the new split, if available, for names.
    """
    before, now = old["samples"], new["samples"]
    if before != now:
        text = f"{counted(before, 'sample')} then and {now:,} now"
    elif old["digest"] != new["digest"]:
        text = f"{counted(now, 'sample')} as before, but with other names or labels"
    else:
        return None
    if not (old["texts"] == before and new["texts"] == now):  # not one for each sample
        return text
    first, distance = _first_difference(old, new)
    last = min(first + distance, now) - 1
    if first >= now:
        return f"{text}; the first {now} are the same"
    position = f"number {first}" if first == last else f"one of the numbers {first} to {last}"
    texts = list(itertools.islice(texts_of(split) or (), first, last + 1))
    names = dict.fromkeys((texts[0], texts[-1])) if texts else {}
    ending = f", now {' to '.join(names)}" if names else ""
    return f"{text}; the first that differs is {position}{ending}"


def _first_difference(old: Fingerprint, new: Fingerprint) -> tuple[int, int]:
    """Return the first sample that may differ, and the number of samples in which one does."""
    distance = max(old["distance"], new["distance"])
    ratios = (distance // old["distance"], distance // new["distance"])
    marks = [one["marks"][r - 1 :: r] for one, r in zip((old, new), ratios, strict=True)]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*marks, strict=False))
    return sum(1 for _ in same) * distance, distance
