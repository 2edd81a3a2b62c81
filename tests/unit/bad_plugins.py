"""What a user may hand in and has got wrong: data, models and tasks for `hvdtrain train`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hvdtrain import Splits, Sums, Task
from hvdtrain.data import Dataset, ImageFormat, TensorSplit

NOT_CALLABLE = 3


def good() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn((40, 1, 4, 4), generator=generator), torch.arange(40) % 3
    split = TensorSplit(inputs, labels)
    return Dataset("good", (1, 4, 4), 3, split, TensorSplit(inputs[:9].clone(), labels[:9]))


def _with(inputs: Any = None, labels: Any = None) -> Dataset:
    data = good()
    assert isinstance(data.train, TensorSplit)
    old = data.train
    inputs, labels = (old.inputs if inputs is None else inputs), labels
    return replace(data, train=TensorSplit(inputs, old.labels if labels is None else labels))


def doubles() -> Dataset:
    """Not wrong: it becomes --dtype."""
    return _with(inputs=torch.zeros(40, 1, 4, 4, dtype=torch.float64))


def raises() -> Dataset:
    raise OSError("the disk of the lab is away")


def leaves() -> Dataset:
    raise SystemExit(3)


def needs_arguments(folder: str) -> Dataset:
    raise AssertionError(folder)


def number() -> Any:
    return 42


def no_split() -> Dataset:
    return replace(good(), train=42)  # type: ignore[arg-type]


def other_shape() -> Dataset:
    return replace(good(), shape=(3, 4, 4))


def flat_shape() -> Dataset:
    return replace(good(), shape=(16,))  # type: ignore[arg-type]


def one_class() -> Dataset:
    return replace(good(), classes=1)


def few_names() -> Dataset:
    return replace(good(), names=("a", "b"))


def no_format() -> Dataset:
    return replace(good(), images="RGB")  # type: ignore[arg-type]


def other_format() -> Dataset:
    return replace(good(), images=ImageFormat(3, 4, 4))


def empty_train() -> Dataset:
    return replace(good(), train=TensorSplit(torch.zeros(0, 1, 4, 4), torch.zeros(0).long()))


def empty_valid() -> Dataset:
    return replace(good(), valid=TensorSplit(torch.zeros(0, 1, 4, 4), torch.zeros(0).long()))


def labels_beyond() -> Dataset:
    return _with(labels=torch.arange(40) % 4)


def negative_labels() -> Dataset:
    return _with(labels=torch.arange(40) % 3 - 1)


def float_labels() -> Dataset:
    return _with(labels=(torch.arange(40) % 3).float())


def one_hot_labels() -> Dataset:
    return _with(labels=torch.eye(3)[torch.arange(40) % 3].long())


def list_labels() -> Dataset:
    return _with(labels=[0, 1] * 20)


def fewer_labels() -> Dataset:
    return _with(labels=torch.arange(39) % 3)


def nan_pixels() -> Dataset:
    inputs = torch.zeros(40, 1, 4, 4)
    inputs[7, 0, 2, 1] = torch.nan
    return _with(inputs=inputs)


def byte_pixels() -> Dataset:
    return _with(inputs=torch.zeros(40, 1, 4, 4, dtype=torch.uint8))


class _LastBad(torch.utils.data.Dataset[Any]):
    classes = ("a", "b")

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1, 4, 4), 2 if index == 7 else index % 2


def late_bad_label() -> Any:
    return _LastBad(), _LastBad()


def no_module(shape, classes) -> Any:
    return "resnet"


def nothing_to_train(shape, classes) -> nn.Module:
    return nn.Flatten()


def model_raises(shape, classes) -> nn.Module:
    raise KeyError("no such layer")


def for_other_shape(shape, classes) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(999, classes))


def fewer_classes(shape, classes) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, classes - 1))


def with_batch_norm(shape, classes) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, classes))


def linear(shape, classes) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, classes))


class Good(Task):
    """The tasks below differ from it in one thing."""

    metrics = ("right",)

    def build_data(self) -> Splits:
        data = good()
        return Splits("good", data.train, data.valid)

    def build_model(self) -> nn.Module:
        return linear((1, 4, 4), 3)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        scores = model(batch[0])
        right = (scores.argmax(1) == batch[1]).sum()
        loss = functional.cross_entropy(scores, batch[1], reduction="sum")
        return Sums(loss, len(batch[1]), {"right": right})


class NotATask:
    def __init__(self, settings: Any) -> None: ...


class NoMethods(Task):
    """Defines nothing."""


class NoModel(Good):
    build_model = Task.build_model


class NoData(Good):
    def build_data(self) -> Any:
        return [1, 2]


class NoBatch(Good):
    def build_data(self) -> Splits:
        return Splits("lists", [1, 2], [3])  # type: ignore[arg-type]


class Raising(Good):
    def build_data(self) -> Splits:
        raise OSError("the disk of the lab is away")


class NoNetwork(Good):
    def build_model(self) -> Any:
        return 3


class NoSums(Good):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch).loss


class Detached(Good):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        found = super().loss(model, batch)
        return replace(found, loss=found.loss.detach())


class Unreduced(Good):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        found = super().loss(model, batch)
        return replace(found, loss=found.loss.repeat(5))


class OneElement(Good):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        found = super().loss(model, batch)
        return replace(found, loss=found.loss[None])


class Number(Good):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        found = super().loss(model, batch)
        return replace(found, loss=found.loss.item())


class Miscounting(Good):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return replace(super().loss(model, batch), samples=1)


class OtherMetrics(Good):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return replace(super().loss(model, batch), metrics={"left": torch.zeros(())})


class PlainMetrics(Good):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return replace(super().loss(model, batch), metrics={"right": 3})


class LongMetrics(Good):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return replace(super().loss(model, batch), metrics={"right": torch.zeros(2)})
