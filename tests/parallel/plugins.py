"""Models for `--model tests.parallel.plugins:NAME` that make real training go wrong."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

from hvdtrain import Splits, Sums, Task, TensorSplit
from hvdtrain.data import Dataset
from hvdtrain.models import LeNet
from hvdtrain.topology import Topology

FAULTY_RANK = 1
FAULTY_CALL = 4
BUSY = "HVDTRAIN_TEST_BUSY"
TRAIN_SAMPLES = 1433  # of digits


class FailingLeNet(LeNet):
    """Calls `fault` in one rank's fourth forward pass."""

    def __init__(self, channels: int, classes: int, fault) -> None:
        super().__init__(channels, classes)
        self.calls = 0
        self.fault = fault

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += self.training  # a model is tried before, and evaluated after
        faulty = Topology.from_environment().rank == FAULTY_RANK
        if self.training and self.calls == FAULTY_CALL and faulty:
            self.fault()
        return super().forward(torch.nn.functional.interpolate(images, (28, 28)))


def raises(shape, classes) -> torch.nn.Module:
    def fault() -> None:
        raise ValueError("a worker's own mistake")

    return FailingLeNet(shape[0], classes, fault)


def leaves(shape, classes) -> torch.nn.Module:
    return FailingLeNet(shape[0], classes, lambda: sys.exit(0))


def leaves_at_once(shape, classes) -> torch.nn.Module:
    return FailingLeNet(shape[0], classes, lambda: os._exit(0))


