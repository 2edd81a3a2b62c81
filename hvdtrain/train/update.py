"""Use of the reduced gradients: check, unscaling, clipping, optimizer step, moving average."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hvdtrain.exchange.gradients import has_finite_sum, parameters_of

Optimizers = Sequence[torch.optim.Optimizer]
AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SMALL_ELEMENTS = 1 << 12  # of a tensor for which an operation costs its call, not its elements
FEW_TENSORS = 64  # so few are not worth joining
JOINED_ELEMENTS = 1 << 16  # of small tensors that one operation takes together


class Update:
    """Mixed precision, gradient clipping and the moving average of weights of one model.

    All of it acts on reduced gradients, which are the same on every rank. So all ranks skip a step
    with infinite fp16 gradients together, and clip by the same norm.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        amp: str = "none",
        clip_grad: float | None = None,
        ema_decay: float | None = None,
    ) -> None:
        """`amp`: none, bf16 or fp16. `clip_grad`: largest norm. `ema_decay`: None: no average."""
        self._model, self._device, self._clip_grad = model, device, clip_grad
        self._amp_dtype = AMP_DTYPES.get(amp)
        self._scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16")
        self._norm: torch.Tensor | None = None  # of the gradients that `not_finite` has measured
        self.is_applied = False  # while the optimizers make their steps
        self.average: AveragedModel | None = None
        if ema_decay is not None:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(ema_decay))

    def autocast(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Return the context manager for the forward pass; not `enabled`: in full precision."""
        enabled = enabled and self._amp_dtype is not None
        if not enabled and not torch.is_autocast_enabled(self._device.type):
            return nullcontext()  # quick
        return torch.autocast(self._device.type, dtype=self._amp_dtype, enabled=enabled)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss, or its gradient, for the backward pass (fp16: times the loss scale)."""
        return self._scaler.scale(loss)

    def not_finite(self, optimizers: Optimizers, measure: bool = False) -> list[str]:
        """Return the names of the parameters whose reduced gradient is not finite, on every rank.

        With fp16 there are none: the scaler skips such a step and lowers the loss scale. `measure`:
        their norm is wanted from `apply`, and is taken here, from the same pass over memory.
        """
        self._norm = None
        if self._scaler.is_enabled():
            return []
        gradients = _gradients(optimizers)
        if measure and self._clip_grad is None:
            self._norm = torch.nn.utils.get_total_norm(list(_joined(gradients)))
        if _all_finite(gradients if self._norm is None else [self._norm]):
            return []
        trained_ids = set(map(id, parameters_of(*optimizers)))
        named = self._model.named_parameters()
        return not_finite(
            {name: p.grad for name, p in named if id(p) in trained_ids and p.grad is not None}
        )

    def rescale(self, optimizers: Optimizers, samples: int, count: float) -> float:
        """Make gradients that were divided by `samples` those of a mean over `count`, unless that
        is 0; return their factor.
        """
        factor = samples / count if count else 1.0
        for gradient in _gradients(optimizers) if factor != 1 else ():
            gradient.mul_(factor)
        return factor

    def apply(self, optimizers: Optimizers, measure: bool = False) -> torch.Tensor | None:
        """Unscale and clip the gradients, all by one norm, and make a step of each optimizer.

        Returns the norm before clipping if clipping is on or `measure` is set, else None.
        """
        for optimizer in optimizers:
            self._scaler.unscale_(optimizer)
        norm = None
        if self._clip_grad is not None:  # in torch's order of addition, as the norm is learned from
            norm = torch.nn.utils.get_total_norm(_gradients(optimizers))
            torch.nn.utils.clip_grads_with_norm_(parameters_of(*optimizers), self._clip_grad, norm)
        elif measure and (norm := self._norm) is None:
            norm = torch.nn.utils.get_total_norm(list(_joined(_gradients(optimizers))))
        self.is_applied = True
        for optimizer in optimizers:
            self._scaler.step(optimizer)
        self.is_applied = False
        self._scaler.update()
        return norm

    def end_step(self) -> None:
        """Update the average, once all optimizers have made their step."""
        if self.average is not None:
            self.average.update_parameters(self._model)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale and the average."""
        return {
            "scaler": self._scaler.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])


def _gradients(optimizers: Optimizers) -> list[torch.Tensor]:
    return [p.grad for p in parameters_of(*optimizers) if p.grad is not None]


def not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors with an element that is infinite or NaN."""
    if _all_finite(tensors.values()):
        return []
    # A sum of finite values may have overflowed, so check each element.
    return [name for name, tensor in tensors.items() if not _values(tensor).isfinite().all()]


def _all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether sums over all elements are finite; with an infinite one or NaN one is not.

    Memory is read once, and only tensors of a model with many small ones are copied. On a device,
    where a sum for each tensor is a kernel to start, it is the norm of all elements, and the host
    waits once.
    """
    tensor_list = list(tensors)
    if tensor_list and tensor_list[0].device.type != "cpu":
        return bool(torch.nn.utils.get_total_norm(list(map(_values, tensor_list))).isfinite())
    parts = tensor_list if len(tensor_list) <= FEW_TENSORS else _joined(tensor_list)
    return all(map(has_finite_sum, parts))


def _joined(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield all elements in fewer tensors: copies of small ones of one shape, and the others."""
    alike = defaultdict(list)
    for tensor in tensors:
        alike[tensor.shape, tensor.dtype, tensor.device, tensor.layout].append(tensor)
    for (shape, _, device, layout), group in alike.items():
        elements = max(shape.numel(), 1)
        is_joined = elements <= SMALL_ELEMENTS and layout == torch.strided and device.type == "cpu"
        together = JOINED_ELEMENTS // elements if is_joined else 1
        for first in range(0, len(group), together):
            part = group[first : first + together]
            yield torch.stack(part) if part[1:] else part[0]


def _values(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(values) if values.is_complex() else values
