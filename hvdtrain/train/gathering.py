"""Features of all samples of a global batch, for losses that compare each with all others.

A rank computes the features of its own samples, gathers those of all ranks, and computes the losses
of its own samples from them. The gradient of a feature is the sum over the losses of all ranks.

Virtual workers compute one after another, so the features of later ones are not there when the
losses of earlier ones need them. They make three rounds of passes over the same batches, with the
same random numbers and buffers: the first collects all features F; the second computes the gradient
of each share's losses with respect to F, which are added in the order of the shares; in the third
the gradients of parameters are made, of the losses with F held constant, and of each share's own
features with the gradient from the second. This is gradient caching (Gao et al., "Scaling Deep
Contrastive Learning Batch Size under Memory Limited Setup", 2021).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hvdtrain.data import SharesLike, VirtualShares
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange, summed
from hvdtrain.log import few

NAME = "hvdtrain.all_gather"


class BatchSlice(NamedTuple):
    """The slice of its micro-batch that a pass has."""

    share: int
    micro_batch: int
    first: int  # number of its first sample
    samples: int  # of its own; 0: its batch has one that stands in
    all_samples: int


def padded(features: torch.Tensor, batch_slice: BatchSlice) -> torch.Tensor:
    """Return the features in their rows among those of all samples, all others zero."""
    after = batch_slice.all_samples - batch_slice.first - batch_slice.samples
    rows = [features.new_zeros(n, *features.shape[1:]) for n in (batch_slice.first, after)]
    return torch.cat([rows[0], features[: batch_slice.samples], rows[1]])


class Gathering:
    """The features that the passes of a step gather, without virtual workers."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._calls = 0  # of this pass

    def trials(self) -> Iterator[None]:
        """Yield for each round of passes before those that make gradients of parameters."""
        yield from ()

    def begin_pass(self) -> None:
        self._calls = 0

    def gather(self, features: torch.Tensor, batch_slice: BatchSlice) -> torch.Tensor:
        """Collective: return the features of all samples of the micro-batch, in their order."""
        name, self._calls = f"{NAME}.{self._calls}", self._calls + 1
        rows = padded(features, batch_slice)
        if not rows.dtype.is_floating_point:
            return self._exchange.sum_later(rows, name)()
        return summed(rows, self._exchange, name, counts=batch_slice.samples > 0)

    def backward(self, loss: torch.Tensor, batch_slice: BatchSlice) -> None:
        """Collective: make the gradients of a pass."""
        loss.backward()


@dataclass
class _Gathered:
    """What a call of `gather` is about, for one micro-batch."""

    features: torch.Tensor  # of all samples
    gradients: torch.Tensor | None = None  # by share; then their sum, of the shape of `features`


class VirtualGathering(Gathering):
    """The features that the passes of a step gather, with `shares` virtual workers."""

    def __init__(self, exchange: Exchange, shares: int) -> None:
        super().__init__(exchange)
        self._shares, self._round = shares, 0
        self._gathered: dict[tuple[int, int], _Gathered] = {}  # by micro-batch and call
        self._leaves: list[torch.Tensor] = []  # of this pass, by call
        self._local_features: list[torch.Tensor] = []

    def trials(self) -> Iterator[None]:
        """Collective: yield for each of two rounds, and exchange what they have found."""
        self._round = 0
        self._gathered.clear()
        yield
        for (micro_batch, call), gathered in sorted(self._gathered.items()):
            name = f"{NAME}.{micro_batch}.{call}"
            gathered.features = self._exchange.sum_later(gathered.features, name)()
        self._round = 1
        yield
        for (micro_batch, call), gathered in sorted(self._gathered.items()):
            if gathered.features.dtype.is_floating_point:
                name = f"{NAME}.{micro_batch}.{call}.backward"
                table = self._table_of(gathered)
                gathered.gradients = self._exchange.sum_later(table, name)().sum(0)
        self._round = 2

    def _table_of(self, gathered: _Gathered) -> torch.Tensor:
        """Return the gradients of each share, made when they are first asked for."""
        if gathered.gradients is None:
            features = gathered.features
            gathered.gradients = features.new_zeros(self._shares, *features.shape)
        return gathered.gradients

    def begin_pass(self) -> None:
        self._calls = 0
        self._leaves, self._local_features = [], []

    def gather(self, features: torch.Tensor, batch_slice: BatchSlice) -> torch.Tensor:
        key, self._calls = (batch_slice.micro_batch, self._calls), self._calls + 1
        if self._round == 0:
            rows = padded(features.detach(), batch_slice)
            if key in self._gathered:
                self._gathered[key].features += rows
            else:
                self._gathered[key] = _Gathered(rows)
            return rows
        all_features = self._gathered[key].features
        if self._round == 2:
            self._local_features.append(features)
            return all_features
        leaf = all_features.detach()
        self._leaves.append(leaf.requires_grad_(leaf.dtype.is_floating_point))
        return leaf

    def backward(self, loss: torch.Tensor, batch_slice: BatchSlice) -> None:
        if self._round == 1:
            self._differentiate(loss, batch_slice)
        if self._round < 2:
            return
        tensors, gradients = [loss], [torch.ones_like(loss)]
        for call, features in enumerate(self._local_features):
            gradient = self._gathered[batch_slice.micro_batch, call].gradients
            if features.requires_grad and gradient is not None and batch_slice.samples:
                tensors.append(features)
                gradients.append(gradient.narrow(0, batch_slice.first, batch_slice.samples))
        torch.autograd.backward(tensors, gradients)

    def _differentiate(self, loss: torch.Tensor, batch_slice: BatchSlice) -> None:
        leaves = {call: leaf for call, leaf in enumerate(self._leaves) if leaf.requires_grad}
        if not leaves or not batch_slice.samples:
            return
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for call, gradient in zip(leaves, gradients, strict=True):
            table = self._table_of(self._gathered[batch_slice.micro_batch, call])
            if gradient is not None:
                table[batch_slice.share] = gradient


def gathering_of(exchange: Exchange, shares: SharesLike) -> Gathering:
    """Return an object that gathers the features of these shares. Raises UsageError, on all ranks,
    if one has no virtual worker, since that would not take part.
    """
    if isinstance(shares, VirtualShares):
        if idle := [rank for rank in range(exchange.size) if not shares.of_rank(rank)]:
            raise UsageError(
                f"gathers=True: rank_weights leaves none of the {shares.rows} virtual workers for "
                f"these ranks: {few(idle)}. Give weights that leave one for each"
            )
        return VirtualGathering(exchange, shares.rows)
    return Gathering(exchange)