def is_stopped(shape, classes) -> torch.nn.Module:
    return FailingLeNet(shape[0], classes, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def is_killed(shape, classes) -> torch.nn.Module:
    return FailingLeNet(shape[0], classes, lambda: os.kill(os.getpid(), signal.SIGKILL))


class RootLeNet(FailingLeNet):
    """Adds sqrt(root^2) to the scores; from one rank's fourth pass on sqrt(0): no derivative."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__(channels, classes, lambda: None)
        self.root = torch.nn.Parameter(torch.ones(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores = super().forward(images)
        faulty = self.training and self.calls >= FAULTY_CALL
        faulty = faulty and Topology.from_environment().rank == FAULTY_RANK
        return scores + torch.sqrt((self.root * (0.0 if faulty else 1.0)).square())


def has_no_derivative(shape, classes) -> torch.nn.Module:
    return RootLeNet(shape[0], classes)


def raises_when_built(shape, classes) -> torch.nn.Module:
    raise KeyError("no such layer")


def grows(shape, classes) -> torch.nn.Module:
    """Unfreezes a layer in the middle of training, on all ranks."""
    model = FailingLeNet(shape[0], classes, lambda: None)
    model.hidden.requires_grad_(False)
    forward = model.forward

    def forward_and_unfreeze(images: torch.Tensor) -> torch.Tensor:
        if model.calls == FAULTY_CALL:
            model.hidden.requires_grad_(True)
        return forward(images)

    model.forward = forward_and_unfreeze
    return model


def wrong_exchange(shape, classes) -> torch.nn.Module:
    """From the fourth step on one rank gets one wrong element from the exchange."""

    def damage(gradient: torch.Tensor, rank: int) -> None:
        if rank == FAULTY_RANK:
            gradient[3, 0, 1, 2] += 1e-3

    return _damaging(damage, shape, classes)


def flips_a_bit(shape, classes) -> torch.nn.Module:
    """From the fourth step on the lowest bit of one element is wrong, on all ranks alike."""

    def damage(gradient: torch.Tensor, rank: int) -> None:
        gradient.view(torch.int32)[3, 0, 1, 2] ^= 1

    return _damaging(damage, shape, classes)


def wrong_backward(shape, classes) -> torch.nn.Module:
    """The backward pass of one rank is wrong, always."""
    model = FailingLeNet(shape[0], classes, lambda: None)
    if Topology.from_environment().rank == FAULTY_RANK:
        spoil_gradients(model.hidden)
    return model


def spoil_gradients(layer: torch.nn.Module) -> None:
    """Flip a bit of the largest gradient of a layer's output, in every backward pass."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone(memory_format=torch.contiguous_format)
        spoilt.view(-1).view(torch.int32)[int(spoilt.abs().argmax())] ^= 1 << 20
        return spoilt

    def watch(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(spoil)

    layer.register_forward_hook(watch)


def _damaging(damage, shape, classes) -> torch.nn.Module:
    from hvdtrain.exchange.horovod import HorovodExchange

    honest = HorovodExchange.reduce_gradients
    calls = 0

    def faulty(self, optimizer, look=False) -> bool:
        nonlocal calls
        honest(self, optimizer)
        calls += 1
        if calls >= FAULTY_CALL:
            damage(optimizer.param_groups[0]["params"][0].grad, self.rank)
        return False

    HorovodExchange.reduce_gradients = faulty
    return FailingLeNet(shape[0], classes, lambda: None)


def logs_samples(shape, classes) -> torch.nn.Module:
    """Logs the number of every training sample; one rank sends itself HVDTRAIN_TEST_SIGNAL."""
    from hvdtrain.data.splits import TensorSplit

    log = Path(os.environ["HVDTRAIN_TEST_LOG"])
    honest = TensorSplit.batch
    number = os.environ.get("HVDTRAIN_TEST_SIGNAL")
    send = (lambda: os.kill(os.getpid(), int(number))) if number else (lambda: None)
    model = FailingLeNet(shape[0], classes, send)

    def batch(self, indices, epoch=0):
        if len(self) == TRAIN_SAMPLES and model.training:
            with log.open("a") as stream:  # one write: lines of several ranks do not mix
                stream.write("".join(f"{index}\n" for index in indices))
        return honest(self, indices, epoch)

    TensorSplit.batch = batch
    return model


def small_resnet(shape, classes) -> torch.nn.Module:
    """torchvision's ResNet with one block a stage and a 3x3 stem, for small images."""
    from hvdtrain.data.builtin import import_torchvision

    resnet = import_torchvision().models.resnet
    model = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=classes)
    model.conv1 = torch.nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
    model.maxpool = torch.nn.Identity()
    return model


class RowTransformer(torch.nn.Module):
    """An encoder over an image's rows, with a mean over them."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(shape[0] * shape[2], 16)
        self.encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(16, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.transpose(1, 2).flatten(2)
        return self.head(self.encoder(self.embed(rows)).mean(dim=1))


def small_transformer(shape, classes) -> torch.nn.Module:
    return RowTransformer(shape, classes)


class PixelCount(torch.nn.Module):
    """Has buffers of its own that the scores depend on, and random numbers, in evaluations too.

    Buffers count the training passes and sum their pixels. With `lazy`, the first pass makes one.
    """

    def __init__(self, lazy: bool) -> None:
        super().__init__()
        self.lazy = lazy
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("pixels", torch.zeros(()))
        self.register_buffer("darkest", None, persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
            self.pixels += images.detach().mean()
        if self.training and self.lazy:
            self.darkest = images.detach().amin(0) * (1 if self.darkest is None else 2)
        noise = 0.1 * torch.rand_like(images)
        darkest = 0 if self.darkest is None else self.darkest
        return images * (1 + 0.01 * self.pixels) + 0.001 * self.passes + noise + darkest


def dropout_everywhere(shape, classes, lazy=False) -> torch.nn.Module:
    """Batch norm, dropout of elements and of channels, and buffers of its own."""
    return torch.nn.Sequential(
        PixelCount(lazy),
        torch.nn.Conv2d(shape[0], 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.Dropout2d(0.2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * shape[1] * shape[2], 300),  # 300: no multiple of a block
        torch.nn.Dropout(0.3),
        torch.nn.Linear(300, classes),
    )


def dropout_and_lazy_buffer(shape, classes) -> torch.nn.Module:
    return dropout_everywhere(shape, classes, lazy=True)


def resnet_with_dropout(shape, classes) -> torch.nn.Module:
    model = small_resnet(shape, classes)
    model.fc = torch.nn.Sequential(torch.nn.Dropout(0.2), model.fc)
    return model


def resnet18_with_dropout(shape, classes) -> torch.nn.Module:
    from hvdtrain.models import build_model

    model = build_model("resnet18-small", shape, classes, torch.float32)
    model.fc = torch.nn.Sequential(torch.nn.Dropout(0.2), model.fc)
    return model


def lenet_with_dropout(shape, classes) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Upsample((28, 28)), LeNet(shape[0], classes), torch.nn.Dropout(0.1)
    )


def _around(*middle: torch.nn.Module):
    """Builds a small network for inputs of 16 values, with these modules as its number 2 and on."""
    layers = [torch.nn.Flatten(), torch.nn.Linear(16, 8), *middle, torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 10))


def small_plain(shape, classes) -> torch.nn.Module:
    return _around()


def small_dropout_and_batch_norm(shape, classes) -> torch.nn.Module:
    return _around(torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8))


class MeanLoss(Task):
    """The mistake of returning a mean where the sum over samples belongs."""

    def build_data(self) -> Splits:
        x = torch.linspace(-1, 1, 64, dtype=self.settings.dtype)[:, None]
        split = TensorSplit(x.expand(64, 16), x**2)
        return Splits("squares", train=split, valid=split)

    def build_model(self) -> torch.nn.Module:
        return _around()

    def loss(self, model: torch.nn.Module, batch) -> Sums:
        x, y = batch
        return Sums((model(x) - y).square().mean(), len(x))


class UnseededSplit(TensorSplit):
    """From the second epoch on it adds noise that differs between processes and readings."""

    def batch(self, indices, epoch=0):
        inputs, labels = super().batch(indices, epoch)
        noise = np.random.default_rng().normal(size=tuple(inputs.shape)) * (epoch > 0)
        return inputs + torch.from_numpy(noise).to(inputs.dtype), labels


def unseeded() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    inputs, labels = torch.randn((48, 1, 4, 4), generator=generator), torch.arange(48) % 10
    valid = TensorSplit(inputs[:9].clone(), labels[:9])
    return Dataset("unseeded", (1, 4, 4), 10, UnseededSplit(inputs, labels), valid)


class BusyAtTimes(torch.nn.Sequential):
    """One rank takes 0.1 s longer for the passes of its process within BUSY, such as 0:30.

    Of several ranks each takes some time more, so that it is known where others use the cores too.
    """

    passes = itertools.count()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        topology = Topology.from_environment()
        if self.training and topology.size > 1:
            first, stop = map(int, os.environ.get(BUSY, "0:0").split(":"))
            is_busy = topology.rank == FAULTY_RANK and first <= next(self.passes) < stop
            time.sleep(0.02 + 0.1 * is_busy)
        return super().forward(images)


def busy_at_times(shape, classes) -> torch.nn.Module:
    return BusyAtTimes(dropout_and_lazy_buffer(shape, classes))


def throttled(shape, classes) -> torch.nn.Module:
    """One rank takes 0.1 s longer for each pass: several times as long, also on a busy machine."""
    model = FailingLeNet(shape[0], classes, lambda: None)
    forward = model.forward

    def slowly(images: torch.Tensor) -> torch.Tensor:
        if model.training and Topology.from_environment().rank == FAULTY_RANK:
            time.sleep(0.1)
        return forward(images)

    model.forward = slowly
    return model
