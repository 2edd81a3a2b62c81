"""Tasks for `--task tests.parallel.tasks:NAME`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hvdtrain import Splits, Sums, Task, TensorSplit
from hvdtrain.topology import Topology
from tests.parallel.plugins import spoil_gradients


class Noisy(TensorSplit):
    """Replaces one token of each sequence at random, by torch's own generator."""

    def batch(self, indices, epoch=0):
        tokens = super().batch(indices, epoch)[0].clone()
        tokens[:, 0] = torch.randint(0, 8, (len(tokens),))
        return tokens, tokens


class Tokens(Task):
    """Sequences of 1 to 9 tokens, padded with -1: the loss is the mean over all tokens."""

    metrics = ("right",)
    counts_samples = False

    def build_data(self) -> Splits:
        generator = torch.Generator().manual_seed(4)
        tokens = torch.randint(0, 8, (170, 9), generator=generator)
        lengths = torch.randint(1, 10, (170, 1), generator=generator)
        tokens[torch.arange(9) >= lengths] = -1
        train, valid = (Noisy(part, part) for part in (tokens[:133], tokens[133:]))
        return Splits("tokens", train, valid)

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Embedding(8, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 8)
        )

    def loss(self, model, batch) -> Sums:
        tokens = batch[0]
        known, wanted = tokens[:, :-1].clamp(min=0), tokens[:, 1:]
        is_token = wanted >= 0
        scores, wanted = model(known)[is_token], wanted[is_token]
        loss = torch.nn.functional.cross_entropy(scores, wanted, reduction="sum")
        return Sums(loss, len(wanted), {"right": (scores.argmax(-1) == wanted).sum()})


class Pictures(Task):
    """Pictures of three colours, with labels that depend on their place in the set."""

    def build_data(self) -> Splits:
        generator = torch.Generator().manual_seed(1)
        split = self.split(torch.rand(64, 3, 12, 12, generator=generator), torch.arange(64) % 4)
        return Splits("pictures", split, split)

    def split(self, inputs: torch.Tensor, labels: torch.Tensor) -> TensorSplit:
        return TensorSplit(inputs, labels)

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3),
            torch.nn.BatchNorm2d(8),
            torch.nn.Dropout(0.3),
            torch.nn.Flatten(),
            torch.nn.Linear(800, 4),
        )

    def loss(self, model, batch) -> Sums:
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return Sums(loss, len(batch[1]))


class Decoded(TensorSplit):
    """Gives named tuples of pictures in the layout of decoders: height, width, channels."""

    def batch(self, indices, epoch=0):
        inputs, labels = super().batch(indices, epoch)
        return Batch(inputs.to(memory_format=torch.channels_last), labels)


class Batch(NamedTuple):
    inputs: torch.Tensor
    labels: torch.Tensor


class DecodedPictures(Pictures):
    def split(self, inputs: torch.Tensor, labels: torch.Tensor) -> TensorSplit:
        return Decoded(inputs, labels)


class Around(torch.nn.Module):
    """Keeps its last features, counts its calls in an attribute, and multiplies by a constant."""

    def __init__(self, inner: torch.nn.Module, anneals: bool) -> None:
        super().__init__()
        self.inner, self.anneals, self.calls = inner, anneals, 0

    def forward(self, inputs):
        self.calls += 1
        self.features = self.inner(inputs) / (self.calls if self.anneals else 1)
        return self.features @ torch.eye(4)


class Caching(Pictures):
    def build_model(self) -> torch.nn.Module:
        return Around(super().build_model(), anneals=False)


class Annealed(Pictures):
    def build_model(self) -> torch.nn.Module:
        return Around(super().build_model(), anneals=True)


class WrongCaching(Caching):
    """The backward pass of rank 1 is wrong."""

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        if Topology.from_environment().rank == 1:
            spoil_gradients(model.inner[0])
        return model
