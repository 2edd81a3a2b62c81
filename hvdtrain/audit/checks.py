"""Within the proven rounding bound? One block of elements at a time."""

from __future__ import annotations

import math

import numpy as np
import torch

from hvdtrain.audit.findings import NOTHING, Block, Finding
from hvdtrain.exchange import AVERAGE, Reduction
from hvdtrain.ring import Transport, all_gather, reduce_scatter, split_evenly
from hvdtrain.ring.bound import (
    ERROR_BOUNDS,
    Floats,
    error_over_bound,
    finite_magnitudes,
    may_overflow,
)
from hvdtrain.ring.orders import KnownOrder, differing_bits, reproduce


class BoundCheck:
    """Sums local gradients and their magnitudes again, in float64.

    The magnitudes scale the bound (`hvdtrain.ring.bound`). Each rank compares only the segment
    that reduce-scatter leaves it: where all ranks hold the same bits, which their digests tell,
    that is every element once.
    """

    whole_parameters = False

    def __init__(self, transport: Transport, reduction: Reduction = AVERAGE) -> None:
        self._transport = transport
        self._op = reduction.op
        self._compressed = np.dtype(np.float16) if reduction.compression == "fp16" else None

    def worst(
        self, block: Block, local: torch.Tensor, reduced: torch.Tensor, whole: bool
    ) -> Finding:
        """Collective: the element of this rank's segment, or of the `whole` block, furthest out.

        `local`, `reduced`: in the block's dtype, of shape (block.length,).
        """
        own, sums, magnitudes = self._summed(local.double().numpy(), whole)
        if own.start == own.stop:
            return NOTHING
        size = self._transport.size
        dtype = self._compressed or torch.empty(0, dtype=block.dtype).numpy().dtype
        casts = 1 if self._compressed else 0
        bound = ERROR_BOUNDS[self._op](magnitudes, size, dtype, further_scalings=casts)
        reference = sums / size if self._op == "average" else sums
        found = reduced[own].to(torch.float64).numpy()
        ratios = _finite_ratios(found, reference, bound)
        if ratios is None:
            overflow = may_overflow(magnitudes, size, dtype, further_scalings=casts)
            ratios = error_over_bound(found, reference, bound, overflow)
        place = int(np.argmax(ratios))
        parameter, index = block.locate(own.start + place)
        return Finding(
            *(float(ratios[place]), block.number, parameter, index),
            *(float(found[place]), float(reference[place]), float(bound[place])),
        )

    def _summed(self, values: Floats, whole: bool) -> tuple[slice, Floats, Floats]:
        """Collective: which elements, their sums over ranks, and those of finite magnitudes.

        A rank's values and magnitudes lie next to one another, so that they travel together.
        """
        size = self._transport.size
        parts = split_evenly(values.size, size)
        both = np.empty(2 * values.size)
        doubled = [slice(2 * part.start, 2 * part.stop) for part in parts]
        for part, place in zip(parts, doubled, strict=True):
            half = both[place].reshape(2, -1)
            half[0] = values[part]
            finite_magnitudes(values[part], out=half[1])
        held = reduce_scatter(both, doubled, self._transport)
        if not whole:
            sums, magnitudes = both[held].reshape(2, -1)
            return slice(held.start // 2, held.stop // 2), sums, magnitudes
        all_gather(both, doubled, self._transport)
        halves = [both[place].reshape(2, -1) for place in doubled]
        sums, magnitudes = (np.concatenate([half[i] for half in halves]) for i in (0, 1))
        return slice(0, values.size), sums, magnitudes


def _finite_ratios(reduced: Floats, reference: Floats, bound: Floats) -> Floats | None:
    """The usual case, in few passes; None where anything is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        ratios = np.subtract(reduced, reference)
        np.abs(ratios, out=ratios)
        np.divide(ratios, bound, out=ratios)  # for N > 1 the bound is above zero
        return ratios if math.isfinite(ratios.sum()) else None


class ExactCheck:
    """Forms each sum or average again in the exchange's own order, so that no bit may differ."""

    whole_parameters = True  # the order of summation depends on where one begins and ends

    def __init__(
        self, transport: Transport, order: KnownOrder, reduction: Reduction = AVERAGE
    ) -> None:
        self._transport = transport
        self._order = order
        self._op = reduction.op
        self._compressed = reduction.compression == "fp16"

    def worst(
        self, block: Block, local: torch.Tensor, reduced: torch.Tensor, whole: bool
    ) -> Finding:
        """Collective: the differing element with the largest error, on this rank.

        `local`, `reduced`: of one parameter, in its dtype.
        """
        terms = local.to(torch.float16) if self._compressed else local
        values = reproduce(terms.numpy(), self._transport, self._order, self._op)
        expected = torch.from_numpy(values).to(block.dtype)
        wrong = np.flatnonzero(differing_bits(reduced.contiguous().numpy(), expected.numpy()))
        if wrong.size == 0:
            return NOTHING
        found = reduced.to(torch.float64).numpy()[wrong]
        reference = expected.to(torch.float64).numpy()[wrong]
        with np.errstate(invalid="ignore"):
            errors = np.abs(found - reference)
        errors[np.isnan(errors)] = math.inf
        place = int(np.argmax(errors))
        parameter, index = block.locate(int(wrong[place]))
        return Finding(
            *(math.inf, block.number, parameter, index),
            *(float(found[place]), float(reference[place]), 0.0),
        )
