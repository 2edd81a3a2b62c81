"""User-defined data for classification: `--data package.module:callable`.

The callable takes no arguments and returns an hvdtrain.Dataset, or two map-style torch data sets
(train, valid) of samples (image tensor, class number), which reader processes then read.
`hvdtrain predict` needs an hvdtrain.ImageFormat, as `images` of the Dataset or `image_format` of
the first data set, to convert image files to such samples.
"""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain.config import plugins
from hvdtrain.data.reading import BadSample, StreamedSplit
from hvdtrain.data.splits import (
    Batch,
    Dataset,
    ImageFormat,
    ReadOptions,
    Shape,
    TensorSplit,
    check_split,
    texts_of,
)
from hvdtrain.errors import UsageError, refuse


def load_plugin(name: str, dtype: torch.dtype, options: ReadOptions) -> Dataset:
    """Return the checked data set of a user. Raises UsageError with its problems."""
    made = plugins.call("--data", name, plugins.import_callable("--data", name))
    if isinstance(made, tuple | list) and len(made) == 2:
        made = _wrapped(name, made, dtype, options)
    if not isinstance(made, Dataset):
        raise UsageError(
            f"--data={name}: returned {type(made).__name__}; expected hvdtrain.Dataset, or two "
            "torch data sets (train, valid) of (image, class)"
        )
    refuse(f"--data={name}: {problem}" for problem in _wrong_in_description(made))
    for part, split in (("train", made.train), ("valid", made.valid)):
        check_split("--data", name, part, split)
        if isinstance(split, TensorSplit):
            where = f"--data={name}: {part} split"
            refuse(f"{where}: {problem}" for problem in _wrong_in_tensors(split, made))
            split.inputs = split.inputs.to(dtype)
    return made


def _wrong_in_description(data: Dataset) -> Iterator[str]:
    sizes = tuple(data.shape) if isinstance(data.shape, tuple | list) else ()
    if len(sizes) != 3 or not all(isinstance(size, int) and size > 0 for size in sizes):
        yield f"shape must be (channels, height, width), and is {data.shape}"
    if not isinstance(data.classes, int) or data.classes < 2:
        yield f"classes must be a whole number of 2 or more, and is {data.classes}"
    elif data.names and len(data.names) != data.classes:
        yield f"names must be {data.classes}, one for each class, and are {len(data.names)}"
    if data.images is not None:
        channels = getattr(data.images, "channels", None)
        if not isinstance(data.images, ImageFormat) or channels not in (1, 3):
            yield f"images must be an hvdtrain.ImageFormat of 1 or 3 channels, and is {data.images}"
        elif sizes[:1] != (channels,):
            yield f"its images have {channels} channels, its shape is {data.shape}"


def _wrong_in_tensors(split: TensorSplit, data: Dataset) -> Iterator[str]:
    inputs, labels = split.inputs, split.labels
    kinds = [type(values).__name__ for values in (inputs, labels)]
    if kinds != ["Tensor", "Tensor"]:
        yield f"expected tensors, not {kinds}"
        return
    if tuple(inputs.shape[1:]) != tuple(data.shape) or inputs.shape[:1] != labels.shape:
        yield (
            f"inputs {list(inputs.shape)} and labels {list(labels.shape)} do not match each "
            f"other, or the shape {list(data.shape)}"
        )
    if not inputs.is_floating_point() or not bool(inputs.isfinite().all()):
        yield "inputs must be finite floating-point numbers, without NaN"
    if labels.dtype != torch.int64 or not bool(((labels >= 0) & (labels < data.classes)).all()):
        yield (
            f"labels must be int64 from 0 to {data.classes - 1}, and are {labels.dtype} from "
            f"{labels.min()} to {labels.max()}"
        )


@dataclass(frozen=True)
class TorchSamples:
    """Samples of a map-style torch data set."""

    name: str
    samples: Any
    shape: Shape
    classes: int
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.samples)

    def fingerprint(self) -> Iterable[str] | None:
        return texts_of(self.samples)

    def read(self, index: int, epoch: int) -> tuple[torch.Tensor, int]:
        try:
            image, label = self.samples[index]
        except Exception as error:
            raise BadSample(
                f"--data={self.name}: sample {index}: {type(error).__name__}: {error}"
            ) from error
        if problem := _problem_of(image, label, self.shape, self.classes):
            raise BadSample(f"--data={self.name}: sample {index}: {problem}")
        return image.to(self.dtype), int(label)

    def empty_batch(self) -> Batch:
        return torch.empty((0, *self.shape), dtype=self.dtype), torch.empty(0, dtype=torch.int64)


def _problem_of(image: Any, label: Any, shape: Shape, classes: int) -> str:
    if not isinstance(image, torch.Tensor) or not image.is_floating_point():
        return f"expected a floating-point tensor, not {getattr(image, 'dtype', type(image))}"
    if tuple(image.shape) != tuple(shape):
        return f"an image of shape {list(image.shape)}, where others have {list(shape)}"
    if not bool(image.isfinite().all()):
        return "its pixels are not all finite"
    try:
        number = operator.index(label)
    except TypeError:
        return f"class {label!r}: expected a whole number"
    return "" if 0 <= number < classes else f"class {number}: out of range for {classes} classes"


def _wrapped(name: str, made: Any, dtype: torch.dtype, options: ReadOptions) -> Dataset:
    if not all(hasattr(part, "__getitem__") and hasattr(part, "__len__") for part in made):
        raise UsageError(f"--data={name}: expected map-style data sets with a length")
    if not all(plugins.call("--data", name, part.__len__) for part in made):
        raise UsageError(f"--data={name}: a data set has no samples")
    train = made[0]
    first = plugins.call("--data", name, train.__getitem__, 0)
    image = first[0] if isinstance(first, tuple | list) and len(first) == 2 else first
    names = getattr(train, "classes", None)
    if not isinstance(names, list | tuple):
        raise UsageError(
            f"--data={name}: the first data set has no `classes`, the list of class names"
        )
    shape = tuple(getattr(image, "shape", ()))
    if len(shape) != 3:
        raise UsageError(
            f"--data={name}: images must be tensors (channels, height, width); the first is a "
            f"{type(image).__name__} of shape {list(shape)}"
        )
    samples = [TorchSamples(name, part, shape, len(names), dtype) for part in made]
    return Dataset(
        name,
        shape,
        len(names),
        train=StreamedSplit(samples[0], options.readers, may_skip=False, stay=True),
        valid=StreamedSplit(samples[1], options.readers, may_skip=False, stay=False),
        names=tuple(map(str, names)),
        images=getattr(train, "image_format", None),
    )
