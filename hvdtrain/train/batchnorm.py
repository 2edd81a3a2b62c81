"""Batch normalisation over several ranks: synchronised, or with the statistics of each rank.

`--sync-bn` takes mean and variance over the samples of all ranks. It exchanges sums, so it is exact
for uneven shares, and works on CPU and GPU. Without it each rank normalises by its own samples; the
running statistics are then averaged for evaluation and for the saved model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.exchange import Exchange


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks, collective in both passes: y = sum_r x_r, so dL/dx_r = sum_s dL_s/dy."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, exchange: Exchange, name: str) -> torch.Tensor:
        ctx.exchange, ctx.name = exchange, name
        return exchange.sum_later(values.clone(), name)()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        summed = ctx.exchange.sum_later(gradient.clone(), f"{ctx.name}.backward")()
        return summed, None, None


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation by the statistics of all ranks' samples.

    Every rank must call it at the same time, even without samples. Parameters and buffers are those
    of the layer that it replaces. As in torch.nn.BatchNorm, only the running variance is unbiased.
    """

    exchange: Exchange
    collective: str  # a name that is unique within the model

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 (torch's own name)
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Normalise `input`, of shape (samples, channels, ...); a collective in training mode."""
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        mean, variance, count = self._statistics(input)
        if self.running_mean is not None and self.running_var is not None:
            self._update_running(mean.detach(), variance.detach(), count)
        shape = (1, -1, *[1] * (input.dim() - 2))
        scale = torch.rsqrt(variance + self.eps)
        shift = -mean * scale
        if self.affine:
            scale = scale * self.weight
            shift = shift * self.weight + self.bias
        return (input * scale.view(shape) + shift.view(shape)).to(input.dtype)

    def _statistics(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Collective: return mean, biased variance (both (channels,)) and count, over all ranks."""
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        dims = [0, *range(2, values.dim())]
        own_count = wide.new_full((1,), values.numel() / values.size(1))
        sums = self._sum(torch.cat([wide.sum(dims), own_count]), "mean")
        count = float(sums[-1].detach())
        if count <= 1:
            raise ValueError("batch norm needs more than one value per channel over all ranks")
        mean = sums[:-1] / count
        centred = wide - mean.view(1, -1, *[1] * (values.dim() - 2))
        squares = self._sum(centred.square().sum(dims), "variance")
        return mean, squares / count, count

    def _sum(self, values: torch.Tensor, what: str) -> torch.Tensor:
        name = f"{self.collective}.{what}"
        summed: torch.Tensor = _SumOverRanks.apply(values, self.exchange, name)  # type: ignore[no-untyped-call]
        return summed

    def _update_running(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        assert self.running_mean is not None and self.running_var is not None
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1 / float(self.num_batches_tracked)
        assert factor is not None
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        unbiased = variance * (count / (count - 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether any layer is batch norm."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def normalises_over_batch(model: nn.Module) -> bool:
    """Return whether any layer normalises over the batch in its present mode: a frozen one, in
    evaluation mode, uses its running statistics.
    """
    layers = [it for it in model.modules() if isinstance(it, _BatchNorm)]
    return any(it.training or it.running_mean is None for it in layers)


def convert_to_sync(model: nn.Module, exchange: Exchange) -> nn.Module:
    """Replace every batch-norm layer by a synchronised one with the same tensors; return the model.

    A model that is itself a batch-norm layer is not changed; its replacement is returned.
    """
    if isinstance(model, _BatchNorm):
        return _converted(model, exchange, "hvdtrain.sync_bn")
    done: dict[nn.Module, SyncBatchNorm] = {}  # a layer may occur in several places
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, _BatchNorm):
            parent, _, name = path.rpartition(".")
            if module not in done:
                done[module] = _converted(module, exchange, f"hvdtrain.sync_bn.{path}")
            setattr(model.get_submodule(parent), name, done[module])
    return model


def _converted(module: _BatchNorm, exchange: Exchange, collective: str) -> SyncBatchNorm:
    sync = SyncBatchNorm(module.num_features)
    vars(sync).update(vars(module), exchange=exchange, collective=collective)
    return sync


def running_statistics(model: nn.Module) -> list[str]:
    """Return the names of the running means and variances that are not synchronised."""
    return [
        f"{path}.{name}" if path else name
        for path, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm)
        for name in ("running_mean", "running_var")
        if getattr(layer, name) is not None
    ]


@contextmanager
def averaged_statistics(
    model: nn.Module, exchange: Exchange, own_weight: float
) -> Iterator[nn.Module]:
    """Collective: yield the model with running statistics averaged over ranks.

    `own_weight`: proportional to this rank's samples. On exit each rank has its own ones again.
    """
    buffers = [model.get_buffer(name) for name in running_statistics(model)]
    if exchange.size == 1 or not buffers:
        yield model
        return
    own = [buffer.clone() for buffer in buffers]
    flat = torch.cat([buffer.reshape(-1).double() * own_weight for buffer in own])
    flat = torch.cat([flat, flat.new_tensor([own_weight])])
    total = exchange.sum_later(flat, "hvdtrain.statistics")()
    averages = (total[:-1] / total[-1]).split([buffer.numel() for buffer in buffers])
    try:
        for buffer, average in zip(buffers, averages, strict=True):
            buffer.copy_(average.view_as(buffer))
        yield model
    finally:
        for buffer, before in zip(buffers, own, strict=True):
            buffer.copy_(before)
