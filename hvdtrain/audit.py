"""Live audit: what Horovod reduced, compared with our own ring, element by element.

At an audited step each rank's local gradients are copied as the backward pass produces them,
before Horovod touches them. They are summed again in float64 over a transport that is not
Horovod's, together with their magnitudes, and the average is compared with the gradients that the
optimizer is about to use. Rounding explains a difference up to the bound of `hvdtrain.ring.bound`;
anything beyond it is a fault of reduction, transport, scaling or synchronisation.

What the audit cannot see is a local backward pass that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.errors import AuditMismatch
from hvdtrain.ring import Transport, all_reduce, average_error_bound
from hvdtrain.ring.bound import may_overflow

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class AuditRecord:
    """The result of one audited step, over all ranks."""

    step: int
    ok: bool
    parameters: int
    elements: int
    worst_error_over_bound: float
    worst_parameter: str


@dataclass(frozen=True)
class _Finding:
    """The element of one rank's gradients that lies furthest out, measured in bounds."""

    ratio: float
    parameter: int
    index: int
    reduced: float
    reference: float
    bound: float


class GradientAudit:
    """Audits the gradients of `model` every `every` steps (0: never)."""

    def __init__(
        self,
        model: torch.nn.Module,
        transport: Transport,
        every: int,
        on_record: Callable[[AuditRecord], None],
        compression: str = "none",
    ) -> None:
        """`compression`: none or fp16, the type in which gradients travel.

        `on_record` is called on every rank with each result, before a mismatch is raised.
        """
        self._named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._transport = transport
        self._every = every
        self._compressed = np.dtype(np.float16) if compression == "fp16" else None
        self._on_record = on_record
        self._local: dict[str, torch.Tensor] = {}
        self._hooks: list[Any] = []

    def begin(self, step: int) -> None:
        """Before the backward pass: at an audited step, copy gradients as they come.

        With accumulation over several backward passes the last copy holds the accumulated one.
        """
        if not self._is_due(step):
            return
        self._local.clear()
        for name, parameter in self._named:
            hook = parameter.register_post_accumulate_grad_hook(self._copier(name))
            self._hooks.append(hook)

    def end(self, step: int) -> None:
        """Collective: after the reduction, compare. Nothing happens at a step that is not audited.

        Raises AuditMismatch on every rank when a gradient on any rank is beyond its bound.
        """
        if not self._is_due(step):
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        own = _worst(self._compare(number) for number in range(len(self._named)))
        findings = self._exchange_findings(own)
        rank = max(range(len(findings)), key=lambda r: findings[r].ratio)
        record = self._record(step, findings[rank])
        self._on_record(record)
        if not record.ok:
            raise AuditMismatch(self._explain(step, findings))

    def close(self) -> None:
        """Collective: give the transport back."""
        self._transport.close()

    def _is_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def _copier(self, name: str) -> Callable[[torch.Tensor], None]:
        def copy(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self._local[name] = parameter.grad.detach().clone()

        return copy

    def _compare(self, number: int) -> _Finding:
        """Collective: one parameter's reduced gradient against the ring's average."""
        name, parameter = self._named[number]
        local = self._local.pop(name, None)
        size = self._transport.size
        values = np.zeros(parameter.numel()) if local is None else _float64(local)
        # One message carries both: the sum, and the sum of magnitudes that scales the bound.
        summed = all_reduce(np.concatenate([values, np.abs(values)]), self._transport)
        reference, magnitudes = summed[: values.size] / size, summed[values.size :]
        reduced = np.zeros_like(reference) if parameter.grad is None else _float64(parameter.grad)
        dtype = self._compressed or torch.empty(0, dtype=parameter.dtype).numpy().dtype
        casts = 1 if self._compressed else 0
        bound = average_error_bound(magnitudes, size, dtype, further_scalings=casts)
        ratios = error_over_bound(reduced, reference, bound, may_overflow(magnitudes, dtype))
        if ratios.size == 0:
            return _Finding(0.0, number, 0, 0.0, 0.0, 0.0)
        index = int(np.argmax(ratios))
        return _Finding(
            *(float(ratios[index]), number, index),
            *(float(reduced[index]), float(reference[index]), float(bound[index])),
        )

    def _exchange_findings(self, own: _Finding) -> list[_Finding]:
        """Collective: every rank's worst element, in rank order, over the ring itself."""
        fields = np.array(list(asdict(own).values()), dtype=np.float64)
        table = np.zeros((self._transport.size, fields.size))
        table[self._transport.rank] = fields
        # Adding zeros changes no value, so the sum of the ranks' tables is the whole table.
        rows = all_reduce(table, self._transport)
        return [_Finding(row[0], int(row[1]), int(row[2]), *row[3:]) for row in rows.tolist()]

    def _record(self, step: int, worst: _Finding) -> AuditRecord:
        return AuditRecord(
            step=step,
            ok=worst.ratio <= 1,
            parameters=len(self._named),
            elements=sum(parameter.numel() for _, parameter in self._named),
            worst_error_over_bound=worst.ratio,
            worst_parameter=self._named[worst.parameter][0],
        )

    def _explain(self, step: int, findings: list[_Finding]) -> str:
        lines = [f"audit: reduced gradients are wrong at step {step}"]
        for rank, finding in enumerate(findings):
            if finding.ratio > 1:
                name, parameter = self._named[finding.parameter]
                index = tuple(int(i) for i in np.unravel_index(finding.index, parameter.shape))
                error = abs(finding.reduced - finding.reference)
                lines.append(
                    f"  rank {rank}: parameter {name}, index {list(index)}: reduced "
                    f"{finding.reduced:.9g}, reference {finding.reference:.9g}, "
                    f"error {error:.3g}, bound {finding.bound:.3g}"
                )
        lines.append(
            "The optimizer has not used these gradients. Rounding cannot explain the difference: "
            "suspect the reduction, the network, memory, or code that changes gradients"
        )
        return "\n".join(lines)


def error_over_bound(
    reduced: Floats, reference: Floats, bound: Floats, overflow_allowed: NDArray[np.bool_]
) -> Floats:
    """|reduced - reference| / bound, element by element; infinite where no bound could hold.

    Not-finite values must be of the same kind in the same place, except where the sum may have
    passed the largest number on its way (`overflow_allowed`).
    """
    ratios = np.zeros_like(reference)
    finite = np.isfinite(reduced) & np.isfinite(reference)
    error = np.abs(reduced[finite] - reference[finite])
    limit = bound[finite]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios[finite] = np.where(error == 0, 0.0, error / limit)
    same_kind = (np.isnan(reduced) & np.isnan(reference)) | (reduced == reference)
    ratios[~finite & ~same_kind & ~overflow_allowed] = math.inf
    return ratios


def _worst(findings: Iterable[_Finding]) -> _Finding:
    return max(list(findings), key=lambda finding: finding.ratio)


def _float64(tensor: torch.Tensor) -> Floats:
    values: Floats = tensor.detach().to("cpu", torch.float64).reshape(-1).numpy()
    return values


class NoAudit:
    """For runs without audits, and for a single process, which exchanges nothing."""

    def begin(self, step: int) -> None: ...

    def end(self, step: int) -> None: ...

    def close(self) -> None: ...
