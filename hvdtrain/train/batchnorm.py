"""Batch normalisation over several ranks: synchronised, or with the statistics of each rank.

`--sync-bn` takes mean and variance over the samples of all ranks. It exchanges sums, so it is exact
for uneven shares, and works on CPU and GPU. Without it each rank normalises by its own samples; the
running statistics are then averaged for evaluation and for the saved model.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from hvdtrain.exchange import Exchange, summed
from hvdtrain.train.worker_state import replaced, slots_of

RUNNING = ("running_mean", "running_var")  # statistics of normalisation layers


class SyncBatchNorm(_BatchNorm):
    """A layer of batch normalisation, of any class, by the statistics of all ranks' samples.

    Every rank must call it at the same time, even without samples. All of the layer stays as it is;
    only `torch.nn.functional.batch_norm`, which its own class calls, is replaced.
    """

    exchange: Exchange
    collective: str  # a name that is unique within the model
    counts = True  # whether its samples are some of the batch

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Compute what the layer's own class does; a collective in training mode."""
        with _Replacement(self) if self.training else nullcontext():
            return super().forward(*inputs, **named_inputs)


class _Replacement(TorchFunctionMode):
    """A context in which `torch.nn.functional.batch_norm` is synchronised."""

    def __init__(self, layer: SyncBatchNorm) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.batch_norm:
            return _batch_norm(self._layer, *args, **kwargs or {})
        return func(*args, **kwargs or {})


def _batch_norm(
    layer: SyncBatchNorm,
    input: torch.Tensor,  # noqa: A002 (torch's own names)
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Collective: normalise `input`, of shape (samples, channels, ...), by all ranks' samples.

    As in `torch.nn.functional.batch_norm`, only the running variance is unbiased.
    """
    if not training:
        normalised: torch.Tensor = torch.nn.functional.batch_norm(
            input, running_mean, running_var, weight, bias, training, momentum, eps
        )
        return normalised
    mean, variance, count = _statistics(layer, input)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
        unbiased = variance.detach() * (count / (count - 1))
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    shape = (1, -1, *[1] * (input.dim() - 2))
    scale = torch.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale
    shift = shift if bias is None else shift + bias
    return (input * scale.view(shape) + shift.view(shape)).to(input.dtype)


def _statistics(
    layer: SyncBatchNorm, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Collective: return mean, biased variance (both (channels,)) and count, over all ranks."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    exchange, collective = layer.exchange, layer.collective
    if not layer.counts:
        wide = wide[:0]
    dims = [0, *range(2, values.dim())]
    local_count = wide.new_full((1,), wide.numel() / values.size(1))
    local_sums = torch.cat([wide.sum(dims), local_count])
    sums = summed(local_sums, exchange, f"{collective}.mean", layer.counts)
    count = float(sums[-1].detach())
    if count <= 1:
        raise ValueError("batch norm needs more than one value per channel over all ranks")
    mean = sums[:-1] / count
    centred = wide - mean.view(1, -1, *[1] * (values.dim() - 2))
    squares = summed(centred.square().sum(dims), exchange, f"{collective}.variance", layer.counts)
    return mean, squares / count, count


def has_batch_norm(model: nn.Module, kind: type[nn.Module] = _BatchNorm) -> bool:
    """Return whether any layer is batch norm, or one of a `kind` of it."""
    return any(isinstance(module, kind) for module in model.modules())


def normalises_over_batch(model: nn.Module) -> bool:
    """Return whether any layer normalises over the batch in its present mode: a frozen one, in
    evaluation mode, uses its running statistics.
    """
    return any(
        isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        for module in model.modules()
    )


def convert_to_sync(model: nn.Module, exchange: Exchange, every: bool = True) -> None:
    """Make the batch-norm layers of a model synchronised ones: `every` one, or those alone that the
    script has made so by `torch.nn.SyncBatchNorm`.
    """
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm if every else nn.SyncBatchNorm):
            module.__class__ = _synchronised(type(module))  # type: ignore[arg-type]
            vars(module).update(exchange=exchange, collective=f"hvdtrain.sync_bn.{path}")


def convert_back(model: nn.Module) -> None:
    """Undo `convert_to_sync`."""
    for module in model.modules():
        if isinstance(module, SyncBatchNorm):
            module.__class__ = type(module).__bases__[1]
            del module.exchange, module.collective


def counting(model: nn.Module, samples: int) -> AbstractContextManager[None]:
    """Return a context of a pass over so many samples of this rank: without any, it gives the model
    one that stands in for them, so that synchronised layers take part, and add nothing.
    """
    return nullcontext() if samples else _counting_nothing(model)


@contextmanager
def _counting_nothing(model: nn.Module) -> Iterator[None]:
    layers = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
    for layer in layers:
        layer.counts = False
    try:
        yield
    finally:
        for layer in layers:
            layer.counts = True


@functools.cache
def _synchronised(kind: type[_BatchNorm]) -> type[SyncBatchNorm]:
    """Return the class of synchronised layers of a class."""
    return type(kind.__name__, (SyncBatchNorm, kind), {"__module__": kind.__module__})


def running_statistics(model: nn.Module) -> list[str]:
    """Return the names of the running means and variances that are not synchronised."""
    return [
        name
        for name, layer, key in slots_of(model)
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm)
        if key in RUNNING and layer._buffers[key] is not None
    ]


def averaged_statistics(
    model: nn.Module, exchange: Exchange, own_weight: float
) -> AbstractContextManager[nn.Module]:
    """Collective: return a context of the model with running statistics averaged over ranks.

    `own_weight`: proportional to this rank's samples. On exit each rank has its own ones again.
    """
    names = running_statistics(model)
    if exchange.size == 1 or not names:
        return nullcontext(model)
    buffers = [model.get_buffer(name) for name in names]
    flat = torch.cat([buffer.reshape(-1).double() * own_weight for buffer in buffers])
    flat = torch.cat([flat, flat.new_tensor([own_weight])])
    total = exchange.sum_later(flat, "hvdtrain.statistics")()
    averages = (total[:-1] / total[-1]).split([buffer.numel() for buffer in buffers])
    values = [one.to(buffer.dtype) for one, buffer in zip(averages, buffers, strict=True)]
    return replaced(model, dict(zip(names, values, strict=True)))
